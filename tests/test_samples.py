"""Calibration samples: what they keep, how a model writes them, how they are drawn from the user's documents."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest

from adx.calibration import documents, sources
from adx.calibration.samples import TEMPERATURES, CalibrationSamples, load_samples, write_samples
from adx.calibration.sources import Reader, read_samples, reservoir, windows
from adx.export.errors import CheckpointError, UsageError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TALK = [{"role": "user", "content": "Why is the sky blue?"}, {"role": "assistant", "content": "Small things scatter."}]
TALK_TEXT = "[user]Why is the sky blue?[assistant]Small things scatter."


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Byte b of a text is token 3 + b; the template writes the beginning-of-text token itself."""
    folder = models.byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), add_bos=True, chat_template=TEMPLATE)
    return Reader(folder, models.BOS, 320, 128)


def rows_of(*lists: list[int]) -> tuple[Any, ...]:
    return tuple(np.array(ids, np.int64) for ids in lists)


def lists(found: CalibrationSamples) -> list[list[int]]:
    return [row.tolist() for row in found.rows]


def lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


# What samples keep.


def test_the_digest_counts_ids_and_where_rows_end() -> None:
    """Length and ids as little-endian 64-bit integers; the same ids in other rows are other samples."""
    found = CalibrationSamples("test", None, rows_of([1, 2], [3]))
    assert found.sha256 == hashlib.sha256(np.array([2, 1, 2, 1, 3], "<i8").tobytes()).hexdigest()
    assert found.sha256 != CalibrationSamples("test", None, rows_of([1], [2, 3])).sha256
    assert found.token_count == 3


def test_windows_are_every_row_and_its_second_half_again_and_again() -> None:
    found = CalibrationSamples("test", None, rows_of([1, 2, 3], [4, 5]))
    for _ in range(2):
        assert [window.tolist() for window in found.windows()] == [[1, 2, 3], [2, 3], [4, 5], [5]]


def test_a_part_can_be_held_out() -> None:
    """No row is in both, none is lost, and the seed says which are held out."""
    found = CalibrationSamples("test", 7, rows_of(*([token] * 3 for token in range(20))))
    kept, held = found.split(0.25)
    assert (len(kept.rows), len(held.rows)) == (15, 5)
    assert sorted(lists(kept) + lists(held)) == lists(found)
    assert [part.sha256 for part in found.split(0.25)] == [kept.sha256, held.sha256]
    other = CalibrationSamples("test", 8, found.rows).split(0.25)
    assert other[1].sha256 != held.sha256
    for part, sizes in ((0.001, (19, 1)), (0.999, (1, 19))):
        assert tuple(len(each.rows) for each in found.split(part)) == sizes


def test_one_sample_cannot_be_parted() -> None:
    with pytest.raises(UsageError, match=r"two samples.*a\.txt gave 1"):
        CalibrationSamples("a.txt", 0, rows_of([1, 2])).split(0.5)


def test_the_summary_is_one_line_for_people() -> None:
    found = CalibrationSamples("a.txt", 0, rows_of([1] * 1000, [2] * 500), {"empty": 1, "not JSON": 1200}, 4, 1000)
    line = "calibration: 2 of 4 samples (1,500 tokens) from a.txt; skipped 1,201: 1,200 not JSON, 1 empty"
    assert found.summary() == line
    assert CalibrationSamples("a.txt", 0, rows_of([1, 2])).summary() == "calibration: 1 sample (2 tokens) from a.txt"


def test_saved_samples_are_read_as_they_were(tmp_path: Path) -> None:
    found = CalibrationSamples("a.txt", 5, rows_of([1, 2], [3]), {"empty": 2}, 9, 64, (0.5, 1.0))
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(found.to_dict()), encoding="utf-8")
    again = load_samples(path, 4)
    assert again is not None
    assert (again.to_dict(), again.sha256) == (found.to_dict(), found.sha256)
    with pytest.raises(UsageError, match="token 3, and this model's vocabulary ends at 2"):
        load_samples(path, 3)
    for name in ("absent.json", "a.jsonl"):
        assert load_samples(tmp_path / name, 4) is None


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [[1, 2], [4]]},
        {"rows": [[1, 2.0], [3]]},
        {"rows": [[1, 2], [True]]},
        {"rows": [[1, 2], [-3]]},
        {"rows": [[1, 2], [2**64]]},
        {"rows": [[1, 2], []]},
        {"rows": []},
        {"rows": 5},
        {"skipped": 5},
        {"seed": "x"},
        {"temperatures": None},
        {"format": "adx-calibration-2"},
    ],
    ids=str,
)
def test_saved_samples_that_were_changed_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    found = CalibrationSamples("a.txt", 5, rows_of([1, 2], [3]))
    path = lines(tmp_path / "calibration.json", {**found.to_dict(), **change})
    with pytest.raises(UsageError, match=r"calibration\.json.*(damaged|this adx reads 'adx-calibration-1')"):
        load_samples(path, 100)


