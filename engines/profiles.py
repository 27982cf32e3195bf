"""TensorRT's shape profiles from three numbers, and the check of a call against them before it is launched.

A corner of a profile (min, opt, max) is one assignment of the graph's named dimensions, so what is tied stays tied: one
batch size for all inputs, total = past + new, the cache's length the same everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from adx.export.errors import LoweringError, UsageError
from adx.export.manifest import Limits
from adx.export.spec import GraphSpec, KVCacheSpec, TensorSpec

Shape = tuple[int, ...]
Span = tuple[int, int, int]  # min, opt, max

LARGEST_TENSOR = 2**40  # elements, as TensorRT takes
BATCH = "batch_size"
SEQUENCE = "sequence_length"  # new tokens of a row
PAST = "past_sequence_length"
TOTAL = "total_sequence_length"  # past and new
CACHE = "cache_length"  # places of a row in a preallocated cache

PREFILL_CHUNK = 1024  # most tokens of a row that prefill reads in one call
PREFILL_USUAL = 128  # a prompt's usual length, which prefill is tuned for
DECODE_TOKENS = 16  # most new tokens of a row in one decode call: drafts to verify
SHORT_TOTAL = 1024  # past and new tokens up to which a past is short

_KNOWN = {"prefill": (BATCH, SEQUENCE, TOTAL, CACHE), "decode": (BATCH, SEQUENCE, PAST, TOTAL, CACHE)}
_LABELS = {BATCH: "batch", SEQUENCE: "length", PAST: "past", TOTAL: "past and new tokens", CACHE: "cache length"}
_REMEDIES = {
    BATCH: "split the batch, or export with a larger --max-batch-size",
    SEQUENCE: "split the tokens over several calls",
    PAST: "shorten the context, or export with a larger --max-seq-len",
    TOTAL: "shorten the context, or export with a larger --max-seq-len",
    CACHE: "make the cache as long as the engine's own",
}


@dataclass(frozen=True)
class ShapeProfile:
    """Shapes of every input of one graph: name to (min, opt, max)."""

    name: str
    shapes: Mapping[str, tuple[Shape, Shape, Shape]]


def plan_profiles(graph: GraphSpec, limits: Limits, kv_cache: KVCacheSpec) -> tuple[ShapeProfile, ...]:
    """The profiles of one graph, those to be preferred first.

    Prefill has one, up to `PREFILL_CHUNK` tokens a row. Decode has "step" (one new token) and "chunk" (1 to
    `DECODE_TOKENS`), and where the past is a dimension of the graph each of them for a short and for a long past. No
    profile goes beyond `limits`, so a chunk near the end of the context may have to be taken in steps.

    Args:
        graph: with past and new tokens joined (`past_sequence_length`, `total_sequence_length`), or with a
            preallocated cache (`cache_length`, named or already fixed).
        limits: of the engine.
        kv_cache: shape of the cache.

    Raises:
        UsageError: the limits hold no batch size, contradict each other, or exceed the cache.
        LoweringError: an input has a dimension that nothing is known of, or a cache of another shape.
    """
    batch = _check_limits(limits, kv_cache)
    _check_graph(graph, limits, kv_cache)
    if graph.phase == "prefill":
        longest = min(limits.max_input_len, PREFILL_CHUNK)
        plans = {"prompt": ((1, min(PREFILL_USUAL, longest), longest), (0, 0, 0))}
    else:
        plans = _decode_plans(graph, limits.max_seq_len)
    return tuple(_profile(name, graph, batch, new, past, limits.max_seq_len) for name, (new, past) in plans.items())


def check_request(profiles: Sequence[ShapeProfile], shapes: Mapping[str, Shape], graph: GraphSpec) -> int:
    """Index of the first profile that holds a call's input shapes.

    A caller that repeats a shape may keep the index: it depends on the shapes alone.

    Raises:
        UsageError: an input is missing, unknown, of another rank or at odds with another input, or no profile holds
            the call; the message says what the engine takes.
    """
    sizes = named_sizes(graph, shapes, f"this {graph.phase} call")
    taken = [_ranges(profile, graph) for profile in profiles]
    for index, ranges in enumerate(taken):
        if all(low <= sizes[name] <= high for name, (low, high) in ranges.items()):
            return index
    raise UsageError(_refusal(graph, sizes, profiles, taken))


def named_sizes(
    graph: GraphSpec, shapes: Mapping[str, Shape], what: str, suspects: Collection[str] = ()
) -> dict[str, int]:
    """The size of each named dimension in `shapes`, one shape for every input of the graph.

    Args:
        what: where the shapes are from, for the message.
        suspects: inputs to blame first where two disagree.

    Raises:
        UsageError: an input is missing or unknown, has another rank or another fixed dimension, or the same name has
            two sizes, or total is not past + new.
    """
    inputs = {tensor.name: tensor for tensor in graph.inputs}
    for name in shapes:
        if name not in inputs:
            raise UsageError(f"{what}: {unknown_input(graph, name)}")
    sizes: dict[str, int] = {}
    owners: dict[str, str] = {}
    for tensor in sorted(graph.inputs, key=lambda tensor: tensor.name in suspects):
        if tensor.name not in shapes:
            raise UsageError(f"{what}: no shape for {tensor.name}; the {graph.phase} graph takes {_inputs(graph)}")
        shape = check_shape(tensor, shapes[tensor.name], what)
        for axis, (dim, size) in enumerate(zip(tensor.dims, shape, strict=True)):
            if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                raise UsageError(
                    f"{what}: {tensor.name}, dimension {axis} ({dim}): found {size}, but {owners[dim]} has "
                    f"{sizes[dim]}: {dim} is the same in every input, so change all that have it"
                )
            if isinstance(dim, str):
                owners.setdefault(dim, tensor.name)
    _check_total(graph, sizes, owners, what)
    return sizes


def check_shape(tensor: TensorSpec, shape: Shape, what: str) -> Shape:
    """`shape`, of the input's rank and with its fixed dimensions.

    Raises:
        UsageError: it is not.
    """
    if len(shape) != len(tensor.dims):
        raise UsageError(
            f"{what}: {tensor.name}: found {in_words(shape)} with {len(shape)} dimensions; it has {len(tensor.dims)}: "
            f"{in_words(tensor.dims)}"
        )
    for axis, (dim, size) in enumerate(zip(tensor.dims, shape, strict=True)):
        if isinstance(dim, int) and dim != size:
            raise UsageError(f"{what}: {tensor.name}, dimension {axis}: found {size}; the graph has it fixed at {dim}")
    return shape


def unknown_input(graph: GraphSpec, name: str) -> str:
    """What to say of an input that the graph does not have."""
    return f"the {graph.phase} graph has no input {name!r}; it takes {_inputs(graph)}"


def in_words(shape: Sequence[str | int]) -> str:
    """A shape as trtexec writes it: `1x3x2048x64`, and `scalar` for one without dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def _inputs(graph: GraphSpec) -> str:
    """Names of the inputs; those of the layers as a pattern."""
    names: dict[str, None] = {}
    for tensor in graph.inputs:
        parts = tensor.name.split(".")
        names[".".join("N" if part.isdecimal() else part for part in parts)] = None
    return ", ".join(names)


