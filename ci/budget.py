"""A build within its quality budget: the fewest parts kept more precise, each candidate compared with PyTorch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from adx.calibration.budget import Step, Unit, fewest, first_guess, ranked
from adx.calibration.recipe import Level, Raised
from adx.ci.bounds import Bound, check
from adx.ci.built import Builder, Built, Source
from adx.ci.figures import finite_or_none

if TYPE_CHECKING:
    from adx.calibration.forward import Tokens
    from adx.ci.evaluate import EvalResult
    from adx.ci.figures import ParityFigures
    from adx.ci.proof import Proof

MARGIN = 0.95  # of each bound that a candidate may use: parity reads more than the candidates are compared on
SENSITIVITY_ROWS, SENSITIVITY_LENGTH = 2, 128
MORE_STEPS = 0.05  # of all steps, added where a candidate was within its budget and parity is not
_MOST_RETRIES = 4

_KEPT: dict[Level, str] = {
    "finer": "smaller blocks",
    "int8": "kept at 8 bits",
    "weights": "its input stays float",
    "float": "stays in float",
}


@dataclass(frozen=True)
class Trial:
    """One candidate that was built and compared on text.

    Attributes:
        kept: steps that it takes, see `BudgetSearch.steps`.
        kl_mean: as `ParityFigures`, so are `top1` and `perplexity_ratio`.
        passed: whether it is within `MARGIN` of the budget.
        seconds: to build and compare it.
    """

    kept: int
    kl_mean: float
    top1: float
    perplexity_ratio: float
    passed: bool
    seconds: float


@dataclass(frozen=True)
class BudgetSearch:
    """What the search for a budget did.

    Attributes:
        bound: the budget, as a parity bound.
        steps: every unit's levels, in the order in which they were to be taken.
        sensitivities: KL divergence, in nats, that each unit's layers caused alone.
        kept: how many of the steps the result has.
        trials: candidates, in order; the first is the recipe as it is, by its parity.
        seconds: in all.
    """

    bound: Bound
    steps: tuple[Step, ...]
    sensitivities: Mapping[tuple[str, ...], float]
    kept: int
    trials: tuple[Trial, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON: numbers that are not finite are null."""
        return {
            "bound": self.bound.to_dict(),
            "kept": self.kept,
            "of": len(self.steps),
            "evaluations": [{k: finite_or_none(v) for k, v in trial.__dict__.items()} for trial in self.trials],
            "steps": [
                {
                    "layers": list(step.unit.layers),
                    "raised_to": step.level,
                    "sensitivity": self.sensitivities[step.unit.layers],
                    "gain": step.gain,
                    "added_bytes": step.added,
                    "kept": index < self.kept,
                }
                for index, step in enumerate(self.steps)
            ],
            "seconds": round(self.seconds, 1),
        }


@dataclass(frozen=True, eq=False)
class Outcome:
    """A build, how far it is from PyTorch, and what was searched for it (None: nothing, the first build will do)."""

    built: Built
    figures: ParityFigures
    search: BudgetSearch | None


def build_within(source: Source, builder: Builder, proof: Proof) -> Outcome:
    """Build as the recipe says; where that misses its bound, keep more precise what costs the most.

    Nothing is searched in float precisions, with `uniform`, or where a parity failure is allowed; nor where what is
    missed is no matter of precision, as a float16 overflow.

    Args:
        builder: makes the engines.
        proof: compares them with PyTorch, on text that nothing was calibrated on.
    """
    request = source.request
    built = builder.build({})
    figures = proof.parity(built)
    searches = request.algorithm is not None and not request.uniform and not request.allow_parity_failure
    if not searches or not _lacks_quality(figures) or not math.isfinite(figures.kl_mean):
        return Outcome(built, figures, None)
    return _Search(source, builder, proof, figures).run()


