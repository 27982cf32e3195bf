"""From a bundle to a session over its prefill and decode graphs or plans: one function a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from adx.engines.profiles import DECODE_TOKENS, PREFILL_CHUNK
from adx.export.errors import BackendError, BundleError, UsageError
from adx.export.manifest import EngineRecord
from adx.export.spec import GRAPHS, Phase
from adx.runtime.static_session import CHECK_CHUNK, StaticSession

if TYPE_CHECKING:
    from adx.engines.plan_record import PlanRecord
    from adx.engines.tensorrt_library import TensorRTLibrary
    from adx.export.bundle import Bundle
    from adx.export.spec import KVCacheSpec
    from adx.runtime.cuda import Cuda
    from adx.runtime.ort_device import DeviceProvider

GPU_THREADS = "threads: this engine computes on the GPU, so a number of CPU threads has no effect; leave it out"


def open_onnx(bundle: Bundle, threads: int | None) -> StaticSession:
    """The graphs that GPU engines are built from, on ONNX Runtime's CPU provider.

    Raises:
        UsageError: the thread count is no number of threads that this machine has.
        BackendError: the bundle holds no such graphs, or ONNX Runtime is not installed.
        BundleError: ONNX Runtime cannot load a graph.
    """
    from adx.runtime.ort_graphs import OrtGraphs

    engine = _engines(bundle, GRAPHS)[0]
    kv_cache, vocab_size = _cache_of(bundle, engine), bundle.manifest.model.vocab_size
    graphs = OrtGraphs(bundle.path / engine.prefill, bundle.path / engine.decode, kv_cache, vocab_size, threads=threads)
    limits = engine.limits
    return StaticSession(
        graphs,
        kv_cache,
        vocab_size,
        max_batch_size=limits.max_batch_size,
        max_input_len=limits.max_input_len,
        prefill_chunk=CHECK_CHUNK,
    )


def open_ort_cuda(bundle: Bundle, threads: int | None, *, device: int = 0) -> StaticSession:
    """The same graphs on ONNX Runtime's CUDA provider, and nowhere else.

    Raises:
        UsageError: threads were asked for.
        BackendError: the bundle holds no such graphs, or the provider is not installed or does not start.
        BundleError: ONNX Runtime cannot load a graph.
    """
    from adx.runtime.ort_device import cuda_provider

    return _open_ort(bundle, threads, device, lambda engine: cuda_provider(), fixed_places=False)


def open_ort_tensorrt(
    bundle: Bundle, threads: int | None, *, device: int = 0, cache_folder: Path | None = None
) -> StaticSession:
    """The same graphs on ONNX Runtime's TensorRT provider, and nowhere else; it compiles them first.

    Args:
        cache_folder: where the provider keeps what it compiled, outside the bundle; None: each start compiles again.

    Raises:
        UsageError: threads were asked for, or the limits hold no batch size.
        BackendError: the bundle holds no such graphs, or the provider is not installed or does not start.
        BundleError: ONNX Runtime cannot load a graph.
    """
    from adx.engines.profiles import plan_profiles
    from adx.runtime.ort_device import tensorrt_provider

    def provider(engine: EngineRecord) -> DeviceProvider:
        kv_cache = _cache_of(bundle, engine)
        files = (engine.prefill, engine.decode)
        profiles = {
            graph.phase: plan_profiles(graph, engine.limits, kv_cache)
            for graph in bundle.manifest.graphs
            if graph.file in files
        }
        return tensorrt_provider(profiles, kv_cache.capacity, cache_folder)

    return _open_ort(bundle, threads, device, provider, fixed_places=True)


def open_tensorrt(bundle: Bundle, threads: int | None, *, device: int = 0, cuda_graph: bool = True) -> StaticSession:
    """A bundle's TensorRT plans for the GPU that is here.

    Args:
        device: index of the GPU.
        cuda_graph: record the step of one new token and replay it.

    Raises:
        UsageError: threads were asked for.
        BackendError: TensorRT or the GPU is not there, or no plan was built for them.
        BundleError: a plan is damaged, exchanged, or not what adx builds.
    """
    return _open_plans(bundle, "tensorrt", threads, device, cuda_graph)


def open_tensorrt_rtx(
    bundle: Bundle, threads: int | None, *, device: int = 0, cuda_graph: bool = True
) -> StaticSession:
    """A bundle's plans of TensorRT for RTX for the GPU that is here; see `open_tensorrt`."""
    return _open_plans(bundle, "tensorrt-rtx", threads, device, cuda_graph)


def choose_engine(bundle: Bundle, target: str, capability: str) -> EngineRecord:
    """The plans that were built for a GPU; else hardware-compatible ones.

    Args:
        capability: the GPU's, as `sm89`.

    Raises:
        BackendError: there are none.
    """
    engines = _engines(bundle, target)
    for engine in engines:
        if engine.compute_capability == capability:
            return engine
    for engine in engines:
        if _is_hardware_compatible(bundle.path / engine.decode):
            return engine
    built = ", ".join(str(engine.compute_capability) for engine in engines)
    raise BackendError(
        f"{bundle.path}: its {target} engines were built for {built}, and the GPU here is {capability}: build one with "
        f"`{_rebuild(bundle, target, capability)}`"
    )


