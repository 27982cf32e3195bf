"""The search for the smallest model within a quality budget: the fewest parts kept more precise, by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adx.calibration.recipe import Level


@dataclass(frozen=True)
class Unit:
    """Layers that are quantized alike, since they read the same input and are computed as one.

    Attributes:
        layers: their names.
        sizes: bytes that they take in an engine, as the recipe has them and then at each of `levels`.
        levels: what they can be raised to, step by step.
    """

    layers: tuple[str, ...]
    sizes: tuple[int, ...]
    levels: tuple[Level, ...]


@dataclass(frozen=True)
class Step:
    """A unit raised to its next level.

    Attributes:
        unit: what is raised.
        rank: which of the unit's levels, from 0.
        gain: KL divergence in nats that it takes away.
        added: bytes that it costs.
    """

    unit: Unit
    rank: int
    gain: float
    added: int

    @property
    def level(self) -> Level:
        """What the unit is raised to."""
        return self.unit.levels[self.rank]


def ranked(
    units: Sequence[Unit], sensitivities: Sequence[float], errors: Sequence[Sequence[float]]
) -> tuple[Step, ...]:
    """Every step of every unit, the one that takes away most divergence for each byte first.

    What a unit costs at a level that was not measured follows from its error there: the divergence that a small error
    of a layer's output causes is in proportion to the error's square.

    Args:
        units: that can be raised.
        sensitivities: KL divergence that each causes alone, as the recipe has it.
        errors: squared errors of each unit's outputs, as the recipe has it and then at each of its levels.
    """
    found: list[tuple[float, Step]] = []
    for unit, sensitivity, squares in zip(units, sensitivities, errors, strict=True):
        costs = [sensitivity * square / squares[0] if squares[0] > 0 else 0.0 for square in squares]
        rate = math.inf
        for rank in range(len(unit.levels)):
            step = Step(unit, rank, max(0.0, costs[rank] - costs[rank + 1]), unit.sizes[rank + 1] - unit.sizes[rank])
            rate = min(rate, step.gain / max(step.added, 1))  # no level before the one below it
            found.append((rate, step))
    return tuple(step for _, step in sorted(found, key=lambda each: -each[0]))


def first_guess(steps: Sequence[Step], excess: float) -> int:
    """How many steps take away a part of all divergence, if the units' divergences add up.

    Args:
        steps: in order.
        excess: the part to take away, 0 to 1.
    """
    total, gone = sum(step.gain for step in steps), 0.0
    for count, step in enumerate(steps):
        if gone >= excess * total and count:
            return count
        gone += step.gain
    return len(steps)


def fewest(count: int, passes: Callable[[int], bool], guess: int) -> int | None:
    """The smallest number of steps that passes, if what passes with some passes with more.

    At most `2 + 2 * log2(count)` calls, none of them twice with the same number; what is returned has passed in any
    case.

    Args:
        count: how many steps there are.
        passes: whether that many are enough; not asked for 0, which is known to fail.
        guess: where to begin.

    Returns:
        1 to `count`, or None: all of them are not enough.
    """
    if count < 1:
        return None
    below, above, width = 0, None, 1
    at = min(max(guess, 1), count)
    while above is None or above - below > 1:
        if passes(at):
            above = at
            # Near the guess first: a good one ends within a few calls.
            at = max(below + 1, above - width) if width < (above - below) / 2 else (above + below) // 2
        elif at == count:
            return None
        else:
            below = at
            at = min(count, below + width) if above is None else (above + below) // 2
        width *= 2
    return above


def most_calls(count: int) -> int:
    """An upper bound on the calls that `fewest` makes."""
    return 2 + 2 * math.ceil(math.log2(max(count, 2)))
