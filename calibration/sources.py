"""The user's documents as calibration samples: encoded as the model reads them, cut into windows, drawn by a seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from adx.calibration.data_files import ACCEPTED, read_documents
from adx.calibration.documents import SURROGATE, Conversation, Document, Skipped, Text, pieces_of
from adx.calibration.samples import CalibrationSamples, load_samples, skipped_in_words
from adx.export.checkpoint_load import quiet_transformers
from adx.export.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATA_ROWS, DATA_LENGTH = 128, 128
LEAST = 8  # tokens of a window at the end of a document; fewer say little, and are left out

NO_TEMPLATE = "with messages, for which the model has no chat template"
TEMPLATE = "refused by the chat template"
TOKENIZER = "refused by the tokenizer"
VOCABULARY = "with tokens that the model's vocabulary lacks"
SHORT = "too short"

Item = TypeVar("Item")


@dataclass(frozen=True)
class Reader:
    """How a model reads text.

    Attributes:
        folder: holds tokenizer.json, tokenizer_config.json and perhaps a chat template.
        bos: token that begins every text, or None. What begins a conversation is the chat template's own choice.
        vocab_size: width of the model's logits.
        capacity: tokens of a sequence at most.
    """

    folder: Path
    bos: int | None
    vocab_size: int
    capacity: int


def read_samples(
    path: Path, reader: Reader, *, seed: int, rows: int | None = None, length: int | None = None
) -> CalibrationSamples:
    """Draw windows of tokens uniformly from all those that a file or a folder has.

    A document is cut into windows from its start; the last one is kept from `LEAST` tokens on. Memory depends on the
    samples that are drawn and on the longest document, not on how much data there is.

    Args:
        path: what `data_files.read_documents` reads, or a `reports/calibration.json` of a bundle, whose rows are taken
            as they are unless fewer or shorter ones are asked for, or a sequence holds less.
        seed: of the draw.
        rows: windows at most; None: `DATA_ROWS`.
        length: tokens of a window; None: `DATA_LENGTH`, or what a sequence holds.

    Raises:
        UsageError: the data cannot be read, or no sample of it can be used.
    """
    longest = min(DATA_LENGTH, reader.capacity) if length is None else length
    if longest < 2:
        raise UsageError(f"samples of {longest} tokens: the first is the beginning-of-text token, so take 2 or more")
    saved = load_samples(path, reader.vocab_size)
    if saved is not None:
        return _redrawn(saved, seed, rows, reader.capacity if length is None else length)
    tally = _Tally()
    encoder = _Encoder.open(path, reader)
    with quiet_transformers():  # a warning for each long document
        found = chain.from_iterable(_windows_of(document, encoder, longest, tally) for document in read_documents(path))
        asked = rows or DATA_ROWS
        drawn = reservoir(found, asked, np.random.default_rng(seed))
    if not drawn:
        raise UsageError(f"calibration data {path}: no sample can be used; {tally.in_words()}; accepted are {ACCEPTED}")
    tokens = tuple(np.array(ids, np.int64) for ids in drawn)
    return CalibrationSamples(path.name, seed, tokens, tally.counts, asked, longest)


def reservoir(items: Iterable[Item], size: int, random: np.random.Generator) -> list[Item]:
    """At most `size` items of a stream in its order, each with the same chance; no more than these are held.

    Vitter, "Random Sampling with a Reservoir" (1985), algorithm R.
    """
    held: list[tuple[int, Item]] = []
    for at, item in enumerate(items):
        if at < size:
            held.append((at, item))
        elif (place := int(random.integers(at + 1))) < size:
            held[place] = (at, item)
    return [item for _, item in sorted(held, key=lambda pair: pair[0])]


def windows(pieces: Iterable[Sequence[int]], length: int, least: int = LEAST) -> Iterator[list[int]]:
    """Cut a document's ids, which come in pieces, into windows of `length`; the last one may be as short as `least`."""
    rest: list[int] = []
    for piece in pieces:
        rest.extend(piece)
        whole = len(rest) - len(rest) % length
        yield from (rest[start : start + length] for start in range(0, whole, length))
        rest = rest[whole:]
    if len(rest) >= min(least, length):
        yield rest


