"""The quantization recipe: for every linear layer how it is stored, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from adx.calibration.activations import InputQuantization
from adx.calibration.channels import ChannelScheme
from adx.calibration.weights import BlockScheme
from adx.export.errors import UsageError
from adx.export.spec import Precision

INT4_GROUP, INT4_FINER = 64, 32
# At 8 bits the error is that of the activations, which share the weights' blocks; the head's input cannot be smoothed.
INT8_GROUPS = {"head": 32, "other": 64}
# Inputs that 8 bits with one static scale would disturb more than this (see `InputQuantization.noise`) stay float.
INPUT_NOISE = 1e-3
SMALLEST_SCALE = 2.0**-24  # of an input: float16's smallest number


Level = Literal["finer", "int8", "weights", "float"]


class Layer(Protocol):
    """What a recipe needs to know of a linear layer."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) features."""

    @property
    def role(self) -> str:
        """`head` or `other`."""


@dataclass(frozen=True)
class LayerRecipe:
    """One layer's scheme, or None for float, and the reason where it departs from the recipe's precision."""

    scheme: BlockScheme | ChannelScheme | None
    reason: str | None = None


@dataclass(frozen=True)
class Raised:
    """A layer that is kept more precise than the recipe's precision.

    Attributes:
        level: `finer`: smaller blocks in a recipe of 4 bits; `int8`: 8 bits there; `weights`: its input stays float in
            a recipe that quantizes inputs; `float`: all of it does.
        reason: why, in words.
    """

    level: Level
    reason: str


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
    embedding: BlockScheme | ChannelScheme | None = None


def make_recipe(
    precision: Precision,
    linears: Mapping[str, Layer],
    *,
    group_size: int | None = None,
    symmetric: bool | None = None,
    exclude: Sequence[str] = (),
    raised: Mapping[str, Raised] | None = None,
) -> QuantRecipe:
    """The recipe of a precision.

    At int4 the head keeps 8 bits, and an embedding tied to it does.

    Args:
        precision: `fp32`, `int8` or `int4`.
        linears: every linear layer by name.
        group_size: weights that share a scale; -1 for whole rows; None for what suits each layer.
        symmetric: without zero points; None: at 8 bits without, at 4 bits with them.
        exclude: regular expressions; layers whose name one of them finds stay in float.
        raised: layers that are kept more precise.

    Raises:
        UsageError: an expression is invalid or matches nothing, or no layer would be quantized.
    """
    if precision == "fp32":
        if exclude or group_size is not None:
            raise UsageError("nodes to exclude and group size have no effect at fp32: choose int8 or int4")
        return QuantRecipe(precision, dict.fromkeys(linears, LayerRecipe(None)))
    patterns = [_compiled(pattern, linears) for pattern in exclude]
    layers: dict[str, LayerRecipe] = {}
    for name, linear in linears.items():
        matched = next((p.pattern for p in patterns if p.search(name)), None)
        more = (raised or {}).get(name)
        scheme = block_scheme(precision, linear, group_size, symmetric, more.level if more else None)
        if matched is not None:
            layers[name] = LayerRecipe(None, f"excluded by {matched!r}")
        elif more is not None:
            layers[name] = LayerRecipe(scheme, more.reason)
        else:
            head = precision == "int4" and linear.role == "head"
            layers[name] = LayerRecipe(scheme, "the head keeps 8 bits" if head else None)
    if all(layer.scheme is None for layer in layers.values()):
        raise UsageError(f"no layer would be quantized to {precision}: exclude fewer")
    return QuantRecipe(precision, layers, BlockScheme(8, INT8_GROUPS["head"]))


