"""8 bits with a scale per output channel, and one scale a layer for inputs: against numpy, number by number."""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

import models
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from adx.calibration.activations import PERCENTILE, InputQuantization, quantize_inputs
from adx.calibration.channels import quantize_channels
from adx.calibration.ranges import LayerRange, layer_ranges
from adx.calibration.recipe import INPUT_NOISE, make_channel_recipe
from adx.calibration.samples import CalibrationSamples
from adx.calibration.smoothing import by_activations, by_weight_error
from adx.export.errors import UsageError
from adx.export.linears import LinearLayer

Floats = NDArray[np.float32]

HALF = np.finfo(np.float16)
SMALLEST = float(HALF.smallest_subnormal)
REACHED = 127 * SMALLEST  # the largest element of a row whose scale is the smallest


# Weights.


def by_hand(weight: Floats) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Codes and scales from the definition, an element at a time, in float64: the smallest float16 of at least
    max|w| / 127, then the nearest multiple, halves to even."""
    halves = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)  # every positive one, rising
    codes, scales = np.zeros(weight.shape, np.int64), np.zeros(len(weight))
    for row, elements in enumerate(weight.astype(np.float64)):
        wanted = max(float(np.float32(np.abs(elements).max()) / np.float32(127)), SMALLEST)
        scales[row] = halves[np.searchsorted(halves, wanted)]
        codes[row] = [round(float(np.float32(element) / np.float32(scales[row]))) for element in elements]
    return codes, scales


def rows_of_all_kinds() -> Floats:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((14, 24)).astype(np.float32)
    rows[0] = 0
    rows[1] *= 1e-8  # below float16's smallest subnormal number
    rows[2] *= 1e-4  # its scale is subnormal
    rows[3, 5] = 1000.0  # one outlier
    rows[4, 5] = -1000.0
    rows[5] = -np.abs(rows[5])  # the largest is negative
    rows[6] = np.where(rng.random(24) < 0.5, -127.0, 127.0)
    rows[7] = np.arange(24) - 12
    rows[8] *= 1e4
    rows[9] = 65400
    rows[10] = np.linspace(-0.5, 0.5, 24)
    rows[11, 1:] = 0
    rows[12] = REACHED
    rows[13] = -REACHED * 1.001
    return rows


def test_codes_and_scales_are_those_of_the_definition() -> None:
    weight = rows_of_all_kinds()
    codes, scales = quantize_channels(weight)
    expected_codes, expected_scales = by_hand(weight)
    assert codes.dtype == np.int8
    assert scales.dtype == np.float16
    np.testing.assert_array_equal(scales.astype(np.float64), expected_scales)
    np.testing.assert_array_equal(codes, expected_codes)
    assert np.abs(codes.astype(int)).max() <= 127, "-128 has no counterpart"
    assert np.isfinite((codes * expected_scales[:, None]).astype(np.float16)).all()
    assert (scales > 0).all()
    assert not codes[0].any()
    assert not codes[1].any(), "what is below half a step is 0, never infinite or NaN"
    assert np.abs(codes[2].astype(int)).max() >= 120, "small rows have their levels, by a subnormal scale"
    assert scales[2] < HALF.tiny
    assert codes[3, 5] == 127
    assert codes[4, 5] == -127
    assert codes[6].tolist() == [int(np.sign(x)) * 127 for x in weight[6]]


def test_a_scale_is_rounded_up_so_that_nothing_saturates() -> None:
    """Of a thousand rows about half of the scales would be rounded down by rounding to nearest, and 127 of them would
    not reach the largest element."""
    weight = np.random.default_rng(1).standard_normal((1000, 8)).astype(np.float32)
    largest = np.abs(weight).max(1)
    _, scales = quantize_channels(weight)
    assert (scales.astype(np.float64) * 127 >= largest * (1 - 1e-6)).all()
    nearest = (largest / 127).astype(np.float16)
    assert 300 < (nearest < scales).sum() < 700
    assert (scales <= np.nextafter(nearest, np.float16(np.inf))).all()


@settings(max_examples=200, deadline=None)
@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=9),
        elements=st.floats(-60000, 60000, width=32),
    )
)
def test_the_error_is_at_most_half_a_step(weight: Floats) -> None:
    """Of any matrix, with the float16 scale that is stored; what is dequantized is finite in float16."""
    codes, scales = quantize_channels(weight)
    stored = codes.astype(np.float64) * scales.astype(np.float64)[:, None]
    assert (np.abs(stored - weight) <= scales.astype(np.float64)[:, None] * 0.5001).all()
    assert np.isfinite(stored.astype(np.float16)).all()
    assert np.abs(codes.astype(int)).max() <= 127


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_refused(value: float) -> None:
    weight = np.ones((3, 4), np.float32)
    weight[1, 2] = value
    with pytest.raises(UsageError, match="NaN or infinity"):
        quantize_channels(weight)


@pytest.mark.parametrize("value", [65504, 7e4, -7e4, 9e6])
def test_what_float16_cannot_hold_is_refused(value: float) -> None:
    """A scale of 516 or 551 fits float16, but 127 times it does not, nor does a scale above 65504."""
    with pytest.raises(UsageError, match="too large for 8 bits with a float16 scale"):
        quantize_channels(np.array([[1, 2, 3], [1, value, 2]], np.float32))


def test_an_empty_matrix_has_no_scales() -> None:
    codes, scales = quantize_channels(np.zeros((0, 5), np.float32))
    assert codes.shape == (0, 5)
    assert scales.shape == (0,)


# Inputs.


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = models.tiny(request.param, tmp_path_factory.mktemp("channels") / request.param)
    return models.load_model(folder)


def rows(count: int = 4, length: int = 12, seed: int = 0) -> list[NDArray[np.int64]]:
    return list(np.random.default_rng(seed).integers(3, 256, (count, length)))


def captured(model: Any, ids: Iterable[NDArray[np.int64]]) -> dict[str, tuple[Floats, Floats]]:
    """Inputs (tokens, in) and outputs (tokens, out) of every linear layer, all of them at once."""
    import torch
    from transformers.pytorch_utils import Conv1D

    found: dict[str, list[tuple[Floats, Floats]]] = {}
    hooks = []
    for name, module in model.named_modules():
        if not isinstance(module, (torch.nn.Linear, Conv1D)):
            continue

        def keep(_module: object, args: Any, output: Any, name: str = name) -> None:
            x, y = (each.detach().reshape(-1, each.shape[-1]).numpy().copy() for each in (args[0], output))
            found.setdefault(name, []).append((x, y))

        hooks.append(module.register_forward_hook(keep))
    with torch.inference_mode():
        for row in ids:
            model(torch.from_numpy(row)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return {
        name: (np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs]))
        for name, pairs in found.items()
    }


def some_divisors(ranges: dict[str, LayerRange]) -> dict[str, Floats]:
    """For every other layer, as smoothing leaves some out."""
    rng = np.random.default_rng(5)
    return {name: rng.uniform(0.2, 5, len(r.inputs)).astype(np.float32) for name, r in list(ranges.items())[::2]}


def test_ranges_are_those_of_the_captured_activations(model: Any) -> None:
    ids = rows()
    ranges = layer_ranges(model, ids)
    activations = captured(model, ids)
    assert set(ranges) == set(activations)
    assert len(ranges) >= 9
    for name, (x, y) in activations.items():
        np.testing.assert_allclose(ranges[name].inputs, np.abs(x).max(0), rtol=1e-5)
        np.testing.assert_allclose(ranges[name].power, np.square(x, dtype=np.float64).mean(0), rtol=1e-5)
        assert ranges[name].output == pytest.approx(np.abs(y).max(), rel=1e-6)


def noise_by_hand(x: NDArray[np.float64], scale: float) -> float:
    """Per token, squared error over square, then the mean over tokens."""
    error = np.clip(np.rint(x / scale), -127, 127) * scale - x
    return float((np.square(error).sum(1) / np.square(x).sum(1)).mean())


@pytest.mark.parametrize("method", ["minmax", "percentile"])
@pytest.mark.parametrize("divided", [False, True], ids=["", "divided"])
def test_input_scales_and_noise_are_those_of_numpy(model: Any, method: Any, divided: bool) -> None:
    """`minmax` exactly; `percentile` to one of 2048 bins of at most twice the range, so that all but a ten-thousandth
    of the values are within."""
    ids = rows(8, 24)
    ranges = layer_ranges(model, ids)
    divisors = some_divisors(ranges) if divided else {}
    found = quantize_inputs(model, ids, ranges, divisors, method)
    clipped = 0
    for name, (x, _) in captured(model, ids).items():
        values = x.astype(np.float64) / divisors.get(name, np.ones(1, np.float32)).astype(np.float64)
        top = np.abs(values).max()
        if method == "minmax":
            assert found[name].scale == pytest.approx(top / 127, rel=1e-5)
        else:
            reach = found[name].scale * 127
            wanted = np.quantile(np.abs(values), PERCENTILE, method="inverted_cdf")
            assert wanted - 1e-4 * top <= reach <= wanted + top / 1024 + 1e-4 * top
            clipped += reach < top * 0.999
        assert found[name].noise == pytest.approx(noise_by_hand(values, found[name].scale), rel=2e-3)
    assert clipped > 0 or method == "minmax"


def test_an_input_with_a_few_huge_tokens_stays_float() -> None:
    """One token a thousand times larger than the others leaves them nothing of one scale. The error over all
    tokens, relative to their common square, would hide it; the mean over tokens does not."""
    values = np.random.default_rng(0).standard_normal((64, 32))
    values[0] *= 1000
    scale = np.abs(values).max() / 127
    pooled = np.square(np.rint(values / scale) * scale - values).sum() / np.square(values).sum()
    assert noise_by_hand(values, scale) > INPUT_NOISE > pooled
    for noise, kept in ((noise_by_hand(values, scale), False), (INPUT_NOISE, True)):
        inputs = {"a": InputQuantization(scale, noise)}
        recipe = make_channel_recipe("int8", {"a": _Shape()}, inputs=inputs).layers["a"]
        assert recipe.scheme is not None
        assert recipe.scheme.name == ("int8-sym-channel-w8a8" if kept else "int8-sym-channel")
        assert ("its input stays float" in str(recipe.reason)) != kept


def test_a_layer_that_no_sample_reached_says_so() -> None:
    """Its input has no scale; the head's has none by choice."""
    inputs = {"a": InputQuantization(0.1, 0.0), "head": InputQuantization(0.1, 0.0)}
    layers = {"a": _Shape(), "b": _Shape(), "head": _Shape(role="head")}
    recipe = make_channel_recipe("int8", layers, inputs=inputs).layers
    assert recipe["a"].reason is None
    assert "no calibration sample reached it" in str(recipe["b"].reason)
    assert "makes the logits" in str(recipe["head"].reason)
    assert [layer.scheme and layer.scheme.bits for layer in recipe.values()] == [8, 8, 8]


