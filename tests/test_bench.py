"""Timing a bundle: what is counted, what is not, and what cannot be measured."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import numpy as np
import pytest

from adx.ci.bench import BenchResult, TimedSession, Workload, bench_session, peak_rss_mb
from adx.export.errors import ContextLengthError, UsageError
from adx.runtime.fake import FakeSession


class SlowSession(FakeSession):
    """An engine whose prefill and decode take a known time; the first calls take longer, as cold ones do.

    Attributes:
        prompts: what prefill was given.
    """

    def __init__(self, *, prefill_ms: float = 20, decode_ms: float = 4, cold_ms: float = 0, **settings: Any) -> None:
        super().__init__(lambda held: np.eye(300, dtype=np.float32)[0], 300, **settings)
        self.prefill_s, self.decode_s, self.cold_s = prefill_ms / 1e3, decode_ms / 1e3, cold_ms / 1e3
        self.prompts: list[Any] = []

    def prefill(self, tokens: Any, *rest: Any) -> Any:
        self.prompts.append(tokens.copy())
        time.sleep(self.prefill_s + self.cold_s)
        self.cold_s = 0
        return super().prefill(tokens, *rest)

    def decode(self, tokens: Any, cache: Any) -> Any:
        time.sleep(self.decode_s)
        return super().decode(tokens, cache)


def measured(session: FakeSession, **settings: Any) -> BenchResult:
    return bench_session(session, Workload(**{"prompt_len": 8, "new_tokens": 6, "repetitions": 3, **settings}))


def test_first_token_and_gaps_are_told_apart() -> None:
    """Prefill goes into the first token's time, decode into the gaps; a run of n tokens has n - 1 of them."""
    result = measured(SlowSession())
    assert result.tpot_ms is not None
    assert result.step_ms is not None
    assert 20 <= result.ttft_ms["median"] < 40
    assert 4 <= result.tpot_ms["median"] < 10
    assert result.ttft_ms["n"] == 3
    assert result.tpot_ms["n"] == 3 * 5
    assert 4 <= result.step_ms["median"] <= result.tpot_ms["median"]
    assert 20 <= result.prefill_ms["median"] <= result.ttft_ms["median"]
    assert result.tpot_ms["median"] <= result.tpot_ms["p90"] <= result.tpot_ms["p99"]
    run_ms = result.ttft_ms["median"] + 5 * result.tpot_ms["median"]
    assert result.tokens_per_s == pytest.approx(6e3 / run_ms, rel=0.2)


def test_warm_up_is_not_counted() -> None:
    """A cold first run of 200 ms is in no figure; without warm-up it is."""
    warm, cold = (measured(SlowSession(cold_ms=200), warmup=warmup) for warmup in (1, 0))
    assert warm.ttft_ms["p99"] < 100
    assert cold.ttft_ms["p99"] > 150


def test_overhead_is_the_time_outside_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that takes 4 ms of its own beside an engine's 4 ms has an overhead of about half."""
    from adx.runtime import loop

    quick = measured(SlowSession()).loop_overhead_pct
    choose = loop.choose_tokens
    monkeypatch.setattr(loop, "choose_tokens", lambda *given: (time.sleep(0.004), choose(*given))[1])
    slow = measured(SlowSession()).loop_overhead_pct
    assert quick is not None
    assert slow is not None
    assert quick < 25
    assert 35 < slow < 75


def test_one_new_token_has_no_time_per_token() -> None:
    """No gap, so no figure: null in JSON, never NaN or a division by zero."""
    result = measured(SlowSession(), new_tokens=1)
    plain = json.loads(json.dumps(dataclasses.asdict(result), allow_nan=False))
    assert [plain[key] for key in ("tpot_ms", "step_ms", "loop_overhead_pct", "decode_tokens_per_s")] == [None] * 4
    assert plain["ttft_ms"]["median"] >= 20
    assert plain["tokens_per_s"] > 0


def test_batch_figures_are_per_row_and_in_total() -> None:
    """Four rows at the same step time give four times the tokens; a row's own speed is a quarter of the total."""
    one, four = (measured(SlowSession(), batch_size=size) for size in (1, 4))
    assert four.tokens_per_s == pytest.approx(4 * one.tokens_per_s, rel=0.3)
    assert four.tokens_per_s_per_row == pytest.approx(four.tokens_per_s / 4)
    assert one.tpot_ms is not None
    assert four.tpot_ms is not None
    assert four.tpot_ms["n"] == one.tpot_ms["n"]
    assert four.decode_tokens_per_s == pytest.approx(4e3 / four.tpot_ms["median"])


def test_prompts_are_random_and_the_same_every_time() -> None:
    """Each run reads new ids, so nothing is answered from a cache; two benchmarks read the same ones."""
    first, second = SlowSession(), SlowSession()
    measured(first)
    measured(second)
    assert len(first.prompts) == 4
    assert all((a == b).all() for a, b in zip(first.prompts, second.prompts, strict=True))
    assert (first.prompts[0] != first.prompts[1]).any()
    assert first.prompts[0].shape == (1, 8)


def test_steps_on_a_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that slows down with the past shows it."""
    session = SlowSession(decode_ms=0)
    decode = session.decode
    monkeypatch.setattr(
        session, "decode", lambda tokens, cache: (time.sleep(cache.lengths[0] / 4e3), decode(tokens, cache))[1]
    )
    result = measured(session, past=(4, 40))
    assert list(result.past_step_ms) == ["4", "40"]
    assert result.past_step_ms["40"] > 10 > result.past_step_ms["4"]


def test_the_median_is_that_of_the_runs_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the peers are measured: one slow run of three does not move it."""
    from adx.ci import bench

    times = iter([[0.1, 0.001, 0.002, 0.003], [0.2, 0.5, 0.5, 0.5], [0.3, 0.003, 0.004, 0.005]])

    def run(session: TimedSession, workload: Workload, rng: object) -> list[float]:
        seconds = next(times)
        session.calls = [second / 2 for second in seconds]
        return seconds

    monkeypatch.setattr(bench, "_run", run)
    result = measured(SlowSession(), warmup=0)
    assert result.tpot_ms is not None
    assert result.tpot_ms["median"] == pytest.approx(4.0)
    assert result.tpot_ms["n"] == 9
    assert result.ttft_ms["median"] == pytest.approx(200.0)
    assert result.loop_overhead_pct == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"prompt_len": 65}, ContextLengthError, "65 tokens, but this engine's context holds 64"),
        ({"prompt_len": 60}, UsageError, "got 6, and a prompt of 60 leaves room for 5 in a context of 64"),
        ({"past": (64,)}, UsageError, "past: got"),
        ({"past": (0,)}, UsageError, "past: got"),
        ({"new_tokens": 0}, UsageError, "new_tokens: got 0"),
        ({"batch_size": 0}, UsageError, "batch_size: got 0"),
        ({"repetitions": 0}, UsageError, "repetitions: got 0"),
        ({"warmup": -1}, UsageError, "warmup: got -1"),
        ({"batch_size": 3}, UsageError, "of 2 at most"),
    ],
)
def test_workloads_that_do_not_fit(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    """Refused before anything runs, with the field and the numbers."""
    session = SlowSession(max_batch_size=2)
    with pytest.raises(error, match=message):
        measured(session, **settings)
    assert not session.prompts


def test_memory_is_in_megabytes() -> None:
    """At least what this process holds now, at most a few times that."""
    import psutil

    now = psutil.Process().memory_info().rss / 1e6
    assert 0.9 * now <= peak_rss_mb() < 20 * now
