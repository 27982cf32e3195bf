"""In every integer mode a row's logits are its own: batch mates, padding and the way it is read do not change them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from static_graphs import lowered, session_over
from traced import Logits, Traced, engine, reference, tokens, traced

from adx.calibration.activations import quantize_inputs
from adx.calibration.ranges import layer_ranges
from adx.calibration.recipe import make_channel_recipe
from adx.calibration.samples import write_samples
from adx.calibration.smoothing import by_activations
from adx.engines.static_graphs import plan_layers
from adx.runtime.session import Session
from adx.runtime.static_session import StaticSession

MODES = ("ort-cpu int8", "ort-cpu int4", "static int8", "static int8, weights alone")
FAMILIES = ("llama", "gpt2")
CLOSE = 1e-3  # of the logits' range
PADDED = 20

Open = Callable[..., Session]


@pytest.fixture(scope="module", params=[(mode, family) for mode in MODES for family in FAMILIES], ids=" ".join)
def opening(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Open, Traced]:
    """A session of a mode, with the settings that static ones take, and its model."""
    mode, family = request.param
    source = traced(tmp_path_factory, family, vocab_size=256)
    if mode.startswith("ort-cpu"):
        return (lambda **settings: engine(source, mode.split()[1])), source
    return functools.partial(static_session, source, "alone" not in mode), source


@functools.cache
def static_session(source: Traced, activations: bool, **settings: Any) -> StaticSession:
    return session_over(static_engine(source, activations), folder_of(source, activations), source, **settings)


def folder_of(source: Traced, activations: bool) -> Path:
    return source.scratch / ("w8a8" if activations else "w8")


@functools.cache
def static_engine(source: Traced, activations: bool) -> Any:
    """The graphs, calibrated as an export calibrates them; every layer's input in 8 bits where that does not disturb
    it, the smoothing that goes with it."""
    rows = write_samples(source.model, seed=0, rows=8, length=32).rows
    ranges = layer_ranges(source.model, rows)
    if not activations:
        return lowered(source, folder_of(source, activations), "int8", ranges=ranges)
    smoothing = by_activations({name: found.inputs for name, found in ranges.items()})
    layers = plan_layers(source.semantic, smoothing)[0].values()
    known = {each.name: each.input_scale for each in layers if each.input_scale is not None}
    inputs = quantize_inputs(source.model, rows, ranges, known)
    quantized = make_channel_recipe("int8", dict(plan_layers(source.semantic)[0]), inputs=inputs).layers.values()
    assert sum(getattr(each.scheme, "input_scale", None) is not None for each in quantized) >= len(inputs) - 2
    return lowered(source, folder_of(source, activations), "int8", ranges=ranges, inputs=inputs, choose=smoothing)


def alone(session: Session, row: NDArray[np.int64]) -> Logits:
    """(T, V): one row by itself, read at once."""
    return session.prefill(row[None], np.array([len(row)]), session.new_cache(1), "all")[0].copy()


def assert_same(got: Logits, expected: Logits) -> None:
    error = float(np.abs(got - expected).max() / np.ptp(expected))
    assert error <= CLOSE, f"{error:.1e} of the range"


def ragged(rows: list[NDArray[np.int64]], more: int, fill: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows padded to the longest one's length and `more`, with any token."""
    lengths = np.array([len(row) for row in rows])
    padded = np.full((len(rows), lengths.max() + more), fill, np.int64)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return padded, lengths


ROWS = [tokens(seed, length) for seed, length in enumerate((14, 9, 23))]


def test_the_mode_quantizes(opening: tuple[Open, Traced]) -> None:
    """The logits are near the float model's and are not the same: what is compared below is an integer engine."""
    opened, source = opening
    expected = reference(source.model, ROWS[2][None])[0]
    error = np.abs(alone(opened(), ROWS[2]) - expected).max() / np.ptp(expected)
    assert 1e-3 < error < 0.5


@pytest.mark.parametrize("longer", [0, PADDED])
@pytest.mark.parametrize("fill", [0, 200])
def test_batch_mates_and_padding(opening: tuple[Open, Traced], longer: int, fill: int) -> None:
    """Rows of three lengths together and one that is longer than them all, each as it is alone; on whatever token they
    are padded with."""
    opened, _ = opening
    session = opened()
    rows = [*ROWS, tokens(5, len(ROWS[2]) + longer)]
    ids, lengths = ragged(rows, 0, fill)
    assert_each_alone(session, rows, ids, lengths)


