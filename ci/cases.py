"""Which shapes parity is measured at: prompts and decode steps that fit an engine's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from adx.runtime.session import Wanted

Kind = Literal["prefill", "chunks", "decode", "text", "greedy"]
DECODE_STEPS = 32


@dataclass(frozen=True)
class Case:
    """One prefill, then decode calls of the same batch.

    Attributes:
        kind: what it exercises; "text" alone counts for perplexity, "greedy" feeds back the engine's own tokens.
        prefill: prompt tokens of each row.
        chunks: new tokens per row of each decode call.
        wanted: which logits prefill is asked for.
    """

    kind: Kind
    prefill: tuple[int, ...]
    chunks: tuple[int, ...] = ()
    wanted: Wanted = "all"

    @property
    def longest(self) -> int:
        """Tokens that the longest row holds in the end."""
        return max(self.prefill) + sum(self.chunks)

    @property
    def positions(self) -> int:
        """Positions whose logits are compared."""
        prompts = sum(self.prefill) if self.wanted == "all" else len(self.prefill)
        return prompts + len(self.prefill) * sum(self.chunks)


_SHAPES = (
    Case("prefill", (1,)),
    Case("prefill", (7,)),
    Case("prefill", (33,)),
    Case("prefill", (2, 2)),
    Case("prefill", (33, 33)),
    Case("prefill", (3, 7, 12)),
    Case("prefill", (33, 1, 20)),
    Case("chunks", (40,), (33,)),
    Case("chunks", (5, 19), (7, 1, 2)),
    Case("decode", (1,), (1, 1, 1, 1)),
    Case("decode", (3, 7, 12), (1,) * DECODE_STEPS, "last"),
    Case("greedy", (9, 16), (1,) * DECODE_STEPS, "last"),
)


@dataclass(frozen=True)
class Limits:
    """What an engine takes.

    Attributes:
        capacity: tokens that a row can hold.
        max_batch_size: rows, or None for any number.
        max_input_len: tokens of a prompt, or None for `capacity`.
        recompute_at: `KVCacheSpec.recompute_at`: no row passes it between two calls.
        windows: `KVCacheSpec.windows`: each gets a prompt that is longer.
    """

    capacity: int
    max_batch_size: int | None = None
    max_input_len: int | None = None
    recompute_at: int | None = None
    windows: tuple[int | None, ...] = ()


def plan_cases(limits: Limits, *, positions: int, text_window: int) -> tuple[Case, ...]:
    """Cases within `limits`, about `positions` scored positions in all.

    Shapes come first: batches of equal and of different lengths, chunks on ragged pasts, single decode steps, a greedy
    run, and a prompt longer than each attention window of up to half of `positions`. The rest is text in windows of at
    most `text_window` tokens, every second one read in two calls.
    """
    shapes = [*_SHAPES, *(Case("prefill", (length,)) for length in _special_lengths(limits, positions // 2))]
    cases = [case for shape in shapes if (case := _fit(shape, limits)) is not None]
    window = min(text_window, limits.capacity, limits.max_input_len or limits.capacity)
    head = window - window // 4
    whole, split = Case("text", (window,)), Case("text", (head,), (window - head,) if window > head else ())
    left = max(positions - sum(case.positions for case in cases), window)
    for index in range(-(-left // window)):
        case = _fit(split if index % 2 else whole, limits)
        cases.append(whole if case is None else case)
    return tuple(cases)


def _special_lengths(limits: Limits, longest: int) -> Sequence[int]:
    """Prompts that pass each attention window and rope change; those beyond `longest` would take too long."""
    edges = sorted({edge for edge in (*limits.windows, limits.recompute_at) if edge})
    return [edge + 17 for edge in edges if edge <= longest and edge + 17 <= limits.capacity]


def _fit(case: Case, limits: Limits) -> Case | None:
    """The case within the limits: fewer rows, shorter prompts, fewer steps; None if nothing of it is left."""
    edge, capacity = limits.recompute_at, limits.capacity
    case = replace(case, prefill=case.prefill[: limits.max_batch_size])
    if edge and _passes(case, edge):
        if edge <= 64 and 2 * edge <= capacity:  # short enough to start all rows behind it
            case = replace(case, prefill=tuple(length + edge for length in case.prefill))
        else:
            capacity = min(capacity, edge - 1)
    if limits.max_input_len:
        bound = limits.max_input_len
        case = replace(
            case,
            prefill=tuple(min(length, bound) for length in case.prefill),
            chunks=tuple(min(chunk, bound) for chunk in case.chunks),
        )
    if case.longest > capacity:
        case = _shorten(case, capacity)
    if (edge and _passes(case, edge)) or (case.kind in ("chunks", "decode", "greedy") and not case.chunks):
        return None
    return case if min(case.prefill) >= 1 else None


def _passes(case: Case, edge: int) -> bool:
    """Whether some rows or steps lie before `edge` and others behind it."""
    return min(case.prefill) < edge <= case.longest and (len(case.prefill) > 1 or bool(case.chunks))


def _shorten(case: Case, capacity: int) -> Case:
    longest = capacity if not case.chunks else max(1, min(max(case.prefill), capacity // 3))
    prefill = tuple(min(length, longest) for length in case.prefill)
    chunks, total = [], max(prefill)
    for chunk in case.chunks:
        size = min(chunk, capacity - total)
        if size < 1:
            break
        chunks.append(size)
        total += size
    return replace(case, prefill=prefill, chunks=tuple(chunks))
