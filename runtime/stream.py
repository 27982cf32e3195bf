"""Text as its tokens come: whole characters only, cut at stop strings; the pieces equal the whole."""

from __future__ import annotations

from collections.abc import Sequence

from adx.runtime.text import TextCodec, clean_up_spaces

_INCOMPLETE = "\ufffd"


class StreamDecoder:
    """Turns tokens, one at a time, into pieces of text that together equal the text of all.

    No piece has a character that is not complete yet. Only a short tail of tokens is decoded each time (the window of
    text-generation-inference and vLLM: text of the tail less text of its part already given), so the cost of a token
    does not grow with the text; a tail that stays incomplete is looked at again only as its length doubles.
    """

    def __init__(self, codec: TextCodec, *, skip_special_tokens: bool = True) -> None:
        self._codec = codec
        self._skip = skip_special_tokens
        self._cleaner = _SpaceCleaner() if codec.cleans else None
        self._ids: list[int] = []
        self._start = 0  # the window's first token
        self._given = 0  # tokens whose text has been given out
        self._retry_at = 0
        self._pieces: list[str] = []

    def push(self, token: int) -> str:
        """The text that a token completes, perhaps none."""
        if not self._codec.has_text(token, self._skip):
            return ""
        self._ids.append(token)
        piece = self._completed(token)
        if self._cleaner is not None and piece:
            piece = self._cleaner.push(piece)
        if piece:
            self._pieces.append(piece)
        return piece

    def flush(self) -> str:
        """The rest of the text, an incomplete character as U+FFFD; call once, at the end."""
        given = sum(map(len, self._pieces))
        return self._codec.decode(self._ids, skip_special_tokens=self._skip)[given:]

    def _completed(self, token: int) -> str:
        pending = len(self._ids) - self._given
        if self._codec.is_byte(token) or pending < self._retry_at:
            return ""
        before = self._codec.decode_raw(self._ids[self._start : self._given], self._skip)
        text = self._codec.decode_raw(self._ids[self._start :], self._skip)
        if text.endswith(_INCOMPLETE) or len(text) == len(before) or not text.startswith(before):
            self._retry_at = 2 * pending if pending > 8 else 0
            return ""
        self._start, self._given, self._retry_at = self._given, len(self._ids), 0
        return text[len(before) :]


class _SpaceCleaner:
    """Cleans spaces in a stream of text; what later text may still change is held back.

    No replaced pattern, one made by another's replacement included, spans more than three spaces.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        self._held += text
        spaces = [at for at, char in enumerate(self._held) if char == " "]
        whole = clean_up_spaces(self._held)
        for at in reversed(spaces[:-2]):
            cleaned = clean_up_spaces(self._held[:at])
            if cleaned + clean_up_spaces(self._held[at:]) == whole:
                self._held = self._held[at:]
                return cleaned
        return ""


class StopMatcher:
    """Cuts a stream of text at the first stop string, holding back what may become one.

    Attributes:
        stopped: whether a stop string came; no text follows then.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that certainly precedes any stop string."""
        if not self._stop or self.stopped:
            return "" if self.stopped else text
        held = self._held + text
        found = [at for at in (held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return held[: min(found)]
        keep = max(_overlap(held, stop) for stop in self._stop)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """The text held back, since the end came before a stop string did."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class RowText:
    """One row's text as its tokens come: whole characters, cut at stop strings."""

    def __init__(self, codec: TextCodec, *, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._decoder = StreamDecoder(codec, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string came."""
        return self._matcher.stopped

    def push(self, token: int) -> str:
        """The text that a token completes, perhaps none."""
        return self._matcher.push(self._decoder.push(token))

    def flush(self) -> str:
        """The rest of the text; call once, at the end."""
        if self.stopped:
            return ""
        last = self._matcher.push(self._decoder.flush())
        return last if self.stopped else last + self._matcher.flush()