@pytest.mark.parametrize("fill", [0, 200])
def test_padding_beyond_the_longest_row(opening: tuple[Open, Traced], fill: int) -> None:
    opened, _ = opening
    assert_each_alone(opened(), ROWS, *ragged(ROWS, PADDED, fill))
    assert_each_alone(opened(), ROWS[:1], *ragged(ROWS[:1], PADDED, fill))


def assert_each_alone(
    session: Session, rows: list[NDArray[np.int64]], ids: NDArray[np.int64], lengths: NDArray[np.int64]
) -> None:
    every = session.prefill(ids, lengths, session.new_cache(len(rows)), "all").copy()
    last = session.prefill(ids, lengths, session.new_cache(len(rows)), "last").copy()
    assert every.shape == (*ids.shape, session.vocab_size)
    for row, whole, end in zip(rows, every, last, strict=True):
        expected = alone(session, row)
        assert_same(whole[: len(row)], expected)
        assert_same(end, expected[-1])


def test_other_batch_mates(opening: tuple[Open, Traced]) -> None:
    """The same row beside others, and in another place of the batch."""
    opened, _ = opening
    session = opened()
    expected = alone(session, ROWS[0])
    for mates in ([tokens(7, 3)], [tokens(8, 40), tokens(9, 1)], [ROWS[0]] * 3):
        for rows in ([ROWS[0], *mates], [*mates, ROWS[0]]):
            ids, lengths = ragged(rows, 0, 0)
            logits = session.prefill(ids, lengths, session.new_cache(len(rows)), "all")
            assert_same(logits[0 if rows[0] is ROWS[0] else -1][: len(ROWS[0])], expected)


def test_read_token_by_token(opening: tuple[Open, Traced]) -> None:
    """One token by prefill and all others by decode, alone and in a batch whose rows differ in length."""
    opened, _ = opening
    session = opened()
    ids, lengths = ragged([row[: len(row) - 8] for row in ROWS], 0, 0)
    cache = session.new_cache(3)
    session.prefill(ids, lengths, cache)
    for step in range(8):
        new = np.array([[row[len(row) - 8 + step]] for row in ROWS])
        logits = session.decode(new, cache)[:, 0].copy()
        for row, got in zip(ROWS, logits, strict=True):
            assert_same(got, alone(session, row)[len(row) - 8 + step])
    single, expected = session.new_cache(1), alone(session, ROWS[0])
    assert_same(session.prefill(ROWS[0][None, :1], np.array([1]), single)[0], expected[0])
    for place in range(1, len(ROWS[0])):
        assert_same(session.decode(ROWS[0][None, place : place + 1], single)[0, 0], expected[place])


@pytest.mark.parametrize("chunk", [4, 5, 16])
def test_read_in_chunks(opening: tuple[Open, Traced], chunk: int) -> None:
    """By decode in pieces, and by a prefill that reads so many tokens at once where a session has such a setting."""
    opened, _ = opening
    session = opened()
    row = ROWS[2]
    expected, cache = alone(session, row), session.new_cache(1)
    session.prefill(row[None, :chunk], np.array([chunk]), cache)
    for start in range(chunk, len(row), chunk):
        piece = row[None, start : start + chunk]
        assert_same(session.decode(piece, cache)[0], expected[start : start + chunk])
    small = opened(prefill_chunk=chunk, decode_tokens=chunk)
    ids, lengths = ragged(ROWS, 0, 0)
    ends = small.prefill(ids, lengths, small.new_cache(3), "last").copy()
    for ids_of_row, end in zip(ROWS, ends, strict=True):
        assert_same(end, alone(session, ids_of_row)[-1])


def test_a_row_that_another_changes_would_be_seen(opening: tuple[Open, Traced]) -> None:
    """What the comparison is good for: one token of the row itself."""
    opened, _ = opening
    session = opened()
    changed = ROWS[0].copy()
    changed[3] = changed[3] % 200 + 20
    with pytest.raises(AssertionError, match="of the range"):
        assert_same(alone(session, changed), alone(session, ROWS[0]))