class _Search:
    """One search; candidates are numbers of steps."""

    def __init__(self, source: Source, builder: Builder, proof: Proof, first: ParityFigures) -> None:
        self.source, self.builder, self.proof, self.first = source, builder, proof, first
        self.bound = _tightened(first.bound)
        self.steps: tuple[Step, ...] = ()
        self.costs: dict[tuple[str, ...], float] = {}
        self.trials = [Trial(0, first.kl_mean, first.top1, first.perplexity_ratio, False, round(first.seconds, 1))]
        self.started = time.perf_counter()

    def run(self) -> Outcome:
        units = self.builder.units()
        self.steps = self._ranked(units)[:-1]  # something must be left to quantize
        guess = first_guess(self.steps, _excess(self.first, self.bound))
        kept = fewest(len(self.steps), self._passes, guess)
        return self._settle(len(self.steps) if kept is None else kept)

    def _settle(self, kept: int) -> Outcome:
        """Build what was found; where parity still misses a bound, a few more steps."""
        more = max(1, round(MORE_STEPS * len(self.steps)))
        for attempt in range(_MOST_RETRIES):
            kept = min(len(self.steps), kept + (more if attempt else 0))
            built = self.builder.build(self._raised(kept))
            figures = self.proof.parity(built)
            if kept == len(self.steps) or not _lacks_quality(figures):
                break
        if kept == len(self.steps) and not figures.passed:
            beyond = "every layer is as precise as this target has it: the budget is below what it reaches"
            figures = replace(figures, misses=(*figures.misses, beyond))
        seconds = time.perf_counter() - self.started
        search = BudgetSearch(self.first.bound, self.steps, self.costs, kept, tuple(self.trials), seconds)
        return Outcome(built, figures, search)

    def _ranked(self, units: Sequence[Unit]) -> tuple[Step, ...]:
        from adx.calibration.sensitivity import measure_sensitivities

        report = partial(self.source.report, "measuring what each layer costs")
        names = [unit.layers for unit in units]
        costs = measure_sensitivities(self.source.model, self._rows(), names, self.builder.altered, report)
        self.costs = dict(zip((unit.layers for unit in units), costs, strict=True))
        self.source.report("measuring what each layer would cost at other precisions", None)
        return ranked(units, costs, [self.builder.errors(unit) for unit in units])

    def _rows(self) -> list[Tokens]:
        rows = self.builder.calibration.samples().rows
        return [row[:SENSITIVITY_LENGTH] for row in rows[:SENSITIVITY_ROWS]]

    def _passes(self, kept: int) -> bool:
        started = time.perf_counter()
        self.source.report(f"trying {kept} of {len(self.steps)} steps to more precision", None)
        found = self.proof.quality(self.builder.build(self._raised(kept)))
        passed = not check(_Figures(found), self.bound)
        assert found.kl_mean is not None
        assert found.top1 is not None
        assert found.perplexity_ratio is not None
        seconds = round(time.perf_counter() - started, 1)
        self.trials.append(Trial(kept, found.kl_mean, found.top1, found.perplexity_ratio, passed, seconds))
        return passed

    def _raised(self, kept: int) -> Mapping[str, Raised]:
        raised: dict[str, Raised] = {}
        for step in self.steps[:kept]:
            reason = _reason(step, self.costs[step.unit.layers])
            raised.update(dict.fromkeys(step.unit.layers, Raised(step.level, reason)))
        return raised


@dataclass(frozen=True)
class _Figures:
    """An evaluation's figures as bounds are checked against."""

    found: EvalResult
    max_abs_logit_error: float = 0.0
    logit_range: float = 1.0
    greedy_identical: bool = True

    @property
    def kl_mean(self) -> float:
        return math.inf if self.found.kl_mean is None else self.found.kl_mean

    @property
    def top1(self) -> float:
        return self.found.top1 or 0.0

    @property
    def perplexity_ratio(self) -> float:
        return math.inf if self.found.perplexity_ratio is None else self.found.perplexity_ratio


def _lacks_quality(figures: ParityFigures) -> bool:
    """Is a bound missed that more precise layers would help to keep?"""
    return bool(check(figures, replace(figures.bound, atol=None, rtol=None, greedy=False)))


def _reason(step: Step, cost: float) -> str:
    added = step.unit.sizes[step.rank + 1] - step.unit.sizes[0]
    others = len(step.unit.layers) - 1
    which = "it alone costs" if not others else f"it and the {others} on the same input alone cost"
    return f"{_KEPT[step.level]}: else {which} a KL divergence of {cost:.2g}; that takes {added:,} bytes more"


def _tightened(bound: Bound) -> Bound:
    """The bound with a margin for what candidates are not compared on."""
    return replace(
        bound,
        kl_mean=None if bound.kl_mean is None else bound.kl_mean * MARGIN,
        top1=None if bound.top1 is None else 1 - (1 - bound.top1) * MARGIN,
        perplexity_ratio=None if bound.perplexity_ratio is None else 1 + (bound.perplexity_ratio - 1) * MARGIN,
    )


def _excess(figures: ParityFigures, bound: Bound) -> float:
    """The part of the divergence that must go, 0 to 1, as if top-1 misses and perplexity were in proportion to it."""
    parts = [0.0]
    if bound.kl_mean is not None and figures.kl_mean > 0:
        parts.append(1 - bound.kl_mean / figures.kl_mean)
    if bound.perplexity_ratio is not None and figures.perplexity_ratio > 1:
        parts.append(1 - (bound.perplexity_ratio - 1) / (figures.perplexity_ratio - 1))
    if bound.top1 is not None and figures.top1 < 1:
        # A position's choice flips in proportion to the logits' error, divergence grows with its square.
        parts.append(1 - ((1 - bound.top1) / (1 - figures.top1)) ** 2)
    return min(1.0, max(parts))
