"""The token loop against transformers' `generate`, on a PyTorch session and on a scripted one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import (
    EOS,
    TorchSession,
    find_gap_prompt,
    fixed_gpt2,
    load_model,
    reference_tokens,
    tiny,
    tiny_llama,
)

from adx.export.errors import ContextLengthError, SamplingError, UsageError
from adx.runtime.cache import KVCache
from adx.runtime.fake import FakeSession
from adx.runtime.loop import generate_tokens
from adx.runtime.params import SamplingParams
from adx.runtime.session import Session

VOCAB = 50


def hashed(history: Sequence[int]) -> np.ndarray:
    """Logits that depend on every token of the history and on their order."""
    seed = 1
    for token in history:
        seed = (seed * 1_000_003 + token + 7) % (2**61 - 1)
    return np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)


def counting(history: Sequence[int]) -> np.ndarray:
    """The next token is the last one plus 1."""
    logits = np.zeros(VOCAB, np.float32)
    logits[(history[-1] + 1) % VOCAB] = 9.0
    return logits


def fake(logits_of: Callable[[Sequence[int]], np.ndarray] = hashed, **keys: Any) -> FakeSession:
    return FakeSession(logits_of, VOCAB, **keys)


def run(
    session: Session, prompts: Sequence[Sequence[int]], params: SamplingParams | list[SamplingParams], **keys: Any
) -> tuple[list[list[int]], list[str | None]]:
    """Tokens of each row, and why it ended."""
    rows: list[list[int]] = [[] for _ in prompts]
    reasons: list[str | None] = [None] * len(prompts)
    for step in generate_tokens(session, prompts, params, **keys):
        for row, (token, reason) in enumerate(zip(step.tokens, step.finished, strict=True)):
            assert reasons[row] is None or (token is None and reason is None), "a row that ended gave something"
            rows[row] += [] if token is None else [token]
            reasons[row] = reason or reasons[row]
    return rows, reasons


def greedy_by_hand(prompt: Sequence[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(int(hashed(history).argmax()))
    return history[len(prompt) :]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(tiny_llama(tmp_path_factory.mktemp("ll"), eos_token_id=None))


def test_greedy_batch_of_different_lengths_equals_transformers_row_by_row(llama: Any) -> None:
    prompts = [find_gap_prompt(llama, length) for length in (3, 7, 12)]
    rows, reasons = run(TorchSession(llama), prompts, SamplingParams(max_new_tokens=16))
    assert rows == [reference_tokens(llama, ids) for ids in prompts]
    assert reasons == ["length"] * 3


def test_rows_end_at_their_own_end_of_text_tokens(llama: Any) -> None:
    """Rows of a batch end at steps 2, 5, 9 and never; each equals its own run alone, the end-of-text token included."""
    prompts = [find_gap_prompt(llama, length) for length in (4, 6, 9, 5)]
    whole = [reference_tokens(llama, ids) for ids in prompts]
    each = [
        SamplingParams(max_new_tokens=16, eos_token_ids=() if at is None else (255, tokens[at - 1]))
        for tokens, at in zip(whole, (2, 5, 9, None), strict=True)
    ]
    session = TorchSession(llama)
    cache = session.new_cache(4, 32)
    rows, reasons = run(session, prompts, each, cache=cache)
    expected = [
        reference_tokens(llama, ids, eos_token_id=list(one.eos_token_ids) or None, pad_token_id=0)
        for ids, one in zip(prompts, each, strict=True)
    ]
    assert rows == expected
    assert [len(row) for row in rows[:3]] == [2, 5, 9] or all(len(row) <= 9 for row in rows[:3])
    assert reasons == ["stop", "stop", "stop", "length"]
    held = [len(ids) + len(row) - 1 for ids, row in zip(prompts, rows, strict=True)]
    assert cache.lengths.tolist() == held, "the cache of a row that ended must not grow"
    for row, (ids, tokens) in enumerate(zip(prompts, rows, strict=True)):
        assert cache.buffers[0][row, : held[row]].tolist() == [*ids, *tokens][: held[row]]
    assert session.prefills == 1
    assert session.decodes == 15, "the loop ends when the last row ends"


def prompt_that_it_changes(model: Any, settings: dict[str, Any], **others: Any) -> list[int]:
    """A prompt whose answer the settings change: with another, a test of them could not fail."""
    for seed in range(50):
        ids = np.random.default_rng(seed).integers(3, 256, 6).tolist()
        if reference_tokens(model, ids, **others, **settings) != reference_tokens(model, ids, **others):
            return ids
    raise AssertionError("no prompt's answer changes")


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": list(range(0, 256, 2))},
        {"begin_suppress_tokens": list(range(0, 256, 2))},
        {"forced_eos_token_id": 7},
        {"min_new_tokens": 9, "eos_token_id": list(range(100, 200)), "pad_token_id": 0},
        {"min_length": 12, "eos_token_id": list(range(100, 200)), "pad_token_id": 0},
        {"bad_words_ids": [[n] for n in range(0, 256, 3)]},
        {"max_length": 14, "max_new_tokens": None},
    ],
)
def test_setting_equals_transformers_and_matters(llama: Any, settings: dict[str, Any]) -> None:
    ids = prompt_that_it_changes(llama, settings)
    expected = reference_tokens(llama, ids, **settings)
    given = {"max_new_tokens": 16, **settings}
    [row], _ = run(TorchSession(llama), [ids], SamplingParams.from_generation_config({}, given))
    assert row == expected


def test_model_file_alone_gives_what_transformers_gives_without_arguments(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    others = {"max_new_tokens": 7, "forced_eos_token_id": 9, "suppress_tokens": list(range(10, 60))}
    file = {"repetition_penalty": 1.5, **others}
    model = load_model(tiny_llama(tmp_path, eos_token_id=None))
    ids = prompt_that_it_changes(model, {"repetition_penalty": 1.5}, **others)
    model.generation_config = GenerationConfig(**file)
    import torch

    expected = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, 6, dtype=torch.long))[0, 6:].tolist()
    assert run(TorchSession(model), [ids], SamplingParams.from_generation_config(file))[0] == [expected]
    flagged = SamplingParams.from_generation_config(file, {"repetition_penalty": 1.0})
    plain = reference_tokens(model, ids, repetition_penalty=1.0, max_new_tokens=7)
    assert run(TorchSession(model), [ids], flagged)[0] == [plain]
    assert plain != expected


# Context and limits


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_context_limit(tmp_path: Path, family: str) -> None:
    """Limit 32: a prompt of 33 is refused before a run, 30 + 10 gives 3 new tokens, 32 + 1 gives one."""
    size = {"n_positions": 32} if family == "gpt2" else {"max_position_embeddings": 32}
    model = load_model(tiny(family, tmp_path, eos_token_id=None, **size))
    session = TorchSession(model, capacity=32)
    with pytest.raises(ContextLengthError, match=r"33.*32"):
        generate_tokens(session, [[5] * 33], SamplingParams(max_new_tokens=1))
    assert session.prefills == 0
    ids = find_gap_prompt(model, 30, new_tokens=2)
    rows, reasons = run(session, [ids], SamplingParams(max_new_tokens=10))
    assert rows[0][:2] == reference_tokens(model, ids, max_new_tokens=2)
    assert (len(rows[0]), reasons) == (3, ["length"])
    rows, reasons = run(session, [[5] * 32], SamplingParams(max_new_tokens=1))
    assert (len(rows[0]), reasons) == (1, ["length"])


def test_row_that_filled_its_cache_waits_while_others_go_on() -> None:
    prompts = [[3] * 30, [4, 5]]
    rows, reasons = run(fake(capacity=32), prompts, SamplingParams(max_new_tokens=20))
    assert rows == [greedy_by_hand(prompts[0], 3), greedy_by_hand(prompts[1], 20)]
    assert reasons == ["length", "length"]


def test_zero_new_tokens() -> None:
    session = fake()
    assert run(session, [[1, 2], [3]], SamplingParams(max_new_tokens=0)) == ([[], []], ["length", "length"])
    assert session.calls == [], "nothing to run"
    mixed = [SamplingParams(max_new_tokens=0), SamplingParams(max_new_tokens=4)]
    assert run(session, [[1, 2], [3]], mixed) == ([[], greedy_by_hand([3], 4)], ["length", "length"])


def test_one_new_token_needs_no_decode() -> None:
    session = fake()
    assert run(session, [[1, 2]], SamplingParams(max_new_tokens=1)) == ([greedy_by_hand([1, 2], 1)], ["length"])
    assert [name for name, _ in session.calls] == ["prefill"]


def test_no_prompts() -> None:
    assert run(fake(), [], SamplingParams()) == ([], [])


@pytest.mark.parametrize(("ids", "message"), [([], "no tokens"), ([1, VOCAB], "50.*vocabulary of 50"), ([-1], "-1")])
def test_unreadable_prompt_is_refused_before_a_run(ids: list[int], message: str) -> None:
    session = fake()
    with pytest.raises(UsageError, match=message):
        generate_tokens(session, [[1], ids], SamplingParams())
    assert session.calls == []


def test_one_setting_or_one_per_prompt() -> None:
    with pytest.raises(UsageError, match="2 prompts and 1 settings"):
        generate_tokens(fake(), [[1], [2]], [SamplingParams()])


# Stopping from outside


def test_ignoring_end_of_text() -> None:
    ends = SamplingParams(max_new_tokens=5, eos_token_ids=(12,))
    assert run(fake(counting), [[10]], ends) == ([[11, 12]], ["stop"])
    goes_on = SamplingParams(max_new_tokens=5, eos_token_ids=(12,), ignore_eos=True)
    assert run(fake(counting), [[10]], goes_on) == ([[11, 12, 13, 14, 15]], ["length"])


def test_row_stopped_from_outside() -> None:
    params = SamplingParams(max_new_tokens=5)
    rows, reasons = run(fake(counting), [[10], [20]], params, stop_row=lambda row, token: token == 12)
    assert rows == [[11, 12], [21, 22, 23, 24, 25]]
    assert reasons == ["stop", "length"]


def test_stop_at_the_limit_is_a_stop() -> None:
    params = SamplingParams(max_new_tokens=2, eos_token_ids=(12,))
    assert run(fake(counting), [[10]], params) == ([[11, 12]], ["stop"])


def test_cancelling_ends_every_row_before_the_next_run() -> None:
    session, asked = fake(counting), []

    def cancelled() -> bool:
        asked.append(len(session.calls))
        return len(asked) > 3

    rows, reasons = run(session, [[10], [20]], SamplingParams(max_new_tokens=50), cancelled=cancelled)
    assert rows == [[11, 12, 13], [21, 22, 23]]
    assert reasons == ["cancelled", "cancelled"]
    assert asked == [0, 1, 2, 3]
    early = fake()
    assert run(early, [[10]], SamplingParams(), cancelled=lambda: True) == ([[]], ["cancelled"])
    assert early.calls == []


def test_leaving_the_iterator_stops_the_work() -> None:
    session = fake(counting)
    steps = generate_tokens(session, [[10]], SamplingParams(max_new_tokens=50))
    next(steps), next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert len(session.calls) == 2


# Sampling in batches


def test_seeded_row_is_the_same_alone_in_any_batch_and_at_any_place() -> None:
    sampled = SamplingParams(do_sample=True, seed=42, max_new_tokens=12)
    greedy = SamplingParams(max_new_tokens=9)
    [alone], _ = run(fake(), [[1, 2, 3]], sampled)
    rows, _ = run(fake(), [[7], [1, 2, 3], [8, 9]], [greedy, sampled, SamplingParams(do_sample=True, seed=5)])
    assert rows[1] == alone != greedy_by_hand([1, 2, 3], 12)
    assert rows[0] == greedy_by_hand([7], 9)
    rows, _ = run(fake(), [[1, 2, 3], [4]], [sampled, greedy])
    assert rows[0] == alone


def test_one_seed_for_a_batch_gives_each_row_its_own_stream() -> None:
    params = SamplingParams(do_sample=True, seed=42, top_k=0, max_new_tokens=12)
    rows, _ = run(fake(), [[1, 2, 3]] * 3, params)
    again, _ = run(fake(), [[1, 2, 3]] * 3, params)
    assert rows == again
    assert len({tuple(row) for row in rows}) == 3
    assert run(fake(), [[1, 2, 3]], params)[0] == rows[:1]
    assert run(fake(), [[1, 2, 3]] * 2, params, first_stream=1)[0] == rows[1:]


def test_fixed_logits_draw_the_model_distribution(tmp_path: Path) -> None:
    logits = [0.5, 2.0, 1.0, -1.0, 1.9]
    session = TorchSession(load_model(fixed_gpt2(tmp_path, logits)))
    params = SamplingParams(do_sample=True, seed=1, max_new_tokens=50, top_k=2)
    rows, _ = run(session, [[0], [1]], params)
    assert set(rows[0]) | set(rows[1]) == {1, 4}
    assert run(session, [[0]], SamplingParams(max_new_tokens=3))[0] == [[1, 1, 1]]


def test_bad_token_id_in_a_setting_is_refused_before_a_run() -> None:
    session = fake()
    with pytest.raises(SamplingError, match=r"^forced_eos_token_id: "):
        generate_tokens(session, [[1]], SamplingParams(forced_eos_token_id=(99,)))
    assert session.calls == []


# Recomputation


class Freezing(FakeSession):
    """Long rope: each cached token was read under the factors of the row's length then, and keeps them."""

    def _frozen(self, cache: KVCache, lengths: np.ndarray) -> None:
        switch = self.recompute_at if self.recompute_at is not None else 6
        for row, length in enumerate(lengths.tolist()):
            marks = cache.bound.setdefault(f"mark{row}", [])
            assert isinstance(marks, list)
            del marks[int(cache.lengths[row]) :]
            marks += [length >= switch] * (length - len(marks))

    def prefill(self, tokens: Any, lengths: Any, cache: KVCache, wanted: Any = "last") -> Any:
        self._frozen(cache, lengths)
        return super().prefill(tokens, lengths, cache, wanted) + self._penalty(cache)

    def decode(self, tokens: Any, cache: KVCache) -> Any:
        self._frozen(cache, cache.lengths + tokens.shape[1])
        return super().decode(tokens, cache) + self._penalty(cache)[:, None]

    def _penalty(self, cache: KVCache) -> np.ndarray:
        """Rows whose cached tokens were read under different factors answer with token 0."""
        out = np.zeros((cache.batch_size, VOCAB), np.float32)
        for row in range(cache.batch_size):
            marks = cache.bound[f"mark{row}"]
            assert isinstance(marks, list)
            out[row, 0] = 100.0 * (len(set(marks)) > 1)
        return out


