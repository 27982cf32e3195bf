"""A TensorRT plan on the GPU: deserialized, held against what the runtime expects, its profiles and contexts.

TensorRT and TensorRT for RTX have the same Python API; which of the two is a module object here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adx.engines.profiles import BATCH, SEQUENCE, Shape, ShapeProfile, check_request
from adx.export.errors import BackendError, BundleError
from adx.export.spec import (
    INPUT_IDS,
    LOGITS,
    PAD_LENGTHS,
    ROW_LENGTHS,
    WRITE_INDICES,
    GraphSpec,
    KVCacheSpec,
    Phase,
    TensorSpec,
    past_name,
    present_name,
)

CALL_INPUTS = (WRITE_INDICES, ROW_LENGTHS, PAD_LENGTHS, INPUT_IDS)  # what a call says, but for the cache


@dataclass
class EngineLog:
    """Errors that the library reports, the last ones last; the messages of failed calls quote them."""

    errors: list[str] = field(default_factory=list)

    def logger(self, module: Any) -> Any:
        """An `ILogger` of the library that writes here."""
        errors = self.errors

        class Logger(module.ILogger):  # type: ignore[misc]  # the base is known only at run time
            def __init__(self) -> None:
                super().__init__()

            def log(self, severity: Any, text: str) -> None:
                if severity.name in ("ERROR", "INTERNAL_ERROR"):
                    errors.append(" ".join(text.split()))
                    del errors[:-8]

        return Logger()

    def last(self) -> str:
        """What was said last."""
        return self.errors[-1] if self.errors else "it gave no reason"


@dataclass
class Context:
    """One execution context, on one profile, and what it is bound to.

    A CUDA graph recorded from a context holds for the binding that it was recorded with, so the two are kept together.

    Attributes:
        key: tells two bindings apart, or None before the first.
        warm: whether it ran with this binding.
        graph: the recorded run, or None.
    """

    phase: Phase
    handle: Any
    log: EngineLog
    key: tuple[int, ...] | None = None
    warm: bool = False
    graph: int | None = None

    def bind(self, shapes: dict[str, Shape], addresses: dict[str, int]) -> None:
        """Shapes of the inputs, then the address of every input and output.

        Raises:
            BackendError: TensorRT refuses one.
        """
        for name, shape in shapes.items():
            if not self.handle.set_input_shape(name, shape):
                raise self.failure(f"does not take {name} of shape {shape}")
        for name, address in addresses.items():
            if not self.handle.set_tensor_address(name, address):
                raise self.failure(f"does not take an address for {name}")

    def enqueue(self, stream: int) -> None:
        """Run, in the stream's order.

        Raises:
            BackendError: TensorRT could not launch it.
        """
        if not self.handle.execute_async_v3(stream):
            raise self.failure("could not be run")

    def capturable(self, stream: int) -> bool:
        """Whether the run can be recorded; where the library cannot say, recording it shows."""
        ask = getattr(self.handle, "is_stream_capturable", None)
        return ask is None or bool(ask(stream))

    def failure(self, what: str) -> BackendError:
        """An error about this context, with what TensorRT said."""
        return BackendError(f"the TensorRT {self.phase} engine {what}: {self.log.last()}")


@dataclass
class LoadedPlan:
    """An engine of one phase.

    Attributes:
        phase: what it serves.
        engine: TensorRT's own object.
        graph: its inputs, those of a call and those of the cache.
        profiles: the shapes that it takes, in its own order.
        outputs: names of its outputs.
        scratch_bytes: memory on the GPU that a run needs beside weights, inputs and outputs.
    """

    phase: Phase
    engine: Any
    graph: GraphSpec
    profiles: tuple[ShapeProfile, ...]
    outputs: tuple[str, ...]
    scratch_bytes: int
    log: EngineLog
    contexts: dict[int, Context] = field(default_factory=dict)
    _chosen: dict[tuple[int, int], int] = field(default_factory=dict)

    @staticmethod
    def load(
        module: Any, runtime: Any, log: EngineLog, phase: Phase, path: Path, kv_cache: KVCacheSpec, vocab_size: int
    ) -> LoadedPlan:
        """Deserialize a plan whose record was checked before.

        Args:
            module: the library.
            runtime: the library's `Runtime`.
            log: what the runtime's logger writes to.
            phase: what the plan serves.
            path: the plan.
            kv_cache: shape of the cache; its capacity is the plan's.
            vocab_size: width of the logits.

        Raises:
            BackendError: the library cannot deserialize it.
            BundleError: its inputs or outputs are not what adx builds.
        """
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise BackendError(f"TensorRT cannot load {path} on this GPU: {log.last()}")
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        inputs = [name for name in names if engine.get_tensor_mode(name) == module.TensorIOMode.INPUT]
        outputs = [name for name in names if name not in inputs]
        graph = GraphSpec(phase, path.name, tuple(_input(engine, module, name) for name in inputs), ())
        _check_tensors(engine, module, path, graph, outputs, kv_cache, vocab_size)
        profiles = tuple(
            ShapeProfile(f"profile {index}", {name: _corners(engine, name, index) for name in inputs})
            for index in range(engine.num_optimization_profiles)
        )
        return LoadedPlan(phase, engine, graph, profiles, tuple(outputs), int(engine.device_memory_size_v2), log)

    def most(self, dim: int) -> int:
        """The largest `input_ids` takes in any profile: rows at 0, new tokens of a row at 1."""
        return max(profile.shapes[INPUT_IDS][2][dim] for profile in self.profiles)

    def choose(self, batch: int, length: int) -> int:
        """Index of the profile that takes a call.

        Raises:
            UsageError: none does.
        """
        if (batch, length) not in self._chosen:
            self._chosen[batch, length] = check_request(self.profiles, self.shapes(batch, length), self.graph)
        return self._chosen[batch, length]

    def shapes(self, batch: int, length: int) -> dict[str, Shape]:
        """The shape of every input in a call."""
        sizes = {BATCH: batch, SEQUENCE: length}
        return {
            tensor.name: tuple(dim if isinstance(dim, int) else sizes[dim] for dim in tensor.dims)
            for tensor in self.graph.inputs
        }

    def new_context(self, module: Any, index: int, scratch: tuple[int, int], stream: int) -> Context:
        """A context on a profile, its memory given by the caller as (address, bytes).

        Raises:
            BackendError: TensorRT cannot make it.
        """
        handle = self.engine.create_execution_context(module.ExecutionContextAllocationStrategy.USER_MANAGED)
        if handle is None:
            raise BackendError(f"TensorRT cannot prepare the {self.phase} engine for a run: {self.log.last()}")
        context = Context(self.phase, handle, self.log)
        if not handle.set_optimization_profile_async(index, stream):
            raise context.failure(f"does not switch to profile {index}")
        handle.set_device_memory(*scratch)
        self.contexts[index] = context
        return context


def _input(engine: Any, module: Any, name: str) -> TensorSpec:
    """An input with its dynamic dimensions named."""
    names = (BATCH, SEQUENCE) if name == INPUT_IDS else (BATCH,)
    shape = tuple(engine.get_tensor_shape(name))
    dims = tuple(names[axis] if size < 0 and axis < len(names) else size for axis, size in enumerate(shape))
    return TensorSpec(name, _dtype(engine, module, name), dims)


def _dtype(engine: Any, module: Any, name: str) -> str:
    types = module.DataType
    known = {types.INT64: "int64", types.HALF: "float16", types.FLOAT: "float32"}
    return known.get(engine.get_tensor_dtype(name), str(engine.get_tensor_dtype(name)))


def _corners(engine: Any, name: str, index: int) -> tuple[Shape, Shape, Shape]:
    least, usual, most = (tuple(shape) for shape in engine.get_tensor_profile_shape(name, index))
    return least, usual, most


def _check_tensors(
    engine: Any,
    module: Any,
    path: Path,
    graph: GraphSpec,
    outputs: Sequence[str],
    kv_cache: KVCacheSpec,
    vocab_size: int,
) -> None:
    """Hold inputs and outputs against the graphs that adx builds; whatever differs is named."""
    problems: list[str] = []
    given = {tensor.name: tensor for tensor in graph.inputs}
    cache = {
        past_name(layer, part): present_name(layer, part)
        for layer in range(kv_cache.layers)
        for part in ("key", "value")
    }
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {name: ("int64", ()) for name in CALL_INPUTS if name in given}
    shape = (kv_cache.kv_heads, kv_cache.capacity, kv_cache.head_dim)
    wanted |= {name: ("float16", shape) for pair in cache.items() for name in pair}
    wanted[LOGITS] = ("float32", (vocab_size,))
    there = {*given, *outputs}
    missing, strange = sorted({*wanted, INPUT_IDS, WRITE_INDICES} - there), sorted(there - {*wanted})
    problems += [f"it has no {name}" for name in missing] + [f"it has {name}" for name in strange]
    for name in there & wanted.keys():
        dtype, tail = wanted[name]
        found, dims = _dtype(engine, module, name), tuple(engine.get_tensor_shape(name))
        if found != dtype or (tail and dims[-len(tail) :] != tail):
            problems.append(f"{name} is {found} {dims}, expected {dtype} (..., {', '.join(map(str, tail))})")
        if engine.get_tensor_location(name) != module.TensorLocation.DEVICE:
            problems.append(f"{name} is wanted on the host")
    problems += [f"{present} is not written in place of {past}" for past, present in _unaliased(engine, cache, there)]
    if problems:
        raise BundleError(f"{path} is no engine that this adx can run: {'; '.join(problems[:4])}: compile it again")


def _unaliased(engine: Any, cache: Mapping[str, str], there: Collection[str]) -> list[tuple[str, str]]:
    """Pairs of past and present that are two buffers to TensorRT; none where the release cannot say."""
    alias = getattr(engine, "get_aliased_input_tensor", None)
    if alias is None:
        return []
    return [(past, present) for past, present in cache.items() if present in there and alias(present) != past]
