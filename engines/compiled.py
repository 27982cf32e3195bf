"""What a compilation leaves in the bundle's folder."""

from __future__ import annotations

from dataclasses import dataclass

from adx.export.spec import GraphSpec


@dataclass(frozen=True)
class CompiledEngine:
    """One target's files.

    Attributes:
        target: the target's name.
        files: paths relative to the bundle.
        graphs: a spec for each phase.
        linears: (out, in) of every linear layer by name.
    """

    target: str
    files: tuple[str, ...]
    graphs: tuple[GraphSpec, ...]
    linears: dict[str, tuple[int, int]]
