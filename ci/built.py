"""What the targets of an export have in common: a build gives engines, and a session to check them with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from adx.ci.export_request import ExportRequest
from adx.ci.progress import Report
from adx.export.manifest import EngineRecord, Limits
from adx.export.spec import GraphSpec, ModelSpec

if TYPE_CHECKING:
    from adx.calibration.budget import Unit
    from adx.calibration.ranges import Tokens
    from adx.calibration.recipe import QuantRecipe, Raised
    from adx.calibration.samples import CalibrationSamples
    from adx.calibration.sensitivity import Altered
    from adx.ci.calibrated import Calibration
    from adx.export.linears import LinearLayer
    from adx.export.trace import SemanticGraph
    from adx.runtime.session import Session


@dataclass(frozen=True, eq=False)
class Source:
    """What a build starts from: a loaded and traced checkpoint, and the bundle's folder.

    Attributes:
        model: a transformers model in float32.
    """

    request: ExportRequest
    spec: ModelSpec
    limits: Limits
    folder: Path
    model: Any
    semantic: SemanticGraph
    report: Report


@dataclass(frozen=True, eq=False)
class Built:
    """What a build left in the bundle's folder.

    Attributes:
        graphs: their specs.
        engines: records of what the runtime can load, plans excepted: those follow once parity has passed.
        recipe: how each layer is stored.
        float_bits: bits of the layers that the recipe keeps in float.
        bound: the row of the parity table that it must keep.
        samples: what it was calibrated on, or None.
        open: the session to compare with PyTorch.
        check: what else must hold, on rows of token ids; it gives what does not, in words.
    """

    graphs: tuple[GraphSpec, ...]
    engines: tuple[EngineRecord, ...]
    recipe: QuantRecipe
    float_bits: int
    bound: str
    samples: CalibrationSamples | None
    open: Callable[[], Session]
    check: Callable[[Sequence[Tokens]], tuple[str, ...]] = lambda rows: ()


class Builder(Protocol):
    """Builds one export's engines, as often as the search for its budget asks."""

    calibration: Calibration

    def build(self, raised: Mapping[str, Raised]) -> Built:
        """Engines with some layers more precise than the recipe has them; what an earlier build left is replaced."""

    def units(self) -> tuple[Unit, ...]:
        """Layers that are quantized alike, with what they can be raised to."""

    def altered(self, name: str) -> Altered | None:
        """A layer as it computes in the recipe; None: in float."""

    def errors(self, unit: Unit) -> tuple[float, ...]:
        """Squared errors of a unit's outputs over the outputs' squares: as the recipe has it, then at each level."""

    def error(self, name: str, scheme: object) -> float | None:
        """Squared error that a layer's stored weight adds to its output, over the output's square; None: in float."""


def onnx_packages() -> Mapping[str, str]:
    """Versions of the ONNX packages that are installed here."""
    from adx.export.manifest import provenance

    return {name: version for name, version in provenance(()).packages.items() if "onnx" in name}


def counter(report: Report, stage: str, total: int) -> Callable[[str], None]:
    """A callback that reports how many of `total` it was called for."""
    done = 0

    def count(_name: str) -> None:
        nonlocal done
        done += 1
        report(stage, done / max(total, 1))

    return count


def linear_count(semantic: SemanticGraph) -> int:
    """Linear layers of a model."""
    return sum(1 for node in semantic.model.graph if node.op_type == "Linear")


class Remembered:
    """A recipe maker that keeps what it made, for the manifest."""

    def __init__(self, make: Callable[[Mapping[str, LinearLayer]], QuantRecipe]) -> None:
        self._make = make
        self.recipe: QuantRecipe | None = None

    def __call__(self, layers: dict[str, LinearLayer]) -> QuantRecipe:
        self.recipe = self._make(layers)
        return self.recipe
