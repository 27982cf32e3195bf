"""The KV cache: buffers that a backend writes in place, and how many tokens each row holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adx.export.errors import UsageError


@dataclass
class KVCache:
    """Key and value buffers of every layer, and the length of every row.

    Attributes:
        buffers: per layer key then value, each (B, kv_heads, places, head_dim) with `capacity` places or more,
            allocated once: arrays, or on a device the backend's own handles.
        lengths: (B,) tokens that each row holds.
        capacity: tokens that a row can hold at most.
        bound: what a backend has prepared for this cache, by its own name.
    """

    buffers: Sequence[Any]
    lengths: NDArray[np.int64]
    capacity: int
    bound: dict[str, object] = field(default_factory=dict, repr=False)

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def rewind(self, lengths: Sequence[int] | NDArray[np.int64]) -> None:
        """Forget all but the first `lengths[b]` tokens of each row; nothing is copied.

        Raises:
            UsageError: a length is negative or more than the row holds.
        """
        new = np.asarray(lengths, np.int64)
        if new.shape != self.lengths.shape or (new < 0).any() or (new > self.lengths).any():
            raise UsageError(f"cannot rewind rows of {self.lengths.tolist()} tokens to {new.tolist()}")
        self.lengths[:] = new

    def clear(self) -> None:
        """Forget every token; the buffers stay."""
        self.lengths[:] = 0
