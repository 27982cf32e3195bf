"""Every family against transformers: logits at every position, ragged batches, greedy text, quantized engines.

Where a family differs from Llama, a test shows that the comparison would see the difference left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import models
import numpy as np
import pytest
from models import FAMILIES
from traced import Traced, engine, engine_logits, reference, tokens, trace_folder, traced

from adx.export.checkpoint import resolve
from adx.export.checkpoint_load import load_config
from adx.export.checkpoint_spec import model_spec
from adx.export.errors import ContextLengthError, UsageError
from adx.export.spec import past_name
from adx.runtime.generator import Generator
from adx.runtime.ort_session import OrtSession

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-4
SEEN = 1e-2  # a difference that no rounding makes
LENGTHS = [3, 7, 12]
LONG = {"num_hidden_layers": 1, "max_position_embeddings": 1100}

Tiny = Callable[..., Traced]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Makes and traces a tiny model of a family, once for each set of overrides."""
    return lambda family, **overrides: traced(tmp_path_factory, family, **overrides)


def worst(a: Any, b: Any) -> float:
    """Largest absolute difference; infinite where one is not finite."""
    difference = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
    return float(difference.max()) if np.isfinite(difference).all() else float("inf")


def grid(source: Traced) -> list[tuple[int, int, int]]:
    """(batch, length, past) to compare; a call that crosses long rope's length is the token loop's to avoid."""
    limit = source.spec.kv_cache.recompute_at
    shapes = [*itertools.product((1, 2, 3), (1, 2, 7, 33), (0, 1, 7, 40)), (2, 16, 0), (2, 17, 0)]
    return [s for s in shapes if not (limit and s[2] and s[2] < limit <= s[1] + s[2])]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_at_every_position(tiny: Tiny, family: str) -> None:
    """Over batches, lengths and pasts, the sizes 1 and 2 that exporters like to freeze among them."""
    source = tiny(family)
    session = engine(source)
    shapes = grid(source)
    assert len(shapes) >= 36
    for seed, (batch, length, past) in enumerate(shapes):
        ids = tokens(seed, batch, past + length)
        got = engine_logits(session, ids, past)
        assert worst(got, reference(source.model, ids)[:, past:]) <= TOLERANCE, (batch, length, past)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_ragged_batch_equal_each_row_alone(tiny: Tiny, family: str) -> None:
    """Prefill of rows of 3, 7 and 12 tokens, single decode steps, then several tokens at once on the ragged pasts."""
    source = tiny(family)
    session = engine(source)
    ids, more = tokens(0, 3, max(LENGTHS)), tokens(1, 3, 4)
    cache = session.new_cache(3)
    first = session.prefill(ids, np.array(LENGTHS), cache).copy()
    steps = np.concatenate([session.decode(more[:, :1], cache).copy(), session.decode(more[:, 1:2], cache).copy()], 1)
    chunk = session.decode(more[:, 2:], cache).copy()
    assert cache.lengths.tolist() == [length + 4 for length in LENGTHS]
    for row, length in enumerate(LENGTHS):
        alone = np.concatenate([ids[row, :length], more[row]])[None]
        expected = reference(source.model, alone)[0, length - 1 :]
        assert worst(np.concatenate([first[row : row + 1], steps[row], chunk[row]]), expected) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_generate(tiny: Tiny, family: str) -> None:
    """One batch of prompts of several lengths, one longer than the sliding window, one that crosses long rope's 16."""
    source = tiny(family)
    prompts = [_gap_prompt(source, length) for length in (1, 12, 21)]
    answers = Generator(engine(source)).generate(prompts, max_new_tokens=10, temperature=0)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == models.reference_tokens(source.model, prompt, max_new_tokens=10)


def _gap_prompt(source: Traced, length: int) -> list[int]:
    return models.find_gap_prompt(source.model, length, new_tokens=10, accept=lambda new: models.EOS not in new)


