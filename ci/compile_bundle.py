"""`adx compile` as one call: plans from the graphs in a bundle, on the host that will run them.

The bundle is all it takes: neither the checkpoint nor PyTorch, transformers or ONNX Runtime.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adx.ci.compile_request import CompiledPlan, CompileRequest, CompileResult, compile_command
from adx.ci.export_request import ORT_CPU, ORT_CUDA, TENSORRT
from adx.ci.progress import Report, quiet
from adx.export.errors import BundleError, UsageError

if TYPE_CHECKING:
    from adx.engines.plan_record import PlanRecord
    from adx.engines.tensorrt import GraphSource
    from adx.export.bundle import Bundle
    from adx.export.manifest import EngineRecord, Limits, Manifest

__all__ = ["CompileRequest", "CompileResult", "compile_bundle"]

_ELSEWHERE = {
    ORT_CUDA: "it needs no plans: ONNX Runtime takes the graphs as they are (adx generate BUNDLE --target ort-cuda)",
    ORT_CPU: "its engine is written from the checkpoint: adx export MODEL --target ort-cpu",
}


def compile_bundle(request: CompileRequest, report: Report = quiet) -> CompileResult:
    """Build plans into a bundle; it is replaced in one step, or stays as it was.

    Plans of the same target and compute capability are replaced, all others stay.

    Raises:
        UsageError: a target, an option, limits or an output that cannot be.
        BundleError: the bundle is damaged, or has no graphs to compile from.
        BackendError: the target's library or GPU is not there; the message has the command for the host that has it.
        LoweringError: the library cannot build the graph.
        Interrupted: by a signal; nothing is left behind.
    """
    from adx.export.interrupt import interruptible

    with interruptible():
        return _compile(request, report)


def _compile(request: CompileRequest, report: Report) -> CompileResult:
    from adx.engines import tensorrt
    from adx.export.bundle import Bundle, BundleWriter

    started = time.perf_counter()
    whole, kept, source = _checked(request)
    kept.verify_files(lambda done, total: report("checking the bundle", done / max(total, 1)))
    place = Path(os.path.realpath(_out(request)))  # "." is another folder once the bundle is replaced
    with BundleWriter(_out(request), force=request.force or request.in_place) as writer:
        _carry_over(kept, writer.folder, link=request.in_place, report=report)
        source = dataclasses.replace(source, folder=writer.folder)
        built = [tensorrt.compile(source, target, request.plans, report) for target in request.targets]
        engines = tuple(engine for group in built for engine in group)
        plans = tuple(plan for engine in engines for plan in _built(writer.folder, engine))
        if _read(request.bundle).manifest != whole.manifest:
            raise BundleError(f"{request.bundle} was changed by another process meanwhile: run the command again")
        manifest = _manifest(whole.manifest, engines, request.command)
        writer.commit(manifest, lambda done, total: report("hashing the bundle", done / max(total, 1)))
    seconds, size = time.perf_counter() - started, Bundle.open(place).total_bytes()
    return CompileResult(
        str(_out(request)),
        whole.manifest.parity.get("passed"),
        round(seconds, 1),
        round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        size,
        request.targets,
        plans,
        (*map(_line, plans), f"{_out(request)}: {size / 1e6:,.1f} MB in {seconds:,.0f} s"),
    )


def _out(request: CompileRequest) -> Path:
    return request.bundle if request.out is None else request.out


def _checked(request: CompileRequest) -> tuple[Bundle, Bundle, GraphSource]:
    """The bundle, what of it stays, and what plans are built from, after every check that reads no large file."""
    from adx.engines import tensorrt
    from adx.engines.static_graphs import PHASES
    from adx.export.bundle import check_free_space, check_output

    _check_request(request)
    whole = _read(request.bundle)
    source = _source(whole, request)
    _refuse_blocks(whole, request)
    for phase in PHASES:
        tensorrt.profiles_of(source, phase, request.plans)
    hint = compile_command(request)
    places = [
        tensorrt.engine_folder(target, sm)
        for target in request.targets
        for sm in tensorrt.prepare(target, request.plans, hint)[1]
    ]
    _refuse_inside(request)
    check_output(Path(os.path.realpath(_out(request))), force=request.force or request.in_place)
    if request.in_place:
        _refuse_strangers(whole)
    kept = _without(whole, places)
    check_free_space(_out(request), _needed(request, kept, source, len(places)))
    return whole, kept, source


def _refuse_blocks(bundle: Bundle, request: CompileRequest) -> None:
    """Weights in blocks are what ONNX Runtime's kernels take; TensorRT's take channels."""
    quantization = bundle.manifest.quantization
    blocks = next((layer for layer in quantization.layers if layer.block_size is not None), None)
    if blocks is not None:
        raise UsageError(
            f"--target {request.targets[0]}: the bundle's {quantization.recipe} weights are stored in blocks of "
            f"{blocks.block_size} ({blocks.name}), for ONNX Runtime's kernels; TensorRT takes one scale per channel: "
            f"export the checkpoint again with --target {request.targets[0]}"
        )


def _refuse_inside(request: CompileRequest) -> None:
    out, bundle = (Path(os.path.realpath(path)) for path in (_out(request), request.bundle))
    if bundle in out.parents:
        raise UsageError(f"-o {request.out} lies inside the bundle {request.bundle}: choose a folder outside of it")


def _needed(request: CompileRequest, kept: Bundle, source: GraphSource, engines: int) -> int:
    """Bytes on the disk: the plans, each with the weights of its phase, and a copy of the bundle where one is made."""
    from adx.engines.static_graphs import FOLDER, WEIGHTS
    from adx.engines.tensorrt import KERNEL_BYTES

    weights = next(file.size for file in kept.manifest.files if file.path == f"{FOLDER}/{WEIGHTS}")
    copy = 0 if request.in_place else sum(file.size for file in kept.manifest.files)
    return copy + 2 * engines * (weights + KERNEL_BYTES)


def _check_request(request: CompileRequest) -> None:
    """What can be refused before the bundle is opened."""
    from adx.engines.tensorrt import check_shape_options

    if not request.targets:
        raise UsageError(f"name a target: --target {' or '.join(TENSORRT)}")
    for target in request.targets:
        if target not in TENSORRT:
            reason = _ELSEWHERE.get(target, f"it is none of {', '.join(TENSORRT)}")
            raise UsageError(f"--target {target} is not compiled from a bundle: {reason}")
    check_shape_options((request.plans.min_shapes, request.plans.opt_shapes, request.plans.max_shapes))


def _read(path: Path) -> Bundle:
    """A bundle whose files are not looked at yet: those of an engine that is built again may be damaged."""
    from adx.export.bundle import Bundle
    from adx.export.manifest import MANIFEST_NAME, from_json

    if not (path / MANIFEST_NAME).is_file():
        return Bundle.open(path)  # it says what there is instead
    return Bundle(path, from_json((path / MANIFEST_NAME).read_text(encoding="utf-8", errors="replace")))


def _source(bundle: Bundle, request: CompileRequest) -> GraphSource:
    """The bundle's graphs over a preallocated cache, and the limits of the plans."""
    from adx.engines import static_graphs
    from adx.engines.profiles import check_volume
    from adx.engines.tensorrt import GraphSource, failed_log

    manifest = bundle.manifest
    files = {file for engine in manifest.engines if engine.target == static_graphs.TARGET for file in engine.files}
    graphs = tuple(graph for graph in manifest.graphs if graph.file in files)
    if {graph.phase for graph in graphs} != set(static_graphs.PHASES):
        there = ", ".join(engine.target for engine in manifest.engines) or "no engine"
        raise BundleError(
            f"{bundle.path} has no graphs to compile plans from ({static_graphs.FOLDER}/), it has {there}: export the "
            f"model with them: adx export MODEL --int8 --target {request.targets[0]} --no-build (or --fp16)"
        )
    log = failed_log(_out(request))
    limits = _limits(request, manifest.limits)
    check_volume(limits, manifest.kv_cache)
    return GraphSource(bundle.path, graphs, manifest.kv_cache, limits, log)


