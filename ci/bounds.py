"""How far an engine may be from PyTorch in float32, by precision, and which figures are beyond that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from adx.export.errors import UsageError


@dataclass(frozen=True)
class Bound:
    """Limits of one precision; None where the precision sets none.

    Attributes:
        precision: the row of the table.
        kl_mean: largest mean KL divergence of the engine's distribution from the reference's, in nats.
        top1: smallest share of positions with the same most likely token.
        perplexity_ratio: largest perplexity of the engine over that of the reference.
        atol: with `rtol`, the largest error of a logit: `atol + rtol * logit_range`.
        rtol: see `atol`.
        greedy: whether greedy tokens must be the reference's wherever its top two differ by more than the largest
            error of a logit.
    """

    precision: str
    kl_mean: float | None = None
    top1: float | None = None
    perplexity_ratio: float | None = None
    atol: float | None = None
    rtol: float | None = None
    greedy: bool = False

    def largest_error(self, logit_range: float) -> float | None:
        """Largest error of a logit over logits that span `logit_range`, or None where errors are not bounded."""
        if self.atol is None and self.rtol is None:
            return None
        return (self.atol or 0.0) + (self.rtol or 0.0) * logit_range

    def to_dict(self) -> dict[str, Any]:
        """The limits that are set, for JSON."""
        return {key: value for key, value in self.__dict__.items() if value is not None and value is not False}


BOUNDS = {
    bound.precision: bound
    for bound in (
        Bound("fp32", rtol=1e-3, greedy=True),
        Bound("fp16", kl_mean=1e-3, top1=0.99),
        Bound("bf16", kl_mean=5e-3, top1=0.98),
        Bound("int8", kl_mean=0.01, top1=0.95, perplexity_ratio=1.01),
        Bound("int8-activations", kl_mean=0.03, top1=0.92, perplexity_ratio=1.03),
        Bound("int4", kl_mean=0.20, top1=0.78, perplexity_ratio=1.20),
    )
}


class Measured(Protocol):
    """Figures that a bound is checked against."""

    @property
    def kl_mean(self) -> float: ...
    @property
    def top1(self) -> float: ...
    @property
    def max_abs_logit_error(self) -> float: ...
    @property
    def logit_range(self) -> float: ...
    @property
    def greedy_identical(self) -> bool: ...
    @property
    def perplexity_ratio(self) -> float: ...


def bound_of(recipe: str, *, atol: float | None = None, rtol: float | None = None) -> Bound:
    """The bound of a precision or a quantization recipe.

    Args:
        recipe: a row of the table, or a recipe whose name starts with one, as `int4-g32`.
        atol: with `rtol`, takes the place of the table's limit on the error of a logit.
        rtol: see `atol`.

    Raises:
        UsageError: a recipe without a bound, or a tolerance that is negative or not a number.
    """
    rows = [name for name in BOUNDS if recipe == name or recipe.startswith(f"{name}-")]
    if not rows:
        raise UsageError(f"precision: got {recipe!r}, which has no parity bound: accepted are {', '.join(BOUNDS)}")
    bound = BOUNDS[max(rows, key=len)]
    for field, value in (("atol", atol), ("rtol", rtol)):
        if value is not None and not 0 <= value < float("inf"):
            raise UsageError(f"{field}: got {value}, accepted are finite numbers of 0 or more")
    if atol is None and rtol is None:
        return bound
    return replace(bound, atol=atol or 0.0, rtol=rtol or 0.0)


def check(figures: Measured, bound: Bound) -> tuple[str, ...]:
    """The bounds that `figures` miss, in words; empty if it meets all. A figure that is not a number is a miss."""
    misses = []
    error = bound.largest_error(figures.logit_range)
    if error is not None and not figures.max_abs_logit_error <= error:
        share = figures.max_abs_logit_error / figures.logit_range if figures.logit_range else float("inf")
        misses.append(
            f"max_abs_logit_error is {figures.max_abs_logit_error:.3g} ({share:.2g} x the logit range "
            f"{figures.logit_range:.4g}), at most {error:.3g} is accepted"
        )
    if bound.kl_mean is not None and not figures.kl_mean <= bound.kl_mean:
        misses.append(f"kl_mean is {figures.kl_mean:.4g}, at most {bound.kl_mean:g} is accepted")
    if bound.top1 is not None and not figures.top1 >= bound.top1:
        misses.append(f"top1 is {figures.top1:.2%}, at least {bound.top1:.0%} is accepted")
    if bound.perplexity_ratio is not None and not figures.perplexity_ratio <= bound.perplexity_ratio:
        misses.append(
            f"perplexity_ratio is {figures.perplexity_ratio:.4f}, at most {bound.perplexity_ratio:g} is accepted"
        )
    if bound.greedy and not figures.greedy_identical:
        misses.append("greedy_identical is false: a greedy token differs where the reference's top two are not tied")
    return tuple(misses)
