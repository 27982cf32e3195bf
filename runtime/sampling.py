"""From a row's logits to its next token: processors, then a sampler, both chosen once, outside the loop.

Order and meaning are transformers': repetition penalty, n-grams, banned sequences, minimum length, forced tokens,
suppressed tokens; then temperature, top-k, top-p, min-p. What is off costs nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adx.export.errors import AdxError, SamplingError
from adx.runtime.params import SamplingParams
from adx.runtime.session import Logits, Tokens

Row = NDArray[np.float32]
# Changes one row's logits (V,) in place, given the row's tokens so far, the prompt's included.
Processor = Callable[[Tokens, Row], None]
# Chooses a token from one row's logits (V,); the second argument counts the row's new tokens.
Sampler = Callable[[Row, int], int]


@dataclass(frozen=True)
class RowChooser:
    """How one row's tokens are chosen.

    Attributes:
        processors: applied in order to a copy of the row's logits.
        sampler: draws from them, or None to take the likeliest.
        bans: names of the settings that may forbid tokens, for an error that says which.
    """

    processors: tuple[Processor, ...]
    sampler: Sampler | None
    bans: tuple[str, ...]

    @classmethod
    def of(cls, params: SamplingParams, prompt_tokens: int, limit: int, vocab_size: int, stream: int) -> RowChooser:
        """The chooser of a row.

        Args:
            params: its settings.
            prompt_tokens: length of its prompt.
            limit: new tokens that it may have.
            vocab_size: width of the logits.
            stream: which of a seed's random streams is the row's own.

        Raises:
            SamplingError: a token id that must come is outside the vocabulary.
        """
        processors = build_processors(params, prompt_tokens, limit, vocab_size)
        sampler = None if params.greedy else build_sampler(params, vocab_size, stream)
        return cls(processors, sampler, tuple(name for name in _BANNING if getattr(params, name)))

    @property
    def plain(self) -> bool:
        """Whether the likeliest token is taken as the engine gave the logits."""
        return self.sampler is None and not self.processors

    def choose(self, logits: Row, history: Tokens, step: int) -> int:
        """The row's next token.

        Raises:
            SamplingError: the settings forbid every token.
            AdxError: the engine gave NaN.
        """
        if self.processors:
            logits = logits.copy()
            for process in self.processors:
                process(history, logits)
        best = int(logits.argmax())  # the first NaN, where there is one
        peak = float(logits[best])
        if peak != peak or peak == -np.inf:
            self._explain(peak)
        if self.sampler is None or peak == np.inf:
            return best
        return self.sampler(logits, step)

    def _explain(self, peak: float) -> None:
        if peak != peak:
            raise AdxError("the engine gave NaN logits: run `adx verify` on the bundle")
        names = " and ".join(self.bans) or "the engine's logits"
        raise SamplingError(self.bans[0] if self.bans else "logits", f"every token is forbidden by {names}: relax them")


_BANNING = (
    "no_repeat_ngram_size",
    "bad_words_ids",
    "min_new_tokens",
    "min_length",
    "suppress_tokens",
    "begin_suppress_tokens",
)


def choose_tokens(
    choosers: Sequence[RowChooser], logits: Logits, histories: Sequence[Tokens], active: Sequence[int], step: int
) -> list[int]:
    """The next token of each active row.

    Args:
        choosers: one per row of the batch.
        logits: (B, V), left as they are.
        histories: per row of the batch, its tokens so far.
        active: rows that want a token.
        step: new tokens that the rows have.
    """
    if len(active) > 1 and all(choosers[row].plain for row in active):
        best = logits.argmax(axis=-1)
        if np.isfinite(logits[np.arange(len(best)), best])[active].all():
            return [int(best[row]) for row in active]
    return [choosers[row].choose(logits[row], histories[row], step) for row in active]


def build_processors(params: SamplingParams, prompt_tokens: int, limit: int, vocab_size: int) -> tuple[Processor, ...]:
    """The processors that a row's settings need, in transformers' order."""
    eos = _inside(params.eos_token_ids, vocab_size)
    minimum = prompt_tokens + params.new_token_minimum(prompt_tokens)
    banned = [words for words in params.bad_words_ids if len(words) > 1 or words[0] not in params.eos_token_ids]
    forced_bos = params.forced_bos_token_id
    first = prompt_tokens if prompt_tokens > 1 or forced_bos is None else prompt_tokens + 1
    out: list[Processor] = []
    if params.repetition_penalty != 1.0:
        out.append(_repetition(params.repetition_penalty))
    if params.no_repeat_ngram_size:
        out.append(_no_repeat_ngram(params.no_repeat_ngram_size))
    if banned:
        out.append(_bad_words(banned, vocab_size))
    if minimum > prompt_tokens and eos.size:
        out.append(_suppress(eos, until=minimum))
    if forced_bos is not None:
        out.append(_force(_known("forced_bos_token_id", (forced_bos,), vocab_size), at=1))
    if params.forced_eos_token_id:
        forced = _known("forced_eos_token_id", params.forced_eos_token_id, vocab_size)
        out.append(_force(forced, at=prompt_tokens + limit - 1))
    if params.suppress_tokens:
        out.append(_suppress(_inside(params.suppress_tokens, vocab_size)))
    if params.begin_suppress_tokens:
        out.append(_suppress(_inside(params.begin_suppress_tokens, vocab_size), at=first))
    return tuple(out)


def _inside(ids: Sequence[int], vocab_size: int) -> Tokens:
    return np.array([token for token in ids if token < vocab_size], np.int64)


def _known(name: str, ids: Sequence[int], vocab_size: int) -> Tokens:
    for token in ids:
        if token >= vocab_size:
            raise SamplingError(name, f"token id {token} is outside the vocabulary of {vocab_size}")
    return np.array(ids, np.int64)


def _repetition(penalty: float) -> Processor:
    """Keskar et al. 2019 (CTRL): a seen token's logit is divided by the penalty where positive, else multiplied."""

    def process(history: Tokens, logits: Row) -> None:
        seen = logits[history]
        logits[history] = np.where(seen < 0, seen * np.float32(penalty), seen / np.float32(penalty))

    return process


