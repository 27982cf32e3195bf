"""The search for the fewest parts kept more precise, and what each part costs: measured, against doing it by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import models
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from adx.calibration.budget import Step, Unit, fewest, first_guess, most_calls, ranked
from adx.calibration.sensitivity import Altered, InputRounding, measure_sensitivities
from adx.export.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Floats = NDArray[np.float32]


# The bisection.


def asked(count: int, passes: Callable[[int], bool], guess: int) -> tuple[int | None, list[int]]:
    """What `fewest` finds, and the numbers that it asked for."""
    calls: list[int] = []

    def noted(steps: int) -> bool:
        calls.append(steps)
        return passes(steps)

    return fewest(count, noted, guess), calls


@pytest.mark.parametrize("count", [*range(1, 20), 33, 64, 100])
def test_the_fewest_are_found_from_every_guess(count: int) -> None:
    """Against every threshold, also one that nothing passes: in few calls, no number twice, none outside 1..count."""
    for needed in range(1, count + 2):
        for guess in range(-1, count + 3):
            found, calls = asked(count, lambda steps, needed=needed: steps >= needed, guess)  # type: ignore[misc]
            assert found == (needed if needed <= count else None), (needed, guess)
            assert len(set(calls)) == len(calls)
            assert len(calls) <= 2 + 2 * math.log2(count) <= most_calls(count)
            assert all(1 <= steps <= count for steps in calls)


def test_a_good_guess_ends_within_three_calls() -> None:
    """The guess itself, and its two neighbours at most, of a thousand."""
    for needed in (1, 2, 500, 999, 1000):
        _, calls = asked(1000, lambda steps, needed=needed: steps >= needed, needed)  # type: ignore[misc]
        assert len(calls) <= 3


@given(passing=st.lists(st.booleans(), min_size=1, max_size=40), guess=st.integers(-2, 50))
@settings(max_examples=300, deadline=None)
def test_what_is_found_has_passed_even_where_more_do_not(passing: list[bool], guess: int) -> None:
    """Passing need not be monotone in practice: the result has passed itself, and None means that all steps failed."""
    found, calls = asked(len(passing), lambda steps: passing[steps - 1], guess)
    assert len(set(calls)) == len(calls)
    if found is None:
        assert not passing[-1]
        assert calls[-1] == len(passing)
    else:
        assert passing[found - 1]
        assert found in calls
        assert found == 1 or not passing[found - 2], "one fewer was tried, and failed"


def test_nothing_to_raise_is_not_enough() -> None:
    assert asked(0, lambda steps: True, 3) == (None, [])


def unit(name: str, *sizes: int) -> Unit:
    return Unit((name,), sizes, ("int8", "float")[: len(sizes) - 1])


def test_steps_are_ranked_by_what_a_byte_takes_away() -> None:
    """Divergence falls with the square of the output's error: of 1.0 at an error of 4 there is 0.25 left at 1. No step
    comes before the one below it, however much it takes away, and equals keep their order."""
    units = [unit("a", 10, 20, 40), unit("b", 10, 110, 120), unit("c", 10, 11), unit("d", 20, 30, 50), unit("e", 5, 5)]
    steps = ranked(units, [1.0, 4.0, 0.05, 1.0, 0.0], [(4, 1, 0), (4, 3, 0), (2, 0), (4, 1, 0), (0, 0)])
    rates = {"a": (0.75 / 10, 0.25 / 20), "b": (1.0 / 100, 3.0 / 10), "c": (0.05 / 1,), "e": (0.0,)}
    assert [(step.unit.layers[0], step.rank) for step in steps] == [
        *(("a", 0), ("d", 0), ("c", 0), ("a", 1), ("d", 1), ("b", 0), ("b", 1), ("e", 0)),
    ]
    for step in steps:
        name = step.unit.layers[0]
        assert step.gain == pytest.approx(rates["a" if name == "d" else name][step.rank] * max(step.added, 1))
        assert step.added == step.unit.sizes[step.rank + 1] - step.unit.sizes[step.rank]
        assert step.level == step.unit.levels[step.rank]


def test_a_finer_level_that_errs_more_takes_nothing_away() -> None:
    steps = ranked([unit("a", 10, 20, 40)], [1.0], [(1.0, 1.5, 0.0)])
    assert [step.gain for step in steps] == [0.0, 1.5]


def steps_of(*sensitivities: float) -> list[Step]:
    return [Step(unit(str(index), 1, 2), 0, value, 1) for index, value in enumerate(sensitivities)]


def test_the_first_guess_adds_up_divergences() -> None:
    """Steps of 4, 3, 2 and 1 of ten: to take away 0.4 of it takes one, 0.41 two, 0.95 all; never none."""
    steps = steps_of(4, 3, 2, 1)
    guesses = [first_guess(steps, excess) for excess in (0.0, 0.1, 0.4, 0.41, 0.7, 0.89, 0.95, 1.0)]
    assert guesses == [1, 1, 1, 2, 2, 3, 4, 4]
    assert first_guess([], 0.5) == 0
    assert first_guess(steps_of(0, 0), 0.5) == 1


# Sensitivities.


def built(folder: Path, family: str, *, tied: bool = False) -> PreTrainedModel:
    overrides = {"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1, "tie_word_embeddings": tied}
    return models.load_model(models.tiny(family, folder / family, **overrides))


@pytest.fixture(scope="module", params=["llama", "llama, tied", "gpt2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    family = request.param.split(",")[0]
    return built(tmp_path_factory.mktemp("sensitivity"), family, tied="tied" in request.param)


def units_of(model: PreTrainedModel) -> list[tuple[str, ...]]:
    if hasattr(model, "transformer"):
        return [("transformer.h.0.attn.c_attn",), ("transformer.h.0.mlp.c_fc",), ("lm_head",)]
    block = "model.layers.0"
    attention = tuple(f"{block}.self_attn.{part}_proj" for part in "qkv")
    return [attention, (f"{block}.mlp.down_proj",), ("lm_head",)]


def is_gpt2_product(model: PreTrainedModel, name: str) -> bool:
    """Does the layer hold its weight as (in, out)? GPT-2's do, but for the head."""
    return hasattr(model, "transformer") and name != "lm_head"


