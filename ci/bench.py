"""How fast a bundle is: time to first token, time per token, what of it is the engine's own, memory, load time."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from adx.ci.progress import Report, quiet
from adx.export.errors import ContextLengthError, UsageError
from adx.runtime.cache import KVCache
from adx.runtime.session import Logits, Session, Tokens, Wanted

PAST_STEPS = 16
_IDS = (100, 40000)  # where random prompt ids lie if the vocabulary has them

Series = dict[str, float | int]  # median, p90, p99 in milliseconds, n


@dataclass(frozen=True)
class BenchResult:
    """Figures of one bundle on this machine; times in milliseconds.

    Attributes:
        ttft_ms: from the prompts' ids to the first chosen token of each row.
        tpot_ms: from one chosen token to the next (of all rows at once): `median` of the runs' medians, percentiles
            over all; None where only one token was asked for.
        tokens_per_s: new tokens of all rows over a run's whole time, median of the runs.
        tokens_per_s_per_row: the same of one row.
        decode_tokens_per_s: new tokens of all rows per second once the first is there.
        load_ms: from the bundle's path to an engine that is ready.
        peak_rss_mb: largest resident memory of this process so far.
        loop_overhead_pct: share of the time between tokens that is spent outside the engine.
        prefill_ms: the engine alone, as part of `ttft_ms`.
        step_ms: the engine alone, as part of `tpot_ms`.
        past_step_ms: the engine's step on a past of that many tokens, median.
    """

    ttft_ms: Series
    tpot_ms: Series | None
    tokens_per_s: float
    tokens_per_s_per_row: float
    decode_tokens_per_s: float | None
    load_ms: float | None
    peak_rss_mb: float
    loop_overhead_pct: float | None
    prefill_ms: Series
    step_ms: Series | None
    past_step_ms: dict[str, float]
    threads: int
    provider: str
    batch_size: int
    prompt_len: int
    new_tokens: int
    repetitions: int


@dataclass(frozen=True)
class Workload:
    """What is run: random prompts, greedy, nothing ends it early.

    Raises:
        UsageError: a number is below what makes sense; names the field.
    """

    prompt_len: int = 128
    new_tokens: int = 128
    batch_size: int = 1
    repetitions: int = 5
    warmup: int = 1
    past: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        least = {"prompt_len": 1, "new_tokens": 1, "batch_size": 1, "repetitions": 1, "warmup": 0}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise UsageError(f"{name}: got {getattr(self, name)}, accepted are {minimum} or more")
        if any(length < 1 for length in self.past):
            raise UsageError(f"past: got {list(self.past)}, accepted are lengths of 1 or more")

    def check(self, capacity: int) -> None:
        """Whether an engine of `capacity` tokens per row can run it.

        Raises:
            ContextLengthError: the prompt alone is too long.
            UsageError: prompt and new tokens together are, or a past is.
        """
        if self.prompt_len > capacity:
            raise ContextLengthError(self.prompt_len, capacity)
        if self.prompt_len + self.new_tokens - 1 > capacity:
            raise UsageError(
                f"new_tokens: got {self.new_tokens}, and a prompt of {self.prompt_len} leaves room for "
                f"{capacity - self.prompt_len + 1} in a context of {capacity}: ask for fewer, or shorten the prompt"
            )
        if max(self.past, default=0) >= capacity:
            raise UsageError(f"past: got {list(self.past)}, and a step on it must fit a context of {capacity}")


class TimedSession:
    """A session that notes how long each call into the engine takes, in seconds."""

    def __init__(self, inner: Session) -> None:
        self._inner = inner
        self.vocab_size, self.capacity = inner.vocab_size, inner.capacity
        self.max_batch_size, self.recompute_at = inner.max_batch_size, inner.recompute_at
        self.max_input_len, self.two_graphs = inner.max_input_len, inner.two_graphs
        self.provider, self.threads = inner.provider, inner.threads
        self.calls: list[float] = []

    def new_cache(self, batch_size: int, capacity: int | None = None) -> KVCache:
        """As `Session.new_cache`."""
        return self._inner.new_cache(batch_size, capacity)

    def prefill(self, tokens: Tokens, lengths: Tokens, cache: KVCache, wanted: Wanted = "last") -> Logits:
        """As `Session.prefill`."""
        start = time.perf_counter()
        logits = self._inner.prefill(tokens, lengths, cache, wanted)
        self.calls.append(time.perf_counter() - start)
        return logits

    def close(self) -> None:
        """See `Session.close`."""
        self._inner.close()

    def decode(self, tokens: Tokens, cache: KVCache) -> Logits:
        """As `Session.decode`."""
        start = time.perf_counter()
        logits = self._inner.decode(tokens, cache)
        self.calls.append(time.perf_counter() - start)
        return logits


@dataclass
class _Times:
    """Seconds of the measured runs: one list per run, its first item the first token's."""

    loop: list[list[float]] = field(default_factory=list)
    engine: list[list[float]] = field(default_factory=list)


