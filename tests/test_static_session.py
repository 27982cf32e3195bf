"""`StaticSession` on ONNX Runtime CPU against transformers: prefill, chunks, decode, ragged rows, long rope, cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from models import FAMILIES, find_gap_prompt, reference_logits, reference_tokens
from numpy.typing import NDArray
from static_graphs import executor, session
from traced import Traced, reference, tokens, traced

from adx.export.errors import BundleError, ContextLengthError, UsageError
from adx.export.spec import INPUT_IDS, KVCacheSpec, Phase
from adx.runtime.cache import KVCache
from adx.runtime.loop import generate_tokens
from adx.runtime.ort_graphs import OrtGraphs
from adx.runtime.params import SamplingParams
from adx.runtime.session import Logits
from adx.runtime.static_session import StaticSession

TOLERANCE = 1e-2  # of the reference's range: float16 keys, values and linear layers
CHUNKS = {"prefill_chunk": 7, "decode_tokens": 5}
RAGGED = (24, 3, 7, 15, 8)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """PyTorch on one thread: the models are tiny."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory, "llama")


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory, "phi3")


def near(found: Logits, wanted: Logits) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= TOLERANCE * np.ptp(wanted)


def ragged(source: Traced, lengths: tuple[int, ...]) -> tuple[NDArray[np.int64], list[Logits]]:
    """Right-padded rows, and transformers' logits of each row alone."""
    ids = tokens(2, len(lengths), max(lengths))
    return ids, [reference_logits(source.model, ids[row, :n].tolist()) for row, n in enumerate(lengths)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [{}, CHUNKS], ids=["whole", "chunks"])
def test_every_family_computes_what_transformers_does(
    tmp_path_factory: pytest.TempPathFactory, family: str, settings: Mapping[str, Any]
) -> None:
    source = traced(tmp_path_factory, family)
    opened = session(source, **settings)
    ids = tokens(1, 2, 27)
    wanted = reference(source.model, ids)
    lengths = np.full(2, 27)
    near(opened.prefill(ids, lengths, opened.new_cache(2)), wanted[:, -1])
    near(opened.prefill(ids, lengths, opened.new_cache(2), "all"), wanted)
    cache = opened.new_cache(2)
    opened.prefill(ids[:, :17], np.full(2, 17), cache)
    near(opened.decode(ids[:, 17:26], cache), wanted[:, 17:26])
    near(opened.decode(ids[:, 26:], cache), wanted[:, 26:])
    assert cache.lengths.tolist() == [27, 27]


@pytest.mark.parametrize("family", ["llama", "mistral", "phi3"])
@pytest.mark.parametrize("settings", [{}, CHUNKS], ids=["whole", "chunks"])
def test_ragged_rows(tmp_path_factory: pytest.TempPathFactory, family: str, settings: Mapping[str, Any]) -> None:
    """A row that ended in an earlier chunk keeps its logits and its keys, whatever the longer rows still read."""
    source = traced(tmp_path_factory, family)
    opened = session(source, **settings)
    ids, wanted = ragged(source, RAGGED)
    cache = opened.new_cache(len(RAGGED))
    lengths = np.array(RAGGED)
    near(opened.prefill(ids, lengths, cache).copy(), np.stack([row[-1] for row in wanted]))
    assert cache.lengths.tolist() == list(RAGGED)
    more = tokens(3, len(RAGGED), 2)
    for row, n in enumerate(RAGGED):
        if family == "phi3" and n + 2 >= 17 > n:
            continue  # the cache would have to be computed again there, which is the loop's part
        after = reference_logits(source.model, [*ids[row, :n].tolist(), *more[row].tolist()])
        one = opened.new_cache(1)
        opened.prefill(ids[row : row + 1, :n], lengths[row : row + 1], one)
        near(opened.decode(more[row : row + 1], one)[0], after[-2:])
    found = opened.decode(more, cache)
    for row, n in enumerate(RAGGED):
        if not (family == "phi3" and n + 2 >= 17 > n):
            near(found[row], reference_logits(source.model, [*ids[row, :n].tolist(), *more[row].tolist()])[-2:])


@pytest.mark.parametrize("settings", [{}, CHUNKS], ids=["whole", "chunks"])
def test_logits_of_every_position_of_ragged_rows(llama: Traced, settings: Mapping[str, Any]) -> None:
    opened = session(llama, **settings)
    ids, wanted = ragged(llama, RAGGED)
    padded = np.concatenate([ids, np.zeros((len(RAGGED), 4), np.int64)], axis=1)  # columns that no row reaches
    found = opened.prefill(padded, np.array(RAGGED), opened.new_cache(len(RAGGED)), "all")
    assert found.shape == (len(RAGGED), 28, 256)
    for row, n in enumerate(RAGGED):
        near(found[row, :n], wanted[row])