def test_half_a_file_of_saved_samples_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(CalibrationSamples("a.txt", 5, rows_of([1, 2], [3])).to_dict())[:-9], encoding="utf-8")
    with pytest.raises(UsageError, match=r"calibration\.json cannot be read"):
        load_samples(path, 100)


# Text that the model writes.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.load_model(models.tiny_llama(tmp_path_factory.mktemp("model"), num_hidden_layers=1))


def test_a_row_depends_on_the_seed_and_its_place_alone(model: Any) -> None:
    """Not on how many are written at a time, on how many there are, or on threads."""
    import torch

    first = write_samples(model, seed=1, rows=6, length=12)
    assert lists(write_samples(model, seed=1, rows=6, length=12, batch=4)) == lists(first)
    assert lists(write_samples(model, seed=1, rows=3, length=9, batch=1)) == [row[:9] for row in lists(first)[:3]]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert write_samples(model, seed=1, rows=6, length=12).sha256 == first.sha256
    finally:
        torch.set_num_threads(threads)
    assert write_samples(model, seed=2, rows=6, length=12).sha256 != first.sha256
    assert {len(row) for row in first.rows} == {12}
    assert {row[0] for row in lists(first)} == {models.BOS}
    assert len({tuple(row) for row in lists(first)}) == 6
    assert (first.temperatures, first.seed, first.asked, first.length) == (TEMPERATURES, 1, 6, 12)
    assert first.summary() == "calibration: 6 samples (72 tokens) written by the model itself"


def test_written_tokens_have_the_model_s_chances_at_each_temperature(tmp_path: Path) -> None:
    """Against softmax worked out by numpy, within four standard deviations of the counts."""
    logits = np.array([0.0, 1.0, 2.0, 0.5])
    fixed = models.load_model(models.fixed_gpt2(tmp_path, logits.tolist()))
    found = write_samples(fixed, seed=0, rows=64, length=60)
    for turn, temperature in enumerate(TEMPERATURES):
        drawn = np.concatenate([row[1:] for row in found.rows[turn :: len(TEMPERATURES)]])
        assert len(drawn) == 16 * 59
        chances = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
        deviation = np.sqrt(chances * (1 - chances) / len(drawn))
        assert (np.abs(np.bincount(drawn, minlength=4) / len(drawn) - chances) < 4 * deviation).all()


@pytest.mark.parametrize(
    ("tokens", "start"),
    [({}, 0), ({"eos_token_id": 3}, 3), ({"eos_token_id": [2, 3]}, 2), ({"bos_token_id": 1, "eos_token_id": 3}, 1)],
    ids=str,
)
def test_rows_begin_as_texts_do(tmp_path: Path, tokens: dict[str, Any], start: int) -> None:
    """Without a beginning-of-text token what ends a text begins the next."""
    fixed = models.load_model(models.fixed_gpt2(tmp_path, [0.0, 1.0, 2.0, 0.5], **tokens))
    assert {row[0] for row in lists(write_samples(fixed, seed=0, rows=2, length=3))} == {start}


def test_rows_fit_a_short_context(tmp_path: Path) -> None:
    fixed = models.load_model(models.fixed_gpt2(tmp_path, [0.0, 1.0], positions=10))
    found = write_samples(fixed, seed=0, rows=2, length=64)
    assert [len(row) for row in found.rows] == [10, 10]
    assert found.length == 10