def test_rows_growing_to_the_length_that_changes_the_rope_are_read_again() -> None:
    prompts = [[3, 4], [5, 6, 7, 8], [9] * 8]
    params = [SamplingParams(max_new_tokens=n) for n in (10, 10, 3)]
    rows, _ = run(Freezing(hashed, VOCAB, recompute_at=6), prompts, params)
    expected = [greedy_by_hand(ids, one.max_new_tokens or 0) for ids, one in zip(prompts, params, strict=True)]
    assert rows == expected
    stale = Freezing(hashed, VOCAB, recompute_at=6)
    stale.recompute_at = None
    assert run(stale, prompts, params)[0] != expected, "without recomputation the answer must differ"


def test_long_rope_crossing_equals_transformers(tmp_path: Path) -> None:
    model = load_model(tiny("phi3", tmp_path, eos_token_id=None))
    prompts = [find_gap_prompt(model, length) for length in (10, 14, 24)]
    session = TorchSession(model)
    session.recompute_at = 17
    rows, _ = run(session, prompts, SamplingParams(max_new_tokens=16))
    assert rows == [reference_tokens(model, ids) for ids in prompts]
    assert session.prefills == 3, "one more for each row that crosses"


# The scripted session keeps the rules of the seam


def test_fake_session_refuses_misuse() -> None:
    session = fake(capacity=4, max_batch_size=2)
    two = np.array([[1, 2], [3, 0]])
    cache = session.new_cache(2)
    with pytest.raises(UsageError, match="prefill first"):
        session.decode(np.array([[1], [2]]), cache)
    session.prefill(two, np.array([2, 1]), cache)
    with pytest.raises(UsageError, match="holds"):
        session.prefill(two, np.array([2, 1]), cache)
    with pytest.raises(UsageError, match="no room"):
        session.decode(np.array([[1, 2, 3]] * 2), cache)
    with pytest.raises(UsageError, match="do not fit a cache of 2 rows"):
        session.decode(np.array([[1]]), cache)
    with pytest.raises(UsageError, match="3 rows"):
        session.new_cache(3)
    with pytest.raises(UsageError, match="5 tokens"):
        session.new_cache(1, 5)
    with pytest.raises(UsageError, match="lengths"):
        session.prefill(two, np.array([3, 1]), session.new_cache(2))
    with pytest.raises(UsageError, match="token ids"):
        session.prefill(np.array([[VOCAB]]), np.array([1]), session.new_cache(1))