@pytest.mark.parametrize("length", [15, 16, 17, 40])
def test_chunks_of_a_long_rope_prompt_read_the_table_of_its_whole_length(phi3: Traced, length: int) -> None:
    """A prompt past the length at which the rotary frequencies change must read the long table from its first chunk."""
    assert phi3.spec.kv_cache.recompute_at == 17
    ids = tokens(5, 2, length)
    wanted = reference(phi3.model, ids)
    opened = session(phi3, **CHUNKS)
    near(opened.prefill(ids, np.full(2, length), opened.new_cache(2)), wanted[:, -1])
    near(opened.prefill(ids, np.full(2, length), opened.new_cache(2), "all"), wanted)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
def test_the_loop_gives_the_tokens_of_transformers(tmp_path_factory: pytest.TempPathFactory, family: str) -> None:
    """Greedy text of two rows at once; the long-rope rows pass the length at which their cache is computed again."""
    source = traced(tmp_path_factory, family)
    prompts = [
        find_gap_prompt(source.model, length, new_tokens=12, gap=0.1, accept=lambda made: len(made) == 12)
        for length in (9, 14)
    ]
    steps = generate_tokens(session(source, **CHUNKS), prompts, SamplingParams(max_new_tokens=12, temperature=0.0))
    found = np.array([step.tokens for step in steps]).T.tolist()
    assert found == [reference_tokens(source.model, prompt, max_new_tokens=12) for prompt in prompts]


def test_a_row_may_fill_the_cache_to_its_last_place(llama: Traced) -> None:
    """Beside a row that fills it, a short one is padded: nothing may be written past the last place."""
    lengths = (30, 4)
    ids, wanted = ragged(llama, lengths)
    opened = session(llama, **CHUNKS)
    wide = np.concatenate([ids, np.zeros((2, 9), np.int64)], axis=1)
    cache = opened.new_cache(2, 30)
    near(opened.prefill(wide, np.array(lengths), cache), np.stack([row[-1] for row in wanted]))
    with pytest.raises(ContextLengthError, match="31 tokens, but this engine's context holds 30"):
        opened.decode(ids[:, :1], cache)
    cache.rewind([28, 4])
    near(opened.decode(ids[:, 28:30], cache)[0], wanted[0][28:])
    assert cache.lengths.tolist() == [30, 6]


def test_a_rewound_row_sees_nothing_of_what_it_forgot(llama: Traced) -> None:
    ids = tokens(7, 1, 20)
    opened = session(llama)
    cache = opened.new_cache(1)
    opened.prefill(ids, np.array([20]), cache)
    cache.rewind([6])
    other = tokens(8, 1, 3)
    near(opened.decode(other, cache)[0], reference_logits(llama.model, [*ids[0, :6], *other[0]])[6:])


def test_the_cache_is_written_in_place_and_only_where_new_tokens_go(llama: Traced) -> None:
    """Past and present are one buffer: no other memory takes the keys, and old places keep every bit."""
    opened = session(llama)
    cache = opened.new_cache(2, 24)
    where = [buffer.ctypes.data for buffer in cache.buffers]
    opened.prefill(tokens(1, 2, 10), np.array([10, 6]), cache)
    before = [buffer.copy() for buffer in cache.buffers]
    opened.decode(tokens(2, 2, 2), cache)
    assert [buffer.ctypes.data for buffer in cache.buffers] == where
    for old, new in zip(before, cache.buffers, strict=True):
        changed = (old != new).any(axis=(1, 3))
        assert changed[0].nonzero()[0].tolist() == [10, 11]
        assert changed[1].nonzero()[0].tolist() == [6, 7]


def test_one_new_token_is_bound_once_for_a_cache(llama: Traced) -> None:
    opened = session(llama)
    cache = opened.new_cache(1)
    opened.prefill(tokens(1, 1, 4), np.array([4]), cache)
    opened.decode(tokens(2, 1, 1), cache)
    kept = dict(cache.bound)
    opened.decode(tokens(3, 1, 1), cache)
    assert kept == cache.bound
    assert len(kept) == 1