def _check_limits(limits: Limits, kv_cache: KVCacheSpec) -> int:
    """The batch size."""
    if limits.max_batch_size is None:
        raise UsageError(
            "TensorRT engines are built for a largest batch, and none was given: pass --max-batch-size N (1 for one "
            "prompt at a time)"
        )
    for option, value in (
        ("--max-batch-size", limits.max_batch_size),
        ("--max-input-len", limits.max_input_len),
        ("--max-seq-len", limits.max_seq_len),
    ):
        if value < 1:
            raise UsageError(f"{option} must be 1 or more, found {value}")
    if limits.max_input_len > limits.max_seq_len:
        raise UsageError(
            f"--max-input-len {limits.max_input_len} is more than --max-seq-len {limits.max_seq_len}, which counts the "
            "prompt and the reply: lower the one or raise the other"
        )
    if limits.max_seq_len > kv_cache.capacity:
        raise UsageError(
            f"--max-seq-len {limits.max_seq_len} is more than the {kv_cache.capacity} tokens that the model was "
            f"exported for: pass at most {kv_cache.capacity}, or export the model again with a larger --max-seq-len"
        )
    return limits.max_batch_size


def _check_graph(graph: GraphSpec, limits: Limits, kv_cache: KVCacheSpec) -> None:
    known = _KNOWN[graph.phase]
    for tensor in graph.inputs:
        for axis, dim in enumerate(tensor.dims):
            if isinstance(dim, str) and dim not in known:
                raise LoweringError(
                    f"{graph.file}: {tensor.name}, dimension {axis} is named {dim!r}, and no profile can be planned "
                    f"for it: the named dimensions of a {graph.phase} graph are {', '.join(known)}"
                )
        if tensor.name.startswith("past_key_values."):
            _check_cache(graph, tensor, limits, kv_cache)


def _check_cache(graph: GraphSpec, tensor: TensorSpec, limits: Limits, kv_cache: KVCacheSpec) -> None:
    heads, size, dims = kv_cache.kv_heads, kv_cache.head_dim, tensor.dims
    fits = len(dims) == 4 and (dims[1], dims[3]) == (heads, size)
    if not fits or (isinstance(dims[2], int) and dims[2] != limits.max_seq_len):
        raise LoweringError(
            f"{graph.file}: {tensor.name} is {in_words(dims)}, but the cache has {heads} KV heads of {size} elements, "
            f"and --max-seq-len is {limits.max_seq_len}: the graph was written for another model or length; export "
            "the model again"
        )


