"""How long work says how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Report: TypeAlias = Callable[[str, float | None], None]  # what is being done, and which part of it is finished (0 to 1)


def quiet(stage: str, fraction: float | None) -> None:
    """A `Report` that says nothing."""