def _no_repeat_ngram(size: int) -> Processor:
    def process(history: Tokens, logits: Row) -> None:
        if len(history) < size:
            return
        windows = np.lib.stride_tricks.sliding_window_view(history, size)  # (n, size)
        prefix = history[len(history) + 1 - size :]
        logits[windows[(windows[:, :-1] == prefix).all(axis=1), -1]] = -np.inf

    return process


def _bad_words(sequences: Sequence[tuple[int, ...]], vocab_size: int) -> Processor:
    for words in sequences:
        _known("bad_words_ids", words, vocab_size)
    always = np.array([words[0] for words in sequences if len(words) == 1], np.int64)
    after = [(np.array(words[:-1], np.int64), words[-1]) for words in sequences if len(words) > 1]

    def process(history: Tokens, logits: Row) -> None:
        logits[always] = -np.inf
        for prefix, last in after:
            if len(prefix) <= len(history) and np.array_equal(history[-len(prefix) :], prefix):
                logits[last] = -np.inf

    return process


def _suppress(ids: Tokens, *, until: int | None = None, at: int | None = None) -> Processor:
    """Forbids tokens: always, while a row is shorter than `until`, or where it is exactly `at` long."""

    def process(history: Tokens, logits: Row) -> None:
        length = len(history)
        if (until is None or length < until) and (at is None or length == at):
            logits[ids] = -np.inf

    return process


def _force(ids: Tokens, *, at: int) -> Processor:
    """Leaves only `ids` where a row is exactly `at` long."""

    def process(history: Tokens, logits: Row) -> None:
        if len(history) == at:
            logits[:] = -np.inf
            logits[ids] = 0.0

    return process


