"""`Executor` on ONNX Runtime's CPU provider: the graphs that GPU engines are built from, run as they are, for checks.

The two sessions map the same weights file. What ONNX Runtime makes of it (float32 copies of float16 weights, packed
forms) it makes once for each session: its Python interface has no way to share those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.export.errors import BackendError, BundleError
from adx.export.spec import INPUT_IDS, LOGITS, KVCacheSpec, Phase, past_name, present_name
from adx.runtime.cache import KVCache
from adx.runtime.session import Logits
from adx.runtime.threads import check_threads, usable_threads

if TYPE_CHECKING:
    import onnxruntime

PROVIDER = "CPUExecutionProvider"


class OrtGraphs:
    """The prefill and the decode graph in ONNX Runtime sessions on CPU; implements `Executor`."""

    def __init__(
        self, prefill: Path, decode: Path, kv_cache: KVCacheSpec, vocab_size: int, *, threads: int | None = None
    ) -> None:
        """Load both graphs.

        Args:
            prefill: the prefill graph; its weights lie beside it.
            decode: the decode graph; the same.
            kv_cache: shape of the cache.
            vocab_size: width of the logits.
            threads: to compute with; default: the CPUs that this process may use.

        Raises:
            UsageError: the thread count is no number of threads that this machine has.
            BackendError: ONNX Runtime is not installed.
            BundleError: ONNX Runtime cannot load a graph.
        """
        if threads is not None:
            check_threads(threads)
        self.threads = usable_threads() if threads is None else threads
        self.kv_cache = kv_cache
        self.vocab_size = vocab_size
        self._sessions: dict[Phase, onnxruntime.InferenceSession] = {
            "prefill": load_graph(prefill, self.threads),
            "decode": load_graph(decode, self.threads),
        }
        self.provider = str(self._sessions["decode"].get_providers()[0])

    def new_buffers(self, batch_size: int, places: int) -> Sequence[NDArray[np.float16]]:
        """See `Executor.new_buffers`."""
        shape = (batch_size, self.kv_cache.kv_heads, places, self.kv_cache.head_dim)
        return [np.zeros(shape, np.float16) for _ in range(2 * self.kv_cache.layers)]

    def run(self, phase: Phase, inputs: Mapping[str, NDArray[np.int64]], cache: KVCache) -> Logits:
        """See `Executor.run`."""
        batch, length = inputs[INPUT_IDS].shape
        if phase == "decode" and length == 1:
            return self._kept_step(cache).run(inputs)
        return _Step.bind(self, phase, (batch, length), cache).run(inputs)

    def close(self) -> None:
        """See `Executor.close`."""
        self._sessions.clear()

    def _kept_step(self, cache: KVCache) -> _Step:
        """The binding for one new token a row, made once for a cache."""
        step = cache.bound.get(PROVIDER)
        if not isinstance(step, _Step) or step.owner is not self:
            step = cache.bound[PROVIDER] = _Step.bind(self, "decode", (cache.batch_size, 1), cache)
        return step


@dataclass(frozen=True)
class _Step:
    """A graph's inputs and outputs bound to memory that stays: a run fills the inputs and reads the logits."""

    owner: OrtGraphs
    session: onnxruntime.InferenceSession
    binding: onnxruntime.IOBinding
    inputs: Mapping[str, NDArray[np.int64]]
    logits: NDArray[np.float32]

    @staticmethod
    def bind(owner: OrtGraphs, phase: Phase, shape: tuple[int, int], cache: KVCache) -> _Step:
        """Bind a cache's buffers, both as past and as present, and new arrays for `shape` tokens."""
        batch, length = shape
        session = owner._sessions[phase]
        binding = session.io_binding()
        cached = cache_names(owner.kv_cache)
        inputs = {
            name: np.zeros(shape if name == INPUT_IDS else batch, np.int64)
            for name in (i.name for i in session.get_inputs())
            if name not in cached
        }
        for name, array in inputs.items():
            _bind_input(binding, name, array)
        for buffer, (past, present) in zip(cache.buffers, cached.items(), strict=True):
            _bind_input(binding, past, buffer)
            _bind_output(binding, present, buffer)
        logits = np.empty((batch, 1 if phase == "prefill" else length, owner.vocab_size), np.float32)
        _bind_output(binding, LOGITS, logits)
        return _Step(owner, session, binding, inputs, logits)

    def run(self, values: Mapping[str, NDArray[np.int64]]) -> Logits:
        """Compute: the logits, in the step's own buffer."""
        for name, array in self.inputs.items():
            array[:] = values[name]
        try:
            self.session.run_with_iobinding(self.binding)
        except Exception as error:  # ONNX Runtime's exceptions have no common base below Exception
            raise BundleError(
                f"ONNX Runtime failed in the graph: {str(error).splitlines()[0]}; adx verify tells whether the bundle "
                "is as it was written"
            ) from error
        return self.logits


def cache_names(kv_cache: KVCacheSpec) -> dict[str, str]:
    """Each past input's name to its present output's, in the order of a cache's buffers."""
    return {
        past_name(layer, part): present_name(layer, part)
        for layer in range(kv_cache.layers)
        for part in ("key", "value")
    }


def load_graph(path: Path, threads: int) -> onnxruntime.InferenceSession:
    """One graph in a session on CPU.

    Raises:
        BackendError: ONNX Runtime is not installed.
        BundleError: it cannot load the graph.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(
            "ONNX Runtime is not installed: `pip install onnxruntime` (or onnxruntime-gpu) brings it"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # The graph as it is written: weights are dequantized once when it is loaded, and not in every step.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=[PROVIDER])
    except Exception as error:  # ONNX Runtime's exceptions have no common base below Exception
        raise BundleError(f"ONNX Runtime cannot load {path}: {str(error).splitlines()[0]}") from error


def _bind_input(binding: onnxruntime.IOBinding, name: str, array: NDArray[Any]) -> None:
    binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def _bind_output(binding: onnxruntime.IOBinding, name: str, array: NDArray[Any]) -> None:
    binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
