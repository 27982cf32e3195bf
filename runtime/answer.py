"""What a prompt is answered with: a completion, or chunks of one, and the row that gathers either."""

from __future__ import annotations

from dataclasses import dataclass

from adx.export.errors import UsageError
from adx.runtime.loop import FinishReason
from adx.runtime.params import SamplingParams
from adx.runtime.stream import RowText
from adx.runtime.text import TextCodec


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        text: without what follows a stop string, and without special tokens unless they were asked for.
        token_ids: the new tokens, the end-of-text token included where one came.
        finish_reason: "stop" (an end-of-text token or a stop string), "length" (the limit or the context's end) or
            "cancelled".
        prompt_tokens: tokens of the prompt.
        completion_tokens: new tokens.
        ttft_ms: milliseconds to the first token, or None where there is none.
        tpot_ms: mean milliseconds per token after the first, or None where there are fewer than two.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer: text that became certain with these tokens, and on the last one why it ended."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


class AnswerRow:
    """What a row has given so far: its tokens, their text, and when they came."""

    def __init__(self, codec: TextCodec | None, params: SamplingParams, *, incremental: bool) -> None:
        if codec is None and params.stop:
            raise UsageError("stop: this bundle has no tokenizer, so stop strings cannot be found: give eos_token_ids")
        self._codec = codec
        self._params = params
        self._text: RowText | None = None
        if codec is not None and incremental:
            self._text = RowText(codec, stop=params.stop, skip_special_tokens=params.skip_special_tokens)
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._times: list[float] = []
        self._reason: FinishReason = "length"

    def stops(self, _row: int, token: int) -> bool:
        """Take a new token's text; whether it completes a stop string."""
        if self._text is None:
            return False
        self._pieces.append(self._text.push(token))
        return self._text.stopped

    def taken(self) -> str:
        """Text that came since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def rest(self) -> str:
        """Text held back until the end."""
        return self._text.flush() if self._text is not None else ""

    def record(self, token: int | None, reason: FinishReason | None, now: float) -> None:
        """Note a step's outcome."""
        if token is not None:
            self._tokens.append(token)
            self._times.append(now)
        self._reason = reason or self._reason

    def completion(self, prompt_tokens: int, start: float) -> Completion:
        """The whole answer."""
        count = len(self._tokens)
        text = self.taken() + self.rest()
        if self._text is None and self._codec is not None:
            text = self._codec.decode(self._tokens, skip_special_tokens=self._params.skip_special_tokens)
        return Completion(
            text=text,
            token_ids=tuple(self._tokens),
            finish_reason=self._reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=count,
            ttft_ms=1e3 * (self._times[0] - start) if count else None,
            tpot_ms=1e3 * (self._times[-1] - self._times[0]) / (count - 1) if count > 1 else None,
        )
