"""Calibration samples: the user's text, or text that the model writes itself from a seed; never random numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.export.checkpoint_load import cache_argument
from adx.export.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS, LENGTH = 8, 64
DATA_ROWS, DATA_LENGTH = 32, 128  # of the user's own data, which costs no sampling
SUFFIXES = (".txt", ".jsonl")


@dataclass(frozen=True)
class CalibrationSamples:
    """Token rows that activations are measured on.

    Attributes:
        source: where they come from, in words.
        seed: what they were drawn with, or None where nothing was drawn.
        tokens: (rows, length) int64.
    """

    source: str
    seed: int | None
    tokens: NDArray[np.int64]

    def windows(self) -> Iterator[NDArray[np.int64]]:
        """Every row, and its second half alone: texts need not begin as rows do, and a text's first token is where
        the largest activations are."""
        for row in self.tokens:
            yield row
            yield row[len(row) // 2 :]

    @property
    def sha256(self) -> str:
        """Over the token ids as little-endian 64-bit integers."""
        return hashlib.sha256(np.ascontiguousarray(self.tokens, "<i8").tobytes()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"source": self.source, "seed": self.seed, "sha256": self.sha256, "tokens": self.tokens.tolist()}


def write_samples(
    model: PreTrainedModel,
    *,
    seed: int,
    rows: int = ROWS,
    length: int = LENGTH,
    progress: Callable[[float], None] = lambda fraction: None,
) -> CalibrationSamples:
    """Let the model continue its beginning-of-text token (else its first token) by plain sampling at temperature 1.

    An end-of-text token does not end a row: what follows it is another text.
    """
    import torch
    from transformers import DynamicCache

    config = model.config.get_text_config()
    bos = config.bos_token_id
    start = int(bos) if isinstance(bos, int) and 0 <= bos < config.vocab_size else 0
    length = min(length, int(config.max_position_embeddings) - 1)
    random = torch.Generator().manual_seed(seed)
    tokens = torch.full((rows, 1), start)
    caller: Any = model
    argument = cache_argument(model)
    cache = DynamicCache(config=config)  # grows in place
    with torch.inference_mode():
        for step in range(length):
            progress(step / length)
            out = caller(input_ids=tokens[:, -1:], use_cache=True, **{argument: cache})
            chances = torch.softmax(out.logits[:, -1].float(), -1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=random)], 1)
    return CalibrationSamples("written by the model itself", seed, tokens.numpy())


def read_samples(
    path: Path, tokenizer: Path, *, bos: int | None, rows: int = DATA_ROWS, length: int = DATA_LENGTH
) -> CalibrationSamples:
    """Cut a text into windows of tokens, from its start.

    Args:
        path: `.txt`, or `.jsonl` with the key `text` in every line.
        tokenizer: the model's `tokenizer.json`.
        bos: token that begins every window, or None.
        rows: windows at most.
        length: tokens of a window, `bos` counted.

    Raises:
        UsageError: the file cannot be read, or its text is too short for one window.
    """
    from tokenizers import Tokenizer

    text = "\n\n".join(_texts(path))
    ids = Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False).ids
    start = [] if bos is None else [bos]
    width = length - len(start)
    if width < 1:
        raise UsageError(f"samples of {length} tokens: the first is the beginning-of-text token, so take 2 or more")
    count = min(rows, len(ids) // width)
    if count < 1:
        raise UsageError(
            f"calibration data {path}: its text makes {len(ids)} tokens, and one sample takes {width}: give more text, "
            "or a smaller --calib-seq-len"
        )
    tokens = np.array([start + ids[row * width : (row + 1) * width] for row in range(count)], np.int64)
    return CalibrationSamples(path.name, None, tokens)


def check_data(path: Path) -> None:
    """Whether a file can be read as calibration data.

    Raises:
        UsageError: it is no `.txt` or `.jsonl`, or does not hold what these hold.
    """
    for _ in _texts(path):
        pass


def _texts(path: Path) -> Iterator[str]:
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"calibration data {path}: accepted are files that end in {' or '.join(SUFFIXES)}")
    if not path.is_file():
        raise UsageError(f"calibration data {path} is no file")
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"calibration data {path} cannot be read as UTF-8 text: {error}") from error
    if path.suffix.lower() == ".txt":
        yield content
        return
    for number, line in enumerate(content.split("\n"), 1):  # other line separators may stand inside a string
        if line.strip():
            yield _text_of(line, f"{path}, line {number}")


def _text_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"calibration data {where}: not JSON: {error}") from error
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise UsageError(f'calibration data {where}: an object with a string under "text" is expected')
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(f"calibration data {where}: half of a surrogate pair, which is no character")
    return text
