"""Running a bundle: sessions, the KV cache, the token loop, sampling, text, and the generator that joins them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adx.runtime.answer import Chunk, Completion
    from adx.runtime.generator import Generator
    from adx.runtime.loading import load
    from adx.runtime.params import SamplingParams

__all__ = ["Chunk", "Completion", "Generator", "SamplingParams", "load"]

_HOMES = {
    "Chunk": "adx.runtime.answer",
    "Completion": "adx.runtime.answer",
    "Generator": "adx.runtime.generator",
    "SamplingParams": "adx.runtime.params",
    "load": "adx.runtime.loading",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing a part of the package stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
