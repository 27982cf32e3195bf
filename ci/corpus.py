"""Token ids to measure on: English prose that ships with adx, or random ids for a model without a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from adx.export.errors import CheckpointError

Tokens = NDArray[np.int64]
_RANDOM_IDS = 4096


@dataclass(frozen=True)
class Corpus:
    """Token ids, read in rows.

    Attributes:
        tokens: (N,) ids, without special tokens.
        prefix: special tokens that the tokenizer puts before a text, as BOS.
        source: what the ids are.
    """

    tokens: Tokens
    prefix: tuple[int, ...] = ()
    source: Literal["text", "random ids"] = "text"

    def row(self, start: int, length: int) -> Tokens:
        """(length,) ids: the prefix, then the corpus from `start` on; behind its end it starts over."""
        body = np.arange(start, start + max(0, length - len(self.prefix))) % len(self.tokens)
        return np.concatenate([np.array(self.prefix, np.int64), self.tokens[body]])[:length]


def corpus_text() -> str:
    """The prose: about 2,500 words of narrative, letters, explanation, dialogue and a little code."""
    return files(__package__).joinpath("corpus.txt").read_text(encoding="utf-8")


def load_corpus(vocab_size: int, tokenizer_file: Path | None = None) -> Corpus:
    """Token ids for a model of `vocab_size` tokens.

    Args:
        vocab_size: width of the model's logits.
        tokenizer_file: its tokenizer.json. Where it is None, or missing, or gives ids that the model lacks (it is not
            this model's then), the ids are random, the same every time.

    Raises:
        CheckpointError: the file is no tokenizer.
    """
    if tokenizer_file is not None and tokenizer_file.is_file():
        corpus = encode_text(tokenizer_file, corpus_text())
        if len(corpus.tokens) and max(int(corpus.tokens.max()), *corpus.prefix, 0) < vocab_size:
            return corpus
    return Corpus(np.random.default_rng(0).integers(vocab_size, size=_RANDOM_IDS), source="random ids")


def encode_text(path: Path, text: str) -> Corpus:
    """A text's ids by the tokenizer.json at `path`, and what this tokenizer puts before every text.

    Raises:
        CheckpointError: the file is no tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path.name} is not a tokenizer that `tokenizers` reads: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    framed = tokenizer.encode("a").ids
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    count = next((at for at in range(len(framed)) if framed[at : at + len(bare)] == bare), 0)
    return Corpus(np.array(plain, np.int64), tuple(framed[:count]))
