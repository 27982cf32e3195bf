"""Calibration samples: rows of token ids that activations are measured on, kept so that the run can be repeated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.export.checkpoint_load import cache_argument
from adx.export.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Tokens = NDArray[np.int64]

ROWS, LENGTH = 64, 128  # that the model writes: a minute of one core's time for SmolLM2-135M
BATCH = 32
TEMPERATURES = (0.6, 0.8, 1.0, 1.2)
FORMAT = "adx-calibration-1"
_HEAD = 4096  # bytes of a file within which FORMAT stands


@dataclass(frozen=True, eq=False)
class CalibrationSamples:
    """Token rows that activations are measured on.

    Attributes:
        source: where they come from, in words.
        seed: what they were drawn with, or None where nothing was drawn.
        rows: token ids, (length,) int64 each; lengths may differ.
        skipped: how many samples of the data were not used, by reason.
        asked: how many rows were asked for; None: all there are.
        length: tokens of a row at most.
        temperatures: what rows were sampled at in turn, row 0 at the first; empty: the model did not write them.
    """

    source: str
    seed: int | None
    rows: tuple[Tokens, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)
    asked: int | None = None
    length: int | None = None
    temperatures: tuple[float, ...] = ()

    def windows(self) -> Iterator[Tokens]:
        """Every row, and its second half alone: texts need not begin as rows do, and a text's first token is where
        the largest activations are."""
        for row in self.rows:
            yield row
            yield row[len(row) // 2 :]

    @property
    def token_count(self) -> int:
        """How many tokens the rows have."""
        return sum(len(row) for row in self.rows)

    @property
    def sha256(self) -> str:
        """Over the rows in order: each its length, then its ids, as little-endian 64-bit integers."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(np.array([len(row)], "<i8").tobytes())
            digest.update(row.astype("<i8").tobytes())
        return digest.hexdigest()

    def split(self, held: float) -> tuple[CalibrationSamples, CalibrationSamples]:
        """Two parts without a common row, drawn by the samples' seed: the larger rest, and what is held out.

        Args:
            held: part of the rows, above 0 and below 1, that is held out; at least one row, and one stays.

        Raises:
            UsageError: there are fewer than two rows.
        """
        count = len(self.rows)
        if not 0 < held < 1:
            raise ValueError(f"a part to hold out lies between 0 and 1, not {held}")
        if count < 2:
            raise UsageError(f"calibration needs two samples, one to measure with, and {self.source} gave {count}")
        out = set(
            np.random.default_rng(self.seed or 0).permutation(count)[: min(max(1, round(held * count)), count - 1)]
        )
        parts = [[row for at, row in enumerate(self.rows) if (at in out) == wanted] for wanted in (False, True)]
        kept, apart = (replace(self, rows=tuple(part)) for part in parts)
        return kept, replace(apart, source=f"{self.source} (held out)")

    def summary(self) -> str:
        """One line for people: how many samples there are, of what, and what was skipped."""
        few = self.asked is not None and len(self.rows) < self.asked
        count = f"{len(self.rows)} of {self.asked}" if few else str(len(self.rows))
        line = f"calibration: {count} sample{'' if count == '1' else 's'} ({self.token_count:,} tokens)"
        line += f" {self.source}" if self.temperatures else f" from {self.source}"
        return line + (f"; {skipped_in_words(self.skipped)}" if self.skipped else "")

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it."""
        return {
            "format": FORMAT,
            "source": self.source,
            "seed": self.seed,
            "asked": self.asked,
            "length": self.length,
            "temperatures": list(self.temperatures),
            "skipped": dict(self.skipped),
            "sha256": self.sha256,
            "rows": [row.tolist() for row in self.rows],
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> CalibrationSamples:
        """Samples that `to_dict` gave.

        Raises:
            UsageError: the format is another, or the rows are not those that were saved.
        """
        if value.get("format") != FORMAT:
            raise UsageError(f"saved calibration samples of format {value.get('format')!r}: this adx reads {FORMAT!r}")
        try:
            rows = tuple(_row(row) for row in value["rows"])
            skipped = {str(reason): int(count) for reason, count in value["skipped"].items()}
            seed, asked, length = (
                None if value[key] is None else int(value[key]) for key in ("seed", "asked", "length")
            )
            temperatures = tuple(float(each) for each in value["temperatures"])
            counts = (0, *skipped.values(), seed or 0, asked or 0, length or 0)
            if not np.isfinite(temperatures).all() or min(counts) < 0:
                raise ValueError("a number is negative, or none")
            samples = cls(str(value["source"]), seed, rows, skipped, asked, length, temperatures)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise UsageError(f"saved calibration samples are damaged: {type(error).__name__}: {error}") from error
        if not rows or samples.sha256 != value.get("sha256"):
            raise UsageError("saved calibration samples are damaged: their sha256 is not that of their rows")
        return samples


def _row(ids: Any) -> Tokens:
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError("a row must be a list of token ids")
    return np.array(ids, np.int64)


def skipped_in_words(skipped: Mapping[str, int]) -> str:
    """As "skipped 3: 2 not JSON, 1 empty", the most frequent reason first."""
    reasons = sorted(skipped.items(), key=lambda item: (-item[1], item[0]))
    return f"skipped {sum(skipped.values()):,}: " + ", ".join(f"{count:,} {reason}" for reason, count in reasons)


def load_samples(path: Path, vocab_size: int) -> CalibrationSamples | None:
    """Samples that an export saved as `reports/calibration.json`; None where the file is no such thing.

    Args:
        vocab_size: of the model that is to read them.

    Raises:
        UsageError: they are damaged, or of a model with a larger vocabulary.
    """
    if path.suffix.lower() != ".json" or not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            if b'"adx-calibration-' not in file.read(_HEAD):
                return None
        value = json.loads(path.read_bytes())
        samples = CalibrationSamples.from_dict(value if isinstance(value, dict) else {})
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"calibration data {path} cannot be read: {error}") from error
    except UsageError as error:
        raise UsageError(f"calibration data {path}: {error}") from error
    largest = max(int(row.max()) for row in samples.rows)
    if largest >= vocab_size:
        raise UsageError(
            f"calibration data {path} has token {largest}, and this model's vocabulary ends at {vocab_size - 1}: the "
            "samples are another model's; give text instead"
        )
    return samples


def write_samples(
    model: PreTrainedModel,
    *,
    seed: int,
    rows: int = ROWS,
    length: int = LENGTH,
    batch: int = BATCH,
    progress: Callable[[float], None] = lambda fraction: None,
) -> CalibrationSamples:
    """Let the model continue its beginning-of-text token by plain sampling, at temperatures that take turns.

    Without such a token it continues its end-of-text token, after which another text begins, or else its first token.
    An end-of-text token does not end a row: what follows it is another text. Row i depends on the seed and on i alone:
    not on how many rows there are or are written at a time, apart from differences of the logits' last digits.

    Args:
        rows: how many.
        length: tokens of a row, the first one counted; where the model's context is shorter, that.
        batch: rows that are written at a time: memory does not depend on `rows`.

    Raises:
        CheckpointError: a logit is NaN or infinite.
    """
    config = model.config.get_text_config()
    length = min(length, int(getattr(config, "max_position_embeddings", None) or length))
    written: list[Tokens] = []
    for begin in range(0, rows, batch):
        indices = range(begin, min(begin + batch, rows))

        def step_done(fraction: float, indices: range = indices) -> None:
            progress((indices.start + fraction * len(indices)) / rows)

        written.extend(_write_batch(model, _first_token(config), seed, indices, length, step_done))
    source = "written by the model itself"
    return CalibrationSamples(source, seed, tuple(written), {}, rows, length, TEMPERATURES)


def _first_token(config: Any) -> int:
    for name in ("bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and 0 <= value < config.vocab_size:
            return value
    return 0


def _write_batch(
    model: PreTrainedModel, start: int, seed: int, indices: range, length: int, progress: Callable[[float], None]
) -> list[Tokens]:
    import torch
    from transformers import DynamicCache

    draws = torch.from_numpy(np.stack([np.random.default_rng([seed, row]).random(length) for row in indices]))
    heat = torch.tensor([[TEMPERATURES[row % len(TEMPERATURES)]] for row in indices], dtype=torch.float64)
    tokens = torch.full((len(indices), length), start)
    caller: Any = model
    cache = {cache_argument(model): DynamicCache(config=model.config.get_text_config())}  # grows in place
    with torch.inference_mode():
        for step in range(1, length):
            logits = caller(input_ids=tokens[:, step - 1 : step], use_cache=True, **cache).logits[:, -1].double()
            if not torch.isfinite(logits).all():
                raise CheckpointError(
                    f"the model's logits are NaN or infinite after {step} tokens of text that it writes itself: its "
                    "weights are damaged, or not meant for float32"
                )
            tokens[:, step] = _draw(logits / heat, draws[:, step])
            progress(step / (length - 1))
    return list(tokens.numpy())


def _draw(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """(B,) tokens where the cumulated chances of (B, V) logits first exceed (B,) draws from 0 to 1."""
    import torch

    chances = torch.softmax(logits, -1).cumsum(-1)
    found = torch.searchsorted(chances, (draws * chances[:, -1])[:, None], right=True)[:, 0]
    return found.clamp(max=logits.shape[1] - 1)
