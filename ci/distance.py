"""How far an engine's logits are from a reference's, position by position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_WORK_ELEMENTS = 1 << 21  # float64 elements of one temporary (16 MB)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Distance:
    """Figures of N positions, each (N,); infinite (and `agree` false) where the engine gave NaN or infinity.

    Attributes:
        kl: KL divergence of the engine's distribution from the reference's, in nats.
        agree: whether both have the same most likely token.
        error: largest absolute difference of a logit.
        worst: the token of that logit.
        low: the reference's smallest logit.
        high: the reference's largest logit.
        finite: whether all of the engine's logits are finite.
    """

    kl: Floats
    agree: NDArray[np.bool_]
    error: Floats
    worst: NDArray[np.int64]
    low: Floats
    high: Floats
    finite: NDArray[np.bool_]


def distance(reference: NDArray[np.float32], engine: NDArray[np.float32]) -> Distance:
    """Compare two (N, V) arrays of logits, softmax and sums in float64; the reference must be finite."""
    count = len(reference)
    kl, error, low, high = (np.full(count, np.inf) for _ in range(4))
    agree, finite = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    worst = np.zeros(count, np.int64)
    for part in _parts(reference):
        low[part], high[part] = reference[part].min(axis=1), reference[part].max(axis=1)
        finite[part] = np.isfinite(engine[part]).all(axis=1)
        worst[part] = np.isfinite(engine[part]).argmin(axis=1)
        rows = np.flatnonzero(finite[part]) + part.start
        if not len(rows):
            continue
        ours, theirs = engine[rows].astype(np.float64), reference[rows].astype(np.float64)
        agree[rows] = ours.argmax(axis=1) == theirs.argmax(axis=1)
        gap = theirs - ours
        worst[rows] = np.abs(gap).argmax(axis=1)
        error[rows] = np.abs(gap[np.arange(len(rows)), worst[rows]])
        their_sum, our_sum = _exponentials(theirs), _exponentials(ours)  # from here on they hold exponentials
        # KL(p || q) = sum p (log p - log q), and log p - log q = gap - (log sum exp p - log sum exp q)
        mean_gap = np.einsum("nv,nv->n", theirs, gap) / theirs.sum(axis=1)
        kl[rows] = np.maximum(mean_gap - (their_sum - our_sum), 0.0)
    return Distance(kl, agree, error, worst, low, high, finite)


def negative_log_likelihood(logits: NDArray[np.float32], targets: NDArray[np.int64]) -> Floats:
    """(N,) nats of the tokens `targets` (N,) under logits (N, V), in float64; infinite where a logit is not finite."""
    nll = np.full(len(logits), np.inf)
    for part in _parts(logits):
        rows = np.flatnonzero(np.isfinite(logits[part]).all(axis=1)) + part.start
        if len(rows):
            wide = logits[rows].astype(np.float64)
            chosen = wide[np.arange(len(rows)), targets[rows]]
            nll[rows] = _exponentials(wide) - chosen
    return nll


def _exponentials(logits: Floats) -> Floats:
    """Turn logits (N, V) into exponentials in place, up to a factor per row; returns log sum exp (N,)."""
    top = logits.max(axis=1, keepdims=True)
    np.subtract(logits, top, out=logits)
    np.exp(logits, out=logits)
    total: Floats = np.log(logits.sum(axis=1)) + top[:, 0]
    return total


def _parts(logits: NDArray[np.float32]) -> Iterator[slice]:
    step = max(1, _WORK_ELEMENTS // logits.shape[1])
    for start in range(0, len(logits), step):
        yield slice(start, min(start + step, len(logits)))
