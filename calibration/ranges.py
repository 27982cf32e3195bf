"""How large what goes into and comes out of each linear layer is, per channel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.calibration.forward import Observe, Progress, Tokens, run_observed
from adx.calibration.samples import CalibrationSamples
from adx.calibration.statistics import Arrays, StatisticsStore, collect, refuse_non_finite

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = [
    "LayerRange",
    "Observe",
    "Progress",
    "RangeObserver",
    "Ranges",
    "RowMaxima",
    "Tokens",
    "input_ranges",
    "layer_ranges",
    "run_observed",
]

Ranges = dict[str, NDArray[np.float32]]

MOMENTUM = 0.9


@dataclass(frozen=True)
class LayerRange:
    """What was seen at one linear layer.

    Attributes:
        inputs: (in,) float32, largest magnitude per input channel.
        power: (in,) float32, mean square per input channel.
        output: largest magnitude over all output features.
        averages: (in,) float32, moving average over rows of the largest magnitude per input channel; None where it
            was not measured.
    """

    inputs: NDArray[np.float32]
    power: NDArray[np.float32]
    output: float
    averages: NDArray[np.float32] | None = None


def layer_ranges(
    model: PreTrainedModel,
    rows: Iterable[Tokens],
    progress: Progress = lambda fraction: None,
    *,
    store: StatisticsStore | None = None,
    digest: str = "",
    chunk: int | None = None,
) -> dict[str, LayerRange]:
    """Ranges of every linear layer by name; `rows` of token ids go through the model one by one.

    Memory does not depend on the number of rows. Keyword arguments as in `collect`.

    Raises:
        CheckpointError: NaN or infinity at a layer.
    """
    observer = RangeObserver()
    collect(model, rows, observer, store=store, digest=digest, progress=progress, chunk=chunk)
    return observer.ranges()


def input_ranges(
    model: PreTrainedModel,
    samples: CalibrationSamples,
    *,
    store: StatisticsStore | None = None,
    digest: str = "",
) -> Ranges:
    """Largest magnitude per input channel, by the layer's name, (in,) float32."""
    found = layer_ranges(model, samples.rows, store=store, digest=digest)
    return {name: layer.inputs for name, layer in found.items()}


class RowMaxima:
    """Exponential moving average of the maxima of rows: 0.9 of what it was and 0.1 of the row, the first row whole.

    As TensorFlow's moving average quantizers and PyTorch's `MovingAverageMinMaxObserver` do it a batch; so the rows'
    order is part of it.

    Attributes:
        averages: by layer, float64.
    """

    def __init__(self) -> None:
        self.averages: dict[str, NDArray[np.float64]] = {}
        self._row: dict[str, NDArray[np.float64]] = {}

    def add(self, name: str, maxima: NDArray[Any]) -> None:
        """Maxima of one piece of the row."""
        found = maxima.astype(np.float64)
        self._row[name] = np.maximum(self._row[name], found) if name in self._row else found

    def row_done(self) -> None:
        """Take in the row's maxima; a layer that the row did not reach keeps its average."""
        for name, found in self._row.items():
            old = self.averages.get(name, found)
            self.averages[name] = MOMENTUM * old + (1 - MOMENTUM) * found if name in self.averages else found
        self._row = {}


class RangeObserver:
    """Per input channel the largest magnitude, its moving average over rows and the mean square; the largest output."""

    def __init__(self) -> None:
        self._largest: Ranges = {}
        self._squares: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, tuple[int, float]] = {}  # tokens, largest output
        self._rows = RowMaxima()

    @property
    def kind(self) -> str:
        """As in `Observer`."""
        return f"ranges, momentum {MOMENTUM}"

    def observe(self, name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """As in `Observer`."""
        flat = x.flatten(0, -2).float()
        inputs = flat.abs().amax(0).numpy()
        output = float(y.abs().max())
        refuse_non_finite(name, float(inputs.max()) + output)
        squares = flat.double().square().sum(0).numpy()
        self._largest[name] = np.maximum(self._largest[name], inputs) if name in self._largest else inputs
        self._squares[name] = self._squares[name] + squares if name in self._squares else squares
        tokens, largest = self._counts.get(name, (0, 0.0))
        self._counts[name] = tokens + len(flat), max(largest, output)
        self._rows.add(name, inputs)

    def row_done(self) -> None:
        """As in `Observer`."""
        self._rows.row_done()

    def ranges(self) -> dict[str, LayerRange]:
        """What was seen so far, by the layer's name."""
        return {
            name: LayerRange(
                largest,
                (self._squares[name] / self._counts[name][0]).astype(np.float32),
                self._counts[name][1],
                self._rows.averages[name].astype(np.float32),
            )
            for name, largest in self._largest.items()
        }

    def state(self) -> dict[str, NDArray[Any]]:
        """As in `Observer`."""
        names = list(self._largest)
        found: dict[str, NDArray[Any]] = {
            "names": np.array(names, np.str_),
            "tokens": np.array([self._counts[name][0] for name in names], np.int64),
            "outputs": np.array([self._counts[name][1] for name in names], np.float64),
        }
        for name in names:
            found[f"largest/{name}"] = self._largest[name]
            found[f"squares/{name}"] = self._squares[name]
            found[f"averages/{name}"] = self._rows.averages[name]
        return found

    def restore(self, state: Arrays) -> None:
        """As in `Observer`."""
        names = [str(name) for name in state["names"]]
        counts = list(zip(state["tokens"].tolist(), state["outputs"].tolist(), strict=True))
        largest, squares, averages = (
            {name: state[f"{what}/{name}"] for name in names} for what in ("largest", "squares", "averages")
        )
        self._counts = dict(zip(names, counts, strict=True))
        self._largest, self._squares, self._rows.averages = largest, squares, averages