def _reloaded(source: Traced, **overrides: Any) -> PreTrainedModel:
    """The same weights under a configuration with some keys changed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source.checkpoint)
    for key, value in overrides.items():
        setattr(config, key, value)
    return AutoModelForCausalLM.from_pretrained(
        source.checkpoint, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _without_query_and_key_norms(source: Traced) -> PreTrainedModel:
    import torch

    model = _reloaded(source)
    for layer in model.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = torch.nn.Identity()
    return model


def _with_zeros(ending: str) -> Callable[[Traced], PreTrainedModel]:
    """Parameters whose name ends so are 0."""

    def change(source: Traced) -> PreTrainedModel:
        model = _reloaded(source)
        found = [p for name, p in model.named_parameters() if name.endswith(ending)]
        assert found
        for parameter in found:
            parameter.data.zero_()
        return model

    return change


def _without_embedding_scale(source: Traced) -> PreTrainedModel:
    """Gemma 2 multiplies embeddings by the root of their width; here they are divided by it first."""
    model = _reloaded(source, tie_word_embeddings=False)
    table = model.get_input_embeddings().weight
    table.data = table.data / source.spec.hidden_size**0.5
    return model


def _rope(**changes: Any) -> Callable[[Traced], PreTrainedModel]:
    def change(source: Traced) -> PreTrainedModel:
        return _reloaded(source, rope_parameters={**source.model.config.rope_parameters, **changes})

    return change


def _config(**changes: Any) -> Callable[[Traced], PreTrainedModel]:
    return lambda source: _reloaded(source, **changes)


ALL_SLIDING, ALL_FULL = ["sliding_attention"] * 4, ["full_attention"] * 4
WIDE = {"short_factor": [1.0, 1.3, 1.7, 2.0] * 2, "long_factor": [1.5, 2.5, 4.0, 6.0] * 2}
SHORT = [1.0, 1.3, 1.7, 2.0]
LLAMA_ROPE = {"rope_type": "default", "rope_theta": 1e6}

PECULIARITIES: dict[str, tuple[str, dict[str, Any], Callable[[Traced], PreTrainedModel]]] = {
    "mistral: window": ("mistral", {}, _config(sliding_window=None)),
    "mistral: window one longer": ("mistral", {}, _config(sliding_window=9)),
    "gemma2: windows": ("gemma2", {}, _config(layer_types=ALL_FULL)),
    "gemma2: layers without a window": ("gemma2", {}, _config(layer_types=ALL_SLIDING)),
    "gemma2: soft cap of attention": ("gemma2", {}, _config(attn_logit_softcapping=None)),
    "gemma2: soft cap of the logits": ("gemma2", {}, _config(final_logit_softcapping=None)),
    "gemma2: query scale": ("gemma2", {}, _config(query_pre_attn_scalar=32)),
    "gemma2: embedding scale": ("gemma2", {}, _without_embedding_scale),
    "phi3: partial rotary": ("phi3", {}, _rope(partial_rotary_factor=1.0, **WIDE)),
    "phi3: long factors": ("phi3", {}, _rope(long_factor=SHORT)),
    "phi3: short factors": ("phi3", {}, _rope(short_factor=[1.5, 2.5, 4.0, 6.0])),
    "gpt_neox: partial rotary": ("gpt_neox", {}, _rope(partial_rotary_factor=1.0)),
    "gpt_neox: parallel residual": ("gpt_neox", {}, _config(use_parallel_residual=False)),
    "qwen3: query and key norms": ("qwen3", {}, _without_query_and_key_norms),
    "qwen2: projection biases": ("qwen2", {}, _with_zeros("_proj.bias")),
    "gpt2: learned positions": ("gpt2", {}, _with_zeros("wpe.weight")),
    "llama: rope_theta": (
        "llama",
        {"num_hidden_layers": 1, "rope_parameters": LLAMA_ROPE},
        _rope(rope_theta=10000.0),
    ),
}


@pytest.mark.parametrize("name", PECULIARITIES)
def test_a_peculiarity_left_out_would_be_seen(tiny: Tiny, name: str) -> None:
    """The engine equals the model as it is, and not the model with one of its peculiarities switched off."""
    family, overrides, switched_off = PECULIARITIES[name]
    source = tiny(family, **overrides)
    other = switched_off(source)
    short, long = tokens(3, 2, 14), tokens(4, 2, 40)
    got = [engine_logits(engine(source), ids) for ids in (short, long)]
    assert max(worst(g, reference(source.model, ids)) for g, ids in zip(got, (short, long), strict=True)) <= TOLERANCE
    assert max(worst(g, reference(other, ids)) for g, ids in zip(got, (short, long), strict=True)) > SEEN


def test_a_query_sees_as_many_tokens_as_its_window_and_not_one_more(tiny: Tiny) -> None:
    """One layer, window 8: token i - 8 does not reach the logits at i, token i - 7 does; in prefill and in decode."""
    session = engine(tiny("mistral", num_hidden_layers=1))
    ids, place = tokens(0, 1, 24), 20
    for past in (0, 19):
        before = engine_logits(session, ids, past)[0, place - past]
        for distance, changes in ((8, False), (7, True)):
            changed = ids.copy()
            changed[0, place - distance] = 3 + (changed[0, place - distance] - 2) % 250
            after = engine_logits(session, changed, past)[0, place - past]
            assert (worst(before, after) > SEEN) is changes, (past, distance)
            assert changes or np.array_equal(before, after)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "head_dim 24 and one KV head": ("llama", {"head_dim": 24, "num_key_value_heads": 1}),
    "tied, biases in attention and MLP": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "rope linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "rope llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "rope yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "rope dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen2 with a window in its second layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 2},
    ),
    "gpt_neox, sequential residual, no biases in attention": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False},
    ),
    "gemma2 without soft caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "phi3 with a window": ("phi3", {"sliding_window": 8}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_a_family_equal_transformers(tiny: Tiny, name: str) -> None:
    """Head sizes, biases, ties, rope types and windows that a configuration can ask for; one layer where that does."""
    family, overrides = VARIANTS[name]
    source = tiny(family, **{"num_hidden_layers": 1, **overrides})
    for batch, length, past in ((2, 33, 0), (1, 1, 0), (2, 1, 40), (2, 7, 40), (5, 1, 3)):
        ids = tokens(past, batch, past + length)
        expected = reference(source.model, ids)[:, past:]
        assert worst(engine_logits(engine(source), ids, past), expected) <= TOLERANCE, (batch, length, past)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith("rope")])
def test_a_rope_type_left_out_would_be_seen(tiny: Tiny, name: str) -> None:
    """The engine of each scaled rope differs from the model with the default one; dynamic only beyond its context."""
    family, overrides = VARIANTS[name]
    source = tiny(family, num_hidden_layers=1, **overrides)
    plain = _reloaded(source, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    ids = tokens(0, 1, 40)
    difference = worst(engine_logits(engine(source), ids), reference(plain, ids))
    assert (difference > SEEN) is (name != "rope dynamic")


def test_dynamic_rope_is_held_to_its_context(tiny: Tiny) -> None:
    """Beyond it the frequencies change under the cached keys: a longer sequence is refused, with the reason."""
    source = tiny("llama", num_hidden_layers=1, **VARIANTS["rope dynamic"][1])
    assert engine(source).capacity == 128
    checkpoint = resolve(str(source.checkpoint))
    with pytest.raises(UsageError, match=r"129.*128.*dynamic"):
        model_spec(checkpoint, load_config(checkpoint), 129)


def test_the_cache_has_the_shape_that_the_configuration_gives(tiny: Tiny) -> None:
    """head_dim is read and not computed from the width, KV heads are not query heads: spec, graph and buffers agree."""
    expected = {
        ("qwen3", ""): (2, 32),
        ("gpt2", ""): (4, 16),
        ("llama", "head_dim 24 and one KV head"): (1, 24),
    }
    for (family, variant), (heads, dim) in expected.items():
        source = tiny(family, **({"num_hidden_layers": 1, **VARIANTS[variant][1]} if variant else {}))
        session = engine(source)
        kv = source.spec.kv_cache
        assert (kv.kv_heads, kv.head_dim) == (heads, dim)
        declared = {i.name: i.shape for i in session._session.get_inputs()}[past_name(0, "key")]
        assert declared == ["batch_size", heads, "cache_length", dim]
        assert {b.shape for b in session.new_cache(2, 9).buffers} == {(2, heads, 9, dim)}


def test_a_bfloat16_checkpoint_exports_as_its_weights_in_float32(tmp_path: Path) -> None:
    """The graph is float32 and equals the model with its weights converted up, not the model that computes in bf16."""
    import torch
    from safetensors.torch import load_file

    model = models.load_model(models.tiny_llama(tmp_path / "float", num_hidden_layers=1))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "checkpoint")
    stored = {t.dtype for t in load_file(tmp_path / "checkpoint" / "model.safetensors").values()}
    assert stored == {torch.bfloat16}
    source = trace_folder(tmp_path / "checkpoint", tmp_path)
    assert source.spec.dtype == "bfloat16"
    ids = tokens(0, 2, 20)
    got = engine_logits(engine(source), ids)
    assert worst(got, reference(models.load_model(source.checkpoint), ids)) <= TOLERANCE
    with torch.inference_mode():
        computed_in_bf16 = model(torch.from_numpy(ids), use_cache=False).logits.float().numpy()
    assert worst(got, computed_in_bf16) > SEEN
    assert {i.type for i in engine(source)._session.get_outputs()} == {"tensor(float)"}


def test_rows_end_at_the_capacity(tiny: Tiny) -> None:
    """The last place of a row is used and right; one token more is refused with both numbers, and nothing changes."""
    source = tiny("llama")
    session = engine(source)
    ids = tokens(0, 2, 128)
    expected = reference(source.model, ids)
    cache = session.new_cache(2)
    assert worst(session.prefill(ids[:, :127], np.array([127, 127]), cache), expected[:, 126]) <= TOLERANCE
    assert worst(session.decode(ids[:, 127:], cache)[:, 0], expected[:, 127]) <= TOLERANCE
    with pytest.raises(ContextLengthError, match=r"129.*128"):
        session.decode(ids[:, :1], cache)
    assert cache.lengths.tolist() == [128, 128]
    cache.clear()
    assert worst(session.prefill(ids, np.array([128, 128]), cache), expected[:, 127]) <= TOLERANCE
    with pytest.raises(ContextLengthError, match=r"129.*128"):
        session.prefill(tokens(0, 1, 129), np.array([129]), session.new_cache(1))


def test_a_small_cache_gives_the_same_logits(tiny: Tiny) -> None:
    """A cache just large enough for its rows, and one of the engine's whole capacity."""
    source = tiny("mistral")
    session = engine(source)
    ids = tokens(0, 2, 31)
    cache = session.new_cache(2, 31)
    session.prefill(ids[:, :30], np.array([30, 30]), cache)
    assert worst(session.decode(ids[:, 30:], cache)[:, 0], reference(source.model, ids)[:, 30]) <= TOLERANCE
    with pytest.raises(ContextLengthError, match=r"32.*31"):
        session.decode(ids[:, :1], cache)


