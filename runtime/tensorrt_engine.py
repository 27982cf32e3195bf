"""`Executor` on TensorRT or TensorRT for RTX: prefill and decode plans, everything allocated once, the cache in place.

A run copies the call's few integers to the GPU in one piece, launches, copies the logits back and waits. For the step
of one new token these three are recorded as a CUDA graph and launched as one.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adx.export.errors import BackendError
from adx.export.spec import INPUT_IDS, LOGITS, KVCacheSpec, Phase, past_name, present_name
from adx.runtime.cache import KVCache
from adx.runtime.cuda import Cuda, DeviceMemory, PinnedMemory, aligned
from adx.runtime.session import Logits
from adx.runtime.tensorrt_plan import CALL_INPUTS, Context, EngineLog, LoadedPlan

INT64, FLOAT32, FLOAT16 = 8, 4, 2  # bytes


class Library(Protocol):
    """A loaded TensorRT: what `adx.engines.tensorrt_library.load_library` gives."""

    @property
    def module(self) -> Any:
        """Its Python module."""

    @property
    def name(self) -> str:
        """The library and its version."""


@dataclass(frozen=True)
class DeviceTensor:
    """One of a cache's buffers on the GPU: float16, zeros at first.

    Attributes:
        memory: the cache's one allocation, which this keeps alive.
        address: where this buffer starts in it.
        shape: (B, kv_heads, places, head_dim).
    """

    memory: DeviceMemory
    address: int
    shape: tuple[int, int, int, int]


class TensorRTExecutor:
    """Both plans on one GPU; implements `Executor`.

    Attributes:
        max_batch_size: rows that the plans take.
        prefill_tokens: tokens of a row that one prefill call takes.
        decode_tokens: new tokens of a row that one decode call takes.
    """

    def __init__(
        self,
        library: Library,
        cuda: Cuda,
        plans: Mapping[Phase, Path],
        kv_cache: KVCacheSpec,
        vocab_size: int,
        *,
        cuda_graph: bool = True,
        host_code: bool = False,
    ) -> None:
        """Load both plans, whose records were checked before.

        Args:
            library: TensorRT.
            cuda: the GPU.
            plans: the file of each phase.
            kv_cache: shape of the cache; its capacity is the plans'.
            vocab_size: width of the logits.
            cuda_graph: record the step of one new token and replay it, instead of launching its kernels one by one.
            host_code: let plans run code on the host, which version-compatible ones bring with them.

        Raises:
            BackendError: TensorRT cannot load a plan, or the GPU has no room.
            BundleError: a plan's inputs or outputs are not what adx builds.
        """
        self.provider, self.threads = library.name, 1
        self.kv_cache, self.vocab_size = kv_cache, vocab_size
        self._module, self._cuda, self._cuda_graph = library.module, cuda, cuda_graph
        self._open = False
        cuda.activate()
        log = EngineLog()
        self._logger = log.logger(self._module)  # TensorRT does not keep it alive
        self._runtime: Any = self._module.Runtime(self._logger)
        self._runtime.engine_host_code_allowed = host_code
        self._plans: dict[Phase, LoadedPlan] = {
            phase: LoadedPlan.load(self._module, self._runtime, log, phase, path, kv_cache, vocab_size)
            for phase, path in plans.items()
        }
        prefill, decode = self._plans["prefill"], self._plans["decode"]
        self.max_batch_size = min(prefill.most(0), decode.most(0))
        self.prefill_tokens, self.decode_tokens = prefill.most(1), decode.most(1)
        self._stream = cuda.new_stream()
        self._open = True
        self._arenas: weakref.WeakSet[DeviceMemory] = weakref.WeakSet()
        try:
            self._allocate()
        except BackendError:
            self.close()
            raise

    def new_buffers(self, batch_size: int, places: int) -> Sequence[DeviceTensor]:
        """See `Executor.new_buffers`; one allocation holds them all."""
        self._check_open()
        self._cuda.activate()
        shape = (batch_size, self.kv_cache.kv_heads, places, self.kv_cache.head_dim)
        size = aligned(int(np.prod(shape)) * FLOAT16)
        count = 2 * self.kv_cache.layers
        memory = DeviceMemory(self._cuda, count * size)
        self._arenas.add(memory)
        self._cuda.clear(memory.address, memory.size, self._stream)
        self._cuda.synchronize(self._stream)
        return tuple(DeviceTensor(memory, memory.address + index * size, shape) for index in range(count))

    def run(self, phase: Phase, inputs: Mapping[str, NDArray[np.int64]], cache: KVCache) -> Logits:
        """See `Executor.run`."""
        self._check_open()
        self._cuda.activate()
        batch, length = inputs[INPUT_IDS].shape
        plan = self._plans[phase]
        index = plan.choose(batch, length)
        kept = 1 if phase == "prefill" else length
        logits = self._logits_memory(batch * kept)
        context = plan.contexts.get(index) or plan.new_context(self._module, index, self._scratch_span(), self._stream)
        self._bind(context, plan, (batch, length), cache, logits)
        copied = self._stage(inputs)
        self._launch(
            context, logits, copied, batch * kept * self.vocab_size * FLOAT32, phase == "decode" and length == 1
        )
        self._cuda.synchronize(self._stream)
        return logits.host.array(np.float32, (batch, kept, self.vocab_size))

    def close(self) -> None:
        """See `Executor.close`. Logits that are still held keep their memory on the host."""
        if not self._open:
            return
        self._open = False
        self._cuda.activate()
        self._cuda.synchronize(self._stream)
        for plan in self._plans.values():
            for context in plan.contexts.values():
                self._forget_graph(context)
        self._plans.clear()
        self._runtime = None
        for memory in list(self._arenas):
            memory.free()
        for held in ("_scratch", "_staging", "_step_logits", "_chunk_logits"):
            self.__dict__.pop(held, None)
        self._cuda.destroy_stream(self._stream)

    def _allocate(self) -> None:
        """All that runs need; a call of several new tokens a row adds room for its logits the first time."""
        places = aligned(self.max_batch_size * INT64)
        longest = max(self.prefill_tokens, self.decode_tokens)
        names = (*(name for name in CALL_INPUTS if name != INPUT_IDS), INPUT_IDS)
        self._offsets = {name: index * places for index, name in enumerate(names)}
        size = self._offsets[INPUT_IDS] + self.max_batch_size * longest * INT64
        self._scratch = DeviceMemory(self._cuda, max(1, *(plan.scratch_bytes for plan in self._plans.values())))
        self._staging = _Mirrored.allocate(self._cuda, size)
        self._step_logits = _Mirrored.allocate(self._cuda, self.max_batch_size * self.vocab_size * FLOAT32)
        self._chunk_logits: _Mirrored | None = None

    def _logits_memory(self, rows: int) -> _Mirrored:
        """Room for the logits of `rows` tokens; the step's own never moves."""
        size = rows * self.vocab_size * FLOAT32
        if size <= self._step_logits.size:
            return self._step_logits
        if self._chunk_logits is None or self._chunk_logits.size < size:
            self._chunk_logits = None  # given back first
            self._chunk_logits = _Mirrored.allocate(self._cuda, size)
        return self._chunk_logits

    def _scratch_span(self) -> tuple[int, int]:
        return self._scratch.address, self._scratch.size

    def _bind(
        self, context: Context, plan: LoadedPlan, shape: tuple[int, int], cache: KVCache, logits: _Mirrored
    ) -> None:
        """Shapes and addresses of a call, unless the context has them already."""
        key = (*shape, cache.buffers[0].address, logits.device.address)
        if context.key == key:
            return
        self._forget_graph(context)
        context.key, context.warm = None, False
        addresses = {name: self._staging.device.address + offset for name, offset in self._offsets.items()}
        addresses[LOGITS] = logits.device.address
        for layer in range(self.kv_cache.layers):
            key_buffer, value_buffer = cache.buffers[2 * layer : 2 * layer + 2]
            addresses[past_name(layer, "key")] = addresses[present_name(layer, "key")] = key_buffer.address
            addresses[past_name(layer, "value")] = addresses[present_name(layer, "value")] = value_buffer.address
        used = {name: addresses[name] for name in (*(tensor.name for tensor in plan.graph.inputs), *plan.outputs)}
        context.bind(plan.shapes(*shape), used)
        context.key = key

    def _stage(self, inputs: Mapping[str, NDArray[np.int64]]) -> int:
        """Write a call's integers where the next copy to the GPU takes them from: its bytes."""
        for name, offset in self._offsets.items():
            self._staging.host.array(np.int64, inputs[name].shape, offset)[...] = inputs[name]
        return self._offsets[INPUT_IDS] + inputs[INPUT_IDS].size * INT64

    def _launch(self, context: Context, logits: _Mirrored, copied: int, wanted: int, step: bool) -> None:
        """Enqueue a call; the second step with one binding is recorded, and those after it are replayed."""
        if context.graph is None and step and self._cuda_graph and context.warm:
            context.graph = self._record(context, logits, copied, wanted)
        if context.graph is not None:
            self._cuda.launch(context.graph, self._stream)
            return
        self._enqueue(context, logits, copied, wanted)
        context.warm = True

    def _enqueue(self, context: Context, logits: _Mirrored, copied: int, wanted: int) -> None:
        staging, stream = self._staging, self._stream
        self._cuda.copy_to_device(staging.device.address, staging.host.address, copied, stream)
        context.enqueue(stream)
        self._cuda.copy_to_host(logits.host.address, logits.device.address, wanted, stream)

    def _record(self, context: Context, logits: _Mirrored, copied: int, wanted: int) -> int:
        """The call as a CUDA graph.

        Raises:
            BackendError: TensorRT cannot be recorded here.
        """
        if not context.capturable(self._stream):
            raise context.failure("cannot be recorded as a CUDA graph, run it without (cuda_graph=False)")
        self._cuda.begin_capture(self._stream)
        try:
            self._enqueue(context, logits, copied, wanted)
        except BackendError as error:
            self._cuda.abandon_capture(self._stream)
            raise BackendError(
                f"{error}; it was being recorded as a CUDA graph: cuda_graph=False runs without"
            ) from error
        return self._cuda.end_capture(self._stream)

    def _forget_graph(self, context: Context) -> None:
        if context.graph is not None:
            self._cuda.destroy_graph(context.graph)
            context.graph = None

    def _check_open(self) -> None:
        if not self._open:
            raise BackendError("this engine is closed: open the bundle again")


@dataclass(frozen=True)
class _Mirrored:
    """Memory on the GPU and as much on the host, to copy from one to the other."""

    device: DeviceMemory
    host: PinnedMemory
    size: int

    @staticmethod
    def allocate(cuda: Cuda, size: int) -> _Mirrored:
        return _Mirrored(DeviceMemory(cuda, size), PinnedMemory(cuda, size), size)
