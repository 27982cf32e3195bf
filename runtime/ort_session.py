"""`Session` on ONNX Runtime: one session for both phases, the KV cache bound in place, outputs into kept buffers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.export.errors import BackendError, BundleError
from adx.export.spec import (
    INPUT_IDS,
    LOGITS,
    LOGITS_INDICES,
    POSITION_IDS,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    KVCacheSpec,
    past_name,
    present_name,
)
from adx.runtime.cache import KVCache
from adx.runtime.hugepages import huge_pages_for_new_memory
from adx.runtime.session import Logits, Tokens, Wanted
from adx.runtime.session_checks import check_decode, check_prefill, checked_capacity
from adx.runtime.threads import check_threads, usable_threads

if TYPE_CHECKING:
    import onnxruntime

    from adx.export.bundle import Bundle

TARGET = "ort-cpu"
PREFILL_CHUNK = 128  # tokens of a row read at once: fastest per token, and it bounds the attention's scratch memory


class OrtSession:
    """A lowered graph in an ONNX Runtime CPU session; implements `Session`."""

    def __init__(self, path: Path, kv_cache: KVCacheSpec, vocab_size: int, *, threads: int | None = None) -> None:
        """Load an engine.

        Args:
            path: the lowered graph; its weights lie beside it.
            kv_cache: shape of the cache.
            vocab_size: width of the logits.
            threads: to compute with; default: the CPUs that this process may use.

        Raises:
            UsageError: the thread count is no number of threads that this machine has.
            BackendError: ONNX Runtime is not installed.
            BundleError: ONNX Runtime cannot load the graph.
        """
        if threads is not None:
            check_threads(threads)
        self.kv_cache = kv_cache
        self.vocab_size = vocab_size
        self.capacity = kv_cache.capacity
        self.max_batch_size: int | None = None
        self.max_input_len: int | None = None
        self.recompute_at = kv_cache.recompute_at
        self.two_graphs = False
        self.threads = usable_threads() if threads is None else threads
        with huge_pages_for_new_memory():
            self._session = _load(path, self.threads)
        self.provider = str(self._session.get_providers()[0])
        self._inputs = {i.name for i in self._session.get_inputs()}

    @classmethod
    def open(cls, bundle: Bundle, *, threads: int | None = None) -> OrtSession:
        """Load a bundle's engine for this target.

        Raises:
            BackendError: the bundle has no engine for it, or ONNX Runtime is not installed.
        """
        manifest = bundle.manifest
        engine = next((e for e in manifest.engines if e.target == TARGET), None)
        if engine is None:
            found = ", ".join(e.target for e in manifest.engines) or "none"
            raise BackendError(
                f"{bundle.path} holds no {TARGET} engine (it holds: {found}); export it with --target {TARGET}"
            )
        path = bundle.path / engine.decode
        session = cls(path, manifest.kv_cache, manifest.model.vocab_size, threads=threads)
        session.max_batch_size = engine.limits.max_batch_size
        session.max_input_len = engine.limits.max_input_len
        return session

    def new_cache(self, batch_size: int, capacity: int | None = None) -> KVCache:
        """See `Session.new_cache`; unused places hold zeros, never NaN."""
        capacity = checked_capacity(self, batch_size, capacity)
        spec = self.kv_cache
        shape = (batch_size, spec.kv_heads, capacity, spec.head_dim)
        buffers = [np.zeros(shape, np.float32) for _ in range(2 * spec.layers)]
        return KVCache(buffers, np.zeros(batch_size, np.int64), capacity)

    def prefill(self, tokens: Tokens, lengths: Tokens, cache: KVCache, wanted: Wanted = "last") -> Logits:
        """See `Session.prefill`."""
        check_prefill(tokens, lengths, cache)
        longest = int(lengths.max())
        if longest < tokens.shape[1]:  # the attention kernel takes no padding behind the longest row
            logits = self.prefill(tokens[:, :longest], lengths, cache, wanted)
            behind = ((0, 0), (0, tokens.shape[1] - longest), (0, 0))
            return logits if wanted == "last" else np.pad(logits, behind)
        batch, length = tokens.shape
        if self.recompute_at is None and length > PREFILL_CHUNK:
            return self._prefill_in_chunks(tokens, lengths, cache, wanted)
        step = _Step.bind(self, cache, tokens.shape, batch if wanted == "last" else batch * length)
        if wanted == "last":
            step.indices[:] = np.arange(batch) * length + lengths - 1
        logits = step.run(tokens, cache.lengths, lengths)
        cache.lengths[:] = lengths
        return logits if wanted == "last" else logits.reshape(batch, length, -1)

    def decode(self, tokens: Tokens, cache: KVCache) -> Logits:
        """See `Session.decode`. Several new tokens for several rows go row by row, on views of the cache."""
        batch, length = tokens.shape
        check_decode(tokens, cache)
        if batch > 1 and length > 1:
            return np.stack([self.decode(tokens[b : b + 1], _row(cache, b))[0].copy() for b in range(batch)])
        step = self._kept_step(cache) if length == 1 else _Step.bind(self, cache, tokens.shape, length)
        after = cache.lengths + length
        logits = step.run(tokens, cache.lengths, after)
        cache.lengths[:] = after
        return logits.reshape(batch, length, -1)

    def close(self) -> None:
        """See `Session.close`."""
        del self._session

    def _kept_step(self, cache: KVCache) -> _Step:
        """The binding for one new token a row, made once for a cache."""
        step = cache.bound.get(TARGET)
        if not isinstance(step, _Step) or step.owner is not self:
            step = cache.bound[TARGET] = _Step.bind(self, cache, (cache.batch_size, 1), cache.batch_size)
        return step

    def _prefill_in_chunks(self, tokens: Tokens, lengths: Tokens, cache: KVCache, wanted: Wanted) -> Logits:
        """Long prompts row by row and chunk by chunk, so that scratch memory does not grow with their square."""
        batch, length = tokens.shape
        last = np.empty((batch, self.vocab_size), np.float32)
        every = np.zeros((batch, length, self.vocab_size), np.float32) if wanted == "all" else None
        for b in range(batch):
            row = _row(cache, b)
            for start in range(0, int(lengths[b]), PREFILL_CHUNK):
                chunk = tokens[b : b + 1, start : min(start + PREFILL_CHUNK, int(lengths[b]))]
                count = chunk.shape[1]
                step = _Step.bind(self, row, chunk.shape, 1 if every is None else count)
                if every is None:
                    step.indices[:] = count - 1
                logits = step.run(chunk, row.lengths, row.lengths + count)
                row.lengths += count
                if every is not None:
                    every[b, start : start + count] = logits
            last[b] = logits[-1]
        return last if every is None else every


@dataclass(frozen=True)
class _Step:
    """Inputs and outputs bound to memory that stays: a run fills the inputs and reads the logits."""

    owner: OrtSession
    binding: onnxruntime.IOBinding
    input_ids: NDArray[np.int64]  # (B, T)
    position_ids: NDArray[np.int64]  # (B, T)
    seqlens_k: NDArray[np.int32]  # (B,)
    total: NDArray[np.int32]  # ()
    indices: NDArray[np.int64]  # (N,)
    logits: NDArray[np.float32]  # (N, V)
    offsets: NDArray[np.int64]  # (1, T)

    @staticmethod
    def bind(owner: OrtSession, cache: KVCache, shape: tuple[int, ...], rows: int) -> _Step:
        """Bind a cache's buffers, both as past and as present, and new arrays for `shape` tokens and `rows` logits."""
        batch, length = shape
        binding = owner._session.io_binding()
        step = _Step(
            owner,
            binding,
            np.zeros((batch, length), np.int64),
            np.zeros((batch, length), np.int64),
            np.zeros(batch, np.int32),
            np.zeros((), np.int32),
            np.arange(rows),
            np.empty((rows, owner.vocab_size), np.float32),
            np.arange(length)[None],
        )
        arrays: dict[str, NDArray[Any]] = {
            INPUT_IDS: step.input_ids,
            POSITION_IDS: step.position_ids,
            SEQLENS_K: step.seqlens_k,
            TOTAL_SEQUENCE_LENGTH: step.total,
            LOGITS_INDICES: step.indices,
        }
        for name, array in arrays.items():
            if name in owner._inputs:
                _bind_input(binding, name, array)
        for layer in range(owner.kv_cache.layers):
            for index, part in enumerate(("key", "value")):
                buffer = cache.buffers[2 * layer + index]
                _bind_input(binding, past_name(layer, part), buffer)  # type: ignore[arg-type]  # a literal of the loop
                _bind_output(binding, present_name(layer, part), buffer)  # type: ignore[arg-type]
        _bind_output(binding, LOGITS, step.logits)
        return step

    def run(self, tokens: Tokens, before: NDArray[np.int64], after: NDArray[np.int64]) -> Logits:
        """Compute: (N, V) logits, in the step's own buffer."""
        self.input_ids[:] = tokens
        np.add(before[:, None], self.offsets, out=self.position_ids)
        np.subtract(after, 1, out=self.seqlens_k, casting="same_kind")
        self.total[...] = after.max()
        try:
            self.owner._session.run_with_iobinding(self.binding)
        except Exception as error:  # ONNX Runtime's exceptions have no common base below Exception
            raise BundleError(
                f"ONNX Runtime failed in the engine: {str(error).splitlines()[0]}; adx verify tells whether the bundle "
                "is as it was written"
            ) from error
        return self.logits


def _bind_input(binding: onnxruntime.IOBinding, name: str, array: NDArray[Any]) -> None:
    binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def _bind_output(binding: onnxruntime.IOBinding, name: str, array: NDArray[Any]) -> None:
    binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def _row(cache: KVCache, row: int) -> KVCache:
    """One row of a cache as a cache of its own, on the same memory."""
    buffers = [buffer[row : row + 1] for buffer in cache.buffers]
    return KVCache(buffers, cache.lengths[row : row + 1], cache.capacity)


def _load(path: Path, threads: int) -> onnxruntime.InferenceSession:
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(
            "ONNX Runtime is not installed: `pip install adx-toolchain[cpu]` (or [gpu]) brings it"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions have no common base below Exception
        raise BundleError(f"ONNX Runtime cannot load {path}: {str(error).splitlines()[0]}") from error
