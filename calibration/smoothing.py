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

from adx.calibration.channels import quantize_channels
from adx.calibration.ranges import LayerRange
from adx.export.linears import LinearLayer, names_of
from adx.export.rewrite import constant, part_of, producer
from adx.export.trace import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir

Floats = NDArray[np.float32]
Choose = Callable[[Sequence[LinearLayer]], "Floats | None"]

ALPHA = 0.5
_SMALLEST = 1e-5
_TINY = float(np.finfo(np.float32).tiny)
_STRENGTHS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
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
        return _divisor(found, _largest_weight(readers), alpha)

    return choose


def by_weight_error(ranges: Mapping[str, LayerRange]) -> Choose:
    """Divisors for layers whose weights alone are quantized, a scale per output channel: of a few strengths the one
    that leaves the least error in the layers' outputs.

    The error of weight (i, j) counts with the mean square of channel j (Lin et al. 2023, "AWQ", section 3.2, with the
    search over strengths done on this sum and not by running the layer).
    """

    def choose(readers: Sequence[LinearLayer]) -> Floats | None:
        found = ranges.get(readers[0].name)
        if found is None or any(layer.name not in ranges for layer in readers):
            return None
        weights = [layer.weight() for layer in readers]
        size, largest = np.sqrt(found.power), _largest_weight(readers)
        divisors = [_divisor(size, largest, alpha) for alpha in _STRENGTHS]
        errors = [_output_error(weights, found.power, divisor) for divisor in (None, *divisors)]
        best = int(np.argmin(errors))
        return None if best == 0 else divisors[best - 1]

    return choose


def _output_error(weights: Sequence[Floats], power: Floats, divisor: Floats | None) -> float:
    """Sum over layers of the error that rounding adds to the output, relative to the output."""
    total = 0.0
    for weight in weights:
        scaled = weight if divisor is None else weight * divisor
        codes, scales = quantize_channels(scaled)
        error = codes * scales.astype(np.float32)[:, None] - scaled
        if divisor is not None:
            error /= divisor
        signal = float((np.square(weight) @ power).sum())
        total += float((np.square(error) @ power).sum()) / max(signal, _TINY)
    return total


def _largest_weight(readers: Sequence[LinearLayer]) -> Floats:
    largest: Floats = np.max([np.abs(layer.weight()).max(0) for layer in readers], axis=0)
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
