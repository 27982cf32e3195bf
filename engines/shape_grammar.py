"""trtexec's shape grammar, `input_ids:1x1,past_key_values.0.key:1x3x2048x64`, and profiles overridden with it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adx.engines.profiles import (
    BATCH,
    CACHE,
    SEQUENCE,
    Shape,
    ShapeProfile,
    check_shape,
    in_words,
    named_sizes,
    unknown_input,
)
from adx.export.errors import UsageError
from adx.export.spec import GraphSpec

_PHASES = ("prefill", "decode")
_CORNERS = ("min", "opt", "max")
_LARGEST = 2**31 - 1
_ENTRY = re.compile(r"\s*(?:'(?P<quoted>[^']*)'|(?P<plain>[^\s:,']+))\s*:(?P<shape>[^,:']*)(?P<end>,|$)")
_GRAMMAR = "shapes are written input_ids:1x16,attention_mask:1x32 (a name that holds ':' or ',' in single quotes)"


def parse_shapes(text: str, option: str) -> dict[str, Shape]:
    """Input name to shape, out of trtexec's grammar.

    Entries are `NAME:SIZExSIZE`, divided by commas; spaces do not count. `NAME:` and `NAME:scalar` are shapes without
    dimensions. A name may stand in single quotes, and must where it holds a colon, a comma or a space.

    Args:
        text: what the user wrote.
        option: how the user spells the option, for the message.

    Raises:
        UsageError: the text is empty or no such list, a size is no number that a dimension can have, or a name comes
            twice.
    """
    shapes: dict[str, Shape] = {}
    place, more = 0, True
    while more:
        entry = _ENTRY.match(text, place)
        name = entry and (entry["quoted"] if entry["plain"] is None else entry["plain"])
        if entry is None or not name:
            rest = text[place:].strip()
            found = f"cannot read {rest!r}" if rest else "a shape is missing at the end" if place else "it is empty"
            raise UsageError(f"{option}: {found}; {_GRAMMAR}")
        if name in shapes:
            raise UsageError(f"{option}: {name} is given twice: give one shape for each input")
        shapes[name] = _shape(entry["shape"].strip(), name, option)
        place, more = entry.end(), entry["end"] == ","
    return shapes


def format_shapes(shapes: Mapping[str, Shape]) -> str:
    """The text that `parse_shapes` reads `shapes` from (names without single quotes)."""
    return ",".join(f"{_quoted(name)}:{in_words(shape)}" for name, shape in shapes.items())


def override(
    profiles: Sequence[ShapeProfile],
    *,
    min_shapes: Mapping[str, Shape],
    opt_shapes: Mapping[str, Shape],
    max_shapes: Mapping[str, Shape],
    graph: GraphSpec,
) -> tuple[ShapeProfile, ...]:
    """`profiles` of one graph with shapes that the user gave in place of the planned ones.

    Each shape goes into every profile; profiles that become equal are one. Inputs that are not given keep their
    planned shape, so a change of the batch size, say, must be given for every input.

    Args:
        profiles: as planned for `graph`.
        min_shapes: input name, or `prefill/NAME` or `decode/NAME` for one graph alone (which goes first), to shape.
        opt_shapes: the same.
        max_shapes: the same.
        graph: whose inputs are meant; keys of the other phase are left to its own call.

    Raises:
        UsageError: an input is unknown, a shape has another rank or another fixed dimension than the input, inputs
            disagree on a named dimension, or min <= opt <= max does not hold; the message names the input and the
            dimension.
    """
    shapes = (min_shapes, opt_shapes, max_shapes)
    given = [_of_phase(one, graph, corner) for one, corner in zip(shapes, _CORNERS, strict=True)]
    made: list[ShapeProfile] = []
    for profile in profiles:
        changed = _overridden(profile, given, graph)
        if all(changed.shapes != other.shapes for other in made):
            made.append(changed)
    return tuple(made)


@dataclass(frozen=True)
class _Given:
    """One corner's shapes for one graph: as the user spelled the input, and the shape."""

    corner: str
    spelled: Mapping[str, str]
    shapes: Mapping[str, Shape]

    @property
    def option(self) -> str:
        return f"--{self.corner}-shapes"


def _shape(text: str, name: str, option: str) -> Shape:
    if text in ("", "scalar"):
        return ()
    sizes = []
    for axis, size in enumerate(text.split("x")):
        if not re.fullmatch(r"\s*[0-9]+\s*", size) or len(size.strip()) > 10 or int(size) > _LARGEST:
            raise UsageError(
                f"{option}: {name}, dimension {axis}: {size.strip()!r} is no size from 0 to {_LARGEST}; {_GRAMMAR}"
            )
        sizes.append(int(size))
    return tuple(sizes)


