"""Geometry of a quantization report's charts: coordinates that its page draws as SVG."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 960.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 16.0, 12.0, 34.0
COLOURS = 10  # that the page has for kinds of layers
_BINS_PER_DECADE, _LOWEST = 4, 1e-9  # smaller divergences count as this


@dataclass(frozen=True)
class Tick:
    """A place on an axis, in the chart's coordinates, and what stands there."""

    at: float
    label: str


@dataclass(frozen=True)
class Bar:
    """A rectangle; `kind` is the number of its colour, `label` what it stands for."""

    x: float
    y: float
    width: float
    height: float
    kind: int
    label: str


@dataclass(frozen=True)
class Chart:
    """What one SVG shows.

    Attributes:
        title: what it is, for who does not see it.
        x_label: what its horizontal axis counts.
        y_label: what its vertical axis counts.
        x: ticks of the horizontal axis.
        y: ticks of the vertical axis.
        bars: from the left.
        dots: small marks (x, y).
        line: corners (x, y) of a line.
        marks: vertical lines with a label.
        limit: a horizontal line with a label, or None.
        legend: colour number and name.
    """

    title: str
    x_label: str
    y_label: str
    x: tuple[Tick, ...]
    y: tuple[Tick, ...]
    bars: tuple[Bar, ...] = ()
    dots: tuple[tuple[float, float], ...] = ()
    line: tuple[tuple[float, float], ...] = ()
    marks: tuple[Tick, ...] = ()
    limit: Tick | None = None
    legend: tuple[tuple[int, str], ...] = ()

    @property
    def dot_path(self) -> str:
        """The dots as strokes without length."""
        return "".join(f"M{x:.1f} {y:.1f}h0" for x, y in self.dots)

    @property
    def line_path(self) -> str:
        """The line as a path."""
        return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in self.line) if self.line else ""


@dataclass(frozen=True)
class _Decades:
    """A logarithmic scale over whole decades, from `near` to `far` in the chart's coordinates."""

    low: int
    high: int
    near: float
    far: float

    @classmethod
    def of(cls, values: Iterable[float], near: float, far: float) -> _Decades:
        logs = [math.log10(max(value, _LOWEST)) for value in values] or [0.0]
        low, high = math.floor(min(logs)), math.ceil(max(logs))
        return cls(low, max(high, low + 1), near, far)

    def at(self, value: float) -> float:
        part = (math.log10(max(value, _LOWEST)) - self.low) / (self.high - self.low)
        return self.near + min(max(part, 0.0), 1.0) * (self.far - self.near)

    def ticks(self) -> tuple[Tick, ...]:
        step = max(1, math.ceil((self.high - self.low) / 8))
        return tuple(Tick(self.at(10.0**e), f"{10.0**e:g}") for e in range(self.low, self.high + 1, step))


def kinds(names: Sequence[str]) -> dict[str, str]:
    """Kind of each layer by its name: the last parts of it, as few as tell the kinds apart (`q_proj`, `mlp.c_proj`).

    Numbers in a name are places in the model and no part of a kind.
    """
    whole = {name: tuple(part for part in name.split(".") if not re.fullmatch(r"\d+", part)) for name in names}
    distinct = set(whole.values())
    ends = Counter(kind[-count:] for kind in distinct for count in range(1, len(kind) + 1))

    def short(kind: tuple[str, ...]) -> str:
        length = next((n for n in range(1, len(kind) + 1) if ends[kind[-n:]] == 1), len(kind))
        return ".".join(kind[-length:])

    return {name: short(kind) for name, kind in whole.items()}


def layer_chart(layers: Sequence[Mapping[str, Any]], key: str, title: str, y_label: str) -> Chart:
    """A bar for each layer, in order, logarithmic; a layer without a value has one of no height."""
    named = kinds([str(layer["name"]) for layer in layers])
    numbers = {kind: index for index, kind in enumerate(dict.fromkeys(named.values()))}
    floor = HEIGHT - BOTTOM
    # A bar's length says nothing on a logarithmic scale but against others: the smallest is not to vanish.
    found = [layer[key] for layer in layers if layer[key]]
    scale = _Decades.of([*found, *(value / 2 for value in found)], floor, TOP)
    step = (WIDTH - LEFT - RIGHT) / max(1, len(layers))
    bars = []
    for index, layer in enumerate(layers):
        name, value = str(layer["name"]), layer[key]
        top = scale.at(value) if value else floor
        said = "none" if value is None else f"{value:.3g}"
        label = f"{name}: {said}, {layer['bits']} bits {layer['scheme']}"
        kind = numbers[named[name]] % COLOURS
        bars.append(Bar(LEFT + index * step, top, max(step * 0.86, 0.5), floor - top, kind, label))
    ticks = tuple(
        Tick(LEFT + (index + 0.5) * step, str(index + 1)) for index in _spread(len(layers), 12) if index < len(layers)
    )
    legend = tuple((number % COLOURS, kind) for kind, number in numbers.items())
    return Chart(title, "layer, in the model's order", y_label, ticks, scale.ticks(), tuple(bars), legend=legend)


