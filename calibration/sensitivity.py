"""What quantizing each part of a model costs, measured: that part alone is quantized, and the outputs compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.calibration.forward import Progress, Tokens
from adx.export.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class InputRounding:
    """How a layer's input is rounded: x / divisor to the nearest of -127..127 times scale.

    Attributes:
        scale: float value of one step.
        divisor: (in,) what smoothing divides the input by, or None.
    """

    scale: float
    divisor: Floats | None = None


@dataclass(frozen=True, eq=False)
class Altered:
    """A linear layer as it computes once quantized, in the checkpoint's own form.

    Attributes:
        weight: (out, in) float32.
        rounding: of its input; None: that stays float.
    """

    weight: Floats
    rounding: InputRounding | None = None


def measure_sensitivities(
    model: PreTrainedModel,
    rows: Sequence[Tokens],
    units: Sequence[Sequence[str]],
    alter: Callable[[str], Altered | None],
    progress: Progress = lambda fraction: None,
) -> tuple[float, ...]:
    """Mean KL divergence, in nats, that each unit causes when its layers alone are quantized.

    Memory: the reference's logits of all `rows`, float32, and one unit's weights.

    Args:
        model: in float32; it is as before afterwards.
        rows: token ids to compare on.
        units: names of layers that are quantized together.
        alter: a layer's quantized form, or None where it stays float.
        progress: told which part is done.

    Raises:
        CheckpointError: a unit's quantized layers make logits that are not finite.
    """
    import torch

    caller: Any = model
    modules = dict(model.named_modules())

    def log_probabilities(row: Tokens) -> torch.Tensor:
        logits = caller(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), -1)

    found = []
    with torch.inference_mode():
        expected = [log_probabilities(row) for row in rows]
        for index, unit in enumerate(units):
            progress(index / len(units))
            changes = {name: altered for name in unit if (altered := alter(name)) is not None}
            with _altered(modules, changes):
                sums = [_divergence(own, log_probabilities(row)) for own, row in zip(expected, rows, strict=True)]
            total = sum(sums)
            if not math.isfinite(total):
                raise CheckpointError(f"with {unit[0]} quantized the logits are NaN or infinite: exclude it")
            found.append(max(0.0, total) / sum(len(row) for row in rows))
    return tuple(found)


def _divergence(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Sum over positions of KL(expected || got), of log probabilities (T, V); what the model rules out counts 0."""
    terms = (expected.exp() * (expected - got)).masked_fill(expected.isneginf(), 0.0)
    return float(terms.double().sum())


@contextmanager
def _altered(modules: dict[str, Any], changes: dict[str, Altered]) -> Iterator[None]:
    """The model with some layers in their quantized form."""
    import torch
    from transformers.pytorch_utils import Conv1D

    kept = {name: modules[name].weight for name in changes}
    hooks = []
    try:
        for name, altered in changes.items():
            module = modules[name]
            weight = torch.from_numpy(np.ascontiguousarray(altered.weight))
            weight = weight.T if isinstance(module, Conv1D) else weight
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
            if altered.rounding is not None:
                hooks.append(module.register_forward_pre_hook(_rounded(altered.rounding)))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, weight in kept.items():
            modules[name].weight = weight


def _rounded(rounding: InputRounding) -> Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]:
    import torch

    divisor = None if rounding.divisor is None else torch.from_numpy(rounding.divisor)

    def hook(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0] if divisor is None else args[0] / divisor
        x = (x / rounding.scale).round().clamp(-127, 127) * rounding.scale
        return (x if divisor is None else x * divisor, *args[1:])

    return hook
