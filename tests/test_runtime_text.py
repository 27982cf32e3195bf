"""Encoding, decoding and streaming against transformers' tokenizers."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from models import BOS, byte_ids, byte_tokenizer, metaspace_tokenizer

from adx.export.errors import BundleError, UsageError
from adx.runtime.stream import RowText, StopMatcher, StreamDecoder
from adx.runtime.text import TextCodec

MIXED = "ab é 🙂 日本"


def hugging_face(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def cleaning_tokenizer(folder: Path) -> Path:
    """A word tokenizer whose decoding removes spaces before punctuation."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", "a", "do", "n", "'", "t", "n't", ".", ",", "!", "?", "'m", "'s", "'ve", "'re", "b", "I"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "bytes": byte_tokenizer(root / "bytes"),
        "merged": byte_tokenizer(root / "merged", merges=[("D", "E"), ("a", "b")], add_bos=True),
        "metaspace": metaspace_tokenizer(root / "metaspace", add_bos=True),
        "cleaning": cleaning_tokenizer(root / "cleaning"),
    }


KINDS = ["bytes", "merged", "metaspace", "cleaning"]


def pieces(codec: TextCodec, ids: Sequence[int], **keys: Any) -> list[str]:
    decoder = StreamDecoder(codec, **keys)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["ab DE", " hello  big world", MIXED, "<s>typed</s> mark", "\n\t x", "a . do n't !"])
def test_encoding_and_decoding_equal_transformers(folders: dict[str, Path], kind: str, text: str) -> None:
    codec, reference = TextCodec.open(folders[kind]), hugging_face(folders[kind])
    ids = reference(text).input_ids
    assert codec.encode(text) == ids
    for skip in (True, False):
        assert codec.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


def test_one_beginning_of_text_token_where_the_tokenizer_adds_it(folders: dict[str, Path]) -> None:
    assert TextCodec.open(folders["merged"]).encode("x").count(BOS) == 1
    assert TextCodec.open(folders["bytes"]).encode("x").count(BOS) == 0


def test_empty_text_is_the_beginning_of_text_token(tmp_path: Path, folders: dict[str, Path]) -> None:
    for kind in ("bytes", "merged", "metaspace"):
        assert TextCodec.open(folders[kind]).encode("") == [BOS]
    folder = byte_tokenizer(tmp_path, bos=False)
    with pytest.raises(UsageError, match="no beginning-of-text token"):
        TextCodec.open(folder).encode("")
    assert TextCodec.open(folder, bos=7).encode("") == [7]


def test_padding_and_truncation_saved_with_a_tokenizer_do_not_touch_prompts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert TextCodec.open(folder).encode("abcdefgh") == byte_ids("abcdefgh")


def test_special_token_named_in_the_configuration_alone_is_special(tmp_path: Path) -> None:
    folder = byte_tokenizer(tmp_path, merges=[("D", "E")], sep_token="DE")
    codec, reference = TextCodec.open(folder), hugging_face(folder)
    for skip in (True, False):
        assert codec.decode([*byte_ids("a"), 259], skip_special_tokens=skip) == reference.decode(
            [*byte_ids("a"), 259], skip_special_tokens=skip
        )
    assert codec.decode([*byte_ids("a"), 259]) == "a"


@pytest.mark.parametrize("kind", KINDS)
def test_ids_beyond_the_tokenizer_give_no_text(folders: dict[str, Path], kind: str) -> None:
    codec = TextCodec.open(folders[kind])
    ids = codec.encode("a b")
    unknown = [ids[0], 5000, *ids[1:], 100_000]
    assert codec.decode(unknown) == codec.decode(ids)
    assert "".join(pieces(codec, unknown)) == codec.decode(ids)


def test_broken_or_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"no tokenizer\.json"):
        TextCodec.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json cannot be read"):
        TextCodec.open(tmp_path)


# Streaming


def test_no_piece_has_a_broken_character(folders: dict[str, Path]) -> None:
    codec = TextCodec.open(folders["bytes"])
    got = pieces(codec, byte_ids(MIXED))
    assert "".join(got) == MIXED
    assert not any("\ufffd" in piece for piece in got)
    assert [piece for piece in got if piece] == list(MIXED), "each character comes with its last byte"


def test_text_cut_inside_a_character_is_flushed_once(folders: dict[str, Path]) -> None:
    for kind in ("bytes", "metaspace"):
        codec, reference = TextCodec.open(folders[kind]), hugging_face(folders[kind])
        ids = [3 + byte for byte in "é🙂".encode()][:4]
        got = pieces(codec, ids)
        assert "".join(got) == reference.decode(ids)
        assert not any("\ufffd" in piece for piece in got[:-1])


