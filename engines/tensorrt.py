"""TensorRT and TensorRT for RTX: plans for prefill and decode, from the graphs in a bundle and nothing else.

Neither the checkpoint nor PyTorch is needed here, so a bundle can be compiled on the host that will run it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from adx.engines.devices import gpus
from adx.engines.plan_record import PlanOptions, PlanRecord, write_record
from adx.engines.profiles import CACHE, ShapeProfile, plan_profiles
from adx.engines.shape_grammar import override, parse_shapes
from adx.engines.static_graphs import FOLDER, PHASES, WEIGHTS
from adx.engines.tensorrt_build import PlanFacts, build_plan
from adx.engines.tensorrt_library import TensorRTLibrary, check_capability, load_library
from adx.engines.tensorrt_options import BuildOptions, check_options
from adx.export.bundle import file_sha256
from adx.export.errors import BackendError, LoweringError, UsageError
from adx.export.manifest import EngineRecord, Limits, adx_version
from adx.export.spec import GraphSpec, KVCacheSpec, Phase

TARGETS = ("tensorrt", "tensorrt-rtx")
DEFAULT_BATCH = 4  # rows that plans take where no limit was asked for
TIMING_CACHE = "timing.cache"
LOG = "build.log"
KERNEL_BYTES = 2_000_000  # of a plan, beside its weights, at the least: a small model's; SmolLM2's has 20 to 40 MB

Report = Callable[[str, float | None], None]


@dataclass(frozen=True)
class PlanRequest:
    """How plans are to be built.

    Attributes:
        sms: compute capabilities, as `sm89`; empty: that of the GPU that is present.
        options: of the builder.
        min_shapes: trtexec's grammar, in place of what the limits give; "" for nothing. So for the next two.
        opt_shapes: see `min_shapes`.
        max_shapes: see `min_shapes`.
    """

    sms: tuple[str, ...] = ()
    options: BuildOptions = field(default_factory=BuildOptions)
    min_shapes: str = ""
    opt_shapes: str = ""
    max_shapes: str = ""


@dataclass(frozen=True)
class GraphSource:
    """What plans are built from.

    Attributes:
        folder: a bundle's folder; plans are written into it.
        graphs: specs of its graphs in `engines/onnx/`, one a phase.
        kv_cache: shape of the model's cache.
        limits: shape limits of the plans.
        failed_log: file outside the bundle that the build's log is copied to when a build fails, for the reader of the
            error: the bundle's folder goes away then.
    """

    folder: Path
    graphs: tuple[GraphSpec, ...]
    kv_cache: KVCacheSpec
    limits: Limits
    failed_log: Path

    def graph(self, phase: Phase) -> GraphSpec:
        """The graph of a phase."""
        return next(graph for graph in self.graphs if graph.phase == phase)


def engine_folder(target: str, sm: str) -> str:
    """Where a target's plans for a compute capability lie in a bundle."""
    return f"engines/{target}/{sm}"


def prepare(target: str, request: PlanRequest, hint: str = "") -> tuple[TensorRTLibrary, tuple[str, ...]]:
    """Load a target's library and settle what to build for, before any work.

    Args:
        hint: the command for a host that has the library, for the message.

    Raises:
        BackendError: the library or the GPU is not there.
        UsageError: an option or a capability that it does not take.
    """
    library = load_library(target, hint)
    check_options(library, request.options)
    late = [name for name, on in (("--refit", request.options.refit), ("--strip", request.options.strip)) if on]
    if late and library.target == "tensorrt-rtx" and not gpus():
        raise BackendError(
            f"{' and '.join(late)}: {library.name} makes plans that take their weights later only on a machine with a "
            "GPU, and there is none here: leave it out, or run the same command there"
        )
    sms = tuple(dict.fromkeys(check_capability(library, sm) for sm in request.sms or (None,)))
    return library, sms


def profiles_of(source: GraphSource, phase: Phase, request: PlanRequest) -> tuple[ShapeProfile, ...]:
    """The shape profiles of one phase, overrides applied.

    Raises:
        UsageError: limits or overrides that do not fit the graph.
    """
    graph = source.graph(phase)
    profiles = plan_profiles(graph, source.limits, source.kv_cache)
    if not (request.min_shapes or request.opt_shapes or request.max_shapes):
        return profiles
    return override(
        profiles,
        min_shapes=parse_shapes(request.min_shapes, "--min-shapes") if request.min_shapes else {},
        opt_shapes=parse_shapes(request.opt_shapes, "--opt-shapes") if request.opt_shapes else {},
        max_shapes=parse_shapes(request.max_shapes, "--max-shapes") if request.max_shapes else {},
        graph=graph,
    )