def _limits(request: CompileRequest, own: Limits) -> Limits:
    """The plans' limits: what was asked for, else the bundle's own; `profiles_of` checks them."""
    from adx.engines.tensorrt import bounded
    from adx.export.manifest import Limits

    sequence = own.max_seq_len if request.max_seq_len is None else request.max_seq_len
    prompt = min(own.max_input_len, sequence) if request.max_input_len is None else request.max_input_len
    batch = own.max_batch_size if request.max_batch_size is None else request.max_batch_size
    return bounded(Limits(batch, prompt, sequence))


def _without(bundle: Bundle, places: Sequence[str]) -> Bundle:
    """The bundle without the files below `places`, but for what the builder measured: the new build starts from it."""
    from adx.engines.tensorrt import TIMING_CACHE

    files = bundle.manifest.files
    kept = tuple(
        file
        for file in files
        if file.path.endswith(f"/{TIMING_CACHE}") or not any(file.path.startswith(f"{place}/") for place in places)
    )
    dropped = {file.path for file in files} - {file.path for file in kept}
    engines = tuple(engine for engine in bundle.manifest.engines if dropped.isdisjoint(engine.files))
    return dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, files=kept, engines=engines))


def _refuse_strangers(bundle: Bundle) -> None:
    """A bundle is replaced as a whole, so a file that someone else put there would be lost, or become part of it."""
    from adx.export.manifest import MANIFEST_NAME

    listed = {MANIFEST_NAME, *(record.path for record in bundle.manifest.files)}
    found = (Path(parent, name) for parent, _, names in os.walk(bundle.path) for name in names)
    if strangers := sorted({path.relative_to(bundle.path).as_posix() for path in found} - listed):
        raise BundleError(
            f"{bundle.path} holds {len(strangers)} file(s) that are not the bundle's, as {strangers[0]}: move them out "
            "of it"
        )


