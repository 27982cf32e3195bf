"""A `Session` without a model: logits are a function of a row's tokens. It keeps every rule of the seam, or fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from adx.export.errors import UsageError
from adx.runtime.cache import KVCache
from adx.runtime.session import Logits, Tokens, Wanted

Scripted = Callable[[Sequence[int]], NDArray[np.float32]]


class FakeSession:
    """A session whose logits after each token are `logits_of(tokens of that row so far)`, a (V,) array.

    A cache's one buffer holds the token ids themselves, so what a row answers depends on what its cache really holds:
    a wrong length, a missed rewind or a row mixed up with another shows in the tokens.

    Attributes:
        calls: per call "prefill" or "decode" and the lengths of the rows before it.
    """

    def __init__(
        self,
        logits_of: Scripted,
        vocab_size: int,
        *,
        capacity: int = 64,
        max_batch_size: int | None = None,
        recompute_at: int | None = None,
    ) -> None:
        self.logits_of = logits_of
        self.vocab_size = vocab_size
        self.capacity = capacity
        self.max_batch_size = max_batch_size
        self.recompute_at = recompute_at
        self.two_graphs = False
        self.max_input_len: int | None = None
        self.provider = "fake"
        self.threads = 1
        self.calls: list[tuple[str, list[int]]] = []

    def new_cache(self, batch_size: int, capacity: int | None = None) -> KVCache:
        """As `Session.new_cache`."""
        room = self.capacity if capacity is None else capacity
        if not 1 <= room <= self.capacity:
            raise UsageError(f"a cache of {room} tokens was asked for, of {self.capacity} at most")
        if batch_size < 1 or (self.max_batch_size is not None and batch_size > self.max_batch_size):
            raise UsageError(f"a cache of {batch_size} rows was asked for, of {self.max_batch_size} at most")
        held = np.full((batch_size, room), -1, np.float32)
        return KVCache(buffers=[held], lengths=np.zeros(batch_size, np.int64), capacity=room)

    def prefill(self, tokens: Tokens, lengths: Tokens, cache: KVCache, wanted: Wanted = "last") -> Logits:
        """As `Session.prefill`."""
        self._check(tokens, cache)
        if cache.lengths.any():
            raise UsageError(f"prefill into a cache that holds {cache.lengths.tolist()} tokens: clear it first")
        if lengths.shape != (len(tokens),) or lengths.min() < 1 or lengths.max() > tokens.shape[1]:
            raise UsageError(f"lengths {lengths.tolist()} do not fit tokens of shape {tokens.shape}")
        if lengths.max() > cache.capacity:
            raise UsageError(f"a prompt of {lengths.max()} tokens exceeds a cache of {cache.capacity}")
        self.calls.append(("prefill", cache.lengths.tolist()))
        out = np.full((*tokens.shape, self.vocab_size), np.nan, np.float32)
        for row, length in enumerate(lengths.tolist()):
            self._write(cache, row, 0, tokens[row, :length])
            first = 0 if wanted == "all" else length - 1
            for end in range(first, length):
                out[row, end] = self.logits_of(self._held(cache, row, end + 1))
        cache.lengths[:] = lengths
        return out if wanted == "all" else out[np.arange(len(out)), lengths - 1]

    def decode(self, tokens: Tokens, cache: KVCache) -> Logits:
        """As `Session.decode`."""
        self._check(tokens, cache)
        new = tokens.shape[1]
        if (cache.lengths < 1).any():
            raise UsageError(f"decode on rows of {cache.lengths.tolist()} tokens: prefill first")
        if (cache.lengths + new > cache.capacity).any():
            raise UsageError(f"rows of {cache.lengths.tolist()} tokens have no room for {new} of {cache.capacity}")
        self.calls.append(("decode", cache.lengths.tolist()))
        out = np.empty((*tokens.shape, self.vocab_size), np.float32)
        for row, length in enumerate(cache.lengths.tolist()):
            self._write(cache, row, length, tokens[row])
            for step in range(new):
                out[row, step] = self.logits_of(self._held(cache, row, length + step + 1))
        cache.lengths += new
        return out

    def close(self) -> None:
        """See `Session.close`; there is nothing to free."""

    def _check(self, tokens: Tokens, cache: KVCache) -> None:
        if tokens.ndim != 2 or tokens.dtype != np.int64 or tokens.shape[0] != cache.batch_size or not tokens.shape[1]:
            raise UsageError(f"tokens of {tokens.dtype} {tokens.shape} do not fit a cache of {cache.batch_size} rows")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise UsageError(f"token ids must be 0 to {self.vocab_size - 1}")

    @staticmethod
    def _write(cache: KVCache, row: int, start: int, tokens: Tokens) -> None:
        held = cache.buffers[0][row]
        held[start : start + len(tokens)] = tokens
        held[start + len(tokens) :] = -1  # what a rewind forgot must not be read again

    @staticmethod
    def _held(cache: KVCache, row: int, length: int) -> list[int]:
        return [int(token) for token in cache.buffers[0][row, :length]]
