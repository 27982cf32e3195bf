"""Observer: the largest magnitude that each input channel of each linear layer takes over calibration samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.calibration.samples import CalibrationSamples

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Ranges = dict[str, NDArray[np.float32]]


def input_ranges(model: PreTrainedModel, samples: CalibrationSamples) -> Ranges:
    """Largest magnitude per input channel, by the layer's name, (in,) float32; rows go through the model one by one.

    Memory does not depend on the number of samples.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    ranges: Ranges = {}

    def observer(name: str) -> Callable[[Any, tuple[Any, ...]], None]:
        def observe(_module: Any, args: tuple[Any, ...]) -> None:
            largest = args[0].detach().abs().flatten(0, -2).amax(0).float().numpy()
            ranges[name] = np.maximum(ranges[name], largest) if name in ranges else largest

        return observe

    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, (torch.nn.Linear, Conv1D))]
    hooks = [module.register_forward_pre_hook(observer(name)) for name, module in linears]
    caller: Any = model
    try:
        with torch.inference_mode():
            for row in samples.tokens:
                caller(input_ids=torch.from_numpy(row)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return ranges