def _carry_over(bundle: Bundle, folder: Path, *, link: bool, report: Report) -> None:
    """Put the bundle's files into `folder`: by link where its old folder goes away, else as copies."""
    files = bundle.manifest.files
    for index, record in enumerate(files):
        report("copying the bundle", index / len(files))
        origin, copy = os.path.realpath(bundle.path / record.path), folder / record.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not (link and _linked(origin, copy)):
            shutil.copyfile(origin, copy)


def _linked(origin: str, copy: Path) -> bool:
    try:
        os.link(origin, copy)
    except OSError:  # a file system without hard links
        return False
    return True


def _built(folder: Path, engine: EngineRecord) -> tuple[CompiledPlan, ...]:
    """The plans of an engine that has just been built."""
    return tuple(
        CompiledPlan(
            engine.target,
            record.compute_capability,
            record.phase,
            file,
            record.plan_bytes,
            record.facts.seconds,
        )
        for file, record in ((file, _record(folder / file)) for file in (engine.prefill, engine.decode))
    )


def _record(plan: Path) -> PlanRecord:
    from adx.engines.plan_record import from_json, record_path

    path = record_path(plan)
    return from_json(path.read_text(encoding="utf-8"), path.name)


def _manifest(old: Manifest, engines: Sequence[EngineRecord], command: Sequence[str]) -> Manifest:
    """The manifest with new engines: plans first, each in the place of the one that it replaces.

    The command joins those that made the bundle, divided by `&&`; the versions that built the plans are with them.
    """
    from adx.export.manifest import adx_version, redact

    plans = {(one.target, one.compute_capability): one for one in old.engines if one.target in TENSORRT}
    plans |= {(one.target, one.compute_capability): one for one in engines}
    others = tuple(one for one in old.engines if one.target not in TENSORRT)
    made = (*old.provenance.command, "&&", *redact(command))
    return dataclasses.replace(
        old,
        adx_version=adx_version(),
        engines=(*plans.values(), *others),
        provenance=dataclasses.replace(old.provenance, command=made),
    )


def _line(plan: CompiledPlan) -> str:
    return f"{plan.target} {plan.sm} {plan.phase}: {plan.bytes / 1e6:,.1f} MB, built in {plan.seconds:,.1f} s"