@dataclasses.dataclass(frozen=True)
class _Shape:
    shape: tuple[int, int] = (4, 4)
    role: str = "other"


@pytest.mark.parametrize("method", ["minmax", "percentile"])
def test_rows_in_any_order_and_twice_give_the_same(model: Any, method: Any) -> None:
    """Counts and maxima: neither the order of the rows matters nor that they come from a generator."""
    ids = rows(6, 10)
    ways = (ids, ids[::-1], ids + ids)
    ranges = [layer_ranges(model, iter(way)) for way in ways]
    found = [quantize_inputs(model, way, each, {}, method) for way, each in zip(ways, ranges, strict=True)]
    for other_ranges, other in zip(ranges[1:], found[1:], strict=True):
        for name, expected in found[0].items():
            np.testing.assert_array_equal(other_ranges[name].inputs, ranges[0][name].inputs)
            np.testing.assert_allclose(other_ranges[name].power, ranges[0][name].power, rtol=1e-6)
            assert other_ranges[name].output == ranges[0][name].output
            assert other[name].scale == pytest.approx(expected.scale, rel=1e-9)
            assert other[name].noise == pytest.approx(expected.noise, rel=1e-6)


def test_memory_does_not_grow_with_the_rows(model: Any) -> None:
    """No activation of an earlier row is alive when the next row comes, and numpy's peak is about the same: kept,
    eight times the rows would take eight times the memory."""
    import torch

    counts: list[int] = []

    def watched(ids: list[NDArray[np.int64]]) -> Iterator[NDArray[np.int64]]:
        for row in ids:
            gc.collect()
            counts.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
            yield row

    few, many = rows(2, 16), rows(16, 16)
    layer_ranges(model, watched(many[:4]))
    assert counts[-1] <= counts[0] + 2, counts
    peaks = []
    for ids in (few, few, many):
        tracemalloc.start()
        ranges = layer_ranges(model, iter(ids))
        quantize_inputs(model, ids, ranges, {}, "percentile")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] <= 2 * peaks[1], peaks