def _redrawn(saved: CalibrationSamples, seed: int, rows: int | None, length: int) -> CalibrationSamples:
    """Saved samples, cut and drawn anew where they are longer or more than asked for."""
    wanted = rows or len(saved.rows)
    if len(saved.rows) <= wanted and all(len(row) <= length for row in saved.rows):
        return saved if rows is None else replace(saved, asked=rows)
    parts = chain.from_iterable(windows([row.tolist()], length) for row in saved.rows)
    drawn = reservoir(parts, wanted, np.random.default_rng(seed))
    tokens = tuple(np.array(ids, np.int64) for ids in drawn)
    return replace(saved, rows=tokens, seed=seed, asked=wanted, length=length)


class _Tally:
    """What was skipped: how often for each reason, and where first."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def add(self, where: str, reason: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self._first.setdefault(reason, where)

    def in_words(self) -> str:
        """For people; each reason with its first place."""
        return skipped_in_words({f"{reason} (first: {self._first[reason]})": n for reason, n in self.counts.items()})


def _windows_of(document: Document, encoder: _Encoder, length: int, tally: _Tally) -> Iterator[list[int]]:
    """Windows of a document; where it gives none, or is given up, the tally says why."""
    if isinstance(document, Skipped):
        tally.add(document.where, document.reason)
        return
    empty = True
    try:
        for window in windows(encoder.ids(document), length):
            empty = False
            yield window
    except _UnusableError as error:
        tally.add(document.where, error.reason)
        return
    if empty:
        tally.add(document.where, SHORT)


class _UnusableError(Exception):
    """A document that the model cannot read."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Encoder:
    """A model's tokenizer with its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reader: Reader) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._reader = reader

    @classmethod
    def open(cls, path: Path, reader: Reader) -> _Encoder:
        """The tokenizer of the reader's folder; `path` is the data, for messages."""
        from transformers import AutoTokenizer

        if not (reader.folder / "tokenizer.json").is_file():
            raise UsageError(
                f"calibration data {path}: the model has no tokenizer.json to read it with; leave --calib-data out, "
                "and the model writes the calibration text itself"
            )
        try:
            with quiet_transformers():
                return cls(AutoTokenizer.from_pretrained(reader.folder, local_files_only=True), reader)
        except Exception as error:  # transformers and tokenizers raise whatever they meet
            raise UsageError(f"calibration data {path}: the model's tokenizer cannot be loaded: {error}") from error

    def ids(self, document: Text | Conversation) -> Iterator[list[int]]:
        """A document's token ids, piece by piece.

        Raises:
            _UnusableError: the model cannot read it.
        """
        plain = isinstance(document, Text)
        pieces = document.pieces if isinstance(document, Text) else pieces_of(self._rendered(document))
        for number, piece in enumerate(pieces):
            try:
                ids: list[int] = self._backend.encode(piece, add_special_tokens=False).ids
            except UnicodeEncodeError as error:
                raise _UnusableError(SURROGATE) from error
            except Exception as error:  # tokenizers raises bare Exception
                raise _UnusableError(TOKENIZER) from error
            if ids and max(ids) >= self._reader.vocab_size:
                raise _UnusableError(VOCABULARY)
            bos = self._reader.bos
            yield ids if number or not plain or bos is None or ids[:1] == [bos] else [bos, *ids]

    def _rendered(self, document: Conversation) -> str:
        if not self._tokenizer.chat_template:
            raise _UnusableError(NO_TEMPLATE)
        try:
            messages = [dict(message) for message in document.messages]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        except Exception as error:  # a template is a program, and fails as one
            raise _UnusableError(TEMPLATE) from error
        return str(text)