class Recorder:
    """An executor that computes nothing and keeps what it was asked."""

    provider, threads = "recorder", 1

    def __init__(self) -> None:
        self.calls: list[tuple[Phase, dict[str, list[Any]]]] = []
        self.places: list[tuple[int, int]] = []
        self.closed = False

    def new_buffers(self, batch_size: int, places: int) -> list[object]:
        self.places.append((batch_size, places))
        return []

    def run(self, phase: Phase, inputs: Mapping[str, NDArray[np.int64]], cache: KVCache) -> Logits:
        self.calls.append((phase, {name: value.tolist() for name, value in inputs.items() if name != INPUT_IDS}))
        batch, length = inputs[INPUT_IDS].shape
        return np.full((batch, 1 if phase == "prefill" else length, 4), len(self.calls), np.float32)

    def close(self) -> None:
        self.closed = True


def recorded(**settings: Any) -> tuple[Recorder, StaticSession]:
    recorder = Recorder()
    return recorder, StaticSession(recorder, KVCacheSpec(1, 1, 8, 32, (None,)), 4, **settings)


def test_what_the_graphs_are_told() -> None:
    """Every chunk starts where the one before it ended, for all rows, and knows the rows' final lengths."""
    recorder, opened = recorded(prefill_chunk=4, decode_tokens=2)
    cache = opened.new_cache(2)
    last = opened.prefill(np.zeros((2, 9), np.int64), np.array([9, 5]), cache)
    assert [phase for phase, _ in recorder.calls] == ["prefill"] * 3
    assert [told["write_indices"] for _, told in recorder.calls] == [[0, 0], [4, 4], [8, 8]]
    assert all(told["row_lengths"] == [9, 5] and told["pad_lengths"] == [0, 0] for _, told in recorder.calls)
    assert last[:, 0].tolist() == [3.0, 2.0]  # the call in which each row ends
    recorder.calls.clear()
    opened.decode(np.zeros((2, 3), np.int64), cache)
    assert [(told["write_indices"], told["row_lengths"]) for _, told in recorder.calls] == [
        ([9, 5], [11, 7]),
        ([11, 7], [12, 8]),
    ]


@pytest.mark.parametrize(("fixed", "places"), [(False, 10), (True, 32)])
def test_an_engine_of_fixed_places_gets_all_of_them(fixed: bool, places: int) -> None:
    recorder, opened = recorded(fixed_places=fixed)
    assert opened.new_cache(3, 10).capacity == 10
    assert recorder.places == [(3, places)]


def test_leaving_the_session_closes_the_executor() -> None:
    recorder, opened = recorded()
    with opened:
        pass
    assert recorder.closed


def test_what_cannot_be_run_is_refused_before_anything_runs() -> None:
    recorder, opened = recorded(max_batch_size=2)
    for batch, capacity, text in ((0, None, "takes 1 to 2"), (3, None, "takes 1 to 2"), (1, 33, "rows hold 1 to 32")):
        with pytest.raises(UsageError, match=text):
            opened.new_cache(batch, capacity)
    cache = opened.new_cache(1, 8)
    ids = np.zeros((1, 9), np.int64)
    with pytest.raises(ContextLengthError, match="9 tokens, but this engine's context holds 8"):
        opened.prefill(ids, np.array([9]), cache)
    for lengths in ([0], [10], [3, 3]):
        with pytest.raises(UsageError, match="into 1 rows"):
            opened.prefill(ids, np.array(lengths), cache)
    with pytest.raises(UsageError, match="into 1 rows"):
        opened.decode(np.zeros((2, 1), np.int64), cache)
    opened.prefill(ids, np.array([8]), cache)
    recorder.calls.clear()
    with pytest.raises(UsageError, match="needs an empty cache"):
        opened.prefill(ids, np.array([8]), cache)
    with pytest.raises(ContextLengthError, match="9 tokens"):
        opened.decode(np.zeros((1, 1), np.int64), cache)
    assert recorder.calls == []
    assert cache.lengths.tolist() == [8]


def test_a_graph_that_cannot_be_loaded_is_named(llama: Traced, tmp_path: Any) -> None:
    (tmp_path / "prefill.onnx").write_bytes(b"no graph")
    with pytest.raises(BundleError, match=r"cannot load .*prefill\.onnx"):
        OrtGraphs(tmp_path / "prefill.onnx", tmp_path / "decode.onnx", llama.spec.kv_cache, 256, threads=1)


def test_the_provider_is_the_one_that_computes(llama: Traced) -> None:
    run = executor(llama)
    assert (run.provider, run.threads) == ("CPUExecutionProvider", 1)
