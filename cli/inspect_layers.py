"""What `adx inspect --layers` shows: how each layer is stored, what that costs, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adx.cli.figures import number
from adx.export.errors import BundleError

if TYPE_CHECKING:
    from adx.export.bundle import Bundle

REPORT = "reports/quantization.json"
ORDERS = ("order", "error", "sensitivity")
# What the report adds to the manifest; a bundle without a report has none of it.
_MEASURED = ("shape", "bytes", "output_error", "sensitivity", "raised_to")


def layer_rows(bundle: Bundle, order: str = "order") -> list[dict[str, Any]]:
    """Each linear layer as the manifest has it, with what the quantization report says of it (else None).

    Args:
        order: `order`: the model's; `error` or `sensitivity`: the largest first, layers without a figure last.

    Raises:
        BundleError: the report cannot be read.
    """
    reported = _reported(bundle)
    rows = []
    for layer in bundle.manifest.quantization.layers:
        found = reported.get(layer.name, {})
        rows.append(
            {
                "name": layer.name,
                "bits": layer.bits,
                "scheme": layer.scheme,
                "group_size": layer.block_size,
                **{key: found.get(key) for key in _MEASURED},
                "reason": layer.reason,
            }
        )
    if order == "order":
        return rows
    key = {"error": "output_error", "sensitivity": "sensitivity"}[order]
    return sorted(rows, key=lambda row: (row[key] is None, -(row[key] or 0.0)))


def layer_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The layers for people: a line for each, whatever the terminal's width, so that it can be searched."""
    table = [("layer", "out x in", "bits", "scheme", "group", "error", "sensitivity", "why")]
    for row in rows:
        table.append(
            (
                row["name"],
                "-" if row["shape"] is None else " x ".join(map(str, row["shape"])),
                str(row["bits"]),
                row["scheme"],
                str(row["group_size"] or "-"),
                number(row["output_error"], "{:.2g}"),
                number(row["sensitivity"], "{:.2g}"),
                row["reason"] or "",
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    words = (0, 3, 7)  # columns of words; figures stand on the right
    return [
        "  ".join(
            cell.ljust(width) if at in words else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]


def _reported(bundle: Bundle) -> dict[str, Mapping[str, Any]]:
    """The report's layers by name; none where the bundle has no report."""
    path = bundle.find(REPORT)
    if path is None:
        return {}
    try:
        layers = json.loads(path.read_text(encoding="utf-8"))["layers"]
        found: dict[str, Mapping[str, Any]] = {str(layer["name"]): dict(layer) for layer in layers}
        for layer in found.values():
            _check(layer)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BundleError(
            f"{REPORT} cannot be read ({type(error).__name__}: {error}): adx verify tells whether the bundle is as it "
            "was written"
        ) from error
    return found


def _check(layer: Mapping[str, Any]) -> None:
    """Raise a ValueError unless a layer's figures have the types that are shown."""
    shape = layer["shape"]
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise ValueError(f"shape {shape!r} of {layer['name']}")
    for key in ("bytes", "output_error", "sensitivity"):
        if layer[key] is not None and (isinstance(layer[key], bool) or not isinstance(layer[key], (int, float))):
            raise ValueError(f"{key} {layer[key]!r} of {layer['name']}")
