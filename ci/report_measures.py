"""What a quantization report measures by itself: divergence by position, time per token, texts before and after."""

from __future__ import annotations

import heapq
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.ci.corpus import Corpus
from adx.ci.decode_steps import EngineSteps, Steps, TorchSteps, greedy
from adx.ci.distance import Distance, distance, negative_log_likelihood
from adx.ci.progress import Report
from adx.runtime.session import Session

if TYPE_CHECKING:
    from adx.runtime.text import TextCodec

Tokens = NDArray[np.int64]
Logits = NDArray[np.float32]

POSITIONS, WINDOW, CHUNK = 768, 256, 64
WORST, CONTEXT = 6, 24  # positions that are shown, and tokens before each
PAST, ROUNDS, TIMED = 64, 4, 3  # tokens read before steps are timed; the first step of each round is not
NEW_TOKENS = 32
PROMPTS = (
    "The old bridge over the river was built by",
    "To grow tomatoes at home, you should first",
    "When the train finally arrived at the station, she",
)


class Measures:
    """An engine beside the reference: both are ready, and each measure uses them in turn.

    Args:
        corpus: token ids to read.
        max_input_len: tokens of a prompt at most.
        codec: the model's tokenizer; None: figures carry token ids alone.
    """

    def __init__(
        self,
        session: Session,
        reference: TorchSteps,
        corpus: Corpus,
        *,
        max_input_len: int,
        codec: TextCodec | None,
        report: Report,
    ) -> None:
        self._session, self._reference, self._corpus = session, reference, corpus
        self._codec, self._report = codec, report
        self._room = min(session.capacity, (session.recompute_at or session.capacity + 1) - 1)
        self._chunk = min(CHUNK, max_input_len, self._room)

    def positions(self) -> dict[str, Any]:
        """KL divergence (nats) after each of the text's first tokens, read in windows, its quantiles, and the largest.

        A window starts without memory of the one before; where engine or text begin anew shows in `window`.
        """
        found: list[Distance] = []
        worst: list[tuple[float, int, dict[str, Any]]] = []
        total, body = min(POSITIONS, len(self._corpus.tokens)), self._body
        for start, theirs, ours in self._read(total):
            self._report("measuring the divergence by position", start / total)
            found.append(one := distance(theirs, ours))
            for at in np.argsort(-one.kl)[:WORST]:
                example = self._example(start + int(at), theirs[at], ours[at])
                heapq.heappush(worst, (float(one.kl[at]), -(start + int(at)), example))
                if len(worst) > WORST:
                    heapq.heappop(worst)
        kl = np.concatenate([one.kl for one in found])
        return {
            "tokens": len(kl),
            "window": body,
            "text": self._corpus.source,
            **quantiles(kl),
            "top1": float(np.concatenate([one.agree for one in found]).mean()),
            "kl": [float(f"{value:.4g}") for value in kl],
            "worst": [{"index": -at, "kl": value, **example} for value, at, example in sorted(worst, reverse=True)],
        }

    @property
    def _body(self) -> int:
        """Tokens of the text in a window."""
        return max(1, min(WINDOW, self._room) - len(self._corpus.prefix))

    def _read(self, total: int) -> Iterator[tuple[int, Logits, Logits]]:
        """Yields (index of the first token, the reference's logits, the engine's) after tokens of the text, (N, V)."""
        prefix, body = np.array(self._corpus.prefix, np.int64), self._body
        cache = self._session.new_cache(1, body + len(prefix))
        for begin in range(0, total, body):
            row = np.concatenate([prefix, self._corpus.tokens[begin : min(begin + body, total)]])
            cache.clear()
            expected = self._reference.stream(row, self._chunk)
            for start in range(0, len(row), self._chunk):
                part = row[None, start : start + self._chunk]
                if start:
                    logits = self._session.decode(part, cache)[0]
                else:
                    logits = self._session.prefill(part, np.array([part.shape[1]]), cache, "all")[0]
                theirs, skipped = next(expected), max(0, len(prefix) - start)
                if skipped < len(theirs):
                    yield begin + start + skipped - len(prefix), theirs[skipped:], logits[skipped : len(theirs)]

    def _example(self, index: int, theirs: Logits, ours: Logits) -> dict[str, Any]:
        """What the two choose after a token of the text, and what the text has there."""
        tokens = self._corpus.tokens
        begin = max(index - index % self._body, index + 1 - CONTEXT)
        following = int(tokens[index + 1]) if index + 1 < len(tokens) else None
        return {
            "context": None if self._codec is None else self._text(tokens[begin : index + 1]),
            "next": None if following is None else {"token": following, "text": self._text([following])},
            "expected": self._choice(theirs),
            "got": self._choice(ours),
        }

    def _choice(self, logits: Logits) -> dict[str, Any]:
        token = int(logits.argmax())
        nats = float(negative_log_likelihood(logits[None], np.array([token]))[0])
        return {"token": token, "text": self._text([token]), "probability": float(np.exp(-nats))}

    def _text(self, tokens: Sequence[int] | Tokens) -> str | None:
        return None if self._codec is None else self._codec.decode([int(t) for t in tokens], skip_special_tokens=False)

    def speed(self) -> dict[str, Any]:
        """Median milliseconds of one new token, engine and PyTorch in turn."""
        each = ROUNDS * (TIMED + 1)
        past = min(PAST, self._room - each)
        if past < 1:
            return {"skipped": f"rows of {self._room} tokens are too short to time {each} steps"}
        self._report("timing decode steps", None)
        prompt = np.resize(self._corpus.tokens, (1, past))
        runs: list[tuple[Steps, list[float]]] = [(self._engine(1, past + each), []), (self._reference, [])]
        for steps, _ in runs:
            steps.restart()
            steps.read(prompt)
        for _ in range(ROUNDS):
            for steps, seconds in runs:
                seconds.extend(_timed(steps, prompt[:, :1])[1:])
        ours, theirs = (statistics.median(seconds) * 1e3 for _, seconds in runs)
        return {
            "past": past,
            "steps": ROUNDS * TIMED,
            "threads": self._session.threads,
            "engine_ms": ours,
            "float_ms": theirs,
            "ratio": theirs / ours,
            "float": "PyTorch float32 with transformers, eager attention",
        }

    def samples(self, ends: Sequence[int]) -> dict[str, Any]:
        """Greedy continuations of a few prompts, by the engine and by PyTorch.

        Args:
            ends: tokens that end a text.
        """
        codec = self._codec
        if codec is None:
            return {"skipped": "there is no tokenizer for this model's text"}
        rows = [codec.encode(prompt) for prompt in PROMPTS]
        length = min(len(row) for row in rows)  # rows of one length need no padding
        if length + NEW_TOKENS > self._room:
            return {"skipped": f"{length} tokens and {NEW_TOKENS} new ones are more than a row holds ({self._room})"}
        prompts = np.array([row[:length] for row in rows], np.int64)
        found = []
        both: tuple[Steps, Steps] = (self._engine(len(rows), length + NEW_TOKENS), self._reference)
        for part, steps in enumerate(both):
            self._report("writing texts with both", part / 2)
            found.append(greedy(steps, prompts, NEW_TOKENS))
        texts = []
        for prompt, *pair in zip(prompts, *found, strict=True):
            texts.append(self._compared(codec.decode(prompt.tolist()), *(_until(row, ends) for row in pair)))
        return {"new_tokens": NEW_TOKENS, "texts": texts}

    def _compared(self, prompt: str, ours: list[int], theirs: list[int]) -> dict[str, Any]:
        """Two continuations, each as the text that both have, its first token that differs, and the rest."""
        alike = sum(1 for _ in _while_equal(ours, theirs))
        differ = alike < max(len(ours), len(theirs))

        def parts(tokens: list[int]) -> dict[str, Any]:
            same, until, whole = (self._text(tokens[:end]) or "" for end in (alike, alike + 1, len(tokens)))
            # A character may take several tokens: what was decoded of its first part is not in the whole text.
            same = "".join(_while_equal(same, whole))
            until = "".join(_while_equal(until, whole))[len(same) :]
            return {"tokens": tokens, "same": same, "differs": until, "rest": whole[len(same) + len(until) :]}

        first = alike if differ else None
        return {"prompt": prompt, "first_difference": first, "engine": parts(ours), "float": parts(theirs)}

    def _engine(self, rows: int, room: int) -> EngineSteps:
        return EngineSteps(self._session, rows, room, self._chunk)


def quantiles(kl: NDArray[np.float64]) -> dict[str, float]:
    """Mean, median, 90 and 99 of 100 positions and the largest; quantiles are values that occur."""
    ordered = np.sort(kl)

    def at(part: float) -> float:
        return float(ordered[max(0, int(np.ceil(part * len(ordered))) - 1)])

    return {"mean": float(kl.mean()), "median": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1.0)}


def _timed(steps: Steps, token: Tokens) -> list[float]:
    """Seconds of some single-token steps."""
    seconds = []
    for _ in range(TIMED + 1):
        start = time.perf_counter()
        steps.read(token)
        seconds.append(time.perf_counter() - start)
    return seconds


def _until(row: Tokens, ends: Sequence[int]) -> list[int]:
    """A row up to and with the first of its tokens that ends a text."""
    tokens = [int(token) for token in row]
    last = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]


def _while_equal(ours: Sequence[Any], theirs: Sequence[Any]) -> Iterator[Any]:
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            return
        yield one
