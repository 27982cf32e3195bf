"""`adx export` as one call: checkpoint → trace → quantized engine → parity → bundle."""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

from adx.ci.built import Built, Source
from adx.ci.calibration import check_calibration, check_samples
from adx.ci.export_record import manifest_of, summary_of
from adx.ci.export_request import PORTABLE_OPSET, ExportPlan, ExportRequest, ExportResult
from adx.ci.progress import Report, quiet
from adx.ci.proof import Proof, budget_of
from adx.ci.quantization_report import write_quantization_report
from adx.ci.targets import check_targets
from adx.export.errors import BackendError, UsageError
from adx.export.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from adx.ci.figures import ParityFigures
    from adx.export.checkpoint import Checkpoint
    from adx.export.manifest import EngineRecord, Limits
    from adx.export.spec import GraphSpec
    from adx.export.trace import SemanticGraph

_KERNEL_BYTES = 30_000_000  # of a plan, beside its weights
_PLAN_SECONDS = 12

__all__ = ["ExportPlan", "ExportRequest", "ExportResult", "export_bundle", "plan_export"]


def plan_export(request: ExportRequest) -> ExportPlan:
    """Everything that can be said without loading a weight.

    Raises:
        AdxError: as `export_bundle`, for all that shows before the work begins.
    """
    from adx.export.checkpoint_load import load_config

    checkpoint = _checked(request)
    return _plan(request, checkpoint, _spec(request, checkpoint, load_config(checkpoint)))


def _spec(request: ExportRequest, checkpoint: Checkpoint, config: PreTrainedConfig) -> ModelSpec:
    from adx.export.checkpoint_spec import model_spec

    spec = model_spec(checkpoint, config, request.max_seq_len)
    if not request.static:
        return spec
    return dataclasses.replace(spec, kv_cache=dataclasses.replace(spec.kv_cache, dtype="float16"))


def _plan(request: ExportRequest, checkpoint: Checkpoint, spec: ModelSpec) -> ExportPlan:
    """The plan, after the last checks that need no weights."""
    from adx.engines import ort_cpu, static_graphs
    from adx.export.checkpoint_spec import estimate

    limits = _limits(request, spec)
    if request.static:
        static_graphs.check_supported(spec, plans=bool(request.plan_targets))
    else:
        ort_cpu.check_supported(spec.kv_cache)
    check_calibration(request, spec)
    takes = estimate(checkpoint, spec, request.precision)
    kv = spec.kv_cache
    windows = sorted({w for w in kv.windows if w is not None})
    lines = (
        f"model:  {spec.source}, {spec.architecture}, {spec.parameters / 1e6:,.1f} M parameters in {spec.dtype}",
        f"cache:  {kv.layers} layers, {kv.kv_heads} KV heads of {kv.head_dim}, {kv.capacity} tokens a row, "
        f"{kv.bytes_per_token() / 1024:,.1f} KiB a token" + (f", windows {windows}" if windows else ""),
        f"limits: batch {limits.max_batch_size or 'unbounded'}, prompt {limits.max_input_len}, "
        f"sequence {limits.max_seq_len}",
        f"builds: {request.precision} for {', '.join(request.targets)} in {request.out}"
        + (" and the portable prefill and decode graphs" if request.keep_onnx else ""),
        *_plan_lines(request),
        "checks: parity with PyTorch float32 over prefill, decode and a greedy run"
        + (", of the graphs on the CPU" if request.static else ""),
    )
    plans = len(request.plan_targets) * max(1, len(request.plans.sms)) if request.build else 0
    disk = takes.disk_bytes + (4 * spec.parameters if request.keep_onnx else 0)
    # Each plan has the weights of its phase, and takes seconds to build.
    disk += plans * 2 * (takes.disk_bytes + _KERNEL_BYTES)
    seconds = takes.seconds + plans * 2 * _PLAN_SECONDS
    # The check of the graphs over a preallocated cache holds float32 copies for each phase.
    memory = takes.peak_memory_bytes + (8 * spec.parameters if request.static else 0)
    return ExportPlan(lines, disk, memory, seconds)


def _plan_lines(request: ExportRequest) -> tuple[str, ...]:
    """What is calibrated on, what may be lost, and which plans are built, where there is any of these."""
    lines = []
    if request.calibrates:
        text = "text that the model writes" if request.calib_data is None else str(request.calib_data)
        measured = "second moments" if request.algorithm == "gptq" else "the ranges"
        lines.append(f"reads:  {text}, for {measured} of activations")
    if request.algorithm is not None:
        limits = [f"{key} {value:g}" for key, value in budget_of(request).to_dict().items() if key != "precision"]
        fixed = request.uniform or request.allow_parity_failure
        lines.append(
            f"budget: {', '.join(limits)}"
            + (" (no search)" if fixed else "; where it is missed, layers that cost the most are kept more precise")
        )
    if request.plan_targets:
        sms = ", ".join(request.plans.sms) or "the GPU that is present"
        lines.append(f"plans:  prefill and decode for {sms}" if request.build else "plans:  none now (--no-build)")
    return tuple(lines)


def export_bundle(request: ExportRequest, report: Report = quiet) -> ExportResult:
    """Export a checkpoint; the bundle appears at `request.out` in one step, or not at all.

    Raises:
        UsageError: options that contradict each other, or an output that is there.
        CheckpointError: the checkpoint is damaged, or not supported.
        BackendError: ONNX Runtime is missing.
        Interrupted: by a signal; nothing is left but what was measured for a second try, in `OUT.calibration`.
    """
    from adx.export.interrupt import interruptible

    with interruptible():
        return _export(request, report)


