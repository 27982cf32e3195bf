"""Weight quantizers: a float matrix becomes integers in blocks along its input dimension."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adx.export.errors import UsageError

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_RANGES, _NARROWEST = 13, 0.64  # how many ranges of a block are tried, and the narrowest as a part of the whole
_HALF_SMALLEST, _HALF_LARGEST = 2.0**-14, 65504.0  # float16's normal numbers
_WORK_ELEMENTS = 1 << 17  # elements whose ranges are tried at once: what the processor's cache holds


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

    def stored_bytes(self, shape: tuple[int, int]) -> int:
        """Bytes that a matrix (rows, columns) takes in an engine's file, its scales in float16."""
        rows, columns = shape
        blocks = -(-columns // self.block_size)
        zeros = 0 if self.symmetric else -(-blocks * self.bits // 8)
        return rows * (blocks * (self.block_size * self.bits // 8 + 2) + zeros)


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

    def take_rows(self, rows: NDArray[np.int64]) -> QuantizedWeight:
        """The matrix of some of its rows, in the order given."""
        zeros = None if self.zero_points is None else self.zero_points[rows]
        return QuantizedWeight(self.scheme, (len(rows), self.shape[1]), self.data[rows], self.scales[rows], zeros)

    @property
    def half_scales(self) -> NDArray[np.float16] | None:
        """The scales in float16 where that holds each of them exactly, else None."""
        with np.errstate(over="ignore"):
            half = self.scales.astype(np.float16)
        return half if np.array_equal(half.astype(np.float32), self.scales) else None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in an engine's file."""
        scales = self.scales.nbytes if self.half_scales is None else self.scales.nbytes // 2
        return self.data.nbytes + scales + (0 if self.zero_points is None else self.zero_points.nbytes)


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


@dataclass(frozen=True)
class Grid:
    """What codes stand for in every block of a matrix.

    Attributes:
        scales: (rows, blocks) float32, of which float16 holds every one exactly unless the matrix is beyond its range.
        zeros: (rows, blocks) uint8, the code that stands for 0.
    """

    scales: Floats
    zeros: Bytes


def quantize(weight: Floats, scheme: BlockScheme, *, importance: Floats | None = None) -> QuantizedWeight:
    """Round a matrix (rows, columns) to the nearest integers of its blocks.

    Args:
        weight: finite.
        scheme: its form.
        importance: as `fit_grid`.

    Raises:
        UsageError: the weight holds NaN or infinity.
    """
    grid = fit_grid(weight, scheme, importance)
    grouped = grouped_columns(weight, scheme.block_size)
    return pack(encode(grouped, grid.scales, grid.zeros, scheme.bits), grid, scheme, weight.shape[1])


def fit_grid(weight: Floats, scheme: BlockScheme, importance: Floats | None = None) -> Grid:
    """Scales and zero points of a matrix's blocks.

    Symmetric: the scale maps the element of largest magnitude onto the end of the range, -2**(bits-1) for 4 bits (as
    llama.cpp's Q4_0 does, which spends the extra code on it) and 127 for 8 bits. Asymmetric: the range covers the
    block's minimum, maximum and zero. Blocks of zeros get scale 0.

    With `importance` (columns,) 4-bit ranges are also tried narrower, down to `_NARROWEST` of the whole, and each block
    takes the one that leaves the smallest sum of squared errors, column j counting `importance[j]` times: clipping the
    outermost weights costs less than a coarse step for all others. 8-bit ranges are never clipped.

    Raises:
        UsageError: the weight holds NaN or infinity.
    """
    if not np.isfinite(weight).all():
        raise UsageError("a weight holds NaN or infinity and cannot be quantized")
    grouped = grouped_columns(weight, scheme.block_size)
    if importance is None or scheme.bits == 8:
        scales, zeros = _range(grouped, scheme, 1.0)
        return Grid(_as_half(scales, scales), zeros)
    counts = grouped_columns(importance[None], scheme.block_size)
    step = max(1, _WORK_ELEMENTS // max(1, grouped[:1].size))
    parts = [_clipped(grouped[start : start + step], counts, scheme) for start in range(0, len(grouped), step)]
    scales, zeros = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Grid(_as_half(scales, scales), zeros)


def _clipped(grouped: Floats, counts: Floats, scheme: BlockScheme) -> tuple[Floats, Bytes]:
    """The best of a few ranges for every block of some rows."""
    whole, zeros = _range(grouped, scheme, 1.0)
    scales = _as_half(whole, whole)
    least = _cost(grouped, counts, scales, zeros, scheme.bits)
    for share in np.linspace(1.0, _NARROWEST, _RANGES)[1:]:
        narrow, narrow_zeros = _range(grouped, scheme, float(share))
        narrow = _as_half(narrow, whole)
        cost = _cost(grouped, counts, narrow, narrow_zeros, scheme.bits)
        better = cost < least
        np.copyto(least, cost, where=better)
        np.copyto(scales, narrow, where=better)
        np.copyto(zeros, narrow_zeros, where=better)
    return scales, zeros


def _cost(grouped: Floats, counts: Floats, scales: Floats, zeros: Bytes, bits: int) -> Floats:
    """(rows, blocks) squared errors on a grid, each element's times its column's count."""
    error = encode(grouped, scales, zeros, bits).astype(np.float32)
    error -= zeros[..., None]
    error *= scales[..., None]
    error -= grouped
    with np.errstate(over="ignore", invalid="ignore"):  # weights whose squares float32 does not hold keep their range
        np.square(error, out=error)
        cost: Floats = np.einsum("rbg,xbg->rb", error, counts)
    return cost


def _range(grouped: Floats, scheme: BlockScheme, share: float) -> tuple[Floats, Bytes]:
    """(rows, blocks) scales and zero points where a block's range is `share` of what its elements span."""
    middle, top = 1 << (scheme.bits - 1), (1 << scheme.bits) - 1
    if scheme.symmetric:
        largest = np.take_along_axis(grouped, np.abs(grouped).argmax(-1)[..., None], -1)[..., 0]
        scales = np.abs(largest) / (middle - 1) if scheme.bits == 8 else -largest / middle
        middles: Bytes = np.full(scales.shape, middle, np.uint8)
        return (scales * np.float32(share)).astype(np.float32), middles
    low = np.minimum(grouped.min(-1), 0) * np.float32(share)
    high = np.maximum(grouped.max(-1), 0) * np.float32(share)
    scales = (high / top - low / top).astype(np.float32)  # the difference itself may be beyond float32
    zeros = np.clip(np.rint(_divide(-low[..., None], scales))[..., 0], 0, top)
    return scales, zeros.astype(np.uint8)


def _as_half(scales: Floats, whole: Floats) -> Floats:
    """Scales that float16 holds exactly, where the largest of `whole` is well within its range; else as they are.

    Below float16's normal numbers, where its steps are coarse, scales are rounded away from 0: none becomes 0, and a
    block's largest element stays within reach of its codes.
    """
    largest = float(np.abs(whole).max(initial=0))
    if not _HALF_SMALLEST <= largest <= _HALF_LARGEST:
        return scales
    half = scales.astype(np.float16)
    sizes = np.abs(scales)
    low = (sizes < _HALF_SMALLEST) & (np.abs(half.astype(np.float32)) < sizes)
    half[low] = np.nextafter(half[low], np.copysign(np.float16(np.inf), half[low]))
    return half.astype(np.float32)


def encode(grouped: Floats, scales: Floats, zeros: Bytes, bits: int) -> Bytes:
    """Codes of elements (rows, blocks, block_size) on a grid (rows, blocks), rounded to nearest even."""
    steps = _divide(grouped, scales)
    np.rint(steps, out=steps)
    steps += zeros[..., None]
    np.clip(steps, 0, (1 << bits) - 1, out=steps)
    return steps.astype(np.uint8)


def pack(codes: Bytes, grid: Grid, scheme: BlockScheme, columns: int) -> QuantizedWeight:
    """Codes (rows, blocks, block_size) in the kernels' layout; those past `columns` are set to stand for 0."""
    rows, blocks = grid.scales.shape
    flat = codes.reshape(rows, -1)
    if columns < flat.shape[1]:
        flat = flat.copy()
        flat[:, columns:] = np.repeat(grid.zeros, scheme.block_size, axis=1)[:, columns:]
    data = _pack(flat, scheme.bits).reshape(rows, blocks, -1)
    zeros = None if scheme.symmetric else _pack(grid.zeros, scheme.bits)
    return QuantizedWeight(scheme, (rows, columns), data, grid.scales, zeros)


def grouped_columns(weight: Floats, block_size: int) -> Floats:
    """(rows, blocks, block_size): a matrix cut into blocks, the last one filled up with zeros."""
    rows, columns = weight.shape
    blocks = -(-columns // block_size)
    if blocks * block_size == columns:
        return weight.reshape(rows, blocks, block_size)
    padded = np.zeros((rows, blocks * block_size), np.float32)
    padded[:, :columns] = weight
    return padded.reshape(rows, blocks, block_size)


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