def test_the_cache_is_written_in_place_for_a_thousand_steps(tiny: Tiny) -> None:
    """Buffers stay where they are, old tokens stay as they were, each step writes its own place."""
    source = tiny("mistral", **LONG)
    session = engine(source)
    ids = tokens(0, 1, 1010)
    cache = session.new_cache(1)
    session.prefill(ids[:, :9], np.array([9]), cache)
    session.decode(ids[:, 9:10], cache)
    addresses = [buffer.ctypes.data for buffer in cache.buffers]
    first = [buffer[:, :, :10].copy() for buffer in cache.buffers]
    for place in range(10, 1010):
        logits = session.decode(ids[:, place : place + 1], cache)
    assert [buffer.ctypes.data for buffer in cache.buffers] == addresses
    for buffer, old in zip(cache.buffers, first, strict=True):
        assert np.array_equal(buffer[:, :, :10], old)
        assert (np.abs(buffer[0, :, :1010]).max(axis=(0, 2)) > 0).all()
        assert not buffer[0, :, 1010:].any()
    assert worst(logits[0, 0], reference(source.model, ids)[0, -1]) <= TOLERANCE


def test_long_prompts_are_read_in_chunks(tiny: Tiny) -> None:
    """Rows of 300, 129, 128 and 5 tokens, of which a run reads 128 at once: the last logits, all of them, a step on."""
    source = tiny("mistral", **LONG)
    session = engine(source)
    ids, lengths = tokens(0, 4, 301), np.array([300, 129, 128, 5])
    expected = reference(source.model, ids)
    for wanted in ("last", "all"):
        cache = session.new_cache(4, 301)
        got = session.prefill(ids[:, :300], lengths, cache, wanted).copy()
        assert cache.lengths.tolist() == lengths.tolist()
        step = session.decode(np.take_along_axis(ids, lengths[:, None], 1), cache)
        for row, length in enumerate(lengths):
            rows = got[row, :length] if wanted == "all" else got[row : row + 1]
            assert worst(rows, expected[row, length - len(rows) : length]) <= TOLERANCE
            assert worst(step[row, 0], expected[row, length]) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_rewound_cache_decodes_as_if_nothing_had_followed(tiny: Tiny, family: str) -> None:
    """Each row by its own number of tokens, as after a rejected draft."""
    session = engine(tiny(family))
    ids, draft, other = tokens(0, 2, 20), tokens(1, 2, 5), tokens(2, 2, 3)
    cache, fresh = session.new_cache(2), session.new_cache(2)
    for held in (cache, fresh):
        session.prefill(ids, np.array([20, 11]), held)
    session.decode(draft, cache)
    cache.rewind([20, 11])
    for step in range(3):
        again = session.decode(other[:, step : step + 1], cache).copy()
        assert np.array_equal(again, session.decode(other[:, step : step + 1], fresh))


