"""Observers over calibration samples: how large what goes into and comes out of each linear layer is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import length_hint
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.calibration.samples import CalibrationSamples

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Tokens = NDArray[np.int64]
Ranges = dict[str, NDArray[np.float32]]
Progress = Callable[[float], None]  # which part is done, 0 to 1
Observe = Callable[[str, "torch.Tensor", "torch.Tensor"], None]


@dataclass(frozen=True)
class LayerRange:
    """What was seen at one linear layer.

    Attributes:
        inputs: (in,) float32, largest magnitude per input channel.
        power: (in,) float32, mean square per input channel.
        output: largest magnitude over all output features.
    """

    inputs: NDArray[np.float32]
    power: NDArray[np.float32]
    output: float


def layer_ranges(
    model: PreTrainedModel, rows: Iterable[Tokens], progress: Progress = lambda fraction: None
) -> dict[str, LayerRange]:
    """Ranges of every linear layer by name; `rows` of token ids go through the model one by one.

    Memory does not depend on the number of rows.
    """
    largest: Ranges = {}
    squares: dict[str, NDArray[np.float64]] = {}
    counts: dict[str, int] = {}
    outputs: dict[str, float] = {}

    def observe(name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        flat = x.flatten(0, -2).float()
        inputs = flat.abs().amax(0).numpy()
        largest[name] = np.maximum(largest[name], inputs) if name in largest else inputs
        squares[name] = squares.get(name, np.zeros(1)) + flat.square().sum(0).double().numpy()
        counts[name] = counts.get(name, 0) + len(flat)
        outputs[name] = max(outputs.get(name, 0.0), float(y.abs().max()))

    run_observed(model, rows, observe, progress)
    return {
        name: LayerRange(largest[name], (squares[name] / counts[name]).astype(np.float32), outputs[name])
        for name in largest
    }


def input_ranges(model: PreTrainedModel, samples: CalibrationSamples) -> Ranges:
    """Largest magnitude per input channel, by the layer's name, (in,) float32."""
    return {name: found.inputs for name, found in layer_ranges(model, list(samples.tokens)).items()}


def run_observed(
    model: PreTrainedModel,
    rows: Iterable[Tokens],
    observe: Observe,
    progress: Progress = lambda fraction: None,
) -> None:
    """Run rows of token ids through the model; `observe` gets (layer's name, input, output) of each linear layer."""
    import torch

    caller: Any = model
    with _observed(model, observe), torch.inference_mode():
        total = length_hint(rows)
        for index, row in enumerate(rows):
            if total:
                progress(index / total)
            caller(input_ids=torch.from_numpy(row)[None], use_cache=False)


@contextmanager
def _observed(model: PreTrainedModel, observe: Observe) -> Iterator[None]:
    import torch
    from transformers.pytorch_utils import Conv1D

    def hook(name: str) -> Callable[[Any, tuple[Any, ...], Any], None]:
        return lambda _module, args, output: observe(name, args[0].detach(), output.detach())

    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, (torch.nn.Linear, Conv1D))]
    hooks = [module.register_forward_hook(hook(name)) for name, module in linears]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()
