"""SmoothQuant: activation outliers move into the weights, channel by channel, before either is quantized.

Xiao et al. 2023, "SmoothQuant", equation 4: channel j of a layer's input is divided, and column j of its weight
multiplied, by s_j = max|x_j|^a / max|w_j|^(1-a). The division folds into what makes the input: the norm before it, or
the projection that a gate multiplies. In float nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from adx.calibration.channels import dequantize_channels, quantize_channels
from adx.calibration.ranges import LayerRange
from adx.calibration.weights import grouped_columns
from adx.export.linears import LinearLayer, names_of
from adx.export.rewrite import constant, part_of, producer
from adx.export.trace import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir

Floats = NDArray[np.float32]
Choose = Callable[[Sequence[LinearLayer]], "Floats | None"]
Rounded = Callable[[Floats], Floats]
Step = Callable[[LayerRange], Floats]

ALPHA = 0.6
_SMALLEST = 1e-5
_TINY = float(np.finfo(np.float32).tiny)
_STRENGTHS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
_SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_LEVELS = 127
_NORMS = {"RMSNormalization", "LayerNormalization"}


def smooth(model: ir.Model, layers: dict[str, LinearLayer], choose: Choose, *, head: bool = False) -> int:
    """Smooth every linear layer whose input's maker can take the division; graph and layers change in place.

    Args:
        model: a semantic graph of its own (a clone), its linear layers collected.
        layers: from `collect_linears`.
        choose: the divisor of each channel, (in,) float32, for layers that share an input; None leaves them.
        head: smooth the layer that makes the logits too; an embedding tied to it must undo that.

    Returns:
        How many layers were smoothed.
    """
    groups: dict[ir.Value, list[ir.Node]] = {}
    for node in model.graph:
        if node.domain == DOMAIN and node.op_type == "Linear" and node.inputs[0] is not None:
            groups.setdefault(node.inputs[0], []).append(node)
    smoothed = 0
    for value, readers in groups.items():
        names = [name for node in readers for name in names_of(node)]
        source = _before_rows(value) if head else value
        if len({use.node for use in value.uses()}) != len(readers) or source is None:
            continue
        scale = choose([layers[name] for name in names])
        if scale is not None and (_divide_norm(source, scale) or _divide_projection(source, layers, scale)):
            for name in names:
                layers[name] = layers[name].with_input_scale(scale)
            smoothed += len(names)
    return smoothed


def by_activations(ranges: Mapping[str, Floats], alpha: float = ALPHA) -> Choose:
    """SmoothQuant's divisors, their geometric mean 1.

    Args:
        ranges: largest magnitude per input channel by layer.
        alpha: share of the outliers that moves into the weights, 0 to 1.
    """

    def choose(readers: Sequence[LinearLayer]) -> Floats | None:
        found = ranges.get(readers[0].name)
        if found is None or any(layer.name not in ranges for layer in readers):
            return None
        return _divisor(found, _largest_weight([layer.weight() for layer in readers]), alpha)

    return choose


def by_weight_error(ranges: Mapping[str, LayerRange], rounded: Rounded | None = None) -> Choose:
    """Divisors for layers whose weights alone are quantized: of a few strengths the one that leaves the least error in
    the layers' outputs.

    The error of weight (i, j) counts with the mean square of channel j (Lin et al. 2023, "AWQ", section 3.2, with the
    search over strengths done on this sum and not by running the layer).

    Args:
        ranges: of the layers' inputs.
        rounded: what a matrix (out, in) becomes; default: 8 bits, a scale per output channel.
    """
    rounded = rounded or _channels

    def error(weight: Floats, power: Floats, divisor: Floats | None) -> float:
        return _weight_error(weight, power, divisor, rounded)

    return _search(ranges, lambda found: np.sqrt(found.power), _STRENGTHS, lambda found, w, d: error(w, found.power, d))


def by_output_error(ranges: Mapping[str, LayerRange], rounded: Rounded | None, step: Step) -> Choose:
    """SmoothQuant's divisors, each group of layers with the share of the outliers that leaves the least error in the
    layers' outputs, counting what rounding adds to the weights and to the activations.

    Args:
        ranges: of the layers' inputs.
        rounded: as `by_weight_error`.
        step: a quantized input's step at each channel, (in,), from the range of the input as it is divided.
    """

    rounded = rounded or _channels

    def error(found: LayerRange, weight: Floats, divisor: Floats | None) -> float:
        by = np.float32(1) if divisor is None else divisor
        power = np.asarray(found.power / np.square(by), np.float32)
        noise = np.square(step(replace(found, inputs=found.inputs / by, power=power))) / 12
        signal = float((np.square(weight) @ found.power).sum())
        rounding = float((np.square(weight * by) @ noise).sum()) / max(signal, _TINY)
        return _weight_error(weight, found.power, divisor, rounded) + rounding

    return _search(ranges, lambda found: found.inputs, _SHARES, error)


def static_step(found: LayerRange) -> Floats:
    """The step of an input with one scale for all of it, in 8 bits."""
    return np.full(found.inputs.shape, found.inputs.max() / _LEVELS, np.float32)


def block_step(block_size: int) -> Step:
    """The step of an input that is quantized as it comes, a scale for each block of channels of each token: a token's
    largest magnitude in a block is taken for three times the largest root mean square there."""

    def step(found: LayerRange) -> Floats:
        size = np.sqrt(found.power)
        blocks = grouped_columns(size[None], block_size).max(-1)[0]
        return (3 / _LEVELS * np.repeat(blocks, block_size)[: len(size)]).astype(np.float32)

    return step


def _search(
    ranges: Mapping[str, LayerRange],
    size: Callable[[LayerRange], Floats],
    strengths: Sequence[float],
    error: Callable[[LayerRange, Floats, Floats | None], float],
) -> Choose:
    """Of the divisors at each strength, and none, the one with the smallest sum of the layers' errors."""

    def choose(readers: Sequence[LinearLayer]) -> Floats | None:
        found = ranges.get(readers[0].name)
        if found is None or any(layer.name not in ranges for layer in readers):
            return None
        weights = [layer.weight() for layer in readers]
        largest = _largest_weight(weights)
        candidates = [None, *(_divisor(size(found), largest, strength) for strength in strengths)]
        errors = [sum(error(found, weight, divisor) for weight in weights) for divisor in candidates]
        return candidates[int(np.argmin(errors))]

    return choose