def test_progress_runs_over_all_rows(model: Any) -> None:
    seen: list[float] = []
    write_samples(model, seed=1, rows=5, length=6, batch=2, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[0] == pytest.approx(2 / 5 / 5)
    assert seen[-1] == 1.0


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(tmp_path: Path, broken: float) -> None:
    """Sampling from them would give arbitrary tokens."""
    import torch

    fixed = models.load_model(models.fixed_gpt2(tmp_path, [0.0, 1.0]))
    with torch.no_grad():
        fixed.lm_head.weight[0, 0] = broken
    with pytest.raises(CheckpointError, match="NaN or infinite after 1 tokens"):
        write_samples(fixed, seed=0, rows=2, length=4)


# Windows and the draw.


def test_documents_are_cut_and_short_ends_are_left_out() -> None:
    def cut(count: int, *, length: int = 10) -> list[int]:
        found = list(windows([list(range(count))], length))
        assert [token for window in found for token in window] == list(range(sum(map(len, found))))
        return [len(window) for window in found]

    assert [cut(n) for n in (0, 7, 8, 10, 17, 18, 30)] == [[], [], [8], [10], [10], [10, 8], [10, 10, 10]]
    assert [cut(n, length=4) for n in (3, 4, 7)] == [[], [4], [4]]
    parts = [list(range(3)), [], list(range(3, 25)), list(range(25, 29))]
    assert list(windows(parts, 10)) == list(windows([list(range(29))], 10))


def test_every_item_of_a_stream_has_the_same_chance() -> None:
    """4 of 20, 5,000 times: each about 1,000 times, within five standard deviations; order is the stream's."""
    counts = np.zeros(20)
    for seed in range(5000):
        drawn = reservoir(iter(range(20)), 4, np.random.default_rng(seed))
        assert drawn == sorted(set(drawn))
        counts[drawn] += 1
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(5000 * 0.2 * 0.8)


def test_the_draw_holds_no_more_than_it_keeps() -> None:
    """A stream of 800 MB, were it held."""

    def stream() -> Iterator[bytearray]:
        for _ in range(100_000):
            yield bytearray(8192)

    tracemalloc.start()
    try:
        assert len(reservoir(stream(), 16, np.random.default_rng(0))) == 16
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_data(reader: Reader, tmp_path: Path) -> None:
    """Twenty times the documents, the same peak."""
    peaks = []
    for count in (1_000, 20_000):
        data = tmp_path / f"{count}.jsonl"
        with data.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": f"document number {n:06}"}) + "\n" for n in range(count))
        read_samples(data, reader, seed=0, rows=8)  # what is loaded once
        tracemalloc.start()
        try:
            read_samples(data, reader, seed=0, rows=8)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.2 + 100_000


def test_the_same_seed_draws_the_same_rows(reader: Reader, tmp_path: Path) -> None:
    """Another one others; in the order of the data."""
    data = lines(tmp_path / "a.jsonl", *({"text": f"text number {n:03}"} for n in range(100)))
    first, again, other = (read_samples(data, reader, seed=seed, rows=10) for seed in (1, 1, 2))
    assert first.sha256 == again.sha256 != other.sha256
    assert lists(first) == sorted(lists(first))
    assert (first.asked, first.length, first.seed, first.source) == (10, 128, 1, "a.jsonl")
    assert all(bytes(token - 3 for token in row[1:]).startswith(b"text number ") for row in lists(first))


# What the model reads.


def test_a_text_begins_with_one_beginning_of_text_token(reader: Reader, tmp_path: Path) -> None:
    """Whether or not the text spells it; later windows of the text have none."""
    texts = ["one text of some length", "<s>another text of some length"]
    data = lines(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    ids = [[models.BOS, *models.byte_ids(text.removeprefix("<s>"))] for text in texts]
    assert lists(read_samples(data, reader, seed=0)) == ids
    cut = read_samples(data, reader, seed=0, length=12)
    assert lists(cut) == [row[at : at + 12] for row in ids for at in (0, 12)] + [ids[1][24:]] * (len(ids[1]) >= 32)
    none = Reader(reader.folder, None, reader.vocab_size, reader.capacity)
    assert lists(read_samples(lines(tmp_path / "b.jsonl", {"text": texts[0]}), none, seed=0)) == [ids[0][1:]]


def test_a_conversation_is_read_through_the_chat_template_once(reader: Reader, tmp_path: Path) -> None:
    """Its beginning-of-text token stands once, though the tokenizer would add one and the model has one; transformers'
    own ids are the same. The assistant's turn is not opened again."""
    from transformers import AutoTokenizer

    found = read_samples(lines(tmp_path / "a.jsonl", {"messages": TALK}), reader, seed=0)
    assert lists(found) == [[models.BOS, *models.byte_ids(TALK_TEXT)]]
    tokenizer = AutoTokenizer.from_pretrained(reader.folder)
    assert lists(found) == [tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=False)]


def test_a_conversation_begins_as_its_template_says(reader: Reader, tmp_path: Path) -> None:
    """A template without the beginning-of-text token: so the model was trained, and so it is run."""
    folder = models.byte_tokenizer(tmp_path / "tokenizer", chat_template=TEMPLATE.removeprefix("{{ bos_token }}"))
    bare = Reader(folder, models.BOS, 320, 128)
    found = read_samples(lines(tmp_path / "a.jsonl", {"messages": TALK}), bare, seed=0)
    assert lists(found) == [models.byte_ids(TALK_TEXT)]


def test_a_long_document_is_read_in_pieces(reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids are those of the whole: pieces part before a space; one word longer than a piece is cut."""
    monkeypatch.setattr(documents, "PIECE", 10)
    monkeypatch.setattr("adx.calibration.data_files.PIECE", 10)
    text = "some words and then\none_that_is_much_longer_than_a_piece and the end öäü of it all"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for data in (tmp_path / "a.txt", lines(tmp_path / "b.jsonl", {"text": text})):
        assert lists(read_samples(data, reader, seed=0)) == [[models.BOS, *models.byte_ids(text)]]
    assert "".join(documents.pieces_of(text)) == text
    assert max(map(len, documents.pieces_of(text))) == 10


def test_lengths_default_to_what_a_sequence_holds(reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 299, encoding="utf-8")
    small = Reader(reader.folder, models.BOS, 320, 40)
    assert [len(row) for row in read_samples(tmp_path / "a.txt", small, seed=0).rows] == [40] * 7 + [20]
    found = read_samples(tmp_path / "a.txt", reader, seed=0)
    assert [len(row) for row in found.rows] == [128, 128, 44]
    assert found.summary() == "calibration: 3 of 128 samples (300 tokens) from a.txt"
    with pytest.raises(UsageError, match="2 or more"):
        read_samples(tmp_path / "a.txt", reader, seed=0, length=1)


# Saved samples as data.


def test_saved_samples_give_the_same_run(reader: Reader, tmp_path: Path) -> None:
    """Other seeds and other tokenizers change nothing; fewer or shorter ones are drawn from them if asked for."""
    data = lines(tmp_path / "a.jsonl", *({"text": f"text number {n:03}, a little longer"} for n in range(20)), {"a": 1})
    first = read_samples(data, reader, seed=1, rows=10)
    saved = lines(tmp_path / "calibration.json", first.to_dict())
    again = read_samples(saved, reader, seed=2)
    assert again.to_dict() == first.to_dict()
    assert again.skipped == {documents.NO_TEXT: 1}
    assert read_samples(saved, reader, seed=2, rows=20).summary().startswith("calibration: 10 of 20 samples")
    fewer = read_samples(saved, reader, seed=2, rows=4)
    assert len(fewer.rows) == 4
    assert all(row in lists(first) for row in lists(fewer))
    small = Reader(reader.folder, models.BOS, 320, 20)
    for halves in (read_samples(saved, reader, seed=2, length=20), read_samples(saved, small, seed=2)):
        parts = [row[at : at + 20] for row in lists(first) for at in (0, 20)]
        assert len(halves.rows) == 10
        assert all(row in parts for row in lists(halves))
    with pytest.raises(UsageError, match="vocabulary ends at 63"):
        read_samples(saved, Reader(reader.folder, 1, 64, 128), seed=0)


# What cannot be used.


def skips(reader: Reader, data: Path) -> dict[str, int]:
    return dict(read_samples(data, reader, seed=0).skipped)


GOOD = b'{"text": "a text that is long enough"}\n'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": ""}', documents.EMPTY),
        (b'{"text": " \\n"}', documents.EMPTY),
        (b'{"messages": []}', documents.EMPTY),
        (b'{"messages": [{"role": "user", "content": " "}]}', documents.EMPTY),
        (b"not json", documents.NOT_JSON),
        (b'{"text": "cut', documents.NOT_JSON),
        (b"[" * 100_000, documents.NOT_JSON),
        (b"{}", documents.NO_TEXT),
        (b'{"prompt": "a text that is long enough", "text": null}', documents.NO_TEXT),
        (b'{"text": 5}', documents.WRONG_TYPE),
        (b'"a text that is long enough"', documents.WRONG_TYPE),
        (b'["a text that is long enough"]', documents.WRONG_TYPE),
        (b'{"messages": "a text that is long enough"}', documents.WRONG_TYPE),
        (b'{"messages": ["a text that is long enough"]}', documents.WRONG_TYPE),
        (b'{"messages": [{"content": "a text that is long enough"}]}', documents.WRONG_TYPE),
        (b'{"messages": [{"role": "user"}]}', documents.WRONG_TYPE),
        (b'{"messages": [{"role": "user", "content": ["a", "b"]}]}', documents.WRONG_TYPE),
        (b'{"text": "a text that is long \xff enough"}', documents.NOT_UTF8),
        (b'{"text": "a text that is long \\ud800 enough"}', documents.SURROGATE),
        (b'{"messages": [{"role": "user", "content": "long \\udfff enough"}]}', documents.SURROGATE),
        (b'{"text": "short!"}', sources.SHORT),
        (b'{"messages": [{"role": "poet", "content": "a text that is long enough"}]}', sources.TEMPLATE),
    ],
)
def test_a_bad_line_is_skipped_and_counted(reader: Reader, tmp_path: Path, line: bytes, reason: str) -> None:
    """Those around it are read; alone it is an error that says why, where, and what is accepted."""
    data = tmp_path / "a.jsonl"
    data.write_bytes(GOOD + line + b"\n\n" + line + b"\n" + GOOD)
    found = read_samples(data, reader, seed=0)
    assert found.skipped == {reason: 2}
    assert lists(found) == [[models.BOS, *models.byte_ids("a text that is long enough")]] * 2
    data.write_bytes(line + b"\n" + line)
    with pytest.raises(UsageError) as caught:
        read_samples(data, reader, seed=0)
    said = str(caught.value)
    assert "a.jsonl: no sample can be used; skipped 2: " in said
    assert f"2 {reason} (first: a.jsonl, line 1)" in said
    assert "accepted are .txt" in said


def test_tokens_that_the_model_lacks_are_not_read(reader: Reader, tmp_path: Path) -> None:
    small = Reader(reader.folder, models.BOS, 3 + ord("x"), 128)
    data = lines(tmp_path / "a.jsonl", {"text": "all of it is known"}, {"text": "all of it but the x is known"})
    assert skips(small, data) == {sources.VOCABULARY: 1}


def test_a_folder_is_counted_with_what_it_holds_besides(reader: Reader, tmp_path: Path) -> None:
    """Text, lines and a picture; the bundle's record names the folder, not where it lies."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("a text that is long enough", encoding="utf-8")
    lines(folder / "b.jsonl", {"messages": TALK}, {"text": ""})
    (folder / "c.png").write_bytes(b"no")
    found = read_samples(folder, reader, seed=0)
    assert len(found.rows) == 2
    assert found.summary().endswith("from data; skipped 2: 1 empty, 1 of type .png")
    assert str(tmp_path) not in json.dumps(found.to_dict())


def test_messages_need_a_chat_template(reader: Reader, tmp_path: Path) -> None:
    bare = Reader(models.byte_tokenizer(tmp_path / "tokenizer"), models.BOS, 320, 128)
    data = lines(tmp_path / "a.jsonl", {"messages": TALK}, {"text": "a text that is long enough"})
    assert skips(bare, data) == {sources.NO_TEMPLATE: 1}


def test_a_tokenizer_that_fails_is_a_reason(reader: Reader, tmp_path: Path) -> None:
    """A word-level tokenizer without an unknown token has nothing for other words."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    tokenizer = Tokenizer(kinds.WordLevel({"a": 0, "b": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "words"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    data = lines(tmp_path / "a.jsonl", {"text": "a b " * 8}, {"text": "a b " * 8 + "c"})
    found = read_samples(data, Reader(folder, None, 2, 128), seed=0)
    assert (found.skipped, lists(found)) == ({sources.TOKENIZER: 1}, [[0, 1] * 8])


def test_a_folder_without_a_usable_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text that is long enough")
    with pytest.raises(UsageError, match=r"a\.txt: the model has no tokenizer\.json.*leave --calib-data out"):
        read_samples(tmp_path / "a.txt", Reader(tmp_path, 1, 320, 128), seed=0)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="the model's tokenizer cannot be loaded"):
        read_samples(tmp_path / "a.txt", Reader(tmp_path, 1, 320, 128), seed=0)
