"""Rows decoded token by token, by an engine and by PyTorch alike."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from adx.ci.reference import Reference
from adx.export.checkpoint_load import cache_argument
from adx.runtime.session import Session

Tokens = NDArray[np.int64]
Logits = NDArray[np.float32]


class Steps(Protocol):
    """Rows of one length that grow together."""

    def restart(self) -> None:
        """Forget all tokens."""

    def read(self, tokens: Tokens) -> Logits:
        """Append tokens (B, N), N of 1 or more; (B, V) logits after the last, valid until the next call."""


class EngineSteps:
    """Rows of an engine, each with a cache of its own: not every engine takes as many at once.

    Args:
        rows: how many.
        room: tokens that a row holds at most.
        chunk: tokens that are read in one call at most.
    """

    def __init__(self, session: Session, rows: int, room: int, chunk: int) -> None:
        self._session, self._chunk = session, chunk
        self._caches = [session.new_cache(1, room) for _ in range(rows)]

    def restart(self) -> None:
        """See `Steps.restart`."""
        for cache in self._caches:
            cache.clear()

    def read(self, tokens: Tokens) -> Logits:
        """See `Steps.read`."""
        return np.stack([self._read(row, tokens[row : row + 1]) for row in range(len(tokens))])

    def _read(self, row: int, tokens: Tokens) -> Logits:
        cache, logits = self._caches[row], np.empty((1, 0), np.float32)
        for start in range(0, tokens.shape[1], self._chunk):
            part = tokens[:, start : start + self._chunk]
            if cache.lengths[0]:
                logits = self._session.decode(part, cache)[:, -1]
            else:
                logits = self._session.prefill(part, np.array([part.shape[1]]), cache, "last")
        last: Logits = logits[0].copy()
        return last


class TorchSteps(Reference):
    """The reference with rows of its own: PyTorch float32 over transformers' KV cache."""

    _rows: dict[str, object] | None = None

    def restart(self) -> None:
        """See `Steps.restart`."""
        self._rows = None

    def read(self, tokens: Tokens) -> Logits:
        """See `Steps.read`."""
        from transformers import DynamicCache

        if self._rows is None:
            self._rows = {cache_argument(self._model): DynamicCache(config=self._model.config)}
        with self._ready() as torch:
            output = self._model(input_ids=torch.from_numpy(tokens), use_cache=True, **self._rows)
        logits: Logits = output.logits[:, -1].float().numpy()
        return logits


def greedy(steps: Steps, prompts: Tokens, count: int) -> Tokens:
    """(B, count): the most likely token after prompts (B, N), `count` times."""
    steps.restart()
    chosen = [steps.read(prompts).argmax(axis=-1)]
    while len(chosen) < count:
        chosen.append(steps.read(chosen[-1][:, None]).argmax(axis=-1))
    return np.stack(chosen, axis=1)
