"""Weight quantizers against numpy arithmetic, number by number, and the recipe that chooses a scheme."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from operators import parts_of

from adx.calibration.recipe import INT4_GROUP, INT8_GROUPS, make_recipe
from adx.calibration.weights import BlockScheme, concatenate, quantize
from adx.export.errors import UsageError

Floats = NDArray[np.float32]

SHAPES = [(6, 256), (5, 300), (3, 40), (1, 7), (4, 257), (2, 1100)]
SCHEMES = [
    BlockScheme(bits, block, symmetric)
    for bits in (4, 8)
    for block in (16, 32, 64, 128, 256, 512)
    for symmetric in (True, False)
]


HALVES = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)  # every one that is not negative
SMALLEST_NORMAL = 2.0**-14


def weights(rows: int, columns: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def textbook(
    blocks: NDArray[np.float64], bits: int, symmetric: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Exact scales, zero points and their distance from a tie, of blocks (..., block_size) in float64.

    Symmetric 4 bits: the element of largest magnitude becomes -8 times the scale. Symmetric 8 bits: +-127 times it.
    Asymmetric: the codes 0..2**bits-1 span the block's range, widened to hold 0.
    """
    if symmetric:
        extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]
        scales = np.abs(extreme) / 127 if bits == 8 else extreme / -8
        return scales, np.full(scales.shape, 2.0 ** (bits - 1)), np.ones(scales.shape)
    low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    scales = (high - low) / (2**bits - 1)
    exact = np.divide(-low, scales, out=np.zeros_like(low), where=scales > 0)
    return scales, np.rint(exact), np.abs(exact - np.trunc(exact) - 0.5)


