"""A quantization report as one HTML file: no script, and nothing that is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

from adx.ci.report_charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    histogram,
    layer_chart,
    position_chart,
    search_chart,
)

PAGE = "quantization_report.txt"  # a Jinja template
NONE = "\N{EN DASH}"  # where a figure is missing


def render(facts: Mapping[str, Any]) -> str:
    """The page of a report, as `quantization.json` holds it. Whatever comes from a model or its data is escaped."""
    from jinja2 import Environment, StrictUndefined

    page = files(__package__).joinpath(PAGE).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"size": _size, "figure": _figure, "percent": _percent}
    frame = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}
    text: str = environment.from_string(page).render(r=facts, charts=_charts(facts), frame=frame)
    return text


def _charts(facts: Mapping[str, Any]) -> dict[str, Chart]:
    layers, positions = facts["layers"], facts["positions"]
    shown = {name: positions[name] for name in ("median", "mean", "p90", "p99", "max")}
    charts = {
        "positions": position_chart(positions["kl"], positions["window"]),
        "histogram": histogram(positions["kl"], shown),
        "errors": layer_chart(layers, "output_error", "Output error by layer", "error, part of the output's square"),
    }
    if facts["search"] is not None:
        charts["search"] = search_chart(facts["search"])
        chart = layer_chart(layers, "sensitivity", "Sensitivity by layer", "KL, nats")
        charts["sensitivities"] = replace(chart, legend=())
    return charts


def _size(count: float | None) -> str:
    if count is None:
        return NONE
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:.0f} bytes"


def _figure(value: float | None, form: str = ".3g") -> str:
    """A number, or a dash where there is none."""
    return NONE if value is None else format(value, form)


def _percent(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{100 * value:.{digits}f} %"
