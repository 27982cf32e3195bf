"""The few calls of the CUDA runtime that an engine on a GPU needs, each return code checked.

Over `cuda.bindings.runtime` (NVIDIA's package cuda-bindings): every function there returns its error code first. Names
and meaning: CUDA Runtime API reference.
"""

from __future__ import annotations

import ctypes
import importlib
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adx.export.errors import BackendError

OUT_OF_MEMORY = "cudaErrorMemoryAllocation"
ALIGNMENT = 256  # bytes: what cudaMalloc guarantees and TensorRT asks for


class Cuda:
    """One GPU, chosen explicitly; addresses and handles are plain integers.

    Attributes:
        device: the GPU's index, as `CUDA_VISIBLE_DEVICES` leaves it.
        compute_capability: as `sm89`.
    """

    def __init__(self, runtime: Any, device: int) -> None:
        """Args:
        runtime: `cuda.bindings.runtime`, or what answers as it does.
        device: the GPU's index.

        Raises:
            BackendError: there is no such GPU, or no driver for one.
        """
        self._runtime = runtime
        self.device = device
        count = self._count()
        if not 0 <= device < count:
            there = f"GPU 0 to {count - 1}" if count > 1 else "GPU 0 alone" if count else "no GPU"
            raise BackendError(f"GPU {device} was asked for, and this machine has {there}: choose one that it has")
        self.activate()
        attributes = runtime.cudaDeviceAttr
        major, minor = (
            self._call("cudaDeviceGetAttribute", attribute, device)
            for attribute in (
                attributes.cudaDevAttrComputeCapabilityMajor,
                attributes.cudaDevAttrComputeCapabilityMinor,
            )
        )
        self.compute_capability = f"sm{major}{minor}"

    @classmethod
    def open(cls, device: int = 0) -> Cuda:
        """The GPU through NVIDIA's package.

        Raises:
            BackendError: the package is not installed, or there is no such GPU.
        """
        try:
            runtime = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise BackendError(
                "cuda-bindings is not installed, which engines on a GPU need: `pip install cuda-bindings` brings it"
            ) from error
        return cls(runtime, device)

    def activate(self) -> None:
        """Make the GPU the current one of this thread: CUDA keeps that per thread."""
        self._call("cudaSetDevice", self.device)

    def malloc(self, size: int) -> int:
        """Address of `size` bytes on the GPU."""
        return int(self._call("cudaMalloc", size))

    def free(self, address: int) -> None:
        """Give back what `malloc` gave; waits for the GPU."""
        self._call("cudaFree", address)

    def malloc_host(self, size: int) -> int:
        """Address of `size` bytes on the host that the GPU reads and writes by itself (page-locked)."""
        return int(self._call("cudaMallocHost", size))

    def free_host(self, address: int) -> None:
        """Give back what `malloc_host` gave."""
        self._call("cudaFreeHost", address)

    def clear(self, address: int, size: int, stream: int) -> None:
        """Set bytes on the GPU to zero, in the stream's order."""
        self._call("cudaMemsetAsync", address, 0, size, stream)

    def copy_to_device(self, to: int, source: int, size: int, stream: int) -> None:
        """Copy from page-locked host memory, in the stream's order."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", to, source, size, kind, stream)

    def copy_to_host(self, to: int, source: int, size: int, stream: int) -> None:
        """Copy to page-locked host memory, in the stream's order; read it after `synchronize`."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", to, source, size, kind, stream)

    def new_stream(self) -> int:
        """A stream that does not wait for the default one."""
        return int(self._call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking))

    def synchronize(self, stream: int) -> None:
        """Wait until all of a stream's work is done; an error in that work appears here."""
        self._call("cudaStreamSynchronize", stream)

    def destroy_stream(self, stream: int) -> None:
        """Give back what `new_stream` gave."""
        self._call("cudaStreamDestroy", stream)

    def begin_capture(self, stream: int) -> None:
        """From here on the stream's work is recorded, not done."""
        self._call(
            "cudaStreamBeginCapture", stream, self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        )

    def end_capture(self, stream: int) -> int:
        """What was recorded since `begin_capture`, ready to be launched any number of times."""
        graph = self._call("cudaStreamEndCapture", stream)
        try:
            return int(self._call("cudaGraphInstantiate", graph, 0))
        finally:
            self._call("cudaGraphDestroy", graph)

    def abandon_capture(self, stream: int) -> None:
        """Leave the recording after an error in it: that error is the one to report, so this raises none."""
        error, graph = self._runtime.cudaStreamEndCapture(stream)
        if not int(error) and graph is not None and int(graph):
            self._runtime.cudaGraphDestroy(graph)
        self._runtime.cudaGetLastError()

    def launch(self, graph: int, stream: int) -> None:
        """Do what was recorded, in the stream's order."""
        self._call("cudaGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        """Give back what `end_capture` gave."""
        self._call("cudaGraphExecDestroy", graph)

    def _count(self) -> int:
        error, count = self._runtime.cudaGetDeviceCount()
        if int(error):
            raise BackendError(
                f"no NVIDIA GPU can be used here ({self._reason(error)}): this engine runs where `nvidia-smi` lists a "
                "GPU and a driver that is new enough"
            )
        return int(count)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self._runtime, name)(*arguments)
        if not int(error):
            return values[0] if values else None
        self._runtime.cudaGetLastError()  # else it is reported again, by whatever call asks next
        reason = self._reason(error)
        if OUT_OF_MEMORY in reason:
            size = f" of {arguments[0] / 1e6:,.0f} MB" if name in ("cudaMalloc", "cudaMallocHost") else ""
            raise BackendError(
                f"GPU {self.device} has no room for a request{size} ({name}: {reason}): use a smaller batch, export "
                "with a smaller --max-seq-len, or end what else runs on this GPU"
            )
        raise BackendError(
            f"{name} failed on GPU {self.device}: {reason}; after such an error this process cannot use the GPU any "
            "more: start it again"
        )

    def _reason(self, error: Any) -> str:
        name, text = (call(error)[1] for call in (self._runtime.cudaGetErrorName, self._runtime.cudaGetErrorString))
        return f"{name.decode()}, {text.decode()}"


class DeviceMemory:
    """Memory on the GPU; given back by `free`, or when nothing holds it any more.

    Attributes:
        address: where it starts, a multiple of 256 bytes.
        size: bytes.
    """

    def __init__(self, cuda: Cuda, size: int) -> None:
        self.size = size
        self.address = cuda.malloc(size)
        self.free = weakref.finalize(self, cuda.free, self.address)
        self.free.atexit = False  # a process that ends gives everything back


class PinnedMemory:
    """Page-locked memory on the host; given back by `free`, or when nothing holds it any more.

    Attributes:
        address: where it starts.
        size: bytes.
    """

    def __init__(self, cuda: Cuda, size: int) -> None:
        self.size = size
        self.address = cuda.malloc_host(size)
        self.free = weakref.finalize(self, cuda.free_host, self.address)
        self.free.atexit = False

    def array(self, dtype: type[np.generic], shape: Sequence[int], offset: int = 0) -> NDArray[Any]:
        """An array on this memory, `offset` bytes from its start; it keeps the memory."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        held = (ctypes.c_uint8 * size).from_address(self.address + offset)
        held.owner = self  # type: ignore[attr-defined]  # the array's base keeps what it holds
        return np.ndarray(tuple(shape), dtype, buffer=memoryview(held))


def aligned(size: int) -> int:
    """`size` rounded up to where the next piece of memory may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT
