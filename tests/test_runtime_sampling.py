"""Settings and samplers against transformers' processors, numpy and hand arithmetic."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest

from adx.export.errors import AdxError, SamplingError, UsageError
from adx.runtime.params import SamplingParams
from adx.runtime.sampling import RowChooser, build_sampler, keep_top_k, keep_top_p, uniform_stream

CONFIG = SamplingParams.from_generation_config


def choose(logits: list[float], step: int = 0, history: list[int] | None = None, **settings: Any) -> int:
    row = np.array(logits, np.float32)
    chooser = RowChooser.of(SamplingParams(**settings), len(history or [0]), 10, len(row), 0)
    return chooser.choose(row, np.array(history or [0], np.int64), step)


def support(logits: np.ndarray, draws: int = 400, **settings: Any) -> set[int]:
    sample = build_sampler(SamplingParams(do_sample=True, seed=0, **settings), len(logits), 0)
    return {sample(logits, step) for step in range(draws)}


# Settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_p", math.nan),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("max_new_tokens", -1),
        ("max_new_tokens", 1.0),
        ("max_new_tokens", True),
        ("max_new_tokens", "10"),
        ("min_new_tokens", -1),
        ("no_repeat_ngram_size", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", 3),
        ("stop", [""]),
        ("do_sample", 1),
        ("suppress_tokens", [-1]),
        ("suppress_tokens", "12"),
        ("bad_words_ids", [3]),
        ("bad_words_ids", [[]]),
    ],
)
def test_value_out_of_range_names_its_field(field: str, value: object) -> None:
    for make in (lambda: SamplingParams(**{field: value}), lambda: CONFIG({}, {field: value})):
        with pytest.raises(SamplingError, match=f"^{field}: ") as caught:
            make()
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "closest"), [("temperatur", "temperature"), ("top_K", "top_k"), ("max_new_token", "max_new_tokens")]
)
def test_misspelt_name_is_refused_with_the_closest(given: str, closest: str) -> None:
    with pytest.raises(UsageError, match=f"'{given}'.*'{closest}'"):
        CONFIG({}, {given: 1})


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("num_beams", 4, 1),
        ("typical_p", 0.9, 1.0),
        ("presence_penalty", 0.5, 0.0),
        ("logit_bias", {"3": 1.0}, None),
        ("n", 2, 1),
        ("epsilon_cutoff", 0.1, 0.0),
        ("length_penalty", 2.0, 1.0),
    ],
)
def test_option_known_elsewhere_is_refused_unless_it_changes_nothing(name: str, value: object, neutral: object) -> None:
    with pytest.raises(SamplingError, match=f"^{name}: "):
        CONFIG({}, {name: value})
    assert CONFIG({}, {name: neutral}) == SamplingParams()


def test_model_file_that_asks_for_beams_is_refused_until_overridden() -> None:
    with pytest.raises(SamplingError, match=r"generation_config\.json.*num_beams=1"):
        CONFIG({"num_beams": 4, "length_penalty": 2.0}, {})
    assert CONFIG({"num_beams": 4, "length_penalty": 2.0}, {"num_beams": 1}) == SamplingParams()


def test_every_key_of_transformers_generation_config_is_known_or_does_not_change_tokens() -> None:
    """A key that changes tokens must be honoured or refused; one new in transformers must be sorted by hand."""
    from transformers import GenerationConfig

    from adx.runtime.param_checks import CHECKS, MOOT, UNSUPPORTED
    from adx.runtime.params import ALIASES

    without_effect = {
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "use_mtp"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        *("bos_token_id", "decoder_start_token_id", "compile_config", "disable_compile", "low_memory"),
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
        *("target_lookbehind", "assistant_ensemble_weight", "speculation_type", "continuous_batching_config"),
        *("transformers_version", "_from_model_config"),
    }
    keys = set(vars(GenerationConfig()))
    assert keys - set(CHECKS) - set(ALIASES) - set(UNSUPPORTED) - set(MOOT) - without_effect == set()


def test_precedence_argument_file_default() -> None:
    file = {"repetition_penalty": 1.5, "max_new_tokens": 7, "eos_token_id": [91, 13], "top_k": 20, "do_sample": True}
    params = CONFIG(file, {})
    assert (params.repetition_penalty, params.max_new_tokens, params.top_k, params.do_sample) == (1.5, 7, 20, True)
    assert params.eos_token_ids == (91, 13)
    assert CONFIG(file, {"repetition_penalty": 1.0, "max_tokens": 3}).repetition_penalty == 1.0
    assert CONFIG(file, {"max_tokens": 3}).max_new_tokens == 3
    assert CONFIG(file, {"max_length": 50}).new_token_limit(10, 100) == 40
    assert CONFIG(file, {"temperature": None}) == params
    banning = {"suppress_tokens": [3], "forced_eos_token_id": 2}
    assert CONFIG(banning, {"suppress_tokens": [], "forced_eos_token_id": []}) == SamplingParams()


def test_temperature_decides_about_sampling() -> None:
    assert CONFIG({}, {}).greedy
    assert not CONFIG({}, {"temperature": 0.7}).greedy
    assert not CONFIG({}, {"top_p": 0.9}).greedy
    assert CONFIG({"do_sample": True}, {"temperature": 0}).greedy
    assert CONFIG({"do_sample": True}, {"temperature": 0, "top_p": 0.5}).greedy
    assert CONFIG({"do_sample": True, "temperature": 0.6}, {"do_sample": False}).greedy
    assert CONFIG({}, {"temperature": 0.7}).top_k == 50, "transformers' default where sampling"
    with pytest.raises(SamplingError, match=r"temperature: 0\.7 has no effect with do_sample=False"):
        CONFIG({}, {"do_sample": False, "temperature": 0.7})


def test_effective_settings_show_what_is_in_force() -> None:
    shown = CONFIG({"repetition_penalty": 1.1, "eos_token_id": 2}, {"temperature": 0}).effective()
    assert shown == {
        "do_sample": False,
        "repetition_penalty": 1.1,
        "eos_token_ids": [2],
        "max_new_tokens": 256,
    }
    assert CONFIG({}, {"temperature": 0.5}).effective()["temperature"] == 0.5


def test_limits() -> None:
    assert SamplingParams().new_token_limit(10, 10_000) == 256
    assert SamplingParams(max_new_tokens=10).new_token_limit(30, 32) == 3
    assert SamplingParams(max_new_tokens=10**9).new_token_limit(32, 32) == 1
    assert SamplingParams(max_new_tokens=0).new_token_limit(5, 32) == 0
    assert SamplingParams(max_length=20).new_token_limit(15, 64) == 5
    assert SamplingParams(max_length=20, max_new_tokens=9).new_token_limit(15, 64) == 9
    with pytest.raises(SamplingError, match="15 tokens and max_length, which counts them, is 15"):
        SamplingParams(max_length=15).new_token_limit(15, 64)
    assert SamplingParams(min_length=20).new_token_minimum(15) == 5
    assert SamplingParams(min_length=20, min_new_tokens=2).new_token_minimum(15) == 2


# Processors, against transformers'

PROCESSORS: list[tuple[dict[str, Any], str, tuple[Any, ...]]] = [
    ({"repetition_penalty": 1.7}, "RepetitionPenaltyLogitsProcessor", (1.7,)),
    ({"repetition_penalty": 0.6}, "RepetitionPenaltyLogitsProcessor", (0.6,)),
    ({"no_repeat_ngram_size": 1}, "NoRepeatNGramLogitsProcessor", (1,)),
    ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor", (2,)),
    ({"no_repeat_ngram_size": 3}, "NoRepeatNGramLogitsProcessor", (3,)),
    ({"bad_words_ids": [[4], [3, 5], [9, 3, 6]]}, "NoBadWordsLogitsProcessor", ([[4], [3, 5], [9, 3, 6]],)),
    ({"min_length": 12, "eos_token_ids": [1, 2]}, "MinLengthLogitsProcessor", (12, [1, 2])),
    ({"min_new_tokens": 3, "eos_token_ids": [1, 2]}, "MinNewTokensLengthLogitsProcessor", (8, 3, [1, 2])),
    ({"min_new_tokens": 2, "eos_token_ids": [1, 2]}, "MinNewTokensLengthLogitsProcessor", (8, 2, [1, 2])),
    ({"forced_eos_token_id": 2}, "ForcedEOSTokenLogitsProcessor", (11, [2])),
    ({"forced_eos_token_id": [2, 7]}, "ForcedEOSTokenLogitsProcessor", (20, [2, 7])),
    ({"suppress_tokens": [1, 5, 300]}, "SuppressTokensLogitsProcessor", ([1, 5, 300],)),
    ({"begin_suppress_tokens": [1, 5]}, "SuppressTokensAtBeginLogitsProcessor", ([1, 5], 8)),
]


@pytest.mark.parametrize(("settings", "name", "arguments"), PROCESSORS)
@pytest.mark.parametrize("history", [[9, 3, 5, 9, 3, 6, 9, 3], [9, 3, 5, 9, 3, 6, 9, 3, 9, 3]])
def test_processor_equals_transformers(
    settings: dict[str, Any], name: str, arguments: tuple[Any, ...], history: list[int]
) -> None:
    """Prompt of 8 tokens; none and two new ones."""
    import torch
    from transformers.generation import logits_process

    logits = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    limit = arguments[0] - 8 if name.startswith("ForcedEOS") else 10
    chooser = RowChooser.of(SamplingParams(**settings), 8, limit, 16, 0)
    row = logits.copy()
    for process in chooser.processors:
        process(np.array(history), row)
    expected = getattr(logits_process, name)(*arguments)(torch.tensor([history]), torch.tensor(logits)[None])[0]
    np.testing.assert_allclose(row, expected.numpy(), rtol=1e-6)
    assert np.array_equal(logits, np.random.default_rng(0).standard_normal(16).astype(np.float32))


def test_forced_first_token_follows_a_prompt_of_one_token_only() -> None:
    assert choose([0, 9, 0, 0], history=[2], forced_bos_token_id=3) == 3
    assert choose([0, 9, 0, 0], history=[2, 2], forced_bos_token_id=3) == 1
    with pytest.raises(SamplingError, match=r"^forced_bos_token_id: token id 4 is outside the vocabulary of 4"):
        choose([0, 9, 0, 0], forced_bos_token_id=4)
    with pytest.raises(SamplingError, match=r"^bad_words_ids: "):
        choose([0, 9, 0, 0], bad_words_ids=[[1, 99]])


def test_logits_stay_as_the_engine_gave_them() -> None:
    row = np.zeros(8, np.float32)
    chooser = RowChooser.of(SamplingParams(suppress_tokens=(0,), do_sample=True, seed=1), 1, 4, 8, 0)
    chooser.choose(row, np.array([1]), 0)
    assert not row.any()


# Samplers, against transformers' warpers

WARPED = [
    {"temperature": 0.5},
    {"top_k": 3},
    {"top_k": 7},
    {"top_p": 0.9},
    {"top_p": 0.5},
    {"top_p": 0.0},
    {"top_p": 1e-9},
    {"top_p": 0.9999999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("settings", WARPED)
@pytest.mark.parametrize("size", [40, 5000])
def test_kept_tokens_and_their_probabilities_equal_transformers(settings: dict[str, Any], size: int) -> None:
    """The inverse distribution function is read off at many points, each within the token's share of transformers'."""
    import torch
    from transformers.generation import logits_process as reference

    logits = 2 * np.random.default_rng(size).standard_normal(size).astype(np.float32)
    scores = torch.tensor(logits)[None]
    if "temperature" in settings:
        scores = reference.TemperatureLogitsWarper(settings["temperature"])(None, scores)
    if "top_k" in settings:
        scores = reference.TopKLogitsWarper(settings["top_k"])(None, scores)
    if "top_p" in settings:
        scores = reference.TopPLogitsWarper(settings["top_p"])(None, scores)
    if "min_p" in settings:
        scores = reference.MinPLogitsWarper(settings["min_p"])(None, scores)
    expected = torch.softmax(scores.double(), -1)[0].numpy()

    sample = build_sampler(SamplingParams(**{"do_sample": True, "seed": 3, "top_k": 0, **settings}), size, 0)
    uniform = uniform_stream(3, 0)
    edges = np.cumsum(expected)
    for step in range(500):
        token, point = sample(logits, step), uniform(step)
        assert expected[token] > 0
        assert edges[token] - expected[token] - 1e-5 <= point <= edges[token] + 1e-5


@pytest.mark.parametrize("size", [5, 100, 49152])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 8.0])
def test_top_k_and_top_p_sets_equal_a_full_sort(size: int, spread: float) -> None:
    """All equal, nearly flat and peaked distributions; ties included."""
    rng = np.random.default_rng(1)
    logits = (np.round(rng.standard_normal(size) * 8) / 8 * spread).astype(np.float32)
    for k in {1, 2, size // 3 + 1, size - 1}:
        expected = np.flatnonzero(logits >= np.sort(logits)[-k])
        np.testing.assert_array_equal(keep_top_k(logits, k), expected)
    weights = np.exp(logits - logits.max())
    order = np.argsort(weights, kind="stable")
    cumulated = np.cumsum(weights[order].astype(np.float64))
    for top_p in (0.0, 0.3, 0.77, 0.95):
        kept = keep_top_p(weights, top_p)
        removed = min(int((cumulated <= (1 - top_p) * cumulated[-1] * (1 - 1e-12)).sum()), size - 1)
        expected = np.sort(order[removed:])
        assert abs(len(kept) - len(expected)) <= 1, "float sums in another order may move the edge by one"
        assert np.setxor1d(kept, expected).size <= 1


FIXED = [0.5, 2.0, 1.0, -1.0, 1.9]


@pytest.mark.parametrize("temperature", [0, 1e-9, 1e-320, 1e9, 1e300])
@pytest.mark.parametrize("top_k", [0, 1, 5, 6, 10**7, -1])
@pytest.mark.parametrize("top_p", [0, 1e-9, 0.9999999, 1])
def test_extreme_settings_give_a_token(temperature: float, top_k: int, top_p: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": 5}
        chooser = RowChooser.of(CONFIG({}, options), 1, 9, 5, 0)
        tokens = [chooser.choose(np.array(FIXED, np.float32), np.array([0]), step) for step in range(20)]
    if temperature < 1 or top_k == 1:
        assert set(tokens) == {1}
    assert all(0 <= token < 5 for token in tokens)


def test_cold_is_argmax_and_hot_is_uniform() -> None:
    logits = np.array(FIXED, np.float32)
    assert support(logits, temperature=1e-9, top_k=0) == {1}
    assert support(logits, temperature=1e9, top_k=0) == {0, 1, 2, 3, 4}
    assert support(logits, top_p=0.0) == {1}
    assert support(logits, top_k=1) == {1}
    assert support(logits, top_k=10**7) == {0, 1, 2, 3, 4}


def test_forbidden_tokens_are_never_drawn_at_any_temperature() -> None:
    logits = np.array([5, -np.inf, 1, -np.inf, 0], np.float32)
    for temperature in (1e-9, 1.0, 1e9, 1e300):
        assert support(logits, temperature=temperature, top_k=0) <= {0, 2, 4}
        assert support(logits, temperature=temperature, top_k=4, top_p=0.99, min_p=1e-9) <= {0, 2, 4}


def test_frequencies_follow_the_distribution() -> None:
    logits = np.array(FIXED, np.float32)
    sample = build_sampler(SamplingParams(do_sample=True, seed=11), 5, 0)
    counts = np.bincount([sample(logits, step) for step in range(20_000)], minlength=5)
    expected = np.exp(logits.astype(np.float64))
    expected *= 20_000 / expected.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 18.47, "chi-square, 4 degrees of freedom, 0.1 %"


def test_every_token_forbidden_names_the_settings() -> None:
    with pytest.raises(SamplingError, match="forbidden by no_repeat_ngram_size and suppress_tokens"):
        choose([1, 2, 3], history=[0, 1], suppress_tokens=(2,), no_repeat_ngram_size=1)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "seed": 0}, {"repetition_penalty": 1.2}])
def test_nan_from_the_engine_is_an_error(settings: dict[str, Any]) -> None:
    with pytest.raises(AdxError, match="NaN"):
        choose([1.0, math.nan, 3.0], **settings)


def test_random_stream_depends_on_seed_stream_and_step_alone() -> None:
    first, again = uniform_stream(7, 0), uniform_stream(7, 0)
    forwards = [first(step) for step in range(50)]
    assert [again(step) for step in reversed(range(50))] == forwards[::-1]
    assert forwards[3] == np.random.Generator(np.random.Philox(key=[7, 0], counter=[3, 0, 0, 0])).random()
    assert uniform_stream(7, 1)(0) != forwards[0] != uniform_stream(8, 0)(0)
    assert len(set(forwards)) == 50, "a generator seeded anew at each step would repeat"
    assert uniform_stream(None, 0)(0) != uniform_stream(None, 0)(0)