def _export(request: ExportRequest, report: Report) -> ExportResult:
    from adx.ci.budget import build_within
    from adx.ci.builders import make_builder
    from adx.ci.calibrated import Calibration
    from adx.export.bundle import Bundle, BundleWriter, check_free_space
    from adx.export.checkpoint_load import load_config, load_model
    from adx.export.checkpoint_spec import weights_sha256
    from adx.export.checkpoint_text import save_text_files
    from adx.export.trace import trace

    started = time.perf_counter()
    report("reading the checkpoint", None)
    checkpoint = _checked(request)
    config = load_config(checkpoint)
    spec = _spec(request, checkpoint, config)
    limits = _limits(request, spec)
    check_free_space(request.out, _plan(request, checkpoint, spec).disk_bytes)
    with BundleWriter(request.out, force=request.force) as writer:
        digest = weights_sha256(checkpoint, lambda done, total: report("hashing the weights", done / max(total, 1)))
        spec = dataclasses.replace(spec, weights_sha256=digest)
        save_text_files(checkpoint, writer.folder, config=config)
        check_samples(request, spec, writer.folder, config, report)
        report("loading the weights", None)
        model = load_model(checkpoint, config=config)
        report("tracing the model", None)
        semantic = trace(model, spec.kv_cache)
        portable = _portable(request, semantic, writer.folder, report)
        source = Source(request, spec, limits, writer.folder, model, semantic, report)
        with Calibration(source) as calibration:
            builder = make_builder(source, calibration)
            proof = Proof(source)
            outcome = build_within(source, builder, proof)
            built, figures = outcome.built, outcome.figures
            _write_report(writer.folder, figures)
            kept = figures.passed or request.allow_parity_failure
            plans = _plans(source, built) if kept else ()
            if kept:
                write_quantization_report(source, builder, proof, outcome, (*plans, *built.engines))
                manifest = manifest_of(request, spec, limits, built, plans, portable, figures)
                writer.commit(manifest, lambda done, total: report("hashing the bundle", done / max(total, 1)))
    size = Bundle.open(request.out).total_bytes() if kept else 0
    seconds = time.perf_counter() - started
    return ExportResult(
        str(request.out),
        figures.passed,
        round(seconds, 1),
        round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        size,
        request.targets,
        figures.to_dict(),
        summary_of(request, built, plans, figures, size, kept, seconds),
    )


def _portable(request: ExportRequest, semantic: SemanticGraph, folder: Path, report: Report) -> tuple[GraphSpec, ...]:
    if not request.keep_onnx:
        return ()
    from adx.export.portable import write_portable

    report("writing the portable graphs", None)
    return write_portable(semantic, folder, full_logits=request.full_logits)


def _plans(source: Source, built: Built) -> tuple[EngineRecord, ...]:
    """Plans of every TensorRT target, once the graphs that they are built from have passed."""
    from adx.engines import tensorrt

    if not source.request.build:
        return ()
    log = tensorrt.failed_log(source.request.out)
    graphs = tensorrt.GraphSource(source.folder, built.graphs, source.spec.kv_cache, source.limits, log)
    return tuple(
        engine
        for target in source.request.plan_targets
        for engine in tensorrt.compile(graphs, target, source.request.plans, source.report)
    )


def _checked(request: ExportRequest) -> Checkpoint:
    """The checkpoint, after every check that needs no weights: cheap ones first."""
    from adx.export.bundle import check_output
    from adx.export.checkpoint import resolve

    check_targets(request)
    if request.opset not in (None, PORTABLE_OPSET):
        raise UsageError(
            f"--opset {request.opset}: the portable graphs are of opset {PORTABLE_OPSET}, the first with Attention, "
            "RotaryEmbedding and RMSNormalization as operators"
        )
    check_output(request.out, force=request.force)
    _require_onnxruntime()
    return resolve(request.model, offline=request.offline, trust_remote_code=request.trust_remote_code)


def _require_onnxruntime() -> None:
    import importlib.util

    if importlib.util.find_spec("onnxruntime") is None:
        raise BackendError(
            "ONNX Runtime is not installed, and the export checks its engine with it: "
            "`pip install 'adx-toolchain[cpu]'` (or [gpu]) brings it"
        )


def _limits(request: ExportRequest, spec: ModelSpec) -> Limits:
    from adx.engines.profiles import check_volume
    from adx.engines.tensorrt import bounded
    from adx.export.manifest import Limits

    capacity = spec.kv_cache.capacity
    prompt = capacity if request.max_input_len is None else request.max_input_len
    if not 1 <= prompt <= capacity:
        raise UsageError(f"--max-input-len {prompt}: a prompt can have 1 to {capacity} tokens, the sequence's limit")
    if request.max_batch_size is not None and request.max_batch_size < 1:
        raise UsageError(f"--max-batch-size {request.max_batch_size}: at least 1")
    limits = Limits(request.max_batch_size, prompt, capacity)
    if not request.plan_targets:
        return limits
    check_volume(bounded(limits), spec.kv_cache)
    return bounded(limits)


def _write_report(folder: Path, figures: ParityFigures) -> None:
    path = folder / "reports" / "parity.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(figures.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
