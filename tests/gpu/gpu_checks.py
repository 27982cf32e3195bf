"""What is checked of a session on a GPU: it computes what PyTorch and the graphs on a CPU compute, in place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from adx.ci.bench import Workload, bench_session
from adx.ci.bounds import bound_of
from adx.ci.corpus import load_corpus
from adx.ci.parity import measure_parity
from adx.ci.reference import Reference
from adx.export.bundle import Bundle
from adx.export.errors import ContextLengthError, UsageError
from adx.export.spec import INPUT_IDS, PAD_LENGTHS, ROW_LENGTHS, WRITE_INDICES, Phase
from adx.runtime.cuda import Cuda, PinnedMemory
from adx.runtime.session import Session
from adx.runtime.static_session import StaticSession
from adx.runtime.tensorrt_engine import DeviceTensor, TensorRTExecutor
from adx.runtime.threads import usable_threads

NEAR = 0.02  # of the logits' range: float16 may order two tokens that are nearer in another way
STEPS = 24
RAGGED = (9, 3, 14)  # prompts of different lengths in one batch


def check_parity(session: Session, bundle: Bundle, checkpoint: Path) -> None:
    """Within the bounds of the bundle's precision of PyTorch float32: batches, chunks, steps, greedy, text.

    Prompts are as long as the cache holds, so an engine that takes fewer tokens at once reads them in chunks.
    """
    figures = measure_parity(
        session,
        Reference.load(str(checkpoint), threads=usable_threads()),
        load_corpus(session.vocab_size, bundle.find("tokenizer.json")),
        bound_of(bundle.manifest.quantization.recipe),
        windows=bundle.manifest.kv_cache.windows,
    )
    print(f"KL {figures.kl_mean:.3g}, top-1 {figures.top1:.2%} over {figures.positions} positions")
    assert figures.passed, "; ".join(figures.misses)


def check_greedy(session: Session, graphs: Session) -> None:
    """A ragged batch's likeliest tokens are those of the graphs on a CPU, until two are as good as level."""
    lengths = np.array(RAGGED[: graphs.max_batch_size], np.int64)
    tokens = _prompts(session, lengths)
    found, _ = _greedy(session, tokens, lengths)
    wanted, logits = _greedy(graphs, tokens, lengths)
    best = np.sort(logits, axis=-1)
    level = best[..., -1] - best[..., -2] <= NEAR * float(np.ptp(logits))
    compared = 0
    for row in range(len(lengths)):
        apart = np.flatnonzero(found[row] != wanted[row])
        first = int(apart[0]) if len(apart) else found.shape[1]
        compared += first
        if first < found.shape[1]:
            assert level[row, first], f"row {row}, step {first}: token {found[row, first]}, not {wanted[row, first]}"
    assert compared >= len(lengths), "all rows part at their first token: nothing was compared"


def check_cache_in_place(session: StaticSession) -> None:
    """A step writes one place of each buffer, the others keep every bit, and no buffer moves."""
    cache = session.new_cache(1)
    tokens = _prompts(session, np.array([5]))
    session.prefill(tokens, np.array([5]), cache)
    where, before = [_address(buffer) for buffer in cache.buffers], _contents(session, cache.buffers)
    for step in range(STEPS):
        session.decode(tokens[:, step % 5 : step % 5 + 1], cache)
        after = _contents(session, cache.buffers)
        place = 5 + step
        for old, new in zip(before, after, strict=True):
            assert new[:, :, place].any(), f"step {step} wrote nothing at place {place}"
            changed = np.flatnonzero((old != new).any(axis=(0, 1, 3)))
            assert changed.tolist() == [place], f"step {step} changed the places {changed.tolist()}, not {place}"
        before = after
    assert [_address(buffer) for buffer in cache.buffers] == where
    assert len(set(where)) == len(where)


def check_limits(session: StaticSession) -> None:
    """The smallest and the largest call work; one more row or token is refused before it is launched."""
    batch = session.max_batch_size
    assert batch is not None
    for rows in (1, batch):
        lengths = np.full(rows, session.capacity - 1)
        cache = session.new_cache(rows)
        assert np.isfinite(session.prefill(_prompts(session, lengths), lengths, cache)).all()
        assert np.isfinite(session.decode(np.full((rows, 1), 5), cache)).all()
        with pytest.raises(ContextLengthError):
            session.decode(np.full((rows, 1), 5), cache)
    with pytest.raises(UsageError, match=f"a batch of {batch + 1} rows"):
        session.new_cache(batch + 1)