def bench_bundle(
    path: str | os.PathLike[str],
    *,
    prompt_len: int = 128,
    new_tokens: int = 128,
    batch_size: int = 1,
    threads: int | None = None,
    repetitions: int = 5,
    warmup: int = 1,
    past: Sequence[int] = (),
    target: str | None = None,
    report: Report = quiet,
) -> BenchResult:
    """Load a bundle and time it.

    Args:
        path: the bundle.
        prompt_len: tokens of each prompt.
        new_tokens: tokens to generate after each.
        batch_size: rows that run at once.
        threads: default: what this process may use.
        repetitions: measured runs.
        warmup: runs before them that do not count.
        past: lengths of past at which the engine's step is timed too.
        target: which engine of the bundle.
        report: told how far it is.

    Raises:
        BundleError: the bundle is damaged, or has no engine for the target.
        ContextLengthError: the prompt is longer than the context.
        UsageError: a number that is not accepted; names the field.
    """
    from adx.runtime import load

    workload = Workload(prompt_len, new_tokens, batch_size, repetitions, warmup, tuple(past))
    report("loading the engine", None)
    start = time.perf_counter()
    session = load(path, target=target, threads=threads).session
    return bench_session(session, workload, load_ms=(time.perf_counter() - start) * 1e3, report=report)


def bench_session(
    session: Session, workload: Workload, *, load_ms: float | None = None, report: Report = quiet
) -> BenchResult:
    """Time the token loop over an engine that is loaded.

    Raises:
        ContextLengthError: the prompt is longer than the context.
        UsageError: the workload does not fit the engine.
    """
    workload.check(session.capacity)
    timed, rng, times = TimedSession(session), np.random.default_rng(0), _Times()
    total = workload.warmup + workload.repetitions
    for index in range(total):
        report("measuring", index / total)
        loop = _run(timed, workload, rng)
        if index >= workload.warmup:
            times.loop.append(loop)
            times.engine.append(timed.calls)
    past = {str(length): _past_step(session, workload.batch_size, length, rng) for length in workload.past}
    return _result(session, workload, times, past, load_ms)


def _run(session: TimedSession, workload: Workload, rng: np.random.Generator) -> list[float]:
    """One run of the real loop: seconds to each token of the batch."""
    from adx.runtime.loop import generate_tokens
    from adx.runtime.params import SamplingParams

    prompts = _ids(rng, session.vocab_size, (workload.batch_size, workload.prompt_len)).tolist()
    params = SamplingParams(max_new_tokens=workload.new_tokens, ignore_eos=True)
    session.calls, seconds = [], []
    start = time.perf_counter()
    for _ in generate_tokens(session, prompts, params):
        now = time.perf_counter()
        seconds.append(now - start)
        start = now
    assert len(seconds) == len(session.calls) == workload.new_tokens
    return seconds


def _ids(rng: np.random.Generator, vocab_size: int, shape: tuple[int, int]) -> Tokens:
    low, high = _IDS if vocab_size >= _IDS[1] else (0, vocab_size)
    return rng.integers(low, high, shape)


def _past_step(session: Session, batch_size: int, length: int, rng: np.random.Generator) -> float:
    """Median milliseconds of one decode step on a past of `length` tokens per row."""
    cache = session.new_cache(batch_size, length + 1)
    tokens = _ids(rng, session.vocab_size, (batch_size, length))
    lengths = np.full(batch_size, length, np.int64)
    session.prefill(tokens, lengths, cache, "last")
    seconds = []
    for _ in range(PAST_STEPS):
        start = time.perf_counter()
        session.decode(tokens[:, :1].copy(), cache)
        seconds.append(time.perf_counter() - start)
        cache.rewind(lengths)
    return statistics.median(seconds[1:]) * 1e3


def _result(
    session: Session, workload: Workload, times: _Times, past: dict[str, float], load_ms: float | None
) -> BenchResult:
    loop_gaps, engine_gaps = ([run[1:] for run in runs] for runs in (times.loop, times.engine))
    spent, engine = (sum(map(sum, gaps)) for gaps in (loop_gaps, engine_gaps))
    tpot = _series(loop_gaps)
    tokens_per_s = statistics.median(workload.batch_size * len(run) / sum(run) for run in times.loop)
    return BenchResult(
        ttft_ms=_series([run[:1] for run in times.loop]) or {},
        tpot_ms=tpot,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_row=tokens_per_s / workload.batch_size,
        decode_tokens_per_s=workload.batch_size * 1e3 / tpot["median"] if tpot else None,
        load_ms=load_ms,
        peak_rss_mb=peak_rss_mb(),
        loop_overhead_pct=100 * (spent - engine) / spent if spent else None,
        prefill_ms=_series([run[:1] for run in times.engine]) or {},
        step_ms=_series(engine_gaps),
        past_step_ms=past,
        threads=session.threads,
        provider=session.provider,
        batch_size=workload.batch_size,
        prompt_len=workload.prompt_len,
        new_tokens=workload.new_tokens,
        repetitions=workload.repetitions,
    )


def _series(runs: Sequence[Sequence[float]]) -> Series | None:
    """Milliseconds out of seconds: median of the runs' medians, percentiles over all of them; None without any."""
    flat = np.array([second for run in runs for second in run]) * 1e3
    if not len(flat):
        return None
    p90, p99 = np.percentile(flat, [90, 99])
    median = statistics.median(statistics.median(run) for run in runs) * 1e3
    return {"median": median, "p90": float(p90), "p99": float(p99), "n": len(flat)}


def peak_rss_mb() -> float:
    """Largest resident memory of this process so far, in MB (10^6 bytes)."""
    import psutil

    process = psutil.Process()
    try:
        import resource
    except ImportError:  # Windows
        return float(getattr(process.memory_info(), "peak_wset", process.memory_info().rss)) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if psutil.MACOS else peak * 1024 / 1e6  # Linux counts KiB, macOS bytes
