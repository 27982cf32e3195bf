"""The reference of every parity figure: the checkpoint in PyTorch, float32, one row at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.export.checkpoint_load import cache_argument
from adx.export.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Logits = NDArray[np.float32]


class Reference:
    """A checkpoint's logits in PyTorch float32, attention as transformers' plain ("eager") form computes it.

    A row is always computed alone, so that what batching or padding does to an engine's rows shows.

    Attributes:
        vocab_size: width of the logits.
    """

    def __init__(self, model: PreTrainedModel, *, threads: int) -> None:
        """Args:
        model: a causal language model in float32 on the CPU. It keeps its own attention form and mode between calls.
        threads: threads that PyTorch computes with during a call.
        """
        self._model: Any = model
        self._threads = threads
        self.vocab_size = int(model.config.get_text_config().vocab_size)

    @classmethod
    def load(cls, source: str, *, threads: int, trust_remote_code: bool = False) -> Reference:
        """Load a checkpoint: a Hugging Face folder, a hub id or a .gguf file.

        Raises:
            CheckpointError: it is missing, damaged or not supported.
        """
        from adx.export.checkpoint import resolve
        from adx.export.checkpoint_load import load_model

        return cls(load_model(resolve(source, trust_remote_code=trust_remote_code)), threads=threads)

    def logits(self, row: NDArray[np.int64]) -> Logits:
        """(N, V) logits after each of the N tokens of one row, in one forward pass without a cache.

        Raises:
            CheckpointError: a logit is NaN or infinite.
        """
        with self._ready() as torch:
            output = self._model(input_ids=torch.from_numpy(row[None]), use_cache=False)
        return _checked(output.logits)

    def stream(self, row: NDArray[np.int64], chunk: int) -> Iterator[Logits]:
        """The same in pieces of `chunk` tokens over a KV cache: no more than one piece of logits is in memory.

        Raises:
            CheckpointError: a logit is NaN or infinite.
        """
        from transformers import DynamicCache

        cache = {cache_argument(self._model): DynamicCache(config=self._model.config)}  # grows in place
        for start in range(0, len(row), chunk):
            with self._ready() as torch:
                ids = torch.from_numpy(row[None, start : start + chunk])
                output = self._model(input_ids=ids, use_cache=True, **cache)
            yield _checked(output.logits)

    @contextmanager
    def _ready(self) -> Iterator[Any]:
        import torch

        model = self._model
        threads, attention, training = torch.get_num_threads(), model.config._attn_implementation, model.training
        torch.set_num_threads(self._threads)
        try:
            model.eval()
            if attention != "eager":
                model.set_attn_implementation("eager")
            with torch.inference_mode():
                yield torch
        finally:
            if attention != "eager":
                model.set_attn_implementation(attention)
            model.train(training)
            torch.set_num_threads(threads)


def _checked(logits: torch.Tensor) -> Logits:
    array: Logits = logits[0].float().numpy()
    if not np.isfinite(array).all():
        position = int(np.flatnonzero(~np.isfinite(array).all(axis=1))[0])
        raise CheckpointError(
            f"the checkpoint itself gives NaN or infinity in PyTorch float32 (first after token {position}): "
            "nothing can be compared with it; download it again or use another"
        )
    return array
