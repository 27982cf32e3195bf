"""`adx export` as one call: checkpoint → trace → quantized engine → parity → bundle."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adx.ci.export_record import manifest_of, summary_of
from adx.ci.export_request import ORT_CPU, PORTABLE_OPSET, ExportPlan, ExportRequest, ExportResult
from adx.ci.progress import Report, quiet
from adx.export.errors import BackendError, UsageError
from adx.export.spec import ModelSpec

if TYPE_CHECKING:
    from adx.calibration.ranges import Ranges
    from adx.calibration.recipe import QuantRecipe
    from adx.calibration.samples import CalibrationSamples
    from adx.ci.figures import ParityFigures
    from adx.engines.ort_cpu import CompiledEngine
    from adx.export.checkpoint import Checkpoint
    from adx.export.linears import LinearLayer
    from adx.export.manifest import Limits

__all__ = ["ExportPlan", "ExportRequest", "ExportResult", "export_bundle", "plan_export"]


def plan_export(request: ExportRequest) -> ExportPlan:
    """Everything that can be said without loading a weight.

    Raises:
        AdxError: as `export_bundle`, for all that shows before the work begins.
    """
    from adx.export.checkpoint_load import load_config
    from adx.export.checkpoint_spec import model_spec

    checkpoint = _checked(request)
    return _plan(request, checkpoint, model_spec(checkpoint, load_config(checkpoint), request.max_seq_len))


def _plan(request: ExportRequest, checkpoint: Checkpoint, spec: ModelSpec) -> ExportPlan:
    """The plan, after the last checks that need no weights."""
    from adx.engines import ort_cpu
    from adx.export.checkpoint_spec import estimate

    limits = _limits(request, spec)
    ort_cpu.check_supported(spec.kv_cache)
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
        "checks: parity with PyTorch float32 over prefill, decode and a greedy run",
    )
    disk = takes.disk_bytes + (4 * spec.parameters if request.keep_onnx else 0)
    return ExportPlan(lines, disk, takes.peak_memory_bytes, takes.seconds)


def export_bundle(request: ExportRequest, report: Report = quiet) -> ExportResult:
    """Export a checkpoint; the bundle appears at `request.out` in one step, or not at all.

    Raises:
        UsageError: options that contradict each other, or an output that is there.
        CheckpointError: the checkpoint is damaged, or not supported.
        BackendError: ONNX Runtime is missing.
        Interrupted: by a signal; nothing is left behind.
    """
    from adx.export.interrupt import interruptible

    with interruptible():
        return _export(request, report)


def _export(request: ExportRequest, report: Report) -> ExportResult:
    from adx.engines import ort_cpu
    from adx.export.bundle import Bundle, BundleWriter, check_free_space
    from adx.export.checkpoint_load import load_config, load_model
    from adx.export.checkpoint_spec import model_spec, weights_sha256
    from adx.export.checkpoint_text import save_text_files
    from adx.export.trace import trace

    started = time.perf_counter()
    report("reading the checkpoint", None)
    checkpoint = _checked(request)
    config = load_config(checkpoint)
    spec = model_spec(checkpoint, config, request.max_seq_len)
    limits = _limits(request, spec)
    check_free_space(request.out, _plan(request, checkpoint, spec).disk_bytes)
    with BundleWriter(request.out, force=request.force) as writer:
        digest = weights_sha256(checkpoint, lambda done, total: report("hashing the weights", done / max(total, 1)))
        spec = model_spec(checkpoint, config, request.max_seq_len, weights_sha256=digest)
        report("loading the weights", None)
        model = load_model(checkpoint, config=config)
        save_text_files(checkpoint, writer.folder, config=config)
        ranges, samples = _calibrated(request, model, writer.folder, report)
        report("tracing the model", None)
        semantic = trace(model, spec.kv_cache)
        made: list[QuantRecipe] = []
        if request.keep_onnx:
            from adx.export.portable import write_portable

            report("writing the portable graphs", None)
            portable = write_portable(semantic, writer.folder, full_logits=request.full_logits)
        else:
            portable = ()
        count = sum(1 for n in semantic.model.graph if n.op_type == "Linear")
        engine = ort_cpu.compile(
            semantic,
            lambda layers: _remember(made, _recipe(request, layers)),
            writer.folder,
            ranges=ranges,
            progress=_counter(report, f"storing the weights in {request.precision}", count),
        )
        del semantic
        (recipe,) = made
        figures = _parity(request, spec, limits, engine, writer.folder, model, report)
        _write_report(writer.folder, figures)
        manifest = manifest_of(request, spec, limits, engine, recipe, samples, portable, figures)
        passed = figures.passed
        if passed or request.allow_parity_failure:
            writer.commit(manifest, lambda done, total: report("hashing the bundle", done / max(total, 1)))
    kept = passed or request.allow_parity_failure
    size = Bundle.open(request.out).total_bytes() if kept else 0
    return ExportResult(
        str(request.out),
        passed,
        round(time.perf_counter() - started, 1),
        round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        size,
        request.targets,
        figures.to_dict(),
        summary_of(request, recipe, figures, size, kept, time.perf_counter() - started),
    )


def _checked(request: ExportRequest) -> Checkpoint:
    """The checkpoint, after every check that needs no weights: cheap ones first."""
    from adx.export.bundle import check_output
    from adx.export.checkpoint import resolve

    if request.precision in ("fp16", "bf16") and ORT_CPU in request.targets:
        raise UsageError(
            f"{request.precision} on ort-cpu: ONNX Runtime's CPU kernels compute attention, norms and matrix products "
            "in float32, so a 16-bit graph would be refused or converted at every node; choose --fp32, --int8 or --int4"
        )
    unknown = [target for target in request.targets if target != ORT_CPU]
    if unknown:
        raise BackendError(f"target {', '.join(unknown)} is not built by this release of adx; it builds {ORT_CPU}")
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
    from adx.export.manifest import Limits

    capacity = spec.kv_cache.capacity
    prompt = capacity if request.max_input_len is None else request.max_input_len
    if not 1 <= prompt <= capacity:
        raise UsageError(f"--max-input-len {prompt}: a prompt can have 1 to {capacity} tokens, the sequence's limit")
    if request.max_batch_size is not None and request.max_batch_size < 1:
        raise UsageError(f"--max-batch-size {request.max_batch_size}: at least 1")
    return Limits(request.max_batch_size, prompt, capacity)


def _calibrated(
    request: ExportRequest, model: Any, folder: Path, report: Report
) -> tuple[Ranges | None, CalibrationSamples | None]:
    """Ranges of the layers' inputs, and the samples they were measured on; the samples are kept in the bundle."""
    from adx.calibration.ranges import input_ranges
    from adx.calibration.samples import write_samples

    if request.algorithm != "smoothquant":
        return None, None
    report("letting the model write calibration text", None)
    samples = write_samples(model, seed=request.seed)
    path = folder / "reports" / "calibration.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(samples.to_dict()) + "\n", encoding="utf-8")
    report("measuring activations", None)
    return input_ranges(model, samples), samples


