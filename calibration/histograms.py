"""Histograms of magnitudes that do not depend on the order of what they count, and how far a scale reaches by them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

BINS = 2048
LEVELS = 127  # codes are -127..127
PERCENTILE = 0.9999
_LOG_BINS = 11
_LEAST_EXPONENT = -100  # smaller magnitudes all count in the first bin
_FIRST = 128  # bins of the least reach that is tried: with fewer bins than codes nothing is known of rounding


@dataclass(frozen=True)
class Histogram:
    """How many magnitudes lie in each of 2048 bins between 0 and the power of two above the largest.

    Bins are a power of two wide: values fall into them exactly, and a range doubles by adding pairs of bins. So the
    histogram depends on the values alone, neither on their order nor on how they came in groups.

    Attributes:
        counts: (2048,) int64; bin i holds values from i to less than i + 1 widths.
        exponent: the range ends at 2**exponent.
        largest: the largest value, exactly.
    """

    counts: Counts
    exponent: int
    largest: float

    @property
    def width(self) -> float:
        """Of one bin."""
        return 2.0 ** (self.exponent - _LOG_BINS)


def histogram_of(values: NDArray[np.floating]) -> Histogram:
    """Of any number of values in float32 or float64, which are finite and not negative."""
    largest = float(values.max(initial=0))
    exponent = max(math.frexp(largest)[1], _LEAST_EXPONENT) if largest else _LEAST_EXPONENT
    scaled = values.ravel() * values.dtype.type(2.0 ** (_LOG_BINS - exponent))
    return Histogram(np.bincount(scaled.astype(np.intp), minlength=BINS), exponent, largest)


def merged(one: Histogram, other: Histogram) -> Histogram:
    """The histogram of the values of both, as `histogram_of` gives it for all of them at once."""
    exponent = max(one.exponent, other.exponent)
    counts = _doubled(one.counts, exponent - one.exponent) + _doubled(other.counts, exponent - other.exponent)
    return Histogram(counts, exponent, max(one.largest, other.largest))


def _doubled(counts: Counts, times: int) -> Counts:
    pairs = 1 << min(times, _LOG_BINS)
    result = np.zeros_like(counts)
    result[: BINS // pairs] = counts.reshape(-1, pairs).sum(1)
    return result


def minmax_reach(histogram: Histogram) -> float:
    """The largest value."""
    return histogram.largest


def percentile_reach(histogram: Histogram, share: float = PERCENTILE) -> float:
    """A magnitude that a share of the values is within: the upper end of the bin where that is so."""
    running = np.cumsum(histogram.counts)
    index = int(np.searchsorted(running, share * running[-1]))
    return min((index + 1) * histogram.width, histogram.largest)


def entropy_reach(histogram: Histogram) -> float:
    """The reach that loses the least information: Kullback-Leibler divergence between the values clipped there, and
    the same in 128 levels.

    Migacz, "8-bit Inference with TensorRT" (GTC 2017), pages 24-27 and 38-39: what TensorRT 8 and older call entropy
    calibration. Of equal divergences the largest reach is taken. Each level's sum over bins is a difference of
    cumulative sums, so no bin is visited twice.
    """
    counts = histogram.counts.astype(np.float64)
    ends = _ends(histogram)
    if not len(ends):
        return histogram.largest
    bounds = -(-np.arange(_FIRST + 1) * ends[:, None] // _FIRST)  # (candidates, 129): first bin of each level
    inside, filled = (_sums(each, bounds) for each in (counts, (counts > 0).astype(np.float64)))
    mean = inside / np.maximum(filled, 1)  # what each of a level's bins that are not empty becomes
    total, kept = counts.sum(), inside.sum(1)
    last = counts[ends - 1]
    clipped = last + (total - kept)  # the last bin counts everything beyond it too
    with np.errstate(divide="ignore", invalid="ignore"):
        own = np.concatenate([[0.0], np.cumsum(_xlogx(counts))])[ends] - _xlogx(last) + _xlogx(clipped)
        levels = (inside * np.log(np.where(mean > 0, mean, 1.0))).sum(1)
        beyond = (total - kept) * np.log(np.where(last > 0, mean[:, -1], 0.0))
    levels += np.where(total > kept, beyond, 0.0)
    divergence = (own - levels) / total - np.log(total) + np.log(np.maximum(kept, 1.0))
    best = len(ends) - 1 - int(np.argmin(divergence[::-1]))
    return min(float(ends[best]) * histogram.width, histogram.largest)


def mse_reach(histogram: Histogram) -> float:
    """The reach of least mean squared error in 8-bit symmetric codes, rounding and clipping both, every value taken
    at its bin's centre; of equal errors the largest reach."""
    ends = _ends(histogram)
    if not len(ends):
        return histogram.largest
    counts = histogram.counts.astype(np.float64)
    centres = np.minimum((np.arange(BINS) + 0.5) * histogram.width, histogram.largest)
    reach = np.minimum(ends * histogram.width, histogram.largest)
    steps = reach[:, None] / LEVELS
    codes = np.arange(LEVELS + 1)
    bounds = np.searchsorted(centres, (codes - 0.5) * steps)  # (candidates, 128): first bin that rounds to each code
    bounds = np.concatenate([bounds, np.full((len(ends), 1), BINS)], 1)
    count, first, second = (_sums(counts * centres**power, bounds) for power in range(3))
    values = codes * steps
    errors = (values**2 * count - 2 * values * first + second).sum(1)
    return float(reach[len(ends) - 1 - int(np.argmin(errors[::-1]))])


def _ends(histogram: Histogram) -> Counts:
    """Bins that each candidate reaches over, up to the one that holds the largest value."""
    filled = np.flatnonzero(histogram.counts)
    return np.arange(_FIRST, (int(filled[-1]) if len(filled) else 0) + 2)


def _sums(values: NDArray[np.float64], bounds: NDArray[np.integer]) -> NDArray[np.float64]:
    """Sums of values between neighbouring bounds, (candidates, levels)."""
    running = np.concatenate([[0.0], np.cumsum(values)])
    found: NDArray[np.float64] = np.diff(running[bounds], axis=1)
    return found


def _xlogx(values: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = values * np.log(np.where(values > 0, values, 1.0))
    return found
