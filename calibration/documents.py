"""A document of calibration data: a text or a conversation, or why there is none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

PIECE = 1 << 16  # characters of a document that are in work at a time

EMPTY = "empty"
NOT_JSON = "not JSON"
NO_TEXT = "without text or messages"
WRONG_TYPE = "of a wrong type"
NOT_UTF8 = "not UTF-8"
SURROGATE = "with half of a surrogate pair"


@dataclass(frozen=True)
class Text:
    """A text, in pieces that are read once and in order; `where` names it in messages."""

    where: str
    pieces: Iterable[str]


@dataclass(frozen=True)
class Conversation:
    """Messages for the model's chat template: objects with `role` and `content`."""

    where: str
    messages: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Skipped:
    """What is no document, and why."""

    where: str
    reason: str


Document: TypeAlias = Text | Conversation | Skipped


def document_of(value: Any, where: str) -> Document:
    """A record with `text`, or else with `messages`."""
    if not isinstance(value, Mapping):
        return Skipped(where, WRONG_TYPE)
    text, messages = value.get("text"), value.get("messages")
    if text is None:
        return Skipped(where, NO_TEXT) if messages is None else _conversation(messages, where)
    if not isinstance(text, str):
        return Skipped(where, WRONG_TYPE)
    if not text.strip():
        return Skipped(where, EMPTY)
    return Text(where, pieces_of(text)) if _is_unicode(text) else Skipped(where, SURROGATE)


def _conversation(messages: Any, where: str) -> Document:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return Skipped(where, WRONG_TYPE)
    if not messages:
        return Skipped(where, EMPTY)
    if not all(isinstance(message, Mapping) for message in messages):
        return Skipped(where, WRONG_TYPE)
    # Parquet gives every message every field of the column, absent ones as None.
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    for message in present:
        content = message.get("content", "" if "tool_calls" in message else None)
        if not isinstance(message.get("role"), str) or not isinstance(content, str):
            return Skipped(where, WRONG_TYPE)
    if not any(message.get("content", "").strip() or "tool_calls" in message for message in present):
        return Skipped(where, EMPTY)
    whole = _is_unicode(json.dumps(present, ensure_ascii=False, default=str))
    return Conversation(where, present) if whole else Skipped(where, SURROGATE)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def pieces_of(text: str) -> Iterator[str]:
    """A text in pieces of at most `PIECE` characters, parted before a space or a line's end where there is one."""
    start = 0
    while len(text) - start > PIECE:
        end = start + PIECE
        cut = max(text.rfind(" ", start + 1, end), text.rfind("\n", start + 1, end))
        cut = cut if cut > 0 else end
        yield text[start:cut]
        start = cut
    yield text[start:]