def _recipe(request: ExportRequest, layers: Mapping[str, LinearLayer]) -> QuantRecipe:
    from adx.calibration.recipe import make_recipe

    return make_recipe(request.precision, layers, group_size=request.group_size, exclude=request.nodes_to_exclude)


def _remember(made: list[QuantRecipe], recipe: QuantRecipe) -> QuantRecipe:
    made.append(recipe)
    return recipe


def _counter(report: Report, stage: str, total: int) -> Any:
    done = 0

    def count(_name: str) -> None:
        nonlocal done
        done += 1
        report(stage, done / max(total, 1))

    return count


def _parity(
    request: ExportRequest,
    spec: ModelSpec,
    limits: Limits,
    engine: CompiledEngine,
    folder: Path,
    model: Any,
    report: Report,
) -> ParityFigures:
    from adx.ci.bounds import bound_of
    from adx.ci.corpus import load_corpus
    from adx.ci.parity import measure_parity
    from adx.ci.reference import Reference
    from adx.runtime.ort_session import OrtSession

    report("loading the engine", None)
    session = OrtSession(folder / engine.graphs[0].file, spec.kv_cache, spec.vocab_size, threads=request.threads)
    session.max_batch_size = limits.max_batch_size
    tokenizer = folder / "tokenizer.json"
    return measure_parity(
        session,
        Reference(model, threads=session.threads),
        load_corpus(spec.vocab_size, tokenizer if tokenizer.exists() else None),
        bound_of(request.precision, atol=request.atol, rtol=request.rtol),
        max_input_len=limits.max_input_len,
        windows=spec.kv_cache.windows,
        seed=request.seed,
        report=report,
    )


def _write_report(folder: Path, figures: ParityFigures) -> None:
    path = folder / "reports" / "parity.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(figures.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
