"""One graph of standard operators into one TensorRT plan, and what is known of the plan without running it."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adx.engines.profiles import ShapeProfile
from adx.engines.tensorrt_failures import builder_failure, parser_failure
from adx.engines.tensorrt_library import TensorRTLibrary, check_capability
from adx.engines.tensorrt_log import BuildLog, make_logger
from adx.engines.tensorrt_options import BuildOptions, check_options, configure
from adx.engines.tensorrt_progress import BuildProgress, Report, make_monitor, watch
from adx.export.errors import AdxError, BackendError, LoweringError, UsageError
from adx.export.interrupt import interruptible


@dataclass(frozen=True)
class PlanFacts:
    """What is known of a plan when it has been built, from the network and from what the builder said.

    Attributes:
        bytes: size of the plan.
        seconds: of the build, without parsing.
        parse_seconds: from the graph's file to a network.
        layers: layers of the network, before the builder fuses them, by type, as `MATRIX_MULTIPLY`.
        precisions: the same layers by the element type of their first output, as `HALF`.
        kv_cache_updates: layers that write new keys or values into the cache in place.
        attentions: attention layers that one kernel computes.
        attentions_decomposed: attention nodes of the graph that were taken apart, or may be.
        plugins: layers that need a plugin.
        weights_bytes: device memory for weights, or None where the builder did not say it. So for the next two.
        scratch_bytes: largest scratch memory of a kernel.
        activation_bytes: device memory of an execution context at the profiles' largest shapes.
        peak_rss_mb: largest resident memory of the process during the build, sampled.
        warnings: what the library warned of, each once.
    """

    bytes: int
    seconds: float
    parse_seconds: float
    layers: Mapping[str, int]
    precisions: Mapping[str, int]
    kv_cache_updates: int
    attentions: int
    attentions_decomposed: int
    plugins: int
    weights_bytes: int | None
    scratch_bytes: int | None
    activation_bytes: int | None
    peak_rss_mb: float
    warnings: tuple[str, ...]


@dataclass
class _Build:
    """The objects of one build.

    They must be gone when it ends: the library keeps the first logger for as long as anything of it lives, and one that
    is freed while a callback of another build runs can wait for ever, for a lock that the callback's caller holds.
    """

    library: TensorRTLibrary
    log: BuildLog
    progress: BuildProgress
    network: Any = None
    plan: Any = None
    timing_cache: Any = None
    parse_seconds: float = 0.0
    seconds: float = 0.0


def build_plan(
    library: TensorRTLibrary,
    graph: Path,
    out: Path,
    *,
    profiles: Sequence[ShapeProfile],
    fixed_dims: Mapping[str, int],
    sm: str | None,
    options: BuildOptions,
    log: Path,
    report: Report,
) -> PlanFacts:
    """Build the plan `out` from an ONNX file. On any error, and when interrupted, no plan is left.

    Args:
        graph: external weights are read from beside it.
        profiles: at least one; every input in each.
        fixed_dims: sizes of named dimensions that must not vary, as `cache_length`.
        sm: compute capability, as `sm89`; None: that of the GPU that is present.
        log: file to add to what the library says.
        report: called from this thread, ten times a second.

    Raises:
        UsageError: an option or a capability that this library cannot build.
        LoweringError: a node, or the whole graph, that the library cannot build; the message names the node.
        BackendError: a GPU is needed, and there is none.
        Interrupted: SIGINT or SIGTERM.
    """
    check_options(library, options)
    sm = check_capability(library, sm)
    label = f"building {out.name} for {sm}"
    with interruptible(), BuildLog(log, graph.resolve().parent) as said:
        said.heading(f"{out.name} from {graph.name} for {sm} with {library.name}, CUDA {library.cuda or 'unknown'}")
        build = _Build(library, said, BuildProgress())
        model = read_graph(graph, fixed_dims)

        def work() -> None:
            _run(build, model, graph, out.name, profiles, sm, options)

        try:
            _, peak = watch(work, build.progress, report, label)
            write_atomically(out, build.plan)
            if options.timing_cache is not None:
                write_atomically(options.timing_cache, build.timing_cache.serialize())
            return _facts(build, sum(node.op_type == "Attention" for node in model.graph.node), peak)
        finally:
            build.network = build.plan = build.timing_cache = None


def read_graph(graph: Path, fixed_dims: Mapping[str, int]) -> Any:
    """The graph's protobuf without its external weights, its named dimensions fixed in inputs, outputs and between.

    Raises:
        UsageError: no input has a dimension of that name.
        LoweringError: the file is no ONNX graph.
    """
    import onnx

    try:
        model = onnx.load(graph, load_external_data=False)
    except Exception as error:  # protobuf's own errors differ between its versions
        raise LoweringError(f"{graph} cannot be read as an ONNX graph ({error}): export the model again") from error
    seen: set[str] = set()
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in fixed_dims:
                seen.add(dim.dim_param)
                dim.dim_value = fixed_dims[dim.dim_param]
    if missing := sorted(set(fixed_dims) - seen):
        raise UsageError(f"{graph.name} has no dimension named {', '.join(missing)} to fix")
    return model


def write_atomically(path: Path, data: Any) -> None:
    """Write `data`, anything with a buffer, under a passing name beside `path`, then rename it.

    Raises:
        AdxError: it cannot be written; nothing is left then.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(memoryview(data))
        part.replace(path)
    except OSError as error:
        raise AdxError(f"{path} cannot be written ({error.strerror}): free or allow the place for it") from error
    finally:
        part.unlink(missing_ok=True)