def weight_of(model: PreTrainedModel, name: str) -> Floats:
    """(out, in) of a layer."""
    weight = model.get_submodule(name).weight.detach().numpy()
    return np.ascontiguousarray(weight.T if is_gpt2_product(model, name) else weight)


def coarse(weight: Floats) -> Floats:
    """To fifteen levels, one scale for all: large errors."""
    scale = np.abs(weight).max() / 7
    return (np.rint(weight / scale) * scale).astype(np.float32)


ROWS = [np.random.default_rng(seed).integers(3, 256, length) for seed, length in ((0, 24), (1, 9))]


def divergence(model: PreTrainedModel, other: PreTrainedModel) -> float:
    """Mean over the positions of all rows of KL(model || other), in float64 from logits without a cache."""
    found = []
    for row in ROWS:
        own, changed = (models.reference_logits(each, row.tolist()).astype(np.float64) for each in (model, other))
        p, q = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)) for logits in (own, changed))
        found.append((np.exp(p) * (p - q)).sum(-1))
    return float(np.concatenate(found).mean())


def by_hand(model: PreTrainedModel, unit: Sequence[str], rounding: InputRounding | None = None) -> float:
    """A copy of the model whose layers' weights are overwritten, a tied head's in a parameter of its own."""
    import torch

    other = copy.deepcopy(model)
    for name in unit:
        module = other.get_submodule(name)
        weight = coarse(weight_of(model, name))
        values = torch.from_numpy(np.ascontiguousarray(weight.T if is_gpt2_product(model, name) else weight))
        module.weight = torch.nn.Parameter(values)
        if rounding is not None:
            plain = module.forward

            def rounded(x: torch.Tensor, plain: Callable[[torch.Tensor], torch.Tensor] = plain) -> torch.Tensor:
                assert rounding is not None
                divisor = np.ones(x.shape[-1]) if rounding.divisor is None else rounding.divisor.astype(np.float64)
                steps = np.clip(np.rint(x.double().numpy() / divisor / rounding.scale), -127, 127)
                return plain(torch.from_numpy(steps * rounding.scale * divisor).float())

            module.forward = rounded
    return divergence(model, other)


def snapshot(model: PreTrainedModel) -> dict[str, tuple[int, bytes]]:
    """Every parameter: which object it is and its bytes."""
    found = model.named_parameters(remove_duplicate=False)
    return {name: (id(parameter), parameter.detach().numpy().tobytes()) for name, parameter in found}


