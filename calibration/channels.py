"""Weights in 8 bits with one scale for each output channel, as TensorRT's kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adx.export.errors import UsageError

Floats = NDArray[np.float32]
LEVELS = 127
LARGEST = LEVELS * 515.5  # the largest scale that float16 holds exactly and whose 127 steps it holds too


@dataclass(frozen=True)
class ChannelScheme:
    """A matrix in 8 bits, symmetric, a scale per output channel.

    Attributes:
        input_scale: float value of one step of the layer's input where that is quantized too; None: the input stays
            float.
    """

    input_scale: float | None = None

    bits = 8
    symmetric = True
    block_size = None

    @property
    def name(self) -> str:
        """Short name for reports."""
        return "int8-sym-channel" + ("" if self.input_scale is None else "-w8a8")


def quantize_channels(weight: Floats) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Round a matrix (out, in) to the nearest of -127..127 times its row's scale.

    The scale is a float16, rounded up so that the largest element is within reach, and the elements are rounded
    against that very value: the scale's own rounding adds no error.

    Returns:
        Codes (out, in), and scales (out,); a row of zeros has the smallest scale above 0.

    Raises:
        UsageError: the weight holds NaN, infinity, or what float16 cannot hold when it is dequantized.
    """
    largest = np.abs(weight).max(axis=1) if weight.size else np.zeros(len(weight), np.float32)
    if not np.isfinite(largest).all():
        raise UsageError("a weight holds NaN or infinity and cannot be quantized")
    if float(largest.max(initial=0)) > LARGEST:
        raise UsageError(f"a weight of {largest.max():.3g} is too large for 8 bits with a float16 scale")
    exact = np.maximum(largest / LEVELS, np.finfo(np.float16).smallest_subnormal).astype(np.float32)
    scales = exact.astype(np.float16)
    low = scales.astype(np.float32) < exact
    scales[low] = np.nextafter(scales[low], np.float16(np.inf))
    codes = np.rint(weight / scales.astype(np.float32)[:, None]).astype(np.int8)
    return codes, scales


def dequantize_channels(codes: NDArray[np.int8], scales: NDArray[np.float16]) -> Floats:
    """The float matrix (out, in) that codes and scales stand for."""
    values: Floats = codes * scales.astype(np.float32)[:, None]
    return values
