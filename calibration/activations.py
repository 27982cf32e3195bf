"""Static scales for activations in 8 bits: one scale a layer, and how much noise it would add.

Both are measured in passes over the samples that keep counts only, so memory does not depend on their number. Noise is
relative to each token's own size and averaged over tokens: where a few tokens are a hundred times larger than the
others (the first ones of a text, in some layers), one scale for all leaves little of the others, which the mean square
over all tokens would not show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from adx.calibration.forward import Progress, Tokens
from adx.calibration.histograms import (
    BINS,
    LEVELS,
    PERCENTILE,
    Histogram,
    entropy_reach,
    histogram_of,
    merged,
    mse_reach,
    percentile_reach,
)
from adx.calibration.ranges import MOMENTUM, LayerRange, RowMaxima
from adx.calibration.statistics import Arrays, StatisticsStore, collect, fingerprint, refuse_non_finite

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = [
    "METHODS",
    "PERCENTILE",
    "HistogramObserver",
    "InputQuantization",
    "Method",
    "NoiseObserver",
    "quantize_inputs",
]

Floats = NDArray[np.float32]
Method = Literal["minmax", "moving-average", "percentile", "entropy", "mse"]

METHODS: tuple[Method, ...] = ("minmax", "moving-average", "percentile", "entropy", "mse")
_REACH: dict[Method, Callable[[Histogram], float]] = {
    "percentile": percentile_reach,
    "entropy": entropy_reach,
    "mse": mse_reach,
}
_SMALLEST = 1e-12


@dataclass(frozen=True)
class InputQuantization:
    """How one layer's input would be quantized.

    Attributes:
        scale: float value of one step; codes are -127..127.
        noise: squared error of a token's quantized input over its square, mean over the samples' tokens.
    """

    scale: float
    noise: float


def quantize_inputs(
    model: PreTrainedModel,
    rows: Iterable[Tokens],
    ranges: Mapping[str, LayerRange],
    divisors: Mapping[str, Floats],
    method: Method = "minmax",
    progress: Progress = lambda fraction: None,
    *,
    store: StatisticsStore | None = None,
    digest: str = "",
    chunk: int | None = None,
) -> dict[str, InputQuantization]:
    """Scales for the inputs of every linear layer. Keyword arguments as in `collect`.

    Args:
        model: in float32.
        rows: token ids, those that `ranges` were measured on.
        ranges: of the first pass.
        divisors: what smoothing divides a layer's input by, (in,); absent where it is not smoothed.
        method: how far codes reach. `minmax`: to the largest magnitude; `moving-average`: to the moving average of
            the rows' largest; `percentile`: to the magnitude that all but a ten-thousandth of the values are within;
            `entropy`: to where the distribution of values loses the least information; `mse`: to where the mean
            squared error is the least.

    Raises:
        CheckpointError: NaN or infinity at a layer.
    """
    rows = list(rows)
    inverse = _inverse(divisors)
    reach = {name: float((found.inputs * inverse.get(name, np.float32(1))).max()) for name, found in ranges.items()}
    passes = 1 if method == "minmax" else 2

    def run(observer: HistogramObserver | NoiseObserver, index: int) -> None:
        def part(fraction: float) -> None:
            progress((index + fraction) / passes)

        collect(model, rows, observer, store=store, digest=digest, progress=part, chunk=chunk)

    if method != "minmax":
        histograms = HistogramObserver(divisors)
        run(histograms, 0)
        reach |= {name: top for name, top in histograms.reach(method).items() if name in ranges}
    scales = {name: max(top, _SMALLEST) / LEVELS for name, top in reach.items()}
    noise = NoiseObserver(divisors, scales)
    run(noise, passes - 1)
    found = noise.noise()
    return {name: InputQuantization(scales[name], found.get(name, 0.0)) for name in ranges}


class HistogramObserver:
    """Per layer a histogram of its input's magnitudes, and the moving average of the rows' largest.

    Attributes:
        histograms: by layer.
    """

    def __init__(self, divisors: Mapping[str, Floats]) -> None:
        """Args:
        divisors: what a layer's input is divided by, (in,); absent where it is not.
        """
        self.histograms: dict[str, Histogram] = {}
        self._inverse = _inverse(divisors)
        self._rows = RowMaxima()

    @property
    def kind(self) -> str:
        """As in `Observer`."""
        return f"histograms, {BINS} bins, momentum {MOMENTUM}, of inputs times {fingerprint(self._inverse)}"

    def observe(self, name: str, x: torch.Tensor, _y: torch.Tensor) -> None:
        """As in `Observer`."""
        magnitudes = np.abs(_scaled(x, self._inverse.get(name)))
        refuse_non_finite(name, float(magnitudes.max()))
        found = histogram_of(magnitudes)
        self.histograms[name] = merged(self.histograms[name], found) if name in self.histograms else found
        self._rows.add(name, np.array(found.largest))

    def row_done(self) -> None:
        """As in `Observer`."""
        self._rows.row_done()

    def reach(self, method: Method) -> dict[str, float]:
        """How far each layer's codes shall reach."""
        if method == "moving-average":
            return {name: float(average) for name, average in self._rows.averages.items()}
        if method == "minmax":
            return {name: histogram.largest for name, histogram in self.histograms.items()}
        return {name: _REACH[method](histogram) for name, histogram in self.histograms.items()}

    def state(self) -> dict[str, NDArray[Any]]:
        """As in `Observer`."""
        found = self.histograms.values()
        return {
            "names": np.array(list(self.histograms), np.str_),
            "counts": np.array([each.counts for each in found], np.int64).reshape(-1, BINS),
            "exponents": np.array([each.exponent for each in found], np.int64),
            "largest": np.array([each.largest for each in found], np.float64),
            "averages": np.array([self._rows.averages[name] for name in self.histograms], np.float64),
        }

    def restore(self, state: Arrays) -> None:
        """As in `Observer`."""
        names = [str(name) for name in state["names"]]
        parts = zip(state["counts"], state["exponents"].tolist(), state["largest"].tolist(), strict=True)
        histograms = dict(zip(names, (Histogram(*each) for each in parts), strict=True))
        averages = dict(zip(names, map(np.array, state["averages"].tolist()), strict=True))
        self.histograms, self._rows.averages = histograms, averages


