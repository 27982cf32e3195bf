"""`Session` over two graphs with a static cache, one for prefill and one for decode; an `Executor` runs them.

Rows are padded on the right: what a call writes past a row's length is garbage that no query sees and that later tokens
overwrite. So all rows of a call start at the same place and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adx.engines.profiles import DECODE_TOKENS, PREFILL_CHUNK
from adx.export.spec import INPUT_IDS, PAD_LENGTHS, ROW_LENGTHS, WRITE_INDICES, KVCacheSpec, Phase
from adx.runtime.cache import KVCache
from adx.runtime.session import Logits, Tokens, Wanted
from adx.runtime.session_checks import check_decode, check_prefill, checked_capacity

CHECK_CHUNK = 128  # the same on a CPU: suits its caches, and lets checks of some length cross from chunk to chunk


class Executor(Protocol):
    """What runs the two graphs on one backend.

    Attributes:
        provider: the backend that really computes, as it names itself.
        threads: threads that it computes with on the host.
    """

    provider: str
    threads: int

    def new_buffers(self, batch_size: int, places: int) -> Sequence[Any]:
        """Per layer a key and a value buffer of zeros, each (batch_size, kv_heads, places, head_dim) float16."""
        ...

    def run(self, phase: Phase, inputs: Mapping[str, NDArray[np.int64]], cache: KVCache) -> Logits:
        """Run one graph; keys and values are written into the cache's buffers in place.

        Args:
            phase: which graph.
            inputs: every input but the cache, by the names of `adx.export.spec`; a graph takes those that it has.
            cache: only its buffers are used, and `bound` for what is prepared once.

        Returns:
            float32 on the host: (B, 1, V) for prefill, (B, T, V) for decode. The array may be reused by the next call.
        """
        ...

    def close(self) -> None:
        """Free what the executor and the buffers that it made hold; neither can be used then."""
        ...


class StaticSession:
    """`Session` over an executor. A context manager: leaving it frees what the executor holds."""

    def __init__(
        self,
        executor: Executor,
        kv_cache: KVCacheSpec,
        vocab_size: int,
        *,
        max_batch_size: int | None = None,
        max_input_len: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        decode_tokens: int = DECODE_TOKENS,
        fixed_places: bool = False,
    ) -> None:
        """Args:
        executor: runs the graphs.
        kv_cache: shape of the cache; its capacity is the engine's.
        vocab_size: width of the logits.
        max_batch_size: rows that a cache can have at most, or None.
        max_input_len: tokens that a prompt can have at most, or None.
        prefill_chunk: tokens of a row that one prefill call reads at most.
        decode_tokens: new tokens of a row that one decode call appends at most.
        fixed_places: the engine takes no cache but of exactly `kv_cache.capacity` places; a cache of less capacity
            then takes as much memory.
        """
        self.kv_cache = kv_cache
        self.vocab_size = vocab_size
        self.capacity = kv_cache.capacity
        self.max_batch_size = max_batch_size
        self.max_input_len = max_input_len
        self.recompute_at = kv_cache.recompute_at
        self.two_graphs = True
        self.provider = executor.provider
        self.threads = executor.threads
        self._executor = executor
        self._prefill_chunk = prefill_chunk
        self._decode_tokens = decode_tokens
        self._fixed_places = fixed_places

    def new_cache(self, batch_size: int, capacity: int | None = None) -> KVCache:
        """See `Session.new_cache`; unused places hold zeros, never NaN."""
        capacity = checked_capacity(self, batch_size, capacity)
        buffers = self._executor.new_buffers(batch_size, self.capacity if self._fixed_places else capacity)
        return KVCache(buffers, np.zeros(batch_size, np.int64), capacity)

    def prefill(self, tokens: Tokens, lengths: Tokens, cache: KVCache, wanted: Wanted = "last") -> Logits:
        """See `Session.prefill`. Prompts of more than `prefill_chunk` tokens are read in chunks."""
        check_prefill(tokens, lengths, cache)
        true = tokens[:, : int(lengths.max())]  # never a place past the cache's end
        read = self._read_last if wanted == "last" else self._read_all
        logits = read(true, lengths, cache, tokens.shape[1])
        cache.lengths[:] = lengths
        return logits

    def decode(self, tokens: Tokens, cache: KVCache) -> Logits:
        """See `Session.decode`. More than `decode_tokens` new tokens are appended in pieces."""
        batch, length = tokens.shape
        check_decode(tokens, cache)
        if length <= self._decode_tokens:
            after = cache.lengths + length
            logits = self._run("decode", tokens, cache.lengths, after, cache)
            cache.lengths[:] = after
            return logits
        every = np.empty((batch, length, self.vocab_size), np.float32)
        for start, piece in _pieces(tokens, self._decode_tokens):
            every[:, start : start + piece.shape[1]] = self.decode(piece, cache)
        return every

    def close(self) -> None:
        """Free what the engine holds, its caches' buffers included."""
        self._executor.close()

    def __enter__(self) -> StaticSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_last(self, tokens: Tokens, lengths: Tokens, cache: KVCache, width: int) -> Logits:
        """(B, V): logits of each row's last token, from the chunk in which the row ends.

        Every chunk is told the rows' final lengths: they decide which rotary table a row reads, and a row's keys must
        all come from one. The graph clamps the place of the logits to the chunk, so rows that end elsewhere give
        unspecified logits, which are passed over.
        """
        if tokens.shape[1] <= self._prefill_chunk:
            return self._run("prefill", tokens, np.zeros_like(lengths), lengths, cache)[:, 0]
        last = np.empty((len(tokens), self.vocab_size), np.float32)
        for start, piece in _pieces(tokens, self._prefill_chunk):
            logits = self._run("prefill", piece, np.full_like(lengths, start), lengths, cache)
            ends = (lengths > start) & (lengths <= start + piece.shape[1])
            last[ends] = logits[ends, 0]
        return last

    def _read_all(self, tokens: Tokens, lengths: Tokens, cache: KVCache, width: int) -> Logits:
        """(B, width, V): logits of every position, zeros past the longest row."""
        every = np.zeros((len(tokens), width, self.vocab_size), np.float32)
        for start, piece in _pieces(tokens, self._decode_tokens):
            logits = self._run("decode", piece, np.full_like(lengths, start), lengths, cache)
            every[:, start : start + piece.shape[1]] = logits
        return every

    def _run(self, phase: Phase, tokens: Tokens, start: Tokens, end: Tokens, cache: KVCache) -> Logits:
        inputs = {INPUT_IDS: tokens, WRITE_INDICES: start, ROW_LENGTHS: end, PAD_LENGTHS: np.zeros_like(start)}
        return self._executor.run(phase, inputs, cache)


def _pieces(tokens: Tokens, size: int) -> Iterator[tuple[int, Tokens]]:
    """The columns of `tokens` in pieces of at most `size`, each with where it starts."""
    for start in range(0, tokens.shape[1], size):
        yield start, tokens[:, start : start + size]