def test_sentencepiece_spaces_are_kept(folders: dict[str, Path]) -> None:
    codec = TextCodec.open(folders["metaspace"])
    ids = codec.encode("hello big world")
    got = pieces(codec, ids)
    assert [piece for piece in got if piece] == ["hello", " big", " world"]


def test_space_after_a_skipped_special_token_is_kept(folders: dict[str, Path]) -> None:
    codec = TextCodec.open(folders["metaspace"])
    hello, big = codec.encode("hello big")[1:]
    ids = [hello, 2, 2, 2, big, 2, hello]
    assert "".join(pieces(codec, ids)) == codec.decode(ids) == "hello big hello"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_of_any_tokens_join_to_the_decoded_whole(folders: dict[str, Path], kind: str, skip: bool) -> None:
    """Random ids: invalid bytes, special tokens anywhere, unknown ids, runs of anything, every cut."""
    codec, reference = TextCodec.open(folders[kind]), hugging_face(folders[kind])
    size = len(reference)
    rng = random.Random(0)
    for _ in range(150):
        ids: list[int] = []
        while len(ids) < 40:
            some = rng.choice([[rng.randrange(size + 5)], byte_ids(rng.choice("aé🙂日 ")), [rng.randrange(size)] * 3])
            ids += [token for token in some if kind != "cleaning" or token < size + 5]
        ids = ids[: rng.randrange(41)]
        whole = reference.decode([token for token in ids if token < size], skip_special_tokens=skip)
        assert codec.decode(ids, skip_special_tokens=skip) == whole
        assert "".join(pieces(codec, ids, skip_special_tokens=skip)) == whole, ids


def test_cleaned_text_streams_before_the_end(folders: dict[str, Path]) -> None:
    codec = TextCodec.open(folders["cleaning"])
    ids = codec.encode("a do n ' t a . I 'm a b , a b ! do n't a b")
    got = pieces(codec, ids)
    assert "".join(got) == codec.decode(ids) == "a don't a. I'm a b, a b! don't a b"
    assert len("".join(got[:-1])) > 15


@pytest.mark.parametrize("token", [3 + ord("a"), 3 + 0x80])
def test_cost_of_a_token_does_not_grow_with_the_text(folders: dict[str, Path], token: int) -> None:
    """4,000 letters, and 4,000 bytes that never make a character: 16 times 250 takes about 16 times as long."""
    codec = TextCodec.open(folders["bytes"])

    def seconds(count: int) -> float:
        start = time.perf_counter()
        pieces(codec, [token] * count)
        return time.perf_counter() - start

    seconds(100)
    assert min(seconds(4000) for _ in range(3)) < 60 * min(seconds(250) for _ in range(3))


# Stop strings


@pytest.mark.parametrize(
    ("script", "stop", "expected", "stopped"),
    [
        ("ABCDE", ["BCD"], "A", True),
        ("ABCDE", ["BCX"], "ABCDE", False),
        ("ABC", ["BCX"], "ABC", False),
        ("ABCDE", ["E"], "ABCD", True),
        ("ABCDE", ["XY", "D", "BC"], "A", True),
        ("ABABC", ["ABC"], "AB", True),
        ("AAAB", ["AAB"], "A", True),
        ("ABCDE", [], "ABCDE", False),
        ("x🙂y", ["🙂"], "x", True),
    ],
)
@pytest.mark.parametrize("kind", ["bytes", "merged"])
def test_text_is_cut_at_the_first_stop_string(
    folders: dict[str, Path], kind: str, script: str, stop: list[str], expected: str, stopped: bool
) -> None:
    """One token per byte, and with D and E in one token, where text stands before the stop string in its token."""
    codec = TextCodec.open(folders[kind])
    row = RowText(codec, stop=stop)
    shown = ""
    for token in codec.encode(script):
        shown += row.push(token)
        assert expected.startswith(shown), "text that a stop string removes was shown"
        if row.stopped:
            break
    assert shown + row.flush() == expected
    assert row.stopped is stopped


def test_text_held_back_is_no_longer_than_it_must_be() -> None:
    matcher = StopMatcher(["BCD"])
    assert [matcher.push(char) for char in "ABXBBC"] == ["A", "", "BX", "", "B", ""]
    assert matcher.flush() == "BC"


def test_stop_string_that_the_last_flush_completes(folders: dict[str, Path]) -> None:
    codec = TextCodec.open(folders["metaspace"])
    row = RowText(codec, stop=["é"])
    shown = "".join(row.push(3 + byte) for byte in "aé".encode())
    assert shown + row.flush() == "a"
    assert row.stopped