def build_sampler(params: SamplingParams, vocab_size: int, stream: int) -> Sampler:
    """Draws from the distribution that temperature, top-k, top-p and min-p leave.

    A token is where a uniform number of the row's own stream falls in the cumulated probabilities, tokens in id order.
    """
    uniform = uniform_stream(params.seed, stream)
    temperature = np.float32(min(max(params.temperature, 1e-20), 1e30))  # both ends are reached long before
    top_k = params.top_k if params.top_k < vocab_size else 0
    top_p, min_p = params.top_p, params.min_p

    def sample(logits: Row, step: int) -> int:
        ids: Tokens | None = None  # None: the whole vocabulary
        if top_k:
            ids = keep_top_k(logits, top_k)
            logits = logits[ids]
        with np.errstate(over="ignore", under="ignore"):
            weights = np.exp((logits - logits.max()) / temperature)
        if top_p < 1.0:
            kept = keep_top_p(weights, top_p)
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        if min_p > 0.0:
            kept = _ids_where(weights >= np.float32(min_p) * weights.max())
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        chosen = _draw(weights, uniform(step))
        return chosen if ids is None else int(ids[chosen])

    return sample


def _draw(weights: Row, uniform: float) -> int:
    cumulated = np.cumsum(weights, dtype=np.float64)
    chosen = int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))
    return min(chosen, len(weights) - 1)


_BLOCK = 64


def keep_top_k(logits: Row, k: int) -> Tokens:
    """Ids of tokens at least as likely as the k-th likeliest, ascending; ties at the edge all stay.

    The k-th largest of the maxima of blocks is a lower bound of the k-th largest of all, so only few are partitioned.
    """
    whole = len(logits) // _BLOCK
    if k > whole:
        return _ids_where(logits >= _kth_largest(logits, k))
    peaks = logits[: whole * _BLOCK].reshape(whole, _BLOCK).max(axis=1)
    ids = _ids_where(logits >= _kth_largest(peaks, k))
    values = logits[ids]
    kept: Tokens = ids[values >= _kth_largest(values, k)]
    return kept


def _kth_largest(values: Row, k: int) -> np.float32:
    largest: np.float32 = np.partition(values, len(values) - k)[len(values) - k]
    return largest


def keep_top_p(weights: Row, top_p: float) -> Tokens:
    """Ids, ascending, of the likeliest tokens that together hold `top_p` of the (unnormalised) probability.

    As transformers: sorted ascending, tokens whose cumulated probability is at most `1 - top_p` go, one stays at least;
    of equal tokens at the edge those of higher id stay. Only the bin that holds the edge is sorted: the upper bits of
    a float of 0 or more order as the float does.
    """
    bins = weights.view(np.int32) >> 16
    held = np.cumsum(np.bincount(bins, weights=weights))
    cut = (1.0 - top_p) * held[-1]
    edge = min(int(np.searchsorted(held, cut, side="right")), len(held) - 1)
    members = np.flatnonzero(bins == edge)
    rising = members[np.argsort(weights[members], kind="stable")]
    cumulated = np.cumsum(weights[rising], dtype=np.float64)
    below = held[edge - 1] if edge else 0.0
    dropped = min(int(np.searchsorted(below + cumulated, cut, side="right")), len(rising) - 1)
    stays = bins > edge
    stays[rising[dropped:]] = True
    return _ids_where(stays)


def _ids_where(mask: NDArray[np.bool_]) -> Tokens:
    return np.flatnonzero(mask).astype(np.int64, copy=False)


def uniform_stream(seed: int | None, stream: int) -> Callable[[int], float]:
    """Numbers in [0, 1) by step, of one of a seed's streams: the same whatever else runs, in any order.

    Philox (Salmon et al. 2011) keyed by seed and stream, with the step as its counter. No seed: a fresh key.
    """
    key = np.array([secrets.randbits(64) if seed is None else seed, stream], np.uint64)
    bits = np.random.Philox(key=key)
    numbers = np.random.Generator(bits)
    state = bits.state
    counter = state["state"]["counter"]

    def uniform(step: int) -> float:
        counter[:] = (step, 0, 0, 0)
        bits.state = state
        return float(numbers.random())

    return uniform
