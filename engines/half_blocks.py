"""Weights in blocks of integers for the float16 graphs, as ONNX Runtime's CUDA kernels take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from adx.calibration.weights import BlockScheme, Floats, QuantizedWeight
from adx.engines.made_nodes import MadeNodes
from adx.engines.ort_attention import MICROSOFT
from adx.export.errors import LoweringError
from adx.export.rewrite import Attribute, node

if TYPE_CHECKING:
    import onnx_ir as ir

BLOCK_SIZES = (16, 32, 64, 128)  # what MatMulNBits on CUDA takes at 4 and at 8 bits
# Part of a matrix's largest scale that float16 may be off by: a quarter of what rounding to 8 bits is at most.
_SCALE_ERROR = 2.0**-10

Store = Callable[[str, "NDArray[np.generic]"], "ir.Value"]


def half_scales(name: str, scales: Floats) -> NDArray[np.float16]:
    """Scales in float16, each off by less than `_SCALE_ERROR` of the largest.

    Raises:
        LoweringError: float16's range does not allow that.
    """
    largest = float(np.abs(scales).max(initial=0))
    with np.errstate(over="ignore"):
        half = scales.astype(np.float16)
    if not float(np.abs(half.astype(np.float32) - scales).max(initial=0)) <= _SCALE_ERROR * largest:
        raise LoweringError(
            f"{name}: the scales of its blocks, {largest:.3g} at most, are beyond what float16 holds: keep the layer "
            "in float with --nodes-to-exclude"
        )
    return half


def block_product(
    made: MadeNodes, store: Store, name: str, x: ir.Value, quantized: QuantizedWeight, factor: float
) -> ir.Value:
    """x times a matrix's transpose, both float16: one kernel, which makes no float copy of the matrix for a few rows.

    Args:
        made: takes the node.
        store: puts an array into the weights file and the graph.
        name: what the names of the matrix's tensors begin with.
        x: (..., in) float16.
        quantized: (out, in).
        factor: power of two that the matrix is multiplied by.

    Raises:
        LoweringError: float16 cannot hold the scales, or the kernels do not take the blocks.
    """
    scheme, zeros = quantized.scheme, quantized.zero_points
    if scheme.block_size not in BLOCK_SIZES:
        raise LoweringError(
            f"{name}: {scheme.block_size} weights share a scale, and the CUDA kernels take "
            f"{', '.join(map(str, BLOCK_SIZES))}: choose --group-size among them"
        )
    inputs = [
        x,
        store(f"{name}.quantized", quantized.data),
        store(f"{name}.scales", half_scales(name, quantized.scales * np.float32(factor))),
    ]
    if zeros is not None:
        inputs.append(store(f"{name}.zero_points", zeros))
    attributes: dict[str, Attribute] = {
        "K": quantized.shape[1],
        "N": quantized.shape[0],
        "bits": scheme.bits,
        "block_size": scheme.block_size,
        "accuracy_level": 0,  # of the CPU's kernel: in float, as CUDA's, so that a check there sees what CUDA computes
    }
    return _added(made, node("MatMulNBits", inputs, attributes, domain=MICROSOFT))


def can_gather(scheme: object, columns: int) -> bool:
    """Can rows of a matrix so stored be gathered and made float in one kernel?"""
    return isinstance(scheme, BlockScheme) and scheme.bits == 8 and columns % scheme.block_size == 0


def gathered_rows(made: MadeNodes, store: Store, name: str, quantized: QuantizedWeight, indices: ir.Value) -> ir.Value:
    """Rows of a matrix in float16; the file holds its bytes once, however many readers there are.

    Raises:
        LoweringError: float16 cannot hold its scales.
    """
    assert can_gather(quantized.scheme, quantized.shape[1])
    inputs = [
        store(f"{name}.rows", quantized.data.reshape(quantized.shape)),
        indices,
        store(f"{name}.scales", half_scales(name, quantized.scales)),
    ]
    if quantized.zero_points is not None:
        inputs.append(store(f"{name}.zero_points", quantized.zero_points))
    attributes: dict[str, Attribute] = {
        "bits": 8,
        "block_size": quantized.scheme.block_size,
        "gather_axis": 0,
        "quantize_axis": 1,
    }
    return _added(made, node("GatherBlockQuantized", inputs, attributes, domain=MICROSOFT))


def _added(made: MadeNodes, new: ir.Node) -> ir.Value:
    made.nodes.append(new)
    return new.outputs[0]