def _decode_plans(graph: GraphSpec, max_seq_len: int) -> dict[str, tuple[Span, Span]]:
    """Name to new tokens and past; the past is 0 where no input has it as a dimension."""
    grows = any(dim in (PAST, TOTAL) for tensor in graph.inputs for dim in tensor.dims)
    most = min(DECODE_TOKENS, max(1, max_seq_len - 1))  # something was read before
    news: dict[str, Span] = {"step": (1, 1, 1)}
    if most > 1:
        news["chunk"] = (1, most // 2, most)
    plans = {}
    for name, new in news.items():
        if not grows:
            plans[name] = (new, (0, 0, 0))
            continue
        short = min(SHORT_TOTAL, max_seq_len) - new[2]
        end = max_seq_len - new[2]
        plans[f"{name}, short past" if end > short else name] = (new, (0, short // 2, short))
        if end > short:
            plans[f"{name}, long past"] = (new, (short + 1, (short + 1 + end) // 2, end))
    return plans


def _profile(name: str, graph: GraphSpec, batch: int, new: Span, past: Span, cache: int) -> ShapeProfile:
    corners = [
        {BATCH: rows, SEQUENCE: tokens, PAST: before, TOTAL: before + tokens, CACHE: cache}
        for rows, tokens, before in zip((1, batch, batch), new, past, strict=True)
    ]
    shapes = {}
    for tensor in graph.inputs:
        least, usual, most = (
            tuple(dim if isinstance(dim, int) else sizes[dim] for dim in tensor.dims) for sizes in corners
        )
        shapes[tensor.name] = (least, usual, most)
    return ShapeProfile(name, shapes)


def _check_total(graph: GraphSpec, sizes: Mapping[str, int], owners: Mapping[str, str], what: str) -> None:
    """total = past + new; in prefill nothing is past."""
    past = sizes.get(PAST, 0 if graph.phase == "prefill" else None)
    if past is None or TOTAL not in sizes or SEQUENCE not in sizes:
        return
    if sizes[TOTAL] != past + sizes[SEQUENCE]:
        axis = next(tensor.dims.index(TOTAL) for tensor in graph.inputs if tensor.name == owners[TOTAL])
        raise UsageError(
            f"{what}: {owners[TOTAL]}, dimension {axis} ({TOTAL}): found {sizes[TOTAL]}; it must be "
            f"{past + sizes[SEQUENCE]}, {past} past and {sizes[SEQUENCE]} new tokens"
        )


def _ranges(profile: ShapeProfile, graph: GraphSpec) -> dict[str, tuple[int, int]]:
    """Least and most of each named dimension."""
    ranges = {}
    for tensor in graph.inputs:
        least, _, most = profile.shapes[tensor.name]
        for axis, dim in enumerate(tensor.dims):
            if isinstance(dim, str):
                ranges[dim] = (least[axis], most[axis])
    return ranges


def _refusal(
    graph: GraphSpec,
    sizes: Mapping[str, int],
    profiles: Sequence[ShapeProfile],
    taken: Sequence[Mapping[str, tuple[int, int]]],
) -> str:
    """Which dimension is outside of every profile; else which dimensions no one profile takes together."""
    out: list[str] = []
    for name in (BATCH, SEQUENCE, PAST, CACHE, TOTAL):
        spans = _union([ranges[name] for ranges in taken if name in ranges])
        if not spans or any(low <= sizes[name] <= high for low, high in spans) or (name == TOTAL and out):
            continue
        remedy = f"; {_REMEDIES[name]}" if sizes[name] > spans[-1][1] or name == CACHE else ""
        takes = " or ".join(map(_span, spans))
        out.append(f"{_LABELS[name]} {sizes[name]}: this engine takes {takes} in {graph.phase}{remedy}")
    if out:
        return ". ".join(out)
    apart = [name for name in (BATCH, SEQUENCE, PAST, CACHE) if len({ranges.get(name) for ranges in taken}) > 1]
    each = "; ".join(
        f"{profile.name!r} takes " + ", ".join(f"{_LABELS[name]} {_span(ranges[name])}" for name in apart)
        for profile, ranges in zip(profiles, taken, strict=True)
    )
    asked = " with ".join(f"{_LABELS[name]} {sizes[name]}" for name in apart)
    return f"{asked}: no profile of this engine takes them together in {graph.phase}: {each}; split the call"


def _union(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, those that touch joined."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return joined


def _span(span: tuple[int, int]) -> str:
    return f"{span[0]} to {span[1]}" if span[0] < span[1] else str(span[0])


def check_volume(limits: Limits, kv_cache: KVCacheSpec) -> None:
    """Refuse limits beyond what a tensor can hold, before any work.

    Raises:
        UsageError: a cache buffer at these limits has too many elements.
    """
    batch = limits.max_batch_size or 1
    elements = batch * kv_cache.kv_heads * limits.max_seq_len * kv_cache.head_dim
    if elements > LARGEST_TENSOR:
        raise UsageError(
            f"--max-batch-size {batch} with sequences of {limits.max_seq_len} tokens makes a cache buffer of "
            f"{elements:.3g} elements, and a tensor holds {LARGEST_TENSOR:.3g}: lower one of them"
        )
