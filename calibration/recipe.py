"""The quantization recipe: for every linear layer how it is stored, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adx.calibration.weights import BlockScheme
from adx.export.errors import UsageError
from adx.export.spec import Precision

INT4_GROUP = 32
LARGEST_BLOCK = 128


@dataclass(frozen=True)
class LayerRecipe:
    """One layer's scheme, or None for float, and the reason where it departs from the recipe's precision."""

    scheme: BlockScheme | None
    reason: str | None = None


@dataclass(frozen=True)
class QuantRecipe:
    """How each linear layer is stored.

    Attributes:
        precision: what was asked for.
        layers: by the layer's name.
        embedding: scheme of an embedding table that is not tied to a layer, or None for float.
    """

    precision: Precision
    layers: Mapping[str, LayerRecipe]
    embedding: BlockScheme | None = None


def make_recipe(
    precision: Precision,
    shapes: Mapping[str, tuple[int, int]],
    *,
    head: str,
    group_size: int | None = None,
    exclude: Sequence[str] = (),
) -> QuantRecipe:
    """The recipe of a precision.

    Args:
        precision: `fp32`, `int8` or `int4`.
        shapes: (out, in) of every linear layer.
        head: the layer that gives the logits; at int4 it keeps 8 bits, and an embedding with it.
        group_size: weights that share a scale; -1 for whole rows; None for what suits each layer.
        exclude: regular expressions; layers whose name one of them finds stay in float.

    Raises:
        UsageError: an expression is invalid or matches nothing, or no layer would be quantized.
    """
    if precision == "fp32":
        if exclude or group_size is not None:
            raise UsageError("nodes to exclude and group size have no effect at fp32: choose int8 or int4")
        return QuantRecipe(precision, dict.fromkeys(shapes, LayerRecipe(None)))
    patterns = [_compiled(pattern, shapes) for pattern in exclude]
    layers: dict[str, LayerRecipe] = {}
    for name, (_, columns) in shapes.items():
        matched = next((p.pattern for p in patterns if p.search(name)), None)
        if matched is not None:
            layers[name] = LayerRecipe(None, f"excluded by {matched!r}")
        elif precision == "int4" and name == head:
            layers[name] = LayerRecipe(BlockScheme(8, _int8_block(columns)), "the head keeps 8 bits")
        elif precision == "int4":
            layers[name] = LayerRecipe(BlockScheme(4, _group(group_size, columns) or INT4_GROUP, symmetric=False))
        else:
            layers[name] = LayerRecipe(BlockScheme(8, _group(group_size, columns) or _int8_block(columns)))
    if all(layer.scheme is None for layer in layers.values()):
        raise UsageError(f"no layer would be quantized to {precision}: exclude fewer")
    return QuantRecipe(precision, layers, BlockScheme(8, _int8_block(shapes[head][1])))


def _compiled(pattern: str, shapes: Mapping[str, object]) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"nodes to exclude: {pattern!r} is not a regular expression: {error}") from error
    if not any(compiled.search(name) for name in shapes):
        raise UsageError(f"nodes to exclude: {pattern!r} matches no layer; layers are named as {next(iter(shapes))!r}")
    return compiled


def _group(group_size: int | None, columns: int) -> int | None:
    """The block of a group size; whole rows are one block, of the next power of two."""
    if group_size is None:
        return None
    return max(16, 1 << (columns - 1).bit_length()) if group_size == -1 else group_size


def _int8_block(columns: int) -> int:
    """The block that takes the fewest bytes a row, its padding and its scales counted."""

    def row_bytes(block: int) -> int:
        blocks = -(-columns // block)
        return blocks * (block + 4)

    return min((LARGEST_BLOCK, 64, 32, 16), key=row_bytes)
