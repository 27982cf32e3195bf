"""What every session checks of its arguments before it computes."""

from __future__ import annotations

from adx.export.errors import ContextLengthError, UsageError
from adx.runtime.cache import KVCache
from adx.runtime.session import Session, Tokens


def checked_capacity(session: Session, batch_size: int, capacity: int | None) -> int:
    """Tokens that a row of a new cache shall hold; None stands for the engine's own capacity.

    Raises:
        UsageError: the engine takes no such cache.
    """
    capacity = session.capacity if capacity is None else capacity
    if batch_size < 1 or (session.max_batch_size is not None and batch_size > session.max_batch_size):
        raise UsageError(
            f"a batch of {batch_size} rows: this engine takes 1 to {session.max_batch_size or 'any number'}"
        )
    if not 1 <= capacity <= session.capacity:
        raise UsageError(f"a cache of {capacity} tokens: this engine's rows hold 1 to {session.capacity}")
    return capacity


def check_prefill(tokens: Tokens, lengths: Tokens, cache: KVCache) -> None:
    """Whether prompts, (B, T) and (B,), fit an empty cache.

    Raises:
        UsageError: the cache is not empty, or shapes and lengths do not go together.
        ContextLengthError: a prompt is longer than a row.
    """
    batch, length = tokens.shape
    if cache.lengths.any():
        raise UsageError("prefill needs an empty cache: clear it, or append with decode")
    if batch != cache.batch_size or lengths.shape != (batch,) or lengths.min() < 1 or lengths.max() > length:
        raise UsageError(f"prefill of {tokens.shape} tokens, lengths {lengths.tolist()}, into {cache.batch_size} rows")
    if lengths.max() > cache.capacity:
        raise ContextLengthError(int(lengths.max()), cache.capacity)


def check_decode(tokens: Tokens, cache: KVCache) -> None:
    """Whether every row has room for its new tokens, (B, T).

    Raises:
        UsageError: shapes do not go together.
        ContextLengthError: a row would grow beyond its capacity.
    """
    batch, length = tokens.shape
    if batch != cache.batch_size or length < 1:
        raise UsageError(f"decode of {tokens.shape} tokens into {cache.batch_size} rows")
    if int(cache.lengths.max()) + length > cache.capacity:
        raise ContextLengthError(int(cache.lengths.max()) + length, cache.capacity)