def in_blocks(matrix: Floats, size: int) -> NDArray[np.float64]:
    """(rows, blocks, size) in float64, the last block filled up with zeros."""
    rows, columns = matrix.shape
    blocks = np.zeros((rows, -(-columns // size) * size))
    blocks[:, :columns] = matrix
    return blocks.reshape(rows, -1, size)


def at_the_ends(matrix: Floats) -> Floats:
    """Every weight at plus or minus the largest."""
    return np.where(matrix < 0, np.float32(-3), np.float32(3))


def with_outliers(matrix: Floats) -> Floats:
    """One weight in every 16 a hundred times larger, of either sign."""
    matrix[:, 3::16] *= 100
    return matrix


def without_some(matrix: Floats) -> Floats:
    """A row of zeros, and the first 512 columns of another."""
    matrix[0], matrix[1:2, :512] = 0, 0
    return matrix


def of_many_sizes(matrix: Floats) -> Floats:
    """Columns from 1 down to what float16 cannot hold: most scales are subnormal float16 numbers, or below."""
    return (matrix * np.logspace(0, -11, matrix.shape[1])).astype(np.float32)


KINDS: dict[str, Callable[[Floats], Floats]] = {
    "normal": lambda matrix: matrix,
    "ends": at_the_ends,
    "outliers": with_outliers,
    "zeros": without_some,
    "positive": np.abs,
    "negative": lambda matrix: -np.abs(matrix),
    "tiny": lambda matrix: matrix * np.float32(1e-6),
    "many sizes": of_many_sizes,
    "beyond float16": lambda matrix: matrix * np.float32(2e7),
    "float32's end": lambda matrix: np.clip(matrix, -1, 1) * np.float32(3e38),
}


def assert_scales(made: Floats, exact: NDArray[np.float64]) -> None:
    """The exact scales rounded to nearest in float16, below its normal numbers away from 0; where the largest is not
    among float16's normal numbers, in float32."""
    largest, size = np.abs(exact).max(initial=0), np.abs(exact)
    assert (np.sign(made) == np.sign(exact)).all(), "no scale becomes 0"
    if not SMALLEST_NORMAL <= largest <= 65504:
        np.testing.assert_allclose(made, exact, rtol=1e-6, atol=2e-45)
        return
    assert np.isin(np.abs(made), HALVES).all()
    step = np.where(size < SMALLEST_NORMAL, 2.0**-24, 2.0 ** (np.floor(np.log2(np.maximum(size, 2.0**-14))) - 10))
    distance = np.abs(made).astype(np.float64) - size
    normal = size >= SMALLEST_NORMAL
    assert (np.abs(distance)[normal] <= (step / 2 * (1 + 1e-3))[normal]).all()  # a tie may fall on either side
    assert (distance[~normal] >= -1e-6 * size[~normal]).all()
    assert (distance[~normal] < step[~normal]).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_those_of_the_textbook(scheme: BlockScheme, kind: str) -> None:
    """Every block, also the last one that columns do not fill (padded with zeros, which widen no range); and the
    dequantized matrix is the packed bytes' to the last place of float32."""
    for shape in SHAPES:
        check_by_the_textbook(KINDS[kind](weights(*shape)), scheme, certain=kind == "normal")


def check_by_the_textbook(matrix: Floats, scheme: BlockScheme, *, certain: bool) -> None:
    """Args:
    certain: hardly any weight is near a tie, which float32 may round either way.
    """
    made = quantize(matrix, scheme)
    shape, size, bits = matrix.shape, scheme.block_size, scheme.bits
    rows, columns = shape
    blocks = -(-columns // size)
    assert (made.shape, made.data.shape, made.data.dtype) == (shape, (rows, blocks, size * bits // 8), np.uint8)
    assert (made.scales.shape, made.scales.dtype) == ((rows, blocks), np.float32)
    assert (made.zero_points is None) == scheme.symmetric
    assert made.zero_points is None or made.zero_points.shape == (rows, -(-blocks * bits // 8))
    codes, zeros = parts_of(made)
    values = in_blocks(matrix, size)
    exact, middle, from_tie = textbook(values, bits, scheme.symmetric)
    assert_scales(made.scales, exact)
    sure = from_tie > 1e-4  # float32 may round a tie the other way
    np.testing.assert_array_equal(zeros[sure], middle[sure])
    scales = made.scales.astype(np.float64)[..., None]
    usable = np.abs(scales) > np.finfo(np.float32).tiny  # smaller ones have no reciprocal: their weights become 0
    steps = np.divide(values, scales, out=np.zeros_like(values), where=usable)
    wanted = np.clip(np.rint(steps) + zeros[..., None], 0, 2**bits - 1)
    clear = np.abs(np.abs(steps - np.trunc(steps)) - 0.5) > 1e-4
    assert not certain or clear.mean() > 0.98
    np.testing.assert_array_equal(codes[clear], wanted[clear])
    assert np.abs(codes - wanted).max() <= 1
    restored = ((codes - zeros[..., None]) * scales).astype(np.float32).reshape(rows, -1)
    assert (restored[:, columns:] == 0).all(), "padding stands for 0"
    np.testing.assert_array_equal(made.dequantize(), restored[:, :columns])


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "zeros"])
def test_the_error_is_half_a_step(scheme: BlockScheme, kind: str) -> None:
    """But where 4 symmetric bits meet the end of their range on the side that has one code less: a whole step. And an
    asymmetric range whose end a zero point has moved by half a step already is moved on by what float16 takes off the
    scale: at most 2**-11 of each of its codes."""
    matrix = KINDS[kind](weights(6, 300))
    made = quantize(matrix, scheme)
    error = np.abs(made.dequantize().astype(np.float64) - matrix)
    step = np.repeat(np.abs(made.scales.astype(np.float64)), scheme.block_size, axis=1)[:, :300]
    half = 0.5 if scheme.symmetric else 0.5 + (2**scheme.bits - 1) * 2.0**-11
    clipped = scheme.symmetric and scheme.bits == 4
    assert (error <= step * ((1 + 2.0**-8 if clipped else half) * (1 + 1e-5))).all()
    assert kind == "ends" or (error / step).max() > 0.4  # the bound is not met by being elsewhere


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_blocks_of_zeros_stay_zero(scheme: BlockScheme) -> None:
    """No division by a scale of 0, and the neighbours are not touched."""
    matrix = weights(2, 1024)
    matrix[0, :512] = 0
    made = quantize(matrix, scheme)
    assert not made.dequantize()[0, :512].any()
    assert np.isfinite(made.scales).all()
    assert (made.scales[0, : 512 // scheme.block_size] == 0).all()
    alone = quantize(matrix[:, 512:], scheme).dequantize()
    np.testing.assert_array_equal(made.dequantize()[:, 512:], alone)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("outlier", [100.0, -100.0])
def test_an_outlier_costs_its_own_block_only(bits: int, symmetric: bool, outlier: float) -> None:
    """The outlier is kept, the other blocks are as without it."""
    matrix = weights(1, 96)
    matrix[0, 40] = outlier
    scheme = BlockScheme(bits, 32, symmetric)
    restored = quantize(matrix, scheme).dequantize()
    assert restored[0, 40] == pytest.approx(outlier, rel=0.04 if not symmetric and bits == 4 else 0.005)
    without = matrix.copy()
    without[0, 40] = 0
    expected = quantize(without, scheme).dequantize()
    np.testing.assert_array_equal(restored[0, :32], expected[0, :32])
    np.testing.assert_array_equal(restored[0, 64:], expected[0, 64:])


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 3e-38, 1e-36])
def test_weights_near_the_smallest_float_do_no_harm(scheme: BlockScheme, size: float) -> None:
    """What is too small to be divided by becomes 0 or itself, never infinity or NaN; warnings would fail the test."""
    matrix = (np.sign(weights(2, 64)) * size).astype(np.float32)
    restored = quantize(matrix, scheme).dequantize()
    assert np.isfinite(restored).all()
    assert np.abs(restored).max() <= 1.1 * size


def test_the_ends_of_the_range_are_reached() -> None:
    """Codes by hand: 4 bits symmetric keep -8..7 (8 becomes 7), asymmetric 0..15, 8 bits -127..127."""
    row = np.zeros((1, 16), np.float32)
    row[0, :4] = [-8, 8, 1, -1]
    four = quantize(row, BlockScheme(4, 16))
    assert four.scales[0, 0] == 1
    assert four.data[0, 0, :2].tolist() == [0 | 15 << 4, 9 | 7 << 4]
    assert four.dequantize()[0, :4].tolist() == [-8, 7, 1, -1]
    flipped = quantize(-row, BlockScheme(4, 16))
    assert flipped.scales[0, 0] == -1  # the largest element's side has the extra code
    assert flipped.dequantize()[0, :4].tolist() == [8, -7, -1, 1]
    row[0, :4] = [-5, 10, 0, 1]
    range4 = quantize(row, BlockScheme(4, 16, symmetric=False))
    assert range4.scales[0, 0] == 1
    assert range4.zero_points is not None
    assert range4.zero_points.tolist() == [[5]]
    assert range4.data[0, 0, :2].tolist() == [0 | 15 << 4, 5 | 6 << 4]
    row[0, :4] = [-127, 127, 1, 0]
    eight = quantize(row, BlockScheme(8, 16))
    assert eight.scales[0, 0] == 1
    assert eight.data[0, 0, :4].tolist() == [1, 255, 129, 128]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_refused(bad: float) -> None:
    matrix = weights(2, 32)
    matrix[1, 5] = bad
    with pytest.raises(UsageError, match="NaN or infinity"):
        quantize(matrix, BlockScheme(8, 32))


@pytest.mark.parametrize(
    ("bits", "block", "message"),
    [(3, 32, "4 or 8 bits"), (16, 32, "4 or 8 bits"), (4, 8, "at least 16"), (4, 48, "power of two"), (8, 0, "16")],
)
def test_schemes_that_no_kernel_has_are_refused(bits: int, block: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BlockScheme(bits, block)


@pytest.mark.parametrize("scheme", [BlockScheme(4, 32, False), BlockScheme(4, 32), BlockScheme(8, 16)], ids=str)
def test_stacked_matrices_are_the_matrices_stacked(scheme: BlockScheme) -> None:
    parts = [weights(rows, 80, seed) for seed, rows in enumerate((3, 5, 2))]
    made = concatenate([quantize(part, scheme) for part in parts])
    whole = quantize(np.concatenate(parts), scheme)
    assert made.shape == (10, 80)
    np.testing.assert_array_equal(made.data, whole.data)
    np.testing.assert_array_equal(made.scales, whole.scales)
    np.testing.assert_array_equal(made.dequantize(), whole.dequantize())


def test_matrices_that_differ_cannot_be_stacked() -> None:
    first = quantize(weights(2, 64), BlockScheme(8, 32))
    for other in (quantize(weights(2, 64), BlockScheme(8, 16)), quantize(weights(2, 48), BlockScheme(8, 32))):
        with pytest.raises(ValueError, match="one scheme and one input"):
            concatenate([first, other])


@dataclass(frozen=True)
class Linear:
    shape: tuple[int, int]
    role: str = "other"


LAYERS = {
    "model.layers.0.self_attn.q_proj": Linear((64, 576), "other"),
    "model.layers.0.mlp.down_proj": Linear((64, 1536)),
    "model.layers.0.mlp.up_proj": Linear((64, 40)),
    "lm_head": Linear((1000, 576), "head"),
}


def test_8_bits_are_as_fine_as_a_layers_role_asks_for() -> None:
    """The head, whose input cannot be smoothed, has the finer blocks; an untied embedding is stored as the head."""
    recipe = make_recipe("int8", LAYERS)
    assert list(recipe.layers) == list(LAYERS)
    assert INT8_GROUPS["head"] < INT8_GROUPS["other"]
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"):
        assert recipe.layers[name].scheme == BlockScheme(8, INT8_GROUPS[LAYERS[name].role])
    assert recipe.embedding == BlockScheme(8, INT8_GROUPS["head"])
    assert all(layer.reason is None for layer in recipe.layers.values())


def test_a_block_is_not_mostly_padding() -> None:
    """40 columns: a block of 64 stores 68 bytes a row, three of 16 store 60."""
    scheme = make_recipe("int8", LAYERS).layers["model.layers.0.mlp.up_proj"].scheme
    assert scheme == BlockScheme(8, 16)


def test_4_bits_leave_the_head_at_8() -> None:
    layers = make_recipe("int4", LAYERS).layers
    for name, layer in layers.items():
        if name == "lm_head":
            assert layer.scheme is not None
            assert layer.scheme.bits == 8
            assert layer.reason == "the head keeps 8 bits"
        else:
            assert layer.scheme == BlockScheme(4, INT4_GROUP, symmetric=False)
            assert layer.reason is None


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_group_size_is_that_of_every_layer(precision: Any) -> None:
    """-1 is one block for a row: the next power of two of its columns; no block is larger than that."""
    layers = make_recipe(precision, LAYERS, group_size=128).layers
    sizes = {layer.scheme.block_size for name, layer in layers.items() if layer.scheme and name != "lm_head"}
    assert sizes == {128, 64}
    rows = make_recipe(precision, LAYERS, group_size=-1).layers
    found = {name: layer.scheme.block_size for name, layer in rows.items() if layer.scheme and name != "lm_head"}
    assert list(found.values()) == [1024, 2048, 64]


@pytest.mark.parametrize("size", [0, 8, 48, -2])
def test_group_sizes_that_no_kernel_has_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match=f"group size {size}"):
        make_recipe("int4", LAYERS, group_size=size)


def test_excluded_layers_stay_in_float() -> None:
    """By regular expressions that are searched for in the name; the reason names the one that matched."""
    layers = make_recipe("int4", LAYERS, exclude=[r"down_proj$", "^lm"]).layers
    floats = {name: layer.reason for name, layer in layers.items() if layer.scheme is None}
    assert floats == {"model.layers.0.mlp.down_proj": "excluded by 'down_proj$'", "lm_head": "excluded by '^lm'"}


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        (["down_proj", "("], r"'\(' is not a regular expression"),
        (["down_prj"], r"'down_prj' matches no layer; layers are named as 'model\.layers\.0\.self_attn\.q_proj'"),
        (["."], "no layer would be quantized to int8"),
    ],
)
def test_exclusions_that_say_nothing_are_refused(exclude: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_recipe("int8", LAYERS, exclude=exclude)


def test_a_model_without_linear_layers_is_not_quantized() -> None:
    with pytest.raises(UsageError, match="no layer would be quantized"):
        make_recipe("int8", {})


def test_float_takes_no_quantizing_options() -> None:
    recipe = make_recipe("fp32", LAYERS)
    assert all(layer.scheme is None for layer in recipe.layers.values())
    assert recipe.embedding is None
    for options in ({"exclude": ["lm_head"]}, {"group_size": 32}):
        with pytest.raises(UsageError, match="no effect at fp32"):
            make_recipe("fp32", LAYERS, **options)  # type: ignore[arg-type]  # one of the two at a time
