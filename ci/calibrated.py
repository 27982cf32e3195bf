"""What the algorithms of one export need of its calibration samples, measured when it is first asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from adx.calibration.statistics import StatisticsStore
from adx.ci.built import Source
from adx.ci.calibration import calibration_samples

if TYPE_CHECKING:
    from adx.calibration.forward import Tokens
    from adx.calibration.ranges import LayerRange
    from adx.calibration.samples import CalibrationSamples

Floats = NDArray[np.float32]

HESSIAN_BYTES = 1 << 30  # of second moments that are in memory at once; more layers take more passes over the samples
KEPT_BYTES = 2 << 30  # of second moments that are kept on disk for a second try, unless a folder was named for them


class Calibration:
    """Samples of one export and what was measured on them.

    Statistics are kept in a folder while the export runs, so that one that is stopped goes on from there; the folder
    named by `--calib-cache` stays, one of the export's own goes when it is done.

    Attributes:
        drawn: the samples, or None as long as nothing needed any.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.drawn: CalibrationSamples | None = None
        self._power: dict[str, Floats] = {}
        own = source.request.out.with_name(f"{source.request.out.name}.calibration")
        self._own: Path | None = own if source.request.calib_cache is None else None
        folder = source.request.calib_cache or own
        self._store = StatisticsStore(
            folder,
            note=lambda text: source.report(text, None),
            used=lambda text: source.report(f"statistics of the samples: {text}", None),
        )

    def samples(self) -> CalibrationSamples:
        """The samples, drawn once."""
        if self.drawn is None:
            self.drawn = calibration_samples(self._source)
        return self.drawn

    def ranges(self) -> dict[str, LayerRange]:
        """Ranges of every linear layer."""
        return self._ranges

    def hessians(self, names: Collection[str]) -> HessianPasses:
        """Second moments of these layers' inputs, by name."""
        return HessianPasses(self, names)

    def moments(self, name: str) -> Floats | None:
        """Mean square of each of a layer's inputs, (in,), as far as it was measured."""
        if name in self._power:
            return self._power[name]
        if "_ranges" in self.__dict__ and name in self._ranges:
            return self._ranges[name].power
        return None

    def rows(self) -> list[Tokens]:
        """Rows for ranges of activations: the samples and their second halves, since texts begin anywhere."""
        return list(self.samples().windows())

    @property
    def store(self) -> StatisticsStore:
        """Where statistics are kept."""
        return self._store

    @cached_property
    def digest(self) -> str:
        """Of the model as it is: configuration and weights."""
        source = self._source
        config = json.dumps(source.model.config.to_dict(), sort_keys=True, default=str)
        return hashlib.sha256(f"{source.spec.weights_sha256}\n{config}".encode()).hexdigest()

    def __enter__(self) -> Calibration:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let go of what was kept for a second try, unless the export was interrupted."""
        if self._own is None:
            return
        if kind is None or not issubclass(kind, KeyboardInterrupt):
            self._store.clear()
        elif self._own.is_dir():
            self._source.report(f"what was measured is kept in {self._own}: the same command goes on from there", None)

    def observe_hessians(self, names: Collection[str], kept: bool) -> Mapping[str, Floats]:
        """One pass over the samples for the second moments of some layers' inputs; `kept`: also for a second try."""
        from adx.calibration.hessians import HessianObserver
        from adx.calibration.statistics import collect

        observer = HessianObserver(names)
        report = partial(self._source.report, "measuring the layers' inputs")
        rows = self.samples().rows
        store = self._store if kept or self._own is None else None
        collect(self._source.model, rows, observer, store=store, digest=self.digest, progress=report)
        found = observer.hessians()
        self._power.update({name: np.ascontiguousarray(matrix.diagonal()) for name, matrix in found.items()})
        return found

    @cached_property
    def _ranges(self) -> dict[str, LayerRange]:
        from adx.calibration.ranges import layer_ranges

        report = partial(self._source.report, "measuring activations")
        return layer_ranges(self._source.model, self.rows(), report, store=self._store, digest=self.digest)


class HessianPasses:
    """Second moments by layer, measured for as many layers at a time as `HESSIAN_BYTES` holds, in the model's order."""

    def __init__(self, calibration: Calibration, names: Collection[str]) -> None:
        self._calibration = calibration
        self._groups = _groups(calibration._source.model, frozenset(names))
        self._now: Mapping[str, Floats] = {}

    def __call__(self, name: str) -> Floats | None:
        """(in, in) mean of x^T x over the samples' tokens; None for a layer that is not among them."""
        if name not in self._now:
            group = next((group for group in self._groups if name in group), None)
            if group is None:
                return None
            self._now = {}  # let go of it before the next is measured
            kept = len(self._groups) * HESSIAN_BYTES <= KEPT_BYTES
            self._now = self._calibration.observe_hessians(group, kept)
        return self._now.get(name)

    def held(self, name: str) -> Floats | None:
        """The same, if it is in memory."""
        return self._now.get(name)


def _groups(model: object, names: frozenset[str]) -> list[tuple[str, ...]]:
    import torch
    from transformers.pytorch_utils import Conv1D

    assert isinstance(model, torch.nn.Module)
    groups: list[list[str]] = [[]]
    held = 0
    for name, module in model.named_modules():
        if name not in names or not isinstance(module, (torch.nn.Linear, Conv1D)):
            continue
        width = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
        size = 8 * width * width
        if groups[-1] and held + size > HESSIAN_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return [tuple(group) for group in groups if group]