def _quoted(name: str) -> str:
    return f"'{name}'" if re.search(r"[\s:,]", name) else name


def _of_phase(shapes: Mapping[str, Shape], graph: GraphSpec, corner: str) -> _Given:
    """Those that are meant for `graph`, each a possible shape of an input that the graph has."""
    spelled: dict[str, str] = {}
    chosen: dict[str, Shape] = {}
    inputs = {tensor.name: tensor for tensor in graph.inputs}
    for key, shape in sorted(shapes.items(), key=lambda item: _phase_of(item[0])[0] is not None):
        phase, name = _phase_of(key)
        if phase not in (None, graph.phase):
            continue
        what = f"--{corner}-shapes"
        if name not in inputs:
            other = next(one for one in _PHASES if one != graph.phase)
            hint = "" if phase else f"; if it is meant for the other graph alone, write {other}/{name}"
            raise UsageError(f"{what}: {unknown_input(graph, name)}{hint}")
        chosen[name], spelled[name] = check_shape(inputs[name], shape, what), key
    return _Given(corner, spelled, chosen)


def _phase_of(key: str) -> tuple[str | None, str]:
    phase, slash, name = key.partition("/")
    return (phase, name) if slash and phase in _PHASES else (None, key)


def _overridden(profile: ShapeProfile, given: Sequence[_Given], graph: GraphSpec) -> ShapeProfile:
    corners = [{name: shapes[i] for name, shapes in profile.shapes.items()} for i in range(len(_CORNERS))]
    for corner, new in zip(corners, given, strict=True):
        before = named_sizes(graph, corner, f"profile {profile.name!r}")
        corner.update(new.shapes)
        what = f"{new.option} in the profile {profile.name!r} of {graph.phase}"
        _check_corner(graph, before, named_sizes(graph, corner, what, suspects=new.shapes), what)
    least, usual, most = corners
    changed = {name: (least[name], usual[name], most[name]) for name in profile.shapes}
    _check_order(profile.name, changed, given, graph)
    return ShapeProfile(profile.name, changed)


def _check_corner(graph: GraphSpec, before: Mapping[str, int], sizes: Mapping[str, int], what: str) -> None:
    """Sizes that an engine can be called with: a row and a token at least, and the cache as long as it was planned."""
    capacity = _capacity(graph, before)
    for name, least, most in ((BATCH, 1, None), (SEQUENCE, 1, capacity), (CACHE, capacity or 1, capacity)):
        size = sizes.get(name, least)
        if size < least or (most is not None and size > most):
            tensor = next(tensor for tensor in graph.inputs if name in tensor.dims)
            takes = f"{least} or more" if most is None else f"{least} to {most}" if least < most else str(most)
            because = f" (--max-seq-len is {capacity})" if most else ""
            raise UsageError(
                f"{what}: {tensor.name}, dimension {tensor.dims.index(name)} ({name}): found {size}; it takes {takes}"
                f"{because}"
            )


def _capacity(graph: GraphSpec, sizes: Mapping[str, int]) -> int | None:
    """Places of a row in a preallocated cache."""
    if CACHE in sizes:
        return sizes[CACHE]
    fixed = (tensor.dims[2] for tensor in graph.inputs if tensor.name.startswith("past_key_values."))
    return next((dim for dim in fixed if isinstance(dim, int)), None)


def _check_order(
    name: str, shapes: Mapping[str, tuple[Shape, Shape, Shape]], given: Sequence[_Given], graph: GraphSpec
) -> None:
    """min <= opt <= max in every dimension."""
    for tensor in graph.inputs:
        least, usual, most = shapes[tensor.name]
        for axis, (low, middle, high) in enumerate(zip(least, usual, most, strict=True)):
            if low <= middle <= high:
                continue
            options = " and ".join(new.option for new in given if tensor.name not in new.shapes)
            spelled = next((new.spelled[tensor.name] for new in given if tensor.name in new.spelled), tensor.name)
            raise UsageError(
                f"{spelled}, dimension {axis} ({tensor.dims[axis]}) in the profile {name!r} of {graph.phase}: min "
                f"{low}, opt {middle}, max {high}; min <= opt <= max must hold"
                + (f": give {options} for it too" if options else "")
            )
