"""Weight quantizers: a float matrix becomes integers in blocks along its input dimension."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adx.export.errors import UsageError

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class BlockScheme:
    """How a matrix is quantized.

    Attributes:
        bits: 4 or 8.
        block_size: consecutive weights of a row that share a scale; a power of two, at least 16.
        symmetric: the zero point is the middle of the range (and is not stored).
    """

    bits: int
    block_size: int
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise UsageError(f"{self.bits} bits: weights are quantized to 4 or 8 bits")
        if self.block_size < 16 or self.block_size & (self.block_size - 1):
            raise UsageError(f"group size {self.block_size}: it must be a power of two and at least 16")

    @property
    def name(self) -> str:
        """Short name for reports, as `int4-sym-g32`."""
        return f"int{self.bits}-{'sym' if self.symmetric else 'asym'}-g{self.block_size}"


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized matrix in the layout of ONNX Runtime's `MatMulNBits`.

    Attributes:
        scheme: how it was quantized.
        shape: (rows, columns) of the float matrix, rows being output features.
        data: (rows, blocks, block_size * bits / 8) uint8, low nibble first; the last block is padded.
        scales: (rows, blocks) float32.
        zero_points: (rows, ceil(blocks * bits / 8)) uint8 packed alike, or None for the middle of the range.
    """

    scheme: BlockScheme
    shape: tuple[int, int]
    data: Bytes
    scales: Floats
    zero_points: Bytes | None

    def dequantize(self) -> Floats:
        """The float matrix that the integers stand for, (rows, columns)."""
        rows, columns = self.shape
        blocks = self.scales.shape[1]
        codes = _unpack(self.data.reshape(rows, -1), self.scheme.bits).reshape(rows, blocks, self.scheme.block_size)
        middle = 1 << (self.scheme.bits - 1)
        if self.zero_points is None:
            zeros = np.full((rows, blocks), middle, np.uint8)
        else:
            zeros = _unpack(self.zero_points, self.scheme.bits)[:, :blocks]
        values = (codes.astype(np.float32) - zeros[..., None].astype(np.float32)) * self.scales[..., None]
        return values.reshape(rows, -1)[:, :columns]


def concatenate(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Matrices on the same input as one, stacked by rows (for fused projections).

    Raises:
        ValueError: they differ in scheme or columns.
    """
    first = parts[0]
    if any((p.scheme, p.shape[1]) != (first.scheme, first.shape[1]) for p in parts):
        raise ValueError("only matrices of one scheme and one input can be stacked")
    zeros = [p.zero_points for p in parts if p.zero_points is not None]
    return QuantizedWeight(
        first.scheme,
        (sum(p.shape[0] for p in parts), first.shape[1]),
        np.concatenate([p.data for p in parts]),
        np.concatenate([p.scales for p in parts]),
        np.concatenate(zeros) if zeros else None,
    )


def quantize(weight: Floats, scheme: BlockScheme) -> QuantizedWeight:
    """Round a matrix (rows, columns) to the nearest integers of its blocks.

    Symmetric: the scale maps the element of largest magnitude onto the end of the range, -2**(bits-1) for 4 bits (as
    llama.cpp's Q4_0 does, which spends the extra code on it) and 127 for 8 bits. Asymmetric: the range covers the
    block's minimum, maximum and zero. Blocks of zeros get scale 0.

    Raises:
        UsageError: the weight holds NaN or infinity.
    """
    if not np.isfinite(weight).all():
        raise UsageError("a weight holds NaN or infinity and cannot be quantized")
    rows, columns = weight.shape
    blocks = -(-columns // scheme.block_size)
    padded = np.zeros((rows, blocks * scheme.block_size), np.float32)
    padded[:, :columns] = weight
    grouped = padded.reshape(rows, blocks, scheme.block_size)
    codes, scales, zeros = (_symmetric if scheme.symmetric else _asymmetric)(grouped, scheme.bits)
    data = _pack(codes.reshape(rows, -1), scheme.bits).reshape(rows, blocks, -1)
    packed_zeros = None if zeros is None else _pack(zeros, scheme.bits)
    return QuantizedWeight(scheme, (rows, columns), data, scales, packed_zeros)


def _symmetric(grouped: Floats, bits: int) -> tuple[Bytes, Floats, None]:
    middle = 1 << (bits - 1)
    largest = np.take_along_axis(grouped, np.abs(grouped).argmax(-1)[..., None], -1)[..., 0]
    scales = np.abs(largest) / (middle - 1) if bits == 8 else -largest / middle
    steps = _divide(grouped, scales)
    codes = np.clip(np.rint(steps), -middle, middle - 1) + middle
    return codes.astype(np.uint8), scales.astype(np.float32), None


def _asymmetric(grouped: Floats, bits: int) -> tuple[Bytes, Floats, Bytes]:
    top = (1 << bits) - 1
    low = np.minimum(grouped.min(-1), 0)
    high = np.maximum(grouped.max(-1), 0)
    scales = ((high - low) / top).astype(np.float32)
    zeros = np.clip(np.rint(_divide(-low[..., None], scales))[..., 0], 0, top)
    codes = np.clip(np.rint(_divide(grouped, scales)) + zeros[..., None], 0, top)
    return codes.astype(np.uint8), scales, zeros.astype(np.uint8)


def _divide(grouped: NDArray[np.floating], scales: NDArray[np.floating]) -> Floats:
    """Elements over their block's scale; 0 where the scale is 0 or too small to divide by."""
    inverse: Floats = np.zeros_like(scales, np.float32)
    usable = np.abs(scales) > np.finfo(np.float32).tiny
    np.divide(1.0, scales, out=inverse, where=usable)
    steps: Floats = grouped * inverse[..., None]
    return steps


def _pack(codes: Bytes, bits: int) -> Bytes:
    """(rows, n) codes to (rows, ceil(n * bits / 8)) bytes, low nibble first."""
    if bits == 8:
        return codes
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8, copy=False)


def _unpack(packed: Bytes, bits: int) -> Bytes:
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