def _open_plans(bundle: Bundle, target: str, threads: int | None, device: int, cuda_graph: bool) -> StaticSession:
    from adx.engines.tensorrt_library import load_library
    from adx.runtime.cuda import Cuda

    if threads is not None:
        raise UsageError(GPU_THREADS)
    _engines(bundle, target)
    _require_gpu()
    return open_plans(bundle, load_library(target), Cuda.open(device), cuda_graph=cuda_graph)


def open_plans(bundle: Bundle, library: TensorRTLibrary, cuda: Cuda, *, cuda_graph: bool) -> StaticSession:
    """The plans of a library's target for a GPU, checked against their records before the library sees them.

    Raises:
        BackendError: no plan was built for this library and GPU, or it cannot be loaded.
        BundleError: a plan is damaged, exchanged, or not what adx builds.
    """
    from adx.runtime.tensorrt_engine import TensorRTExecutor

    engine = choose_engine(bundle, library.target, cuda.compute_capability)
    plans: dict[Phase, Path] = {"prefill": bundle.path / engine.prefill, "decode": bundle.path / engine.decode}
    records = [_check_plan(bundle, library, cuda.compute_capability, phase, plan) for phase, plan in plans.items()]
    kv_cache, vocab_size = _cache_of(bundle, engine), bundle.manifest.model.vocab_size
    host_code = any(record.version_compatible for record in records)
    executor = TensorRTExecutor(library, cuda, plans, kv_cache, vocab_size, cuda_graph=cuda_graph, host_code=host_code)
    return StaticSession(
        executor,
        kv_cache,
        vocab_size,
        max_batch_size=executor.max_batch_size,
        max_input_len=engine.limits.max_input_len,
        prefill_chunk=executor.prefill_tokens,
        decode_tokens=executor.decode_tokens,
        fixed_places=True,
    )


def _check_plan(bundle: Bundle, library: TensorRTLibrary, capability: str, phase: Phase, plan: Path) -> PlanRecord:
    from adx.engines.plan_record import check_plan

    graphs = _engines(bundle, GRAPHS)[0]
    digests = {file.path: file.sha256 for file in bundle.manifest.files}
    weights = next(file for file in graphs.files if file not in (graphs.prefill, graphs.decode))
    rebuild = _rebuild(bundle, library.target, capability)
    record = check_plan(
        plan,
        library=library.target,
        library_version=library.version,
        compute_capability=capability,
        graph_sha256=digests[graphs.prefill if phase == "prefill" else graphs.decode],
        weights_sha256=digests[weights],
        rebuild=rebuild,
    )
    if record.options.strip:
        raise BackendError(
            f"{plan.name} was built without its weights and cannot run as it is. Build it again: {rebuild}"
        )
    return record


def _open_ort(
    bundle: Bundle,
    threads: int | None,
    device: int,
    provider: Callable[[EngineRecord], DeviceProvider],
    *,
    fixed_places: bool,
) -> StaticSession:
    from adx.runtime.ort_device import OrtDevice

    if threads is not None:
        raise UsageError(GPU_THREADS)
    engine = _engines(bundle, GRAPHS)[0]
    _require_gpu()
    kv_cache, vocab_size = _cache_of(bundle, engine), bundle.manifest.model.vocab_size
    graphs: dict[Phase, Path] = {"prefill": bundle.path / engine.prefill, "decode": bundle.path / engine.decode}
    executor = OrtDevice(graphs, kv_cache, vocab_size, provider(engine), device=device)
    limits = engine.limits
    return StaticSession(
        executor,
        kv_cache,
        vocab_size,
        max_batch_size=limits.max_batch_size,
        max_input_len=limits.max_input_len,
        prefill_chunk=min(PREFILL_CHUNK, limits.max_input_len),
        decode_tokens=min(DECODE_TOKENS, max(1, limits.max_seq_len - 1)),
        fixed_places=fixed_places,
    )


def _require_gpu() -> None:
    """Say so first: what else is missing does not matter without one."""
    from adx.engines.devices import gpus

    if not gpus():
        raise BackendError("there is no NVIDIA GPU here, or its driver is not installed, and this engine runs on one")


def _engines(bundle: Bundle, target: str) -> Sequence[EngineRecord]:
    """The bundle's engines of a target, at least one."""
    found = [engine for engine in bundle.manifest.engines if engine.target == target]
    if not found:
        held = ", ".join(dict.fromkeys(engine.target for engine in bundle.manifest.engines)) or "none"
        remedy = "export it for a GPU target" if target == GRAPHS else f"`adx compile {bundle.path} --target {target}`"
        raise BackendError(f"{bundle.path} holds no {target} engine (it holds: {held}): {remedy}")
    return found


def _cache_of(bundle: Bundle, engine: EngineRecord) -> KVCacheSpec:
    """The model's cache as the engine was built for it."""
    return replace(bundle.manifest.kv_cache, capacity=engine.limits.max_seq_len)


def _is_hardware_compatible(plan: Path) -> bool:
    """Whether a plan's record says so; what is wrong with a record, `check_plan` reports."""
    from adx.engines.plan_record import from_json, record_path

    path = record_path(plan)
    try:
        return from_json(path.read_text(encoding="utf-8"), path.name).hardware_compatible
    except (OSError, BundleError):
        return False


def _rebuild(bundle: Bundle, target: str, capability: str) -> str:
    return f"adx compile {bundle.path} --target {target} --sm {capability}"
