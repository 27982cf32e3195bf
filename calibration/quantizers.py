"""Weight quantizers by layer: rounding to nearest, the same with clipped ranges, GPTQ; what was made is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from adx.calibration.gptq import Factor, factor, quantize_gptq
from adx.calibration.weights import BlockScheme, QuantizedWeight, quantize
from adx.export.linears import LinearLayer

Floats = NDArray[np.float32]
Hessians = Callable[[str], "Floats | None"]  # from a layer's name to (in, in) mean of x^T x


class WeightQuantizer(Protocol):
    """From a layer and a scheme to integers; the layer's order of rows is its callers' affair, and kept."""

    def __call__(self, layer: LinearLayer, scheme: BlockScheme) -> QuantizedWeight: ...


def round_to_nearest(layer: LinearLayer, scheme: BlockScheme) -> QuantizedWeight:
    """Every weight to the nearest code, ranges as wide as their blocks."""
    return quantize(layer.weight(), scheme)


@dataclass(frozen=True)
class Clipped:
    """Round to nearest, 4-bit ranges clipped where that leaves less error in the layer's output.

    Attributes:
        power: mean square of each input channel, (in,), by layer; layers that are not there count all channels alike.
    """

    power: Mapping[str, Floats]

    def __call__(self, layer: LinearLayer, scheme: BlockScheme) -> QuantizedWeight:
        found = self.power.get(layer.name)
        power = np.ones(layer.shape[1], np.float32) if found is None else scaled_power(found, layer)
        return quantize(layer.weight(), scheme, importance=power)


@dataclass(frozen=True)
class Gptq:
    """GPTQ for 4 bits; 8 bits are rounded, since hardly any of their error is the weights'.

    Attributes:
        hessians: second moments of layers' inputs; a layer without is rounded.
    """

    hessians: Hessians
    _last: dict[tuple[int, str], Factor] = field(default_factory=dict, repr=False)  # one: neighbours share an input

    def __call__(self, layer: LinearLayer, scheme: BlockScheme) -> QuantizedWeight:
        hessian = self.hessians(layer.name) if scheme.bits == 4 else None
        if hessian is None:
            return quantize(layer.weight(), scheme)
        return quantize_gptq(layer.weight(), scheme, self._factor(hessian, layer))

    def _factor(self, hessian: Floats, layer: LinearLayer) -> Factor:
        scale = layer.input_scale
        key = (id(hessian), "" if scale is None else scale.tobytes().hex())
        if key not in self._last:
            self._last.clear()
            self._last[key] = factor(hessian if scale is None else hessian / np.outer(scale, scale))
        return self._last[key]


@dataclass(frozen=True)
class Remembering:
    """A quantizer that does each layer and scheme once, however often and in whatever order of rows it is asked for.

    Attributes:
        quantizer: does it.
        moments: what is known of a layer's input: (in, in) second moments, (in,) mean squares or None.
        errors: by layer and scheme `output_error`.
    """

    quantizer: WeightQuantizer
    moments: Callable[[str], Floats | None] = lambda name: None
    errors: dict[tuple[str, BlockScheme], float] = field(default_factory=dict, repr=False)
    _made: dict[tuple[str, BlockScheme], QuantizedWeight] = field(default_factory=dict, repr=False)

    def __call__(self, layer: LinearLayer, scheme: BlockScheme) -> QuantizedWeight:
        key = (layer.name, scheme)
        if key not in self._made:
            plain = replace(layer, rows=None)
            self._made[key] = made = self.quantizer(plain, scheme)
            self.errors[key] = output_error(plain, stored_weight(plain, made), self.moments(layer.name))
        made = self._made[key]
        return made if layer.rows is None else made.take_rows(layer.rows)


def output_error(layer: LinearLayer, stored: Floats, moments: Floats | None) -> float:
    """Squared error that a stored weight (out, in) adds to a layer's output, over the output's own square.

    Args:
        layer: in its own order of rows.
        stored: as `stored_weight`.
        moments: (in, in) mean of x^T x, or its diagonal (in,), or None for inputs of one size that are independent.
    """
    weight = original_weight(layer)
    signal, noise = _square(weight, moments), _square(stored - weight, moments)
    return noise / signal if signal > 0 else 0.0


def _square(weight: Floats, moments: Floats | None) -> float:
    """Sum over rows w of the mean of (w x)^2."""
    if moments is None:
        return float(np.square(weight).sum())
    if moments.ndim == 1:
        return float((np.square(weight) @ moments).sum())
    import torch

    matrix = torch.from_numpy(weight)
    return float(((matrix @ torch.from_numpy(moments)) * matrix).sum())


def scaled_power(power: Floats, layer: LinearLayer) -> Floats:
    """Mean square of each channel as the layer reads it, smoothing included."""
    if layer.input_scale is None:
        return power
    return np.asarray(power / np.square(layer.input_scale), np.float32)


def stored_weight(layer: LinearLayer, quantized: QuantizedWeight) -> Floats:
    """The matrix (out, in) that a layer computes with once quantized, as the checkpoint has it: without smoothing.

    `quantized` is in the checkpoint's order of rows.
    """
    return unsmoothed(layer, quantized.dequantize())


def original_weight(layer: LinearLayer) -> Floats:
    """The checkpoint's own matrix (out, in)."""
    return unsmoothed(layer, replace(layer, rows=None).weight())


def unsmoothed(layer: LinearLayer, weight: Floats) -> Floats:
    """A matrix as `layer.weight()` gives it, in its own order of rows, with smoothing undone."""
    plain = weight if layer.input_scale is None else weight / layer.input_scale
    return np.asarray(plain if layer.output_scale is None else plain / layer.output_scale[:, None], np.float32)