def _weight_error(weight: Floats, power: Floats, divisor: Floats | None, rounded: Rounded) -> float:
    """The error that rounding the weight adds to the output, relative to the output."""
    scaled = weight if divisor is None else weight * divisor
    error = rounded(scaled) - scaled
    if divisor is not None:
        error /= divisor
    signal = float((np.square(weight) @ power).sum())
    return float((np.square(error) @ power).sum()) / max(signal, _TINY)


def _channels(weight: Floats) -> Floats:
    return dequantize_channels(*quantize_channels(weight))


def _largest_weight(weights: Sequence[Floats]) -> Floats:
    largest: Floats = np.max([np.abs(weight).max(0) for weight in weights], axis=0)
    return largest


def _divisor(size: Floats, largest_weight: Floats, alpha: float) -> Floats:
    weight, activation = np.maximum(largest_weight, _SMALLEST), np.maximum(size, _SMALLEST)
    logs = alpha * np.log(activation) - (1 - alpha) * np.log(weight)
    scale: Floats = np.exp(logs - logs.mean()).astype(np.float32)
    return scale


def _before_rows(value: ir.Value) -> ir.Value | None:
    """What the choice of the logits' rows is made from, or the value itself; None if others read it too."""
    rows = producer(value, "LogitsRows", DOMAIN)
    if rows is None:
        return value
    source = rows.inputs[0]
    return source if source is not None and len(list(source.uses())) == 1 else None


def _divide_norm(value: ir.Value, scale: Floats) -> bool:
    """Fold the division into the weight (and bias) of the norm that makes the value."""
    import onnx_ir as ir

    norm = value.producer()
    if norm is None or norm.op_type not in _NORMS:
        return False
    parameters = [parameter for parameter in norm.inputs[1:] if parameter is not None]
    if any(len(list(p.uses())) != 1 or constant(p) is None for p in parameters):
        return False
    for parameter in parameters:
        array = constant(parameter)
        assert array is not None
        parameter.const_value = ir.tensor((array / scale).astype(np.float32), name=parameter.name)
    return True


def _divide_projection(value: ir.Value, layers: dict[str, LinearLayer], scale: Floats) -> bool:
    """Fold the division into the rows of the projection that a gate multiplies: activation(gate) * projection."""
    product = producer(value, "Mul")
    if product is None:
        return False
    for operand in product.inputs:
        if operand is None or len(list(operand.uses())) != 1:
            continue
        made_by = operand.producer()
        source, start = operand, 0
        if made_by is not None and made_by.op_type in {"Split", "Slice"} and made_by.inputs[0] is not None:
            source = made_by.inputs[0]
            span = part_of(operand, source)
            if span is None:
                continue
            start = span[0]
        linear = producer(source, "Linear", DOMAIN)
        if linear is None or len(names_of(linear)) != 1:
            continue
        (name,) = names_of(linear)
        layer = layers[name]
        factor = np.ones(layer.shape[0], np.float32) if layer.output_scale is None else layer.output_scale.copy()
        factor[start : start + len(scale)] /= scale
        layers[name] = replace(layer, output_scale=factor)
        return True
    return False
