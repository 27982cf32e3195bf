"""GPTQ, clipped ranges and the searches for smoothing divisors against plain numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from adx.calibration.gptq import factor, quantize_gptq
from adx.calibration.quantizers import Gptq
from adx.calibration.ranges import LayerRange
from adx.calibration.smoothing import Choose, block_step, by_output_error, by_weight_error
from adx.calibration.weights import BlockScheme, QuantizedWeight, quantize
from adx.export.errors import CheckpointError, UsageError
from adx.export.linears import LinearLayer

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

SHARES = np.linspace(1, 0.64, 13)  # of a block's range, that clipping tries
TIE = 3e-4  # steps this near to a tie may be rounded either way in float32


def matrix(rows: int, columns: int, seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def inputs(tokens: int, columns: int, seed: int) -> Doubles:
    """Correlated inputs whose columns differ in size: a few directions and some noise."""
    rng = np.random.default_rng(1000 + seed)
    mixed = rng.standard_normal((tokens, max(2, columns // 4))) @ rng.standard_normal((max(2, columns // 4), columns))
    return (mixed + 0.3 * rng.standard_normal((tokens, columns))) * rng.lognormal(0, 0.7, columns)


def moments_of(x: Doubles) -> Floats:
    return (x.T @ x / len(x)).astype(np.float32)


def unpacked(made: QuantizedWeight) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Codes (rows, columns) and zero points (rows, blocks) from the bytes of a 4-bit matrix."""
    rows, columns = made.shape
    data = made.data.reshape(rows, -1).astype(np.int64)
    codes = np.stack([data % 16, data // 16], -1).reshape(rows, -1)[:, :columns]
    if made.zero_points is None:
        return codes, np.full(made.scales.shape, 8)
    packed = made.zero_points.astype(np.int64)
    return codes, np.stack([packed % 16, packed // 16], -1).reshape(rows, -1)[:, : made.scales.shape[1]]


def by_the_paper(
    weight: Floats, scales: Doubles, zeros: NDArray[np.int64], hessian: Floats
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Algorithm 1 of the paper column by column, without its blocks: codes, and which rows met no tie.

    Columns go by falling second moment. A hundredth of the mean second moment, over the columns that have one, is added
    to each; columns without have one of their own, which touches no other.

    Args:
        scales: (rows, columns), zero points alike.
    """
    h = hessian.astype(np.float64)
    dead = np.diag(h) == 0
    h[dead, dead] = np.diag(h)[~dead].mean() if not dead.all() else 1.0
    order = np.argsort(-np.diag(h), kind="stable")
    h = h[np.ix_(order, order)]
    h += np.eye(len(h)) * 0.01 * np.diag(h).mean()
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    left, codes = weight.astype(np.float64)[:, order], np.zeros(weight.shape, np.int64)
    clear = np.ones(len(weight), np.bool_)
    for i, column in enumerate(order):
        scale, zero = scales[:, column], zeros[:, column]
        steps = np.divide(left[:, i], scale, out=np.zeros(len(left)), where=scale != 0)
        codes[:, column] = np.clip(np.rint(steps) + zero, 0, 15)
        clear &= np.abs(np.abs(steps - np.trunc(steps)) - 0.5) > TIE
        error = (left[:, i] - (codes[:, column] - zero) * scale) / upper[i, i]
        left[:, i + 1 :] -= np.outer(error, upper[i, i + 1 :])
    return codes, clear


def by_column(values: NDArray[Any], made: QuantizedWeight) -> NDArray[Any]:
    """(rows, blocks) to (rows, columns)."""
    return np.repeat(values, made.scheme.block_size, axis=1)[:, : made.shape[1]]


def output_error(made: QuantizedWeight, weight: Floats, hessian: Floats) -> float:
    error = made.dequantize().astype(np.float64) - weight
    return float(np.einsum("ri,ij,rj->", error, hessian.astype(np.float64), error))


def check_against_the_paper(weight: Floats, hessian: Floats, scheme: BlockScheme) -> None:
    """The codes of every row that met no tie on its way, and those are enough to see a fault; on a grid that is fixed
    before, by the columns' second moments."""
    made = quantize_gptq(weight, scheme, factor(hessian))
    grid = quantize(weight, scheme, importance=np.diag(hessian).copy())
    np.testing.assert_array_equal(made.scales, grid.scales)
    codes, zeros = unpacked(made)
    scales = by_column(made.scales, made).astype(np.float64)
    expected, clear = by_the_paper(weight, scales, by_column(zeros, made), hessian)
    assert clear.mean() > 0.7
    np.testing.assert_array_equal(codes[clear], expected[clear])


SCHEMES = [BlockScheme(4, group, symmetric) for group in (32, 64, 256) for symmetric in (True, False)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("columns", [64, 200, 256])
def test_codes_are_those_of_the_paper(scheme: BlockScheme, columns: int) -> None:
    """Groups of 32, 64 and whole rows; 200 columns are no multiple of any, and more than are rounded at once."""
    for seed in range(2):
        hessian = moments_of(inputs(2 * columns, columns, seed))
        check_against_the_paper(matrix(48, columns, seed), hessian, scheme)


@pytest.mark.parametrize("scheme", SCHEMES[:4], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_inputs_that_are_always_zero(scheme: BlockScheme, size: float) -> None:
    """Their weights are rounded to the nearest code, and they change nothing for the others, of whatever size those
    inputs are: neither their order nor what is added to their second moments."""
    x = inputs(300, 96, 3) * size
    x[:, [0, 17, 40, 41, 95]] = 0
    hessian, weight = moments_of(x), matrix(48, 96, 4)
    check_against_the_paper(weight, hessian, scheme)
    codes, zeros = unpacked(made := quantize_gptq(weight, scheme, factor(hessian)))
    steps = weight[:, 17] / by_column(made.scales, made)[:, 17].astype(np.float64)
    wanted = np.clip(np.rint(steps) + by_column(zeros, made)[:, 17], 0, 15)
    clear = np.abs(np.abs(steps - np.trunc(steps)) - 0.5) > TIE
    np.testing.assert_array_equal(codes[clear, 17], wanted[clear])


def test_no_input_at_all_is_rounding() -> None:
    weight, scheme = matrix(8, 64, 0), BlockScheme(4, 32)
    made = quantize_gptq(weight, scheme, factor(np.zeros((64, 64), np.float32)))
    np.testing.assert_array_equal(made.dequantize(), quantize(weight, scheme).dequantize())


@pytest.mark.parametrize("tokens", [1, 7, 50])
def test_fewer_tokens_than_columns(tokens: int) -> None:
    """A singular matrix of second moments: what is added to its diagonal makes it one that can be factored."""
    hessian, weight = moments_of(inputs(tokens, 128, 5)), matrix(48, 128, 6)
    assert np.linalg.matrix_rank(hessian) <= tokens
    made = quantize_gptq(weight, BlockScheme(4, 64), factor(hessian))
    assert np.isfinite(made.dequantize()).all()
    assert output_error(made, weight, hessian) <= output_error(quantize(weight, BlockScheme(4, 64)), weight, hessian)
    check_against_the_paper(weight, hessian, BlockScheme(4, 64))


def test_what_is_no_matrix_of_second_moments_is_refused() -> None:
    """NaN, and a matrix with directions of negative size, which no inputs have."""
    hessian = moments_of(inputs(100, 32, 0))
    hessian[3, 4] = np.nan
    with pytest.raises(CheckpointError, match="not finite"):
        factor(hessian)
    wrong = np.ones((32, 32), np.float32)
    wrong[0, 1] = wrong[1, 0] = 100
    with pytest.raises(CheckpointError, match="no such matrix"):
        factor(wrong)
    weight = matrix(4, 32, 0)
    weight[1, 1] = np.inf
    with pytest.raises(UsageError, match="NaN or infinity"):
        quantize_gptq(weight, BlockScheme(4, 32), factor(moments_of(inputs(100, 32, 0))))


def test_more_is_added_where_a_hundredth_is_too_little() -> None:
    """Rounding can leave a direction of slightly negative size; a tenth or the whole of the mean is added then."""
    rng = np.random.default_rng(0)
    directions, _ = np.linalg.qr(rng.standard_normal((32, 32)))
    for lowest in (-0.05, -0.5):
        sizes = np.linspace(0.5, 1.5, 32)
        sizes[0] = lowest
        hessian = ((directions * sizes) @ directions.T).astype(np.float32)
        weight = matrix(8, 32, 0)
        made = quantize_gptq(weight, BlockScheme(4, 32), factor(hessian))
        step = np.abs(by_column(made.scales, made))
        assert np.abs(made.dequantize() - weight).max() < 8 * step.max()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_the_outputs_error_is_less_than_roundings(scheme: BlockScheme) -> None:
    """On correlated inputs, for every seed: than to nearest on the same grid, and than to nearest on whole ranges."""
    gains = []
    for seed in range(20):
        weight, hessian = matrix(32, 96, seed), moments_of(inputs(256, 96, seed))
        made = output_error(quantize_gptq(weight, scheme, factor(hessian)), weight, hessian)
        same_grid = quantize(weight, scheme, importance=np.diag(hessian).copy())
        rounded = [output_error(each, weight, hessian) for each in (same_grid, quantize(weight, scheme))]
        assert made <= min(rounded), f"seed {seed}"
        gains.append(made / min(rounded))
    assert np.mean(gains) < 0.6


def test_the_same_again_gives_the_same_bytes() -> None:
    weight, hessian = matrix(32, 200, 0), moments_of(inputs(300, 200, 0))
    first, again = (quantize_gptq(weight, BlockScheme(4, 64, False), factor(hessian)) for _ in range(2))
    np.testing.assert_array_equal(first.data, again.data)
    np.testing.assert_array_equal(first.scales, again.scales)
    np.testing.assert_array_equal(first.zero_points, again.zero_points)


def layer(name: str, weight: Floats, input_scale: Floats | None = None) -> LinearLayer:
    import onnx_ir as ir

    return LinearLayer(name, ir.tensor(weight), False, None, input_scale=input_scale)


def test_a_smoothed_layer_has_the_moments_of_its_smoothed_input() -> None:
    """Input j divided by d_j: second moment (i, j) divided by d_i d_j; other layers and 8 bits are
    rounded."""
    weight, x = matrix(24, 64, 0), inputs(200, 64, 0)
    divisor = np.exp(np.random.default_rng(0).standard_normal(64)).astype(np.float32)
    scheme, hessian = BlockScheme(4, 32, False), moments_of(x)
    quantizer = Gptq(lambda name: hessian if name == "known" else None)
    made = quantizer(layer("known", weight, divisor), scheme)
    by_hand = quantize_gptq(weight * divisor, scheme, factor(moments_of(x / divisor)))
    assert (made.data == by_hand.data).mean() > 0.99  # the two matrices are equal but for rounding
    plain = quantizer(layer("known", weight), scheme)
    np.testing.assert_array_equal(plain.data, quantize_gptq(weight, scheme, factor(hessian)).data)
    for name, other in (("unknown", scheme), ("known", BlockScheme(8, 32))):
        np.testing.assert_array_equal(quantizer(layer(name, weight), other).data, quantize(weight, other).data)


# Clipping.


def cost(blocks: Doubles, scales: Doubles, zeros: Doubles, counts: Doubles) -> Doubles:
    """(rows, blocks) weighted squared error of rounding to nearest on 16 codes."""
    steps = np.divide(blocks, scales[..., None], out=np.zeros_like(blocks), where=scales[..., None] != 0)
    codes = np.clip(np.rint(steps) + zeros[..., None], 0, 15)
    return ((((codes - zeros[..., None]) * scales[..., None] - blocks) ** 2) * counts).sum(-1)


def half(scales: Doubles) -> Doubles:
    return scales.astype(np.float16).astype(np.float64)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("columns", [96, 256, 300])
def test_the_chosen_range_leaves_the_least_error(scheme: BlockScheme, columns: int) -> None:
    """Of all ranges that are tried, computed one by one in float64: never more than the whole range's, and less for
    most blocks of many weights; columns count by their power, some of them not at all."""
    weight = matrix(16, columns, 0)
    power = np.random.default_rng(1).lognormal(0, 1, columns).astype(np.float32)
    power[5:9] = 0
    made = quantize(weight, scheme, importance=power)
    size, rows = scheme.block_size, 16
    blocks = np.zeros((rows, -(-columns // size) * size))
    counts = np.zeros(blocks.shape[1])
    blocks[:, :columns], counts[:columns] = weight, power
    blocks, counts = blocks.reshape(rows, -1, size), counts.reshape(-1, size)
    tried = []
    for share in SHARES:
        if scheme.symmetric:
            extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]
            exact, zeros = extreme / -8 * share, np.full(extreme.shape, 8.0)
        else:
            low, high = np.minimum(blocks.min(-1), 0) * share, np.maximum(blocks.max(-1), 0) * share
            exact = (high - low) / 15
            zeros = np.rint(-low / exact)
        tried.append(cost(blocks, half(exact), zeros, counts))
    _, zeros_made = unpacked(made)
    got = cost(blocks, made.scales.astype(np.float64), zeros_made.astype(np.float64), counts)
    assert (got <= np.min(tried, axis=0) * 1.001 + 1e-12).all()
    assert (got <= tried[0] * (1 + 1e-6) + 1e-12).all()
    assert (got < tried[0] * 0.99).mean() > 0.4


def test_8_bits_are_never_clipped() -> None:
    weight, power = matrix(8, 96, 0), np.ones(96, np.float32)
    for symmetric in (True, False):
        scheme = BlockScheme(8, 32, symmetric)
        clipped, whole = quantize(weight, scheme, importance=power), quantize(weight, scheme)
        np.testing.assert_array_equal(clipped.scales, whole.scales)
        np.testing.assert_array_equal(clipped.data, whole.data)


@pytest.mark.parametrize("size", [1e-9, 1e25], ids=str)
def test_weights_of_any_size_are_clipped_without_a_warning(size: float) -> None:
    """Squares that float32 does not hold leave the whole range."""
    weight = (matrix(8, 96, 0) * size).astype(np.float32)
    made = quantize(weight, BlockScheme(4, 32), importance=np.ones(96, np.float32))
    error = np.abs(made.dequantize().astype(np.float64) - weight)
    assert error.max() <= 0.4 * np.abs(weight).max()


# The searches for divisors.


def in_4_bits(weight: Floats) -> Floats:
    """Symmetric, whole rows, by hand."""
    extreme = np.take_along_axis(weight, np.abs(weight).argmax(1)[:, None], 1)
    scales = np.where(extreme == 0, 1, extreme / -8)
    return (np.clip(np.rint(weight / scales), -8, 7) * scales).astype(np.float32)


def in_8_bits(weight: Floats) -> Floats:
    """Symmetric, whole rows, by hand."""
    scales = np.abs(weight).max(1, keepdims=True) / 127
    return (np.rint(weight / scales) * scales).astype(np.float32)


def readers_and_ranges(seed: int) -> tuple[list[LinearLayer], dict[str, LayerRange]]:
    """Two layers on one input, some of whose channels are much larger than others."""
    rng = np.random.default_rng(seed)
    power = np.square(rng.lognormal(0, 1.2, 48)).astype(np.float32)
    found = LayerRange((3 * np.sqrt(power)).astype(np.float32), power, 1.0)
    layers = [layer(name, matrix(rows, 48, seed * 2 + rows)) for name, rows in (("a", 20), ("b", 12))]
    return layers, {"a": found, "b": found}


def formula(size: Floats, layers: list[LinearLayer], strength: float) -> Doubles:
    """SmoothQuant's equation 4, its geometric mean taken to 1."""
    largest = np.abs(np.concatenate([each.weight() for each in layers])).max(0).astype(np.float64)
    divisor = size.astype(np.float64) ** strength / largest ** (1 - strength)
    scaled: Doubles = divisor / np.exp(np.log(divisor).mean())
    return scaled


def rounding_error(weight: Floats, power: Floats, divisor: Doubles, rounded: Callable[[Floats], Floats]) -> float:
    """What rounding the scaled weight adds to the output's square, over the output's square."""
    stored = rounded((weight * divisor).astype(np.float32)) / divisor
    signal = np.square(weight.astype(np.float64)) @ power
    return float((np.square(stored - weight.astype(np.float64)) @ power).sum() / signal.sum())


@pytest.mark.parametrize("seed", range(8))
def test_the_divisor_for_weights_has_the_least_error_of_those_tried(seed: int) -> None:
    """No divisor and strengths 0 to 0.5 of the inputs' root mean square, the error summed over both layers."""
    layers, ranges = readers_and_ranges(seed)
    power = ranges["a"].power
    candidates = [np.ones(48), *(formula(np.sqrt(power), layers, s) for s in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5))]

    def total(divisor: Doubles) -> float:
        return sum(rounding_error(each.weight(), power, divisor, in_4_bits) for each in layers)

    check_choice(by_weight_error(ranges, in_4_bits), layers, candidates, total)


@pytest.mark.parametrize("seed", range(8))
def test_the_divisor_for_weights_and_inputs_has_the_least_error_of_those_tried(seed: int) -> None:
    """No divisor and shares 0.3 to 0.9 of the inputs' largest magnitudes; inputs quantized in blocks of 16 add a
    twelfth of their step's square, which is three root mean squares of the block's largest channel over 127."""
    layers, ranges = readers_and_ranges(seed)
    power = ranges["a"].power
    shares = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    candidates = [np.ones(48), *(formula(ranges["a"].inputs, layers, share) for share in shares)]

    def total(divisor: Doubles) -> float:
        step = 3 / 127 * np.repeat((np.sqrt(power) / divisor).reshape(3, 16).max(1), 16)
        found = 0.0
        for each in layers:
            weight = each.weight().astype(np.float64)
            noise = (np.square(weight * divisor) @ (np.square(step) / 12)).sum()
            found += (
                rounding_error(each.weight(), power, divisor, in_8_bits) + noise / (np.square(weight) @ power).sum()
            )
        return float(found)

    check_choice(by_output_error(ranges, in_8_bits, block_step(16)), layers, candidates, total)


def check_choice(
    choose: Choose, layers: list[LinearLayer], candidates: list[Doubles], total: Callable[[Doubles], float]
) -> None:
    """The choice is one of the candidates (the first stands for none), and none of them has less error."""
    chosen = choose(layers)
    errors = [total(candidate) for candidate in candidates]
    given = candidates[0] if chosen is None else chosen.astype(np.float64)
    assert any(np.allclose(given, candidate, rtol=1e-4) for candidate in candidates)
    assert total(given) <= min(errors) * (1 + 1e-3)
    assert min(errors) < max(errors) * 0.9, "the candidates differ"


def test_layers_that_were_not_measured_are_not_smoothed() -> None:
    layers, ranges = readers_and_ranges(0)
    for known in ({}, {"a": ranges["a"]}):
        assert by_weight_error(known, in_4_bits)(layers) is None
        assert by_output_error(known, in_4_bits, block_step(16))(layers) is None