def test_a_layer_that_sees_only_zeros_has_a_scale(model: Any) -> None:
    """No division by 0 and no NaN, though nothing is there to measure."""
    ids = rows(2)
    ranges = {
        name: LayerRange(np.zeros_like(r.inputs), np.zeros_like(r.power), 0.0)
        for name, r in layer_ranges(model, ids).items()
    }
    found = quantize_inputs(model, ids, ranges, {})
    assert all(0 < each.scale < 1e-10 and np.isfinite(each.noise) for each in found.values())


def test_each_row_is_also_read_from_its_middle() -> None:
    """Texts need not begin as the samples do."""
    samples = CalibrationSamples("test", None, tuple(np.arange(20).reshape(2, 10)))
    windows = [window.tolist() for window in samples.windows()]
    assert windows == [list(range(10)), list(range(5, 10)), list(range(10, 20)), list(range(15, 20))]


# Divisors.


def layer(weight: Floats, name: str = "a") -> LinearLayer:
    import onnx_ir as ir

    return LinearLayer(name, ir.tensor(weight), False, None)


def output_error(weights: list[Floats], power: Floats, divisor: Floats | None) -> float:
    """Relative square error of the layers' outputs for inputs of this power, summed, from the definition."""
    total = 0.0
    for weight in weights:
        scaled = weight.astype(np.float64) * (1.0 if divisor is None else divisor.astype(np.float64))
        codes, scales = by_hand(scaled.astype(np.float32))
        stored = codes * scales[:, None] / (1.0 if divisor is None else divisor.astype(np.float64))
        total += float((np.square(stored - weight) @ power).sum() / (np.square(weight) @ power).sum())
    return total


