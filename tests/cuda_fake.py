"""A GPU that is none: the CUDA runtime's calls and TensorRT's module, recorded, and computing in host memory.

Work on a stream is done when the stream is waited for and not before, device memory starts as NaN, and every address is
held against what is allocated: a wait, a copy or a clearing that is missing shows as wrong numbers or as a failure.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adx.export.spec import KVCacheSpec, past_name, present_name

Arrays = Mapping[str, NDArray[Any]]
Event = tuple[Any, ...]
SUCCESS, NO_MEMORY, NO_DEVICE, ILLEGAL_ADDRESS, NO_CAPTURE = 0, 2, 100, 700, 900
TEXTS = {
    NO_MEMORY: ("cudaErrorMemoryAllocation", "out of memory"),
    NO_DEVICE: ("cudaErrorNoDevice", "no CUDA-capable device is detected"),
    ILLEGAL_ADDRESS: ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    NO_CAPTURE: ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
}


class FakeCuda:
    """What `cuda.bindings.runtime` is to the code under test.

    Attributes:
        events: every call in order, as (name, arguments...), and what the fake TensorRT adds.
        fail: by name of a call, the codes that its next calls return (0: it works).
        live: by handle or address, what is allocated and not given back: "device", "host", "stream", "graph", "exec".
        pending: the error that `cudaGetLastError` will give.
    """

    cudaStreamNonBlocking = 1
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrComputeCapabilityMajor=75, cudaDevAttrComputeCapabilityMinor=76)

    def __init__(self, devices: int = 1, capability: tuple[int, int] = (8, 9)) -> None:
        self.devices, self.capability = devices, capability
        self.events: list[Event] = []
        self.fail: dict[str, list[int]] = {}
        self.live: dict[int, str] = {}
        self._memory: dict[int, tuple[ctypes.Array[Any], int]] = {}
        self._queue: list[Callable[[], None]] = []
        self._capture: list[Callable[[], None]] | None = None
        self._graphs: dict[int, list[Callable[[], None]]] = {}
        self._next = 1
        self.pending = SUCCESS

    def cudaGetLastError(self) -> tuple[int]:
        code, self.pending = self.pending, SUCCESS
        return (code,)

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        """`cudaX(...)` records the call, fails if it shall, and does `_X(...)`."""
        if not name.startswith("cuda"):
            raise AttributeError(name)
        work = getattr(self, f"_{name[4:]}")

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.events.append((name, *arguments))
            codes = self.fail.get(name)
            code = codes.pop(0) if codes else SUCCESS
            if code:
                self.pending = code
                return (code, None)
            result = work(*arguments)
            return (SUCCESS,) if result is None else (SUCCESS, result)

        return call

    def cudaGetErrorName(self, code: int) -> tuple[int, bytes]:
        return SUCCESS, TEXTS[code][0].encode()

    def cudaGetErrorString(self, code: int) -> tuple[int, bytes]:
        return SUCCESS, TEXTS[code][1].encode()

    def names(self) -> list[str]:
        """Names of the events, in order."""
        return [event[0] for event in self.events]

    def queue(self, work: Callable[[], None]) -> None:
        """Work of the one stream there is."""
        (self._queue if self._capture is None else self._capture).append(work)

    def check(self, address: int, size: int, kind: str) -> None:
        """The bytes lie within one live allocation of that kind."""
        for start, (_, room) in self._memory.items():
            if start <= address and address + size <= start + room:
                assert self.live[start] == kind, f"{address:#x} is {self.live[start]} memory, not {kind}"
                return
        raise AssertionError(f"{size} bytes at {address:#x} are not allocated")

    def _GetDeviceCount(self) -> int:
        return self.devices

    def _SetDevice(self, device: int) -> None:
        assert 0 <= device < self.devices

    def _DeviceGetAttribute(self, attribute: int, device: int) -> int:
        return self.capability[attribute - 75]

    def _Malloc(self, size: int) -> int:
        return self._allocate(size, "device")

    def _MallocHost(self, size: int) -> int:
        return self._allocate(size, "host")

    def _Free(self, address: int) -> None:
        self._StreamSynchronize(0)
        self._give_back(address, "device")

    def _FreeHost(self, address: int) -> None:
        self._give_back(address, "host")

    def _MemsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        self.check(address, size, "device")
        self.queue(lambda: ctypes.memset(address, value, size) and None)

    def _MemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        assert self.live[stream] == "stream"
        self.check(to, size, "device" if kind == 1 else "host")
        self.check(source, size, "host" if kind == 1 else "device")
        self.queue(lambda: ctypes.memmove(to, source, size) and None)

    def _StreamCreateWithFlags(self, flags: int) -> int:
        return self._handle("stream")

    def _StreamDestroy(self, stream: int) -> None:
        self._give_back(stream, "stream")

    def _StreamSynchronize(self, stream: int) -> None:
        assert self._capture is None, "a wait in a capture"
        work, self._queue = self._queue, []
        for one in work:
            one()

    def _StreamBeginCapture(self, stream: int, mode: int) -> None:
        assert self._capture is None
        self._capture = []

    def _StreamEndCapture(self, stream: int) -> int:
        assert self._capture is not None
        graph = self._handle("graph")
        self._graphs[graph], self._capture = self._capture, None
        return graph

    def _GraphInstantiate(self, graph: int, flags: int) -> int:
        made = self._handle("exec")
        self._graphs[made] = self._graphs[graph]
        return made

    def _GraphDestroy(self, graph: int) -> None:
        self._give_back(graph, "graph")

    def _GraphExecDestroy(self, graph: int) -> None:
        self._give_back(graph, "exec")

    def _GraphLaunch(self, graph: int, stream: int) -> None:
        assert self.live[graph] == "exec"
        for one in self._graphs[graph]:
            self.queue(one)

    def _allocate(self, size: int, kind: str) -> int:
        held = (ctypes.c_uint8 * (size + 256))()
        address = -(-ctypes.addressof(held) // 256) * 256
        ctypes.memset(address, 0xFF, size)
        self._memory[address] = held, size
        self.live[address] = kind
        return address

    def _handle(self, kind: str) -> int:
        self._next += 1
        self.live[self._next] = kind
        return self._next

    def _give_back(self, what: int, kind: str) -> None:
        assert self.live.pop(what) == kind
        self._memory.pop(what, None)


def write_plan(path: Path, phase: str, kv_cache: KVCacheSpec, vocab_size: int, **changes: Any) -> Path:
    """A plan that the fake TensorRT reads: the engine that adx builds, for batches of 1 to 2, unless `changes` say.

    Args:
        changes: `profiles` ((least, most) new tokens each), `tensors` (name to (mode, dtype, shape), added or replaced;
            None takes one away), `aliased` (False: the cache is copied), `host` (names wanted on the host).
    """
    shape = [-1, kv_cache.kv_heads, kv_cache.capacity, kv_cache.head_dim]
    tensors: dict[str, Any] = {"input_ids": ["INPUT", "INT64", [-1, -1]], "write_indices": ["INPUT", "INT64", [-1]]}
    if phase == "prefill":
        tensors["row_lengths"] = ["INPUT", "INT64", [-1]]
    tensors["pad_lengths"] = ["INPUT", "INT64", [-1]]
    pairs = [(past_name(n, p), present_name(n, p)) for n in range(kv_cache.layers) for p in ("key", "value")]
    tensors |= {past: ["INPUT", "HALF", shape] for past, _ in pairs}
    tensors["logits"] = ["OUTPUT", "FLOAT", [-1, 1 if phase == "prefill" else -1, vocab_size]]
    tensors |= {present: ["OUTPUT", "HALF", shape] for _, present in pairs}
    tensors |= changes.pop("tensors", {})
    plan = {
        "phase": phase,
        "batch": 2,
        "profiles": [[1, 8]] if phase == "prefill" else [[1, 1], [1, 4]],
        "tensors": {name: tensor for name, tensor in tensors.items() if tensor is not None},
        "aliased": True,
        "host": [],
        **changes,
    }
    path.write_text(json.dumps(plan))
    return path


class FakeTensorRT:
    """What the `tensorrt` module is to the code under test; plans are those of `write_plan`.

    Attributes:
        compute: called when a run's work is done, with the phase and an array on each tensor's own address.
        contexts: all that were made.
        says: what the library reports as an error when a call fails.
        capturable: what a context answers when asked whether it can be recorded.
        runtime: the last one that was made, or None.
    """

    target, version, name = "tensorrt", "10.14.1", "TensorRT 10.14.1"
    TensorIOMode = SimpleNamespace(INPUT="INPUT", OUTPUT="OUTPUT")
    DataType = SimpleNamespace(INT64="INT64", HALF="HALF", FLOAT="FLOAT")
    TensorLocation = SimpleNamespace(DEVICE="DEVICE", HOST="HOST")
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="USER_MANAGED")

    class ILogger:
        def __init__(self) -> None:
            self.ready = True

    def __init__(self, cuda: FakeCuda, compute: Callable[[str, Arrays], None]) -> None:
        self.cuda, self.compute = cuda, compute
        self.contexts: list[FakeContext] = []
        self.says = ""
        self.capturable = True
        self.runtime: Any = None

    @property
    def module(self) -> FakeTensorRT:
        return self

    def Runtime(self, logger: Any) -> Any:
        assert logger.ready
        self.logger = logger
        self.runtime = SimpleNamespace(deserialize_cuda_engine=self._deserialize, engine_host_code_allowed=False)
        return self.runtime

    def error(self) -> None:
        """The library reports an error."""
        self.logger.log(SimpleNamespace(name="WARNING"), "nothing of note")
        self.logger.log(SimpleNamespace(name="ERROR"), self.says)

    def _deserialize(self, data: bytes) -> FakeEngine | None:
        if not data.startswith(b"{"):
            self.error()
            return None
        return FakeEngine(self, json.loads(data))


class FakeEngine:
    """`ICudaEngine`, of a plan."""

    device_memory_size_v2 = 4096

    def __init__(self, trt: FakeTensorRT, plan: dict[str, Any]) -> None:
        self.trt, self.plan, self.tensors = trt, plan, plan["tensors"]
        self.names = list(self.tensors)
        self.num_io_tensors = len(self.names)
        self.num_optimization_profiles = len(plan["profiles"])

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> str:
        return self.tensors[name][0]

    def get_tensor_dtype(self, name: str) -> str:
        return self.tensors[name][1]

    def get_tensor_shape(self, name: str) -> list[int]:
        return self.tensors[name][2]

    def get_tensor_location(self, name: str) -> str:
        return "HOST" if name in self.plan["host"] else "DEVICE"

    def get_aliased_input_tensor(self, name: str) -> str | None:
        aliased = self.plan["aliased"] and name.startswith("present.")
        return name.replace("present.", "past_key_values.") if aliased else None

    def get_tensor_profile_shape(self, name: str, index: int) -> list[list[int]]:
        least, most = self.plan["profiles"][index]
        corners = [[1, least], [1, (least + most) // 2], [self.plan["batch"], most]]
        shape = self.tensors[name][2]
        return [[corner[axis] if size < 0 else size for axis, size in enumerate(shape)] for corner in corners]

    def create_execution_context(self, strategy: str) -> FakeContext:
        assert strategy == "USER_MANAGED"
        self.trt.contexts.append(FakeContext(self))
        return self.trt.contexts[-1]


class FakeContext:
    """`IExecutionContext`: refuses what TensorRT refuses, and computes on what lies at the addresses it was given."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.cuda, self.phase = engine, engine.trt.cuda, engine.plan["phase"]
        self.profile: int | None = None
        self.scratch: tuple[int, int] | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self._record("profile", index)
        self.profile = index
        return self.cuda.live[stream] == "stream"

    def set_device_memory(self, address: int, size: int) -> None:
        self.cuda.check(address, size, "device")
        assert size >= self.engine.device_memory_size_v2
        self.scratch = address, size

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        self._record("shape", name, tuple(shape))
        assert self.profile is not None
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
        self.shapes[name] = tuple(shape)
        fits = len(shape) == len(least) and all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True))
        return fits or self._refuse()

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._record("address", name, address)
        self.addresses[name] = address
        return name in self.engine.tensors or self._refuse()

    def is_stream_capturable(self, stream: int) -> bool:
        return self.engine.trt.capturable

    def execute_async_v3(self, stream: int) -> bool:
        self._record("enqueue", self.profile)
        if self.engine.trt.says or self.cuda.pending:  # TensorRT takes an error that was left for its own
            return self._refuse()
        assert self.cuda.live[stream] == "stream"
        assert self.scratch is not None
        assert self.shapes.keys() == {n for n in self.engine.names if self.engine.get_tensor_mode(n) == "INPUT"}
        assert self.addresses.keys() == set(self.engine.names)
        arrays = {name: self._array(name) for name in self.engine.names}
        self.cuda.queue(lambda: self.engine.trt.compute(self.phase, arrays))
        return True

    def _array(self, name: str) -> NDArray[Any]:
        batch, length = self.shapes["input_ids"]
        declared = self.engine.get_tensor_shape(name)
        shape = self.shapes.get(name) or tuple(
            (batch, length)[axis] if size < 0 else size for axis, size in enumerate(declared)
        )
        dtype = {"INT64": np.int64, "HALF": np.float16, "FLOAT": np.float32}[self.engine.get_tensor_dtype(name)]
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address = self.addresses[name]
        assert address % 256 == 0, f"{name} lies at {address:#x}"
        self.cuda.check(address, size, "device")
        return np.ndarray(shape, dtype, buffer=(ctypes.c_uint8 * size).from_address(address))

    def _record(self, what: str, *rest: Any) -> None:
        self.cuda.events.append((what, self.phase, *rest))

    def _refuse(self) -> bool:
        self.engine.trt.error()
        return False
