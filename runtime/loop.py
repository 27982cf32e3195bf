"""The token loop: `logits = prefill(ids)`, then sample, stop?, `decode(token)`. It knows token ids only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from adx.export.errors import ContextLengthError, PromptLengthError, UsageError
from adx.runtime.cache import KVCache
from adx.runtime.params import SamplingParams
from adx.runtime.sampling import RowChooser, choose_tokens
from adx.runtime.session import Logits, Session, Tokens

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Step:
    """What one step of a batch gave.

    Attributes:
        tokens: per row its new token, or None where the row had ended before.
        finished: per row why it ended with this step, or None.
    """

    tokens: tuple[int | None, ...]
    finished: tuple[FinishReason | None, ...]


@dataclass
class _Batch:
    """The rows of a run: tokens so far, right-padded, and which rows still want tokens."""

    tokens: Tokens  # (B, room + 1): prompt and new tokens
    lengths: Tokens  # (B,) prompt and new tokens of each row
    limits: list[int]
    params: Sequence[SamplingParams]
    choosers: Sequence[RowChooser]
    active: list[int] = field(default_factory=list)

    def histories(self) -> list[Tokens]:
        return [held[:length] for held, length in zip(self.tokens, self.lengths, strict=True)]


def generate_tokens(
    session: Session,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    stop_row: Callable[[int, int], bool] | None = None,
    cancelled: Callable[[], bool] | None = None,
    cache: KVCache | None = None,
    first_stream: int = 0,
) -> Iterator[Step]:
    """Answer a batch of prompts, one step at a time, until the last row ends.

    A row ends with "stop" at an end-of-text token (which is given out) or where `stop_row` says so, and with "length"
    at its limit: `max_new_tokens`, or what the context leaves. Since the last token needs no room in the cache, a
    prompt of n tokens in a context of c can have c - n + 1 new ones. A row with a limit of 0 ends in the first step.
    Rows that have ended keep their place; their cache lengths no longer grow.

    Args:
        session: the compiled model.
        prompts: token ids per row, of any lengths.
        params: settings of all rows (row i then draws from the seed's i-th random stream), or one per row (each from
            its seed's first stream, so a request gives the same tokens alone and in any batch).
        stop_row: called with a row and its new token; True ends the row.
        cancelled: asked before every run of the session; True ends all rows with "cancelled".
        cache: an empty cache to use; default: a new one, as large as the rows can need.
        first_stream: with one `params`, the random stream of row 0, where the batch is a part of a longer list.

    Raises:
        ContextLengthError: a prompt is longer than the context; nothing has run.
        UsageError: a prompt is empty or has an id outside the vocabulary; nothing has run.
    """
    rows = _prepare(session, prompts, params, first_stream)
    return _steps(session, rows, stop_row, cancelled, cache)


def _prepare(
    session: Session,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    first_stream: int,
) -> _Batch:
    shared = isinstance(params, SamplingParams)
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise UsageError(f"{len(prompts)} prompts and {len(each)} settings: give one setting, or one per prompt")
    for ids in prompts:
        check_prompt(ids, session)
    lengths = np.array([len(ids) for ids in prompts], np.int64)
    limits = [p.new_token_limit(len(ids), session.capacity) for p, ids in zip(each, prompts, strict=True)]
    width = max((len(ids) + max(limit, 1) for ids, limit in zip(prompts, limits, strict=True)), default=1)
    tokens = np.zeros((len(prompts), width), np.int64)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    choosers = [
        RowChooser.of(p, len(ids), limit, session.vocab_size, first_stream + row if shared else 0)
        for row, (p, ids, limit) in enumerate(zip(each, prompts, limits, strict=True))
    ]
    return _Batch(tokens, lengths, limits, each, choosers)


def check_prompt(ids: Sequence[int], session: Session) -> None:
    """Refuse a prompt that the session cannot read.

    Raises:
        ContextLengthError: it is longer than the context.
        PromptLengthError: it is longer than the prompts that the engine was exported for.
        UsageError: it is empty or has an id outside the vocabulary.
    """
    if not len(ids):
        raise UsageError("a prompt has no tokens: give one at least, as the model's beginning-of-text token")
    if len(ids) > session.capacity:
        raise ContextLengthError(len(ids), session.capacity)
    if session.max_input_len is not None and len(ids) > session.max_input_len:
        raise PromptLengthError(len(ids), session.max_input_len)
    if min(ids) < 0 or max(ids) >= session.vocab_size:
        wrong = next(token for token in ids if not 0 <= token < session.vocab_size)
        raise UsageError(f"token id {wrong} of a prompt is outside the model's vocabulary of {session.vocab_size}")


def _steps(
    session: Session,
    batch: _Batch,
    stop_row: Callable[[int, int], bool] | None,
    cancelled: Callable[[], bool] | None,
    cache: KVCache | None,
) -> Iterator[Step]:
    batch.active = [row for row, limit in enumerate(batch.limits) if limit > 0]
    ended = [row for row, limit in enumerate(batch.limits) if limit == 0]
    if not batch.active:
        if ended:
            yield _ending(batch, ended, "length")
        return
    if cancelled is not None and cancelled():
        yield _ending(batch, range(len(batch.limits)), "cancelled")
        return
    if cache is None:
        cache = session.new_cache(len(batch.limits), min(batch.tokens.shape[1] - 1, session.capacity))
    logits = _prefill(session, batch, cache)
    step = 0
    while True:
        chosen = choose_tokens(batch.choosers, logits, batch.histories(), batch.active, step)
        step += 1
        yield _accept(batch, chosen, step, ended, stop_row)
        ended = []
        if not batch.active:
            return
        if cancelled is not None and cancelled():
            yield _ending(batch, batch.active, "cancelled")
            return
        logits = _decode(session, batch, cache)


def _prefill(session: Session, batch: _Batch, cache: KVCache) -> Logits:
    """Read every row's tokens so far into an empty cache: logits (B, V) after each row's last one."""
    width = int(batch.lengths.max())
    return session.prefill(np.ascontiguousarray(batch.tokens[:, :width]), batch.lengths.copy(), cache)


def _decode(session: Session, batch: _Batch, cache: KVCache) -> Logits:
    """Append each active row's newest token to its cache: logits (B, V).

    A row that has ended reads its last cached token again, in its own place, so that its cache stays as it was.
    """
    held = cache.lengths
    if len(batch.active) < len(batch.limits):
        active = np.zeros(len(batch.limits), bool)
        active[batch.active] = True
        held = np.where(active, cache.lengths, cache.lengths - 1)
        cache.rewind(held)
    if session.recompute_at is not None and (held[batch.active] + 1 == session.recompute_at).any():
        return _recompute(session, batch, cache, held)
    tokens = np.take_along_axis(batch.tokens, held[:, None], axis=1)
    return session.decode(tokens, cache)[:, -1]


def _recompute(session: Session, batch: _Batch, cache: KVCache, held: Tokens) -> Logits:
    """The same by reading whole rows again, for a model whose cache must not outlive a row's growth to a length."""
    lengths = held + 1
    cache.clear()
    return session.prefill(np.ascontiguousarray(batch.tokens[:, : int(lengths.max())]), lengths, cache)


def _accept(
    batch: _Batch, chosen: Sequence[int], step: int, ended: Sequence[int], stop_row: Callable[[int, int], bool] | None
) -> Step:
    """Add the chosen tokens to their rows, and end the rows that end here."""
    tokens: list[int | None] = [None] * len(batch.limits)
    finished: list[FinishReason | None] = [None] * len(batch.limits)
    for row in ended:
        finished[row] = "length"
    for row, token in zip(batch.active, chosen, strict=True):
        batch.tokens[row, batch.lengths[row]] = token
        batch.lengths[row] += 1
        tokens[row] = token
        finished[row] = _reason(batch, row, token, step, stop_row)
    batch.active = [row for row in batch.active if finished[row] is None]
    return Step(tuple(tokens), tuple(finished))


def _reason(
    batch: _Batch, row: int, token: int, step: int, stop_row: Callable[[int, int], bool] | None
) -> FinishReason | None:
    params = batch.params[row]
    text_stops = stop_row is not None and stop_row(row, token)
    if text_stops or (token in params.eos_token_ids and not params.ignore_eos):
        return "stop"
    return "length" if step >= batch.limits[row] else None


def _ending(batch: _Batch, rows: Sequence[int], reason: FinishReason) -> Step:
    """A step without tokens that ends some rows."""
    count = len(batch.limits)
    ending = set(rows)
    return Step((None,) * count, tuple(reason if row in ending else None for row in range(count)))