def cases() -> dict[str, tuple[list[Floats], Floats]]:
    rng = np.random.default_rng(2)
    weights = [rng.standard_normal((12, 16)).astype(np.float32) for _ in range(2)]
    flat, outlier = np.ones(16, np.float32), np.ones(16, np.float32)
    outlier[3] = 2500.0  # a channel 50 times larger than the others
    odd = [weight.copy() for weight in weights]
    for weight in odd:
        weight[:, 7] *= 40
    return {
        "flat": (weights, flat),
        "an outlier in the input": (weights, outlier),
        "an outlier in the weight": (odd, flat),
        "both": (odd, outlier),
        "random": (weights, rng.lognormal(0, 2, 16).astype(np.float32)),
        "a channel that is never used": (weights, np.where(np.arange(16) == 2, 0, flat).astype(np.float32)),
    }


def chosen(weights: list[Floats], power: Floats) -> Floats | None:
    layers = [layer(weight, f"l{index}") for index, weight in enumerate(weights)]
    found = LayerRange(np.sqrt(power), power, 1.0)
    return by_weight_error(dict.fromkeys((each.name for each in layers), found))(layers)


@pytest.mark.parametrize("name", cases())
def test_the_divisor_is_the_one_of_least_error(name: str) -> None:
    """Among strengths 0 to 0.5 in tenths and none at all, by an error computed from its definition."""
    weights, power = cases()[name]
    got = chosen(weights, power)
    size = np.maximum(np.sqrt(power.astype(np.float64)), 1e-5)
    largest = np.max([np.abs(weight).max(0) for weight in weights], axis=0)
    errors: list[tuple[float, Floats | None]] = [(output_error(weights, power, None), None)]
    for strength in np.arange(6) / 10:
        logs = strength * np.log(size) - (1 - strength) * np.log(largest)
        divisor = np.exp(logs - logs.mean()).astype(np.float32)
        errors.append((output_error(weights, power, divisor), divisor))
    best = min(error for error, _ in errors)
    assert output_error(weights, power, got) <= errors[0][0] * (1 + 1e-6), "worse than none"
    assert output_error(weights, power, got) == pytest.approx(best, rel=1e-3)
    if got is not None:
        assert np.exp(np.log(got).mean()) == pytest.approx(1, abs=1e-5)


def test_a_divisor_pays_where_channels_differ() -> None:
    """An outlier in the weight: less than a tenth of the error without a divisor."""
    weights, power = cases()["an outlier in the weight"]
    assert output_error(weights, power, chosen(weights, power)) < output_error(weights, power, None) / 10


def test_layers_without_ranges_are_left(model: Any) -> None:
    """A layer that no sample reached has no divisor, by either choice; nor have its neighbours on the same input."""
    weights = [layer(np.ones((3, 4), np.float32), name) for name in ("seen", "unseen")]
    found = {"seen": LayerRange(np.ones(4, np.float32), np.ones(4, np.float32), 1.0)}
    assert by_weight_error(found)(weights) is None
    assert by_activations({"seen": found["seen"].inputs})(weights) is None