def make_channel_recipe(
    precision: Precision,
    linears: Mapping[str, Layer],
    *,
    inputs: Mapping[str, InputQuantization] | None = None,
    exclude: Sequence[str] = (),
    raised: Mapping[str, Raised] | None = None,
    uniform: bool = False,
) -> QuantRecipe:
    """The recipe of a precision for kernels that take one scale per output channel (TensorRT's).

    Args:
        precision: `fp16` or `int8`.
        linears: every linear layer by name.
        inputs: how each layer's input would be quantized; None: weights alone are quantized.
        exclude: as `make_recipe`.
        raised: as `make_recipe`.
        uniform: quantize inputs however much noise that adds, the head's too.

    Raises:
        UsageError: as `make_recipe`.
    """
    if precision == "fp16":
        if exclude:
            raise UsageError("nodes to exclude have no effect at fp16: choose int8")
        return QuantRecipe(precision, dict.fromkeys(linears, LayerRecipe(None)))
    patterns = [_compiled(pattern, linears) for pattern in exclude]
    layers: dict[str, LayerRecipe] = {}
    for name in linears:
        matched = next((p.pattern for p in patterns if p.search(name)), None)
        found, more = None if inputs is None else inputs.get(name), (raised or {}).get(name)
        if matched is not None:
            layers[name] = LayerRecipe(None, f"excluded by {matched!r}")
        elif more is not None:
            layers[name] = LayerRecipe(None if more.level == "float" else ChannelScheme(), more.reason)
        elif inputs is None:
            layers[name] = LayerRecipe(ChannelScheme())
        elif found is None:
            layers[name] = LayerRecipe(ChannelScheme(), "its input stays float: no calibration sample reached it")
        elif found.scale < SMALLEST_SCALE:
            layers[name] = LayerRecipe(ChannelScheme(), "its input stays float: it is zero on every sample, or nearly")
        elif linears[name].role == "head" and not uniform:
            # Noise in the head's input is noise in the logits, with no layer after it to average over.
            layers[name] = LayerRecipe(ChannelScheme(), "its input stays float: it makes the logits")
        elif found.noise > INPUT_NOISE and not uniform:
            reason = f"its input stays float: in 8 bits its noise would be {found.noise:.2g} of it"
            layers[name] = LayerRecipe(ChannelScheme(), reason)
        else:
            layers[name] = LayerRecipe(ChannelScheme(found.scale))
    if all(layer.scheme is None for layer in layers.values()):
        raise UsageError(f"no layer would be quantized to {precision}: exclude fewer")
    return QuantRecipe(precision, layers, ChannelScheme())


def _compiled(pattern: str, shapes: Mapping[str, object]) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"nodes to exclude: {pattern!r} is not a regular expression: {error}") from error
    if not any(compiled.search(name) for name in shapes):
        raise UsageError(f"nodes to exclude: {pattern!r} matches no layer; layers are named as {next(iter(shapes))!r}")
    return compiled


def _group(group_size: int, columns: int) -> int:
    """The block of a group size; whole rows are one block, of the next power of two, and no block is larger."""
    row = max(16, 1 << (columns - 1).bit_length())
    return row if group_size == -1 else min(group_size, row)


def block_scheme(
    precision: Precision, linear: Layer, group_size: int | None, symmetric: bool | None, level: Level | None = None
) -> BlockScheme | None:
    """How a layer is stored in blocks at int8 or int4, or None for float.

    Args:
        level: what it is raised to; None: as the precision has it.
    """
    columns = linear.shape[1]
    if level == "float":
        return None
    if precision == "int4" and linear.role != "head" and level != "int8":
        return int4_scheme(columns, INT4_FINER if level == "finer" else group_size, symmetric)
    if precision == "int4":
        return BlockScheme(8, _int8_block(linear))
    block = _int8_block(linear) if group_size is None else _group(group_size, columns)
    if linear.role == "head" and columns % block:
        block = max(16, columns & -columns)  # blocks that fill whole rows: an embedding tied to it needs them
    return BlockScheme(8, block, symmetric is not False)


def int4_scheme(columns: int, group_size: int | None, symmetric: bool | None) -> BlockScheme:
    """How a layer is stored in 4 bits unless something says otherwise."""
    return BlockScheme(4, INT4_GROUP if group_size is None else _group(group_size, columns), symmetric is True)


def _int8_block(linear: Layer) -> int:
    """The block for 8 bits: what the layer's role asks for, or less where padding would take more bytes."""
    columns = linear.shape[1]
    wanted = INT8_GROUPS[linear.role]

    def row_bytes(block: int) -> int:
        blocks = -(-columns // block)
        return blocks * (block + 4)

    return min((block for block in (wanted, 32, 16) if block <= wanted), key=row_bytes)