def _run(
    build: _Build, model: Any, graph: Path, name: str, profiles: Sequence[ShapeProfile], sm: str, options: BuildOptions
) -> None:
    """Parse and build; in the builder's thread."""
    gc.collect()  # what is left of others is freed here, not in a callback
    module = build.library.module
    logger = make_logger(module, build.log)
    builder = module.Builder(logger)
    if builder is None:
        raise BackendError(f"{build.library.name} gives no builder: {'; '.join(build.log.causes()[-1:])}")
    started = time.perf_counter()
    build.network = builder.create_network(_network_flags(module))
    parser = module.OnnxParser(build.network, logger)
    if not parser.parse(model.SerializeToString(), str(graph.resolve())):
        raise parser_failure(build.library, parser, graph.name, build.log)
    build.parse_seconds = time.perf_counter() - started
    config = builder.create_builder_config()
    monitor = make_monitor(module, build.progress)
    config.progress_monitor = monitor
    configure(build.library, config, sm, options, build.log)
    for profile in profiles:
        _add_profile(builder, config, build.network, profile)
    started = time.perf_counter()
    build.plan = builder.build_serialized_network(build.network, config)
    build.seconds = time.perf_counter() - started
    if build.plan is None:
        refit = options.refit or options.strip
        raise builder_failure(
            build.library, build.network, name, build.log, refit=refit, workspace=options.workspace_bytes
        )
    if options.timing_cache is not None:
        build.timing_cache = config.get_timing_cache()


def _network_flags(module: Any) -> int:
    """Strongly typed: TensorRT 10 needs it said, later ones do nothing else."""
    flag = getattr(module.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _add_profile(builder: Any, config: Any, network: Any, profile: ShapeProfile) -> None:
    """Give the build one profile.

    Raises:
        UsageError: it lacks an input of the graph, or is in no order.
    """
    shapes = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        name = network.get_input(index).name
        if name not in profile.shapes:
            raise UsageError(f"the profile {profile.name!r} has no shape for the input {name}: add it")
        least, usual, most = profile.shapes[name]
        if any(not low <= middle <= high for low, middle, high in zip(least, usual, most, strict=True)):
            raise UsageError(
                f"the profile {profile.name!r} has {name} from {least} to {most} with {usual} between: it must be "
                "min <= opt <= max in every dimension"
            )
        shapes.set_shape(name, least, usual, most)
    if not shapes or config.add_optimization_profile(shapes) < 0:
        raise UsageError(f"the profile {profile.name!r} is not accepted: compare its shapes with the graph's inputs")


def count_attentions(module: Any, network: Any, nodes: int) -> tuple[int, int]:
    """Attentions that one kernel must compute, and those that were taken apart, or may be where no kernel fits.

    Args:
        nodes: nodes `Attention` of the graph that the network was parsed from.
    """
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    kept = [layer for layer in layers if layer.type.name == "ATTENTION_INPUT"]
    whole = sum(not _may_be_decomposed(module, layer) for layer in kept)
    return whole, max(nodes, len(kept)) - whole


def _facts(build: _Build, attentions: int, peak_rss_mb: float) -> PlanFacts:
    """Count what the network holds.

    Args:
        attentions: nodes `Attention` of the graph.
    """
    layers = [build.network.get_layer(index) for index in range(build.network.num_layers)]
    types = Counter(layer.type.name for layer in layers)
    whole, decomposed = count_attentions(build.library.module, build.network, attentions)
    figures = build.log.figures
    return PlanFacts(
        bytes=build.plan.nbytes,
        seconds=round(build.seconds, 2),
        parse_seconds=round(build.parse_seconds, 2),
        layers=_sorted(types),
        precisions=_sorted(Counter(layer.get_output(0).dtype.name for layer in layers if layer.num_outputs)),
        kv_cache_updates=types["KV_CACHE_UPDATE"],
        attentions=whole,
        attentions_decomposed=decomposed,
        plugins=sum(count for name, count in types.items() if name.startswith("PLUGIN")),
        weights_bytes=figures.get("weights"),
        scratch_bytes=figures.get("scratch"),
        activation_bytes=figures.get("activation"),
        peak_rss_mb=round(peak_rss_mb, 1),
        warnings=tuple(build.log.warnings),
    )


def _may_be_decomposed(module: Any, layer: Any) -> bool:
    kind = getattr(module, "IAttentionInputLayer", None)
    if kind is None:
        return False
    layer.__class__ = kind  # a network hands out its layers as ILayer; this is how TensorRT's Python API casts
    return bool(layer.attention.decomposable)


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