def compile(source: GraphSource, target: str, request: PlanRequest, report: Report) -> tuple[EngineRecord, ...]:
    """Build the plans of one target, a record beside each.

    Returns:
        An engine a compute capability, in the order asked for.

    Raises:
        BackendError: the library or the GPU is not there.
        UsageError: an option, a capability or shapes that cannot be built.
        LoweringError: the library cannot build the graph; the message names the node.
        Interrupted: by a signal.
    """
    library, sms = prepare(target, request)
    profiles = {phase: profiles_of(source, phase, request) for phase in PHASES}
    digests = {phase: file_sha256(source.folder / source.graph(phase).file) for phase in PHASES}
    weights = file_sha256(source.folder / FOLDER / WEIGHTS)
    engines = []
    for sm in sms:
        place = engine_folder(target, sm)
        (source.folder / place).mkdir(parents=True, exist_ok=True)
        options = _with_timing_cache(request.options, library, source.folder / place / TIMING_CACHE)
        files = []
        log = source.folder / place / LOG
        with _log_kept_on_failure(log, source.failed_log):
            for phase in PHASES:
                plan = source.folder / place / f"{phase}.plan"
                facts = build_plan(
                    library,
                    source.folder / source.graph(phase).file,
                    plan,
                    profiles=profiles[phase],
                    fixed_dims={CACHE: source.limits.max_seq_len},
                    sm=sm,
                    options=options,
                    log=log,
                    report=report,
                )
                built = _Plan(plan, phase, profiles[phase], digests[phase], weights)
                record = _record(library, sm, source.limits, options, facts, built)
                files += [f"{place}/{plan.name}", f"{place}/{write_record(plan, record).name}"]
        built_with = {library.target: library.version, **({"cuda": library.cuda} if library.cuda else {})}
        prefill, decode = (f"{place}/{phase}.plan" for phase in PHASES)
        files.append(f"{place}/{LOG}")
        engines.append(EngineRecord(target, tuple(files), prefill, decode, built_with, None, sm, source.limits))
    return tuple(engines)


@contextmanager
def _log_kept_on_failure(log: Path, kept: Path) -> Iterator[None]:
    """Where the builder itself fails, its log is copied to `kept`, and the error names that."""
    try:
        yield
    except (LoweringError, BackendError, UsageError) as error:
        if not log.exists() or str(log) not in str(error):
            raise
        shutil.copyfile(log, kept)
        raise type(error)(str(error).replace(str(log), str(kept))) from error


def bounded(limits: Limits) -> Limits:
    """Limits with a bound on the batch, which plans need."""
    return limits if limits.max_batch_size is not None else replace(limits, max_batch_size=DEFAULT_BATCH)


def check_shape_options(texts: Sequence[str]) -> None:
    """Whether shape overrides follow the grammar at all, before any work.

    Raises:
        UsageError: with the option and what is wrong.
    """
    for option, text in zip(("--min-shapes", "--opt-shapes", "--max-shapes"), texts, strict=True):
        if text:
            parse_shapes(text, option)


def failed_log(out: Path) -> Path:
    """Where the log of a build that failed is kept: beside the bundle `out`, a name of this process's own."""
    place = Path(os.path.realpath(out))
    return place.with_name(f"{place.name}.build.{os.getpid()}.log")


def _with_timing_cache(options: BuildOptions, library: TensorRTLibrary, path: Path) -> BuildOptions:
    """TensorRT keeps what it measured beside the plans, unless another file is named; RTX measures nothing."""
    if options.timing_cache is not None or library.target == "tensorrt-rtx":
        return options
    return replace(options, timing_cache=path)


@dataclass(frozen=True)
class _Plan:
    """A plan that was built, and what it was built from."""

    path: Path
    phase: Phase
    profiles: tuple[ShapeProfile, ...]
    graph_sha256: str
    weights_sha256: str


def _record(
    library: TensorRTLibrary, sm: str, limits: Limits, options: BuildOptions, facts: PlanFacts, built: _Plan
) -> PlanRecord:
    return PlanRecord(
        library=library.target,
        library_version=library.version,
        cuda=library.cuda,
        compute_capability=sm,
        hardware_compatible=options.hardware_compatible,
        version_compatible=options.version_compatible,
        phase=built.phase,
        limits=limits,
        profiles=built.profiles,
        graph_sha256=built.graph_sha256,
        weights_sha256=built.weights_sha256,
        plan_sha256=file_sha256(built.path),
        plan_bytes=facts.bytes,
        facts=facts,
        options=PlanOptions(options.opt_level, options.workspace_bytes, options.refit, options.strip),
        adx_version=adx_version(),
    )