def test_fake_session_gives_logits_of_true_tokens() -> None:
    session = fake()
    cache = session.new_cache(2)
    tokens, lengths = np.array([[1, 2, 3], [4, 9, 9]]), np.array([3, 1])
    every = session.prefill(tokens, lengths, cache, wanted="all")
    np.testing.assert_array_equal(every[0, 1], hashed([1, 2]))
    cache.clear()
    last = session.prefill(tokens, lengths, cache)
    np.testing.assert_array_equal(last, [hashed([1, 2, 3]), hashed([4])])
    both = session.decode(np.array([[5, 6], [7, 8]]), cache)
    np.testing.assert_array_equal(both[1], [hashed([4, 7]), hashed([4, 7, 8])])
    cache.rewind([3, 2])
    np.testing.assert_array_equal(session.decode(np.array([[6], [8]]), cache)[1, 0], hashed([4, 7, 8]))


# Cost


class Ready:
    """A session whose logits are there already: what is left is the loop."""

    vocab_size, capacity, max_batch_size, recompute_at, provider, threads = 49152, 2048, None, None, "none", 1
    max_input_len = None

    def __init__(self) -> None:
        self.logits = np.random.default_rng(0).standard_normal((1, 1, self.vocab_size)).astype(np.float32)

    def new_cache(self, batch_size: int, capacity: int | None = None) -> KVCache:
        return KVCache([], np.zeros(batch_size, np.int64), capacity or self.capacity)

    def prefill(self, tokens: Any, lengths: Any, cache: KVCache, wanted: Any = "last") -> Any:
        cache.lengths[:] = lengths
        return self.logits[:, 0]

    def decode(self, tokens: Any, cache: KVCache) -> Any:
        cache.lengths += 1
        return self.logits


def test_loop_costs_less_than_a_twentieth_of_a_step_of_4_ms() -> None:
    session, best = Ready(), 1.0
    for _ in range(3):
        start = time.perf_counter()
        steps = sum(1 for _ in generate_tokens(session, [[1, 2, 3]], SamplingParams(max_new_tokens=300)))
        best = min(best, (time.perf_counter() - start) / steps)
    assert best < 200e-6, f"{best * 1e6:.0f} µs a step"


def test_end_of_text_constant_is_what_the_tiny_models_have(tmp_path: Path) -> None:
    assert load_model(tiny_llama(tmp_path)).generation_config.eos_token_id == EOS


def test_a_prompt_beyond_the_engine_s_own_limit_is_refused_with_both_numbers() -> None:
    """An engine exported for prompts of 4 tokens refuses 5, though its cache would hold them."""
    session = FakeSession(hashed, VOCAB, capacity=32)
    session.max_input_len = 4
    with pytest.raises(UsageError, match=r"5 tokens.*at most 4"):
        generate_tokens(session, [[1, 2, 3, 4, 5]], SamplingParams(max_new_tokens=1))