def position_chart(kl: Sequence[float | None], window: int) -> Chart:
    """A dot for each position, logarithmic, and the mean of each eighth of a window as a line."""
    finite = [value for value in kl if value is not None]
    scale = _Decades.of(finite, HEIGHT - BOTTOM, TOP)
    step = (WIDTH - LEFT - RIGHT) / max(1, len(kl))
    dots = tuple((LEFT + (i + 0.5) * step, scale.at(value)) for i, value in enumerate(kl) if value is not None)
    each = max(1, window // 8)
    line = []
    for start in range(0, len(kl), each):
        part = [value for value in kl[start : start + each] if value is not None]
        if part:
            line.append((LEFT + (start + len(kl[start : start + each]) / 2) * step, scale.at(sum(part) / len(part))))
    ticks = tuple(Tick(LEFT + at * step, str(at)) for at in range(0, len(kl) + 1, window))
    return Chart(
        "KL divergence by position", "token of the text", "KL, nats", ticks, scale.ticks(), dots=dots, line=tuple(line)
    )


def histogram(kl: Sequence[float | None], quantiles: Mapping[str, float | None]) -> Chart:
    """How many positions have which divergence, in bins of a quarter of a decade, with the quantiles marked."""
    finite = [value for value in kl if value is not None]
    across = _Decades.of(finite, LEFT, WIDTH - RIGHT)
    bins = (across.high - across.low) * _BINS_PER_DECADE
    counts = [0] * bins
    for value in finite:
        at = (math.log10(max(value, _LOWEST)) - across.low) * _BINS_PER_DECADE
        counts[min(max(int(at), 0), bins - 1)] += 1
    floor, most = HEIGHT - BOTTOM, max(counts, default=0) or 1
    width, bars = (WIDTH - LEFT - RIGHT) / bins, []
    for index, count in enumerate(counts):
        low, high = (10 ** (across.low + n / _BINS_PER_DECADE) for n in (index, index + 1))
        height = (floor - TOP) * count / most
        label = f"{low:.2g} to {high:.2g}: {count} positions"
        bars.append(Bar(LEFT + index * width, floor - height, width - 1, height, 0, label))
    marks = tuple(Tick(across.at(value), name) for name, value in quantiles.items() if value is not None)
    ticks = tuple(Tick(floor - (floor - TOP) * part / most, str(part)) for part in _spread(most + 1, 4))
    title = "Positions by KL divergence"
    return Chart(title, "KL, nats", "positions", across.ticks(), ticks, tuple(bars), marks=marks)


def search_chart(search: Mapping[str, Any]) -> Chart:
    """Candidates of a search: steps that they take against the divergence that is left."""
    trials = [trial for trial in search["evaluations"] if trial["kl_mean"] is not None]
    bound = search["bound"].get("kl_mean")
    floor, most = HEIGHT - BOTTOM, max(1, search["of"])
    top = max([*(trial["kl_mean"] for trial in trials), bound or 0.0]) * 1.05 or 1.0

    def place(kept: float, kl: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * kept / most, floor - (floor - TOP) * kl / top

    bars = []
    for number, trial in enumerate(trials, 1):
        x, y = place(trial["kept"], trial["kl_mean"])
        label = f"evaluation {number}: {trial['kept']} steps, KL {trial['kl_mean']:.3g}"
        bars.append(Bar(x - 4, y - 4, 8, 8, 2 if trial["passed"] else 3, label))
    ticks = tuple(Tick(place(kept, 0)[0], str(kept)) for kept in _spread(most + 1, 8))
    levels = tuple(Tick(place(0, top * part / 4)[1], f"{top * part / 4:.2g}") for part in range(5))
    limit = None if bound is None else Tick(place(0, bound)[1], f"budget {bound:g}")
    legend = ((2, "within the budget"), (3, "beyond it"))
    marks = (Tick(place(search["kept"], 0)[0], "chosen"),)
    title = "Evaluations of the search"
    return Chart(title, "steps taken", "KL, nats", ticks, levels, tuple(bars), (), (), marks, limit, legend)


def _spread(count: int, about: int) -> range:
    """About as many of 0 to `count` - 1, at equal distances that are round."""
    rough = max(1, count / about)
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return range(0, count, step)