class NoiseObserver:
    """Per layer how much 8-bit codes of one scale would change its input, relative to each token's own size."""

    def __init__(self, divisors: Mapping[str, Floats], scales: Mapping[str, float]) -> None:
        """Args:
        divisors: what a layer's input is divided by, (in,); absent where it is not.
        scales: of the divided input; layers without one are left out.
        """
        self._inverse = _inverse(divisors)
        self._scales = dict(scales)
        self._sums: dict[str, tuple[int, float]] = {}  # tokens, relative squared error

    @property
    def kind(self) -> str:
        """As in `Observer`."""
        return f"noise at {fingerprint(self._scales)} of inputs times {fingerprint(self._inverse)}"

    def observe(self, name: str, x: torch.Tensor, _y: torch.Tensor) -> None:
        """As in `Observer`."""
        scale = self._scales.get(name)
        if scale is None:
            return
        values = _scaled(x, self._inverse.get(name)).reshape(-1, x.shape[-1])
        error = np.clip(np.rint(values / scale), -LEVELS, LEVELS) * scale - values
        size = np.square(values).sum(1, dtype=np.float64)
        relative = float((np.square(error).sum(1, dtype=np.float64) / np.maximum(size, _SMALLEST)).sum())
        refuse_non_finite(name, relative)
        tokens, total = self._sums.get(name, (0, 0.0))
        self._sums[name] = tokens + len(values), total + relative

    def row_done(self) -> None:
        """As in `Observer`."""

    def noise(self) -> dict[str, float]:
        """Mean over tokens, by layer."""
        return {name: total / tokens for name, (tokens, total) in self._sums.items()}

    def state(self) -> dict[str, NDArray[Any]]:
        """As in `Observer`."""
        return {
            "names": np.array(list(self._sums), np.str_),
            "tokens": np.array([tokens for tokens, _ in self._sums.values()], np.int64),
            "sums": np.array([total for _, total in self._sums.values()], np.float64),
        }

    def restore(self, state: Arrays) -> None:
        """As in `Observer`."""
        pairs = zip(state["tokens"].tolist(), state["sums"].tolist(), strict=True)
        self._sums = dict(zip([str(name) for name in state["names"]], pairs, strict=True))


def _inverse(divisors: Mapping[str, Floats]) -> dict[str, Floats]:
    return {name: np.float32(1) / np.asarray(divisor, np.float32) for name, divisor in divisors.items()}


def _scaled(x: torch.Tensor, inverse: Floats | None) -> Floats:
    values: Floats = x.float().numpy()
    return values if inverse is None else values * inverse