def is_as_before(model: PreTrainedModel, before: dict[str, tuple[int, bytes]]) -> bool:
    hooked = [name for name, module in model.named_modules() if module._forward_pre_hooks or module._forward_hooks]
    return snapshot(model) == before and not hooked


def test_each_part_costs_what_swapping_its_weights_costs(model: PreTrainedModel) -> None:
    """Several layers of a unit together, a weight that is held turned, and a head whose embedding stays as it is."""
    units, before = units_of(model), snapshot(model)
    told: list[float] = []
    found = measure_sensitivities(model, ROWS, units, lambda name: Altered(coarse(weight_of(model, name))), told.append)
    assert is_as_before(model, before)
    expected = [by_hand(model, unit) for unit in units]
    assert min(expected) > 1e-4
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    assert told == [0, pytest.approx(1 / 3), pytest.approx(2 / 3)]


@pytest.mark.parametrize("smoothed", [False, True])
def test_a_rounded_input_counts_too(model: PreTrainedModel, smoothed: bool) -> None:
    """Its scale saturates some inputs, and smoothing divides before and multiplies after."""
    units, before = units_of(model)[1:2], snapshot(model)
    columns = weight_of(model, units[0][0]).shape[1]
    divisor = np.exp(np.random.default_rng(0).standard_normal(columns)).astype(np.float32) if smoothed else None
    rounding = InputRounding(0.008, divisor)
    found = measure_sensitivities(model, ROWS, units, lambda name: Altered(coarse(weight_of(model, name)), rounding))
    assert is_as_before(model, before)
    expected = by_hand(model, units[0], rounding)
    assert expected != pytest.approx(by_hand(model, units[0]), rel=0.01)
    assert found[0] == pytest.approx(expected, rel=5e-3)


def test_what_stays_float_costs_nothing(model: PreTrainedModel) -> None:
    units = units_of(model)
    assert measure_sensitivities(model, ROWS, units, lambda name: None) == (0.0, 0.0, 0.0)
    same = measure_sensitivities(model, ROWS, units, lambda name: Altered(weight_of(model, name)))
    assert max(same) < 1e-9


@pytest.mark.parametrize("where", ["the weight", "the product", "the second layer"])
def test_the_model_is_as_before_after_a_failure(model: PreTrainedModel, where: str) -> None:
    """A quantizer that fails, a matrix of the wrong shape in the product, the second of a unit's layers."""
    before, unit = snapshot(model), [name for names in units_of(model) for name in names]

    def alter(name: str) -> Altered:
        weight = coarse(weight_of(model, name))
        if where == "the weight" and name == unit[-1]:
            raise ZeroDivisionError("a fault")
        if where == "the product":
            weight = weight[:, :-1]
        if where == "the second layer" and name == unit[1]:
            return Altered(None, InputRounding(1.0))  # type: ignore[arg-type]  # what a broken quantizer gives
        return Altered(weight, InputRounding(0.1))

    with pytest.raises((ZeroDivisionError, RuntimeError, TypeError, AttributeError, ValueError)):
        measure_sensitivities(model, ROWS, [unit], alter)
    assert is_as_before(model, before)


def test_logits_that_are_no_numbers_are_an_error(model: PreTrainedModel) -> None:
    """They must not pass for no divergence at all."""
    (name,), before = units_of(model)[1], snapshot(model)
    broken = np.full_like(weight_of(model, name), np.nan)
    with pytest.raises(CheckpointError, match=rf"{name} quantized the logits are NaN"):
        measure_sensitivities(model, ROWS, [(name,)], lambda _: Altered(broken))
    assert is_as_before(model, before)


def test_tokens_that_a_model_rules_out_count_nothing(model: PreTrainedModel) -> None:
    """Logits of minus infinity are so in both, and 0 times infinity is not NaN here."""

    def rule_out(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[..., :5] = -math.inf
        return output

    unit = units_of(model)[0]
    free = measure_sensitivities(model, ROWS, [unit], lambda name: Altered(coarse(weight_of(model, name))))
    hook = model.get_submodule("lm_head").register_forward_hook(rule_out)
    try:
        bound = measure_sensitivities(model, ROWS, [unit], lambda name: Altered(coarse(weight_of(model, name))))
    finally:
        hook.remove()
    assert bound[0] == pytest.approx(free[0], rel=0.2)
