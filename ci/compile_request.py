"""What a compilation is asked for, and what it gives, as frozen values; and the command line that asks for it."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from adx.engines.tensorrt import PlanRequest


@dataclass(frozen=True)
class CompileRequest:
    """What to compile, and how.

    Attributes:
        bundle: the bundle's folder.
        targets: TensorRT targets to build plans for.
        out: another folder for the bundle with the plans; None: the bundle itself is replaced.
        plans: how TensorRT builds.
        max_batch_size: of the plans; None: the bundle's own. So for the next two.
        max_input_len: see `max_batch_size`.
        max_seq_len: see `max_batch_size`; at most what the model was exported for.
        force: replace a bundle that is at `out`.
        command: as the user typed it, for the bundle's provenance.
    """

    bundle: Path
    targets: tuple[str, ...]
    out: Path | None = None
    plans: PlanRequest = field(default_factory=PlanRequest)
    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    force: bool = False
    command: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv))

    @property
    def in_place(self) -> bool:
        """Whether the bundle itself is replaced."""
        return self.out is None or os.path.realpath(self.out) == os.path.realpath(self.bundle)


@dataclass(frozen=True)
class CompiledPlan:
    """One plan that was built: for which GPU and phase, where it is, its size, and the seconds of its build."""

    target: str
    sm: str
    phase: str
    file: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class CompileResult:
    """What a compilation gave; `passed` is what the export recorded of parity, None where it was skipped."""

    bundle: str
    passed: bool | None
    seconds: float
    peak_rss_mb: float
    bytes: int
    targets: tuple[str, ...]
    plans: tuple[CompiledPlan, ...]
    summary: tuple[str, ...]


def compile_command(request: CompileRequest) -> str:
    """The command line that does what `request` asks for, for another host."""
    options, plans = request.plans.options, request.plans
    values: dict[str, object] = {
        "-o": request.out,
        "--max-batch-size": request.max_batch_size,
        "--max-input-len": request.max_input_len,
        "--max-seq-len": request.max_seq_len,
        "--sm": ",".join(plans.sms) or None,
        "--opt-level": options.opt_level,
        "--workspace": options.workspace_bytes and f"{options.workspace_bytes}B",
        "--timing-cache": options.timing_cache,
        "--min-shapes": plans.min_shapes or None,
        "--opt-shapes": plans.opt_shapes or None,
        "--max-shapes": plans.max_shapes or None,
    }
    flags = {
        "--hardware-compatibility": options.hardware_compatible,
        "--version-compatible": options.version_compatible,
        "--refit": options.refit,
        "--strip": options.strip,
        "--force": request.force,
    }
    words = ["adx", "compile", str(request.bundle)]
    for target in request.targets:
        words += ["--target", target]
    for option, value in values.items():
        words += [] if value is None else [option, str(value)]
    return shlex.join([*words, *(flag for flag, on in flags.items() if on)])