QUANTIZED = [(family, precision) for family in FAMILIES for precision in ("int8", "int4")]


@pytest.mark.parametrize(("family", "precision"), QUANTIZED)
def test_a_quantized_row_does_not_depend_on_its_batch(tiny: Tiny, family: str, precision: Any) -> None:
    """Alone, beside one row or another, padded by 0 or by 20, at once or token by token: the same logits."""
    source = tiny(family)
    session = engine(source, precision, 32)
    row, mates = tokens(0, 5), tokens(1, 3, 25)
    alone = session.prefill(row[None], np.array([5]), session.new_cache(1)).copy()
    assert np.isfinite(alone).all()
    batches = {"mate": (mates[:1, :5], [5]), "other mate": (mates[1:2, :5], [5]), "padded": (mates, [25, 9, 1])}
    for name, (others, lengths) in batches.items():
        ids = np.zeros((1 + len(others), others.shape[1]), np.int64)
        ids[0, :5], ids[1:] = row, others
        got = session.prefill(ids, np.array([5, *lengths]), session.new_cache(len(ids)))
        assert worst(got[0], alone[0]) <= TOLERANCE, name
    steps = engine_logits(session, np.stack([row, mates[0, :5]]), 1)
    assert worst(steps[0, -1], alone[0]) <= TOLERANCE