def check_profiles(session: StaticSession) -> None:
    """Each plan runs at its profiles' min, opt and max; beyond the largest nothing is launched."""
    executor = session._executor
    assert isinstance(executor, TensorRTExecutor)
    for phase, plan in executor._plans.items():
        for profile in plan.profiles:
            for rows, length in profile.shapes[INPUT_IDS]:
                assert np.isfinite(_call(session, phase, rows, length)).all(), (phase, profile.name, rows, length)
        rows, length = plan.most(0), plan.most(1)
        with pytest.raises(UsageError, match=rf"batch {rows + 1}: this engine takes 1 to {rows}"):
            _call(session, phase, rows + 1, length)
        with pytest.raises(UsageError, match=rf"length {length + 1}: this engine takes 1 to {length}"):
            _call(session, phase, rows, length + 1)


def check_cuda_graph(recorded: StaticSession, launched: StaticSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step as a CUDA graph gives what its kernels give one by one, and it really was a graph."""
    launches: list[int] = []
    launch = Cuda.launch

    def noted(cuda: Cuda, graph: int, stream: int) -> None:
        launches.append(graph)
        launch(cuda, graph, stream)

    monkeypatch.setattr(Cuda, "launch", noted)
    lengths = np.array(RAGGED[: recorded.max_batch_size], np.int64)
    tokens = _prompts(recorded, lengths)
    plain_tokens, plain = _greedy(launched, tokens, lengths)
    assert launches == []
    graph_tokens, graph = _greedy(recorded, tokens, lengths)
    assert len(launches) == STEPS - 1, "the first step runs as it is, all others are replayed"
    assert np.abs(plain - graph).max() <= 1e-3 * np.ptp(plain)
    assert np.array_equal(plain_tokens, graph_tokens)


def latency(session: Session) -> str:
    """Medians of time to first token and per token, in words."""
    prompt = min(128, session.max_input_len or session.capacity, session.capacity // 2)
    result = bench_session(session, Workload(prompt, min(64, session.capacity - prompt), 1, 3, 1))
    assert result.tpot_ms is not None
    ttft, tpot = result.ttft_ms["median"], result.tpot_ms["median"]
    return f"first token {ttft:.2f} ms, per token {tpot:.2f} ms (prompt of {prompt}, batch 1)"


def _prompts(session: Session, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """(B, T): random tokens; what pads a row is random too, so that an engine that reads it departs."""
    return np.random.default_rng(1).integers(3, session.vocab_size, (len(lengths), int(lengths.max())))


def _greedy(
    session: Session, tokens: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(B, steps + 1) chosen tokens and their (B, steps + 1, V) logits."""
    cache = session.new_cache(len(lengths))
    logits = [session.prefill(tokens, lengths, cache).copy()]
    for _ in range(STEPS):
        logits.append(session.decode(logits[-1].argmax(-1)[:, None], cache)[:, 0].copy())
    every = np.stack(logits, axis=1)
    return every.argmax(-1), every


def _call(session: StaticSession, phase: Phase, rows: int, length: int) -> NDArray[np.float32]:
    """One call of a graph into an empty cache, whatever the session would have made of it."""
    executor = session._executor
    buffers = executor.new_buffers(rows, session.capacity)
    cache = type(session.new_cache(1))(buffers, np.zeros(rows, np.int64), session.capacity)
    inputs = {
        INPUT_IDS: np.full((rows, length), 5),
        WRITE_INDICES: np.zeros(rows, np.int64),
        ROW_LENGTHS: np.full(rows, length),
        PAD_LENGTHS: np.zeros(rows, np.int64),
    }
    return executor.run(phase, inputs, cache)


def _address(buffer: Any) -> int:
    if isinstance(buffer, DeviceTensor):
        return buffer.address
    return int(buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.data_ptr())


def _contents(session: StaticSession, buffers: Sequence[Any]) -> list[NDArray[np.float16]]:
    """What the buffers hold, copied to the host."""
    executor = session._executor
    if not isinstance(executor, TensorRTExecutor):
        return [np.array(one if isinstance(one, np.ndarray) else one.numpy()) for one in buffers]
    cuda, stream, copies = executor._cuda, executor._stream, []
    for one in buffers:
        host = PinnedMemory(cuda, int(np.prod(one.shape)) * 2)
        cuda.copy_to_host(host.address, one.address, host.size, stream)
        cuda.synchronize(stream)
        copies.append(host.array(np.float16, one.shape).copy())
    return copies
