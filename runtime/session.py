"""The seam between the token loop and a backend: prefill and decode over a KV cache, token ids in, logits out."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from adx.runtime.cache import KVCache

Tokens = NDArray[np.int64]
Logits = NDArray[np.float32]
Wanted = Literal["last", "all"]


class Session(Protocol):
    """A compiled model, ready to run. One session serves both phases; it is not thread-safe.

    Attributes:
        vocab_size: width of the logits.
        capacity: tokens that a row's cache can hold at most.
        max_batch_size: rows that a cache can have at most, or None where the engine sets no bound.
        max_input_len: tokens that a prompt can have at most, or None where the capacity is the bound.
        recompute_at: `KVCacheSpec.recompute_at`.
        two_graphs: prefill with "last" runs another graph than decode, and than prefill with "all" may.
        provider: the backend that really computes, as it names itself.
        threads: threads that it computes with.
    """

    vocab_size: int
    capacity: int
    max_batch_size: int | None
    max_input_len: int | None
    recompute_at: int | None
    two_graphs: bool
    provider: str
    threads: int

    def new_cache(self, batch_size: int, capacity: int | None = None) -> KVCache:
        """An empty cache of `batch_size` rows, each of `capacity` tokens (default: the engine's own capacity)."""
        ...

    def prefill(self, tokens: Tokens, lengths: Tokens, cache: KVCache, wanted: Wanted = "last") -> Logits:
        """Read prompts into an empty cache.

        Args:
            tokens: (B, T), rows padded on the right with any valid id.
            lengths: (B,), true tokens of each row, 1..T.
            cache: B rows, all empty; its lengths become `lengths`.
            wanted: logits of each row's last true token, or of all positions.

        Returns:
            (B, V) for "last", (B, T, V) for "all" (padded positions hold unspecified values). The array may be
            reused by the next call: copy what is to be kept.
        """
        ...

    def decode(self, tokens: Tokens, cache: KVCache) -> Logits:
        """Append the same number of new tokens to every row.

        Args:
            tokens: (B, T), T of 1 or more.
            cache: B rows of any lengths, each with room for T more.

        Returns:
            (B, T, V): logits after each new token. The array may be reused by the next call.
        """
        ...

    def close(self) -> None:
        """Free what the engine holds, the buffers of its caches on a device included; it cannot be used then."""
        ...
