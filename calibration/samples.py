"""Calibration samples: text that the model writes itself, from a seed, so that a run can be repeated."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.export.checkpoint_load import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS, LENGTH = 8, 64


@dataclass(frozen=True)
class CalibrationSamples:
    """Token rows that activations are measured on.

    Attributes:
        source: where they come from, in words.
        seed: what they were drawn with.
        tokens: (rows, length) int64.
    """

    source: str
    seed: int
    tokens: NDArray[np.int64]

    @property
    def sha256(self) -> str:
        """Over the token ids as little-endian 64-bit integers."""
        return hashlib.sha256(np.ascontiguousarray(self.tokens, "<i8").tobytes()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"source": self.source, "seed": self.seed, "sha256": self.sha256, "tokens": self.tokens.tolist()}


def write_samples(model: PreTrainedModel, *, seed: int, rows: int = ROWS, length: int = LENGTH) -> CalibrationSamples:
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
        for _ in range(length):
            out = caller(input_ids=tokens[:, -1:], use_cache=True, **{argument: cache})
            chances = torch.softmax(out.logits[:, -1].float(), -1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=random)], 1)
    return CalibrationSamples("written by the model itself", seed, tokens.numpy())
