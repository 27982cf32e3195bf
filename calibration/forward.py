"""Rows of tokens through the float model, in pieces over its KV cache, with every linear layer watched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from operator import length_hint
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.export.checkpoint_load import cache_argument

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Tokens = NDArray[np.int64]
Progress = Callable[[float], None]  # which part is done, 0 to 1
Observe = Callable[[str, "torch.Tensor", "torch.Tensor"], None]


def run_observed(
    model: PreTrainedModel,
    rows: Iterable[Tokens],
    observe: Observe,
    progress: Progress = lambda fraction: None,
    *,
    chunk: int | None = None,
) -> None:
    """Run rows of token ids through the model; `observe` gets (layer's name, input, output) of each linear layer.

    Memory does not depend on the number of rows.

    Args:
        chunk: as in `run_row`.
    """
    total = length_hint(rows)
    with observed(model, observe):
        for index, row in enumerate(rows):
            if total:
                progress(index / total)
            run_row(model, row, chunk)


def run_row(model: PreTrainedModel, row: Tokens, chunk: int | None = None) -> None:
    """One row, one piece after the other: the first is the prefill of an empty cache, each other a decode on a past.

    A model that keeps no KV cache, or a recurrent state beside it, takes the row whole.

    Args:
        chunk: tokens of a piece; None for two pieces of half a row, so that both phases are seen.
    """
    import torch
    from transformers import DynamicCache

    caller: Any = model
    ids = torch.tensor(np.asarray(row, np.int64))[None]
    ends = _ends(len(row), chunk or -(-len(row) // 2), _long_from(model)) if _has_cache(model) else [len(row)]
    if len(ends) == 1:
        caller(input_ids=ids, use_cache=False)
        return
    cache = {cache_argument(model): DynamicCache(config=model.config)}  # grows in place
    for start, end in zip([0, *ends], ends, strict=False):
        caller(input_ids=ids[:, start:end], use_cache=True, **cache)


@contextmanager
def observed(model: PreTrainedModel, observe: Observe) -> Iterator[None]:
    """Inside the block `observe` is called after every linear layer, and no gradients are kept."""
    import torch
    from transformers.pytorch_utils import Conv1D

    def hook(name: str) -> Callable[[Any, tuple[Any, ...], Any], None]:
        return lambda _module, args, output: observe(name, args[0].detach(), output.detach())

    # Not inference mode: observers tell tensors apart by their version, which its tensors do not have.
    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, (torch.nn.Linear, Conv1D)):
                stack.callback(module.register_forward_hook(hook(name)).remove)
        yield


def _ends(length: int, chunk: int, long_from: int | None) -> list[int]:
    """Where pieces of a row end. One that reaches long rope begins with a piece that does: keys that were cached
    before have the short frequencies."""
    first = chunk if long_from is None or length < long_from else max(chunk, long_from)
    return [*range(first, length, chunk), length]


def _has_cache(model: PreTrainedModel) -> bool:
    takes_one = not {"cache", "past_key_values"}.isdisjoint(signature(model.forward).parameters)
    return takes_one and not model._is_stateful


def _long_from(model: PreTrainedModel) -> int | None:
    """Tokens from which long rope changes its frequencies, as `KVCacheSpec.recompute_at`."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return int(rope["original_max_position_embeddings"]) + 1 if rope.get("rope_type") == "longrope" else None
