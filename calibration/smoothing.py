"""SmoothQuant: activation outliers move into the weights, channel by channel, before either is quantized.

Xiao et al. 2023, "SmoothQuant", equation 4: channel j of a layer's input is divided, and column j of its weight
multiplied, by s_j = max|x_j|^a / max|w_j|^(1-a). The division folds into what makes the input: the norm before it, or
the projection that a gate multiplies. In float nothing changes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from adx.calibration.ranges import Ranges
from adx.export.linears import LinearLayer, names_of
from adx.export.rewrite import constant, part_of, producer
from adx.export.trace import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir

Floats = NDArray[np.float32]

ALPHA = 0.5
_SMALLEST = 1e-5
_NORMS = {"RMSNormalization", "LayerNormalization"}


def smooth(model: ir.Model, layers: dict[str, LinearLayer], ranges: Ranges, alpha: float = ALPHA) -> int:
    """Smooth every linear layer whose input's maker can take the division; graph and layers change in place.

    Args:
        model: a semantic graph of its own (a clone), its linear layers collected.
        layers: from `collect_linears`.
        ranges: largest magnitude per input channel by layer.
        alpha: share of the outliers that moves into the weights, 0 to 1.

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
        if len({use.node for use in value.uses()}) != len(readers) or any(name not in ranges for name in names):
            continue
        scale = _scale([layers[name] for name in names], ranges[names[0]], alpha)
        if _divide_norm(value, scale) or _divide_projection(value, layers, scale):
            for name in names:
                layers[name] = layers[name].with_input_scale(scale)
            smoothed += len(names)
    return smoothed


def _scale(readers: list[LinearLayer], largest_input: Floats, alpha: float) -> Floats:
    """The divisor of each channel, its geometric mean 1."""
    largest_weight = np.max([np.abs(layer.weight()).max(0) for layer in readers], axis=0)
    weight, activation = np.maximum(largest_weight, _SMALLEST), np.maximum(largest_input, _SMALLEST)
    logs = alpha * np.log(activation) - (1 - alpha) * np.log(weight)
    scale: Floats = np.exp(logs - logs.mean()).astype(np.float32)
    return scale


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
