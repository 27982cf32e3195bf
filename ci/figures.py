"""What a parity run measured: sums over positions, and the figures that they give."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from adx.ci.bounds import Bound
from adx.ci.distance import Distance
from adx.export.errors import ParityError


@dataclass(frozen=True)
class ParityFigures:
    """What was compared and how far apart it was.

    Attributes:
        kl_mean: mean over positions of KL(reference || engine), in nats; infinite if the engine gave NaN.
        top1: share of positions with the same most likely token.
        max_abs_logit_error: largest absolute difference of a logit.
        logit_range: the reference's largest logit less its smallest, over all positions.
        greedy_identical: whether each token of the engine's own greedy run is what the reference chooses after the
            same tokens, ties within the bound on logit errors aside.
        perplexity_ratio: the engine's perplexity of the text over the reference's.
        positions: positions compared.
        decode_steps: single-token steps compared, counted once per batch.
        greedy_tokens: tokens of the greedy run.
        text: what the tokens were: "text" or "random ids".
        cases: per case its shape, figures and where its worst logit is.
        bound: what was asked.
        misses: what is beyond the bound, in words.
        seconds: how long it took.
    """

    kl_mean: float
    top1: float
    max_abs_logit_error: float
    logit_range: float
    greedy_identical: bool
    perplexity_ratio: float
    positions: int
    decode_steps: int
    greedy_tokens: int
    text: str
    cases: tuple[dict[str, Any], ...]
    bound: Bound
    misses: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every bound is met."""
        return not self.misses

    def require(self) -> None:
        """Raise if a bound is missed.

        Raises:
            ParityError: with every miss, and where the worst logit is.
        """
        if self.misses:
            raise ParityError(f"the engine does not compute what PyTorch computes: {'; '.join(self.misses)}")

    def to_dict(self) -> dict[str, Any]:
        """For JSON: numbers that are not finite are null."""
        plain = {key: finite_or_none(value) for key, value in self.__dict__.items()}
        return {"passed": self.passed, **plain, "bound": self.bound.to_dict()}


@dataclass
class Tally:
    """Running sums over one case or over all."""

    positions: int = 0
    kl: float = 0.0
    agree: int = 0
    error: float = 0.0
    worst: dict[str, int] = field(default_factory=dict)
    low: float = math.inf
    high: float = -math.inf
    nonfinite: int = 0

    def add(self, row: int, start: int, found: Distance) -> None:
        """Add the figures of positions `start`... of row `row`."""
        self.positions += len(found.kl)
        self.kl += float(found.kl.sum())
        self.agree += int(found.agree.sum())
        self.low, self.high = min(self.low, float(found.low.min())), max(self.high, float(found.high.max()))
        self.nonfinite += int((~found.finite).sum())
        at = int(found.error.argmax())
        if found.error[at] > self.error or not self.worst:
            self.error = float(found.error[at])
            self.worst = {"row": row, "position": start + at, "token": int(found.worst[at])}

    def merge(self, other: Tally) -> None:
        """Add another tally's sums; `worst` stays with the cases."""
        self.positions += other.positions
        self.kl += other.kl
        self.agree += other.agree
        self.error = max(self.error, other.error)
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.nonfinite += other.nonfinite


def finite_or_none(value: Any) -> Any:
    """The value, or None for a number that JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