@pytest.mark.parametrize(("family", "precision"), QUANTIZED)
def test_a_quantized_engine_stays_near_the_model(tiny: Tiny, family: str, precision: Any) -> None:
    """Random weights quantize badly, so the bound is loose: it finds a layer that is scaled or ordered wrongly."""
    source = tiny(family)
    ids = tokens(0, 2, 16)
    got, expected = engine_logits(engine(source, precision, 32), ids), reference(source.model, ids)
    assert np.isfinite(got).all()
    correlation = np.corrcoef(got.ravel(), expected.ravel())[0, 1]
    assert correlation > (0.99 if precision == "int8" else 0.8)


def test_batches_of_five_prompts_of_one_token(tiny: Tiny) -> None:
    """The shortest prompt there is, in more rows than anything was traced with, then three steps."""
    for family in ("gpt2", "qwen3"):
        source = tiny(family)
        session: OrtSession = engine(source)
        ids = tokens(0, 5, 4)
        cache = session.new_cache(5)
        rows = [session.prefill(ids[:, :1], np.ones(5, np.int64), cache).copy()[:, None]]
        rows += [session.decode(ids[:, step : step + 1], cache).copy() for step in (1, 2, 3)]
        assert worst(np.concatenate(rows, 1), reference(source.model, ids)) <= TOLERANCE
