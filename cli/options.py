"""Options that several commands share. The environment is read here and nowhere else in adx."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import click

from adx.export.errors import AdxError, BackendError

THREADS_VARIABLE = "ADX_THREADS"

# Every target of adx, and whether this release builds and runs it.
TARGETS = {"ort-cpu": True, "ort-cuda": False, "tensorrt": False, "tensorrt-rtx": False}

# How onnxruntime, onnxruntime-genai and optimum call them.
TARGET_NAMES = {
    "cpu": "ort-cpu",
    "cpuexecutionprovider": "ort-cpu",
    "cuda": "ort-cuda",
    "cudaexecutionprovider": "ort-cuda",
    "tensorrtexecutionprovider": "tensorrt",
    "nvtensorrtrtx": "tensorrt-rtx",
    "nvtensorrtrtxexecutionprovider": "tensorrt-rtx",
}
TARGET_ALIASES = {"--device": "--target", "--execution-provider": "--target", "--provider": "--target"}
THREADS_ALIASES = {"--num-threads": "--threads"}


def available(names: Sequence[str], error: type[AdxError]) -> tuple[str, ...]:
    """The targets named, each once.

    Raises:
        AdxError: of the given class, if this release has no engine for one of them.
    """
    for name in names:
        if not TARGETS[name]:
            usable = ", ".join(target for target, there in TARGETS.items() if there)
            raise error(f"--target {name}: this release of adx does not build or run {name} engines, only {usable}")
    return tuple(dict.fromkeys(names))


def _run_target(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    return value if value is None else available([value], BackendError)[0]


def finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Refuse NaN and infinities, which pass for numbers of any range."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number", ctx, param)
    return value


def threads_option() -> click.Option:
    """`--threads`, or the environment's ADX_THREADS."""
    return click.Option(
        ["-t", "--threads"],
        type=click.IntRange(min=1),
        envvar=THREADS_VARIABLE,
        metavar="N",
        help=f"Threads to compute with; {THREADS_VARIABLE} sets it too. Default: the CPUs that this process may use.",
    )


def target_option() -> click.Option:
    """`--target` of the commands that run a bundle."""
    return click.Option(
        ["-e", "--target"],
        type=click.Choice(list(TARGETS)),
        callback=_run_target,
        help="Engine of the bundle to run; there is no falling back to another. Default: the bundle's only engine.",
    )


def reference_option(default: str) -> click.Option:
    """`--reference` of the commands that compare with PyTorch; `default` says what happens without it."""
    return click.Option(
        ["--reference"],
        metavar="MODEL",
        help=f"Checkpoint to compare with: a folder, a hub id or a .gguf file. Default: {default}.",
    )


def bundle_argument() -> click.Argument:
    """`BUNDLE`, a folder that `adx export` wrote."""
    return click.Argument(["bundle"], type=click.Path(path_type=Path))


def integer_option(
    name: str, help: str, *, minimum: int = 1, maximum: int | None = None, default: int | None = None
) -> click.Option:
    """An option that takes a whole number from `minimum` to `maximum`."""
    return click.Option(
        [name],
        type=click.IntRange(minimum, maximum),
        default=default,
        metavar="N",
        help=help,
        show_default=default is not None,
    )
