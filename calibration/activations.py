"""Static scales for activations in 8 bits: one scale a layer, and how much noise it would add.

Both are measured in passes over the samples that keep counts only, so memory does not depend on their number. Noise is
relative to each token's own size and averaged over tokens: where a few tokens are a hundred times larger than the
others (the first ones of a text, in some layers), one scale for all leaves little of the others, which the mean square
over all tokens would not show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from adx.calibration.ranges import LayerRange, Progress, Tokens, run_observed

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Floats = NDArray[np.float32]
Method = Literal["minmax", "percentile"]

METHODS: tuple[Method, ...] = ("minmax", "percentile")
PERCENTILE = 0.9999
BINS = 2048
LEVELS = 127
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
    rows: Sequence[Tokens],
    ranges: Mapping[str, LayerRange],
    divisors: Mapping[str, Floats],
    method: Method = "minmax",
    progress: Progress = lambda fraction: None,
) -> dict[str, InputQuantization]:
    """Scales for the inputs of every linear layer.

    Args:
        model: in float32.
        rows: token ids, those that `ranges` were measured on.
        ranges: of the first pass.
        divisors: what smoothing divides a layer's input by, (in,); absent where it is not smoothed.
        method: `minmax` reaches to the largest magnitude; `percentile` to the one that all but a ten-thousandth of
            the values are within.
    """
    one: Floats = np.ones(1, np.float32)
    inverse: dict[str, Floats] = {name: np.float32(1) / divisors.get(name, one) for name in ranges}
    reach = {name: float((found.inputs * inverse[name]).max()) for name, found in ranges.items()}
    if method == "percentile":
        reach = _percentiles(model, rows, inverse, reach)
    scales = {name: max(top, _SMALLEST) / LEVELS for name, top in reach.items()}
    noise = _noise(model, rows, inverse, scales, progress)
    return {name: InputQuantization(scales[name], noise[name]) for name in ranges}


def _percentiles(
    model: PreTrainedModel, rows: Sequence[Tokens], inverse: Mapping[str, Floats], tops: Mapping[str, float]
) -> dict[str, float]:
    """The magnitude that a share of `PERCENTILE` of the values is within, from histograms up to `tops`."""
    import torch

    counts = {name: np.zeros(BINS) for name in tops}

    def observe(name: str, x: torch.Tensor, _y: torch.Tensor) -> None:
        magnitudes = (x.float() * torch.from_numpy(inverse[name])).abs().flatten()
        counts[name] += torch.histc(magnitudes, BINS, 0.0, max(tops[name], _SMALLEST)).numpy()

    run_observed(model, rows, observe)
    found = {}
    for name, count in counts.items():
        share = np.cumsum(count) / max(count.sum(), 1)
        found[name] = tops[name] * (1 + int(np.searchsorted(share, PERCENTILE))) / BINS
    return found


def _noise(
    model: PreTrainedModel,
    rows: Sequence[Tokens],
    inverse: Mapping[str, Floats],
    scales: Mapping[str, float],
    progress: Progress,
) -> dict[str, float]:
    sums = dict.fromkeys(scales, 0.0)
    tokens = dict.fromkeys(scales, 0)

    def observe(name: str, x: torch.Tensor, _y: torch.Tensor) -> None:
        import torch

        values = x.float().flatten(0, -2) * torch.from_numpy(inverse[name])
        error = (values / scales[name]).round().clamp(-LEVELS, LEVELS) * scales[name] - values
        relative = error.square().sum(1) / values.square().sum(1).clamp(min=_SMALLEST)
        sums[name] += float(relative.sum())
        tokens[name] += len(values)

    run_observed(model, rows, observe, progress)
    return {name: sums[name] / max(tokens[name], 1) for name in scales}
