"""Options of TensorRT builds, one list for `adx export` and `adx compile`, and the request that they make."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from adx.cli.command import Values
from adx.cli.options import integer_option

if TYPE_CHECKING:
    from adx.engines.tensorrt import PlanRequest

PLAN_TARGETS = ("tensorrt", "tensorrt-rtx")

# How trtexec calls them.
PLAN_ALIASES = {
    "--builderOptimizationLevel": "--opt-level",
    "--memPoolSize": "--workspace",
    "--minShapes": "--min-shapes",
    "--optShapes": "--opt-shapes",
    "--maxShapes": "--max-shapes",
    "--stripWeights": "--strip",
    "--timingCacheFile": "--timing-cache",
    "--vc": "--version-compatible",
    "--versionCompatible": "--version-compatible",
}

AMPERE = "ampere+"
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"(?P<pool>[a-z]+:)?(?P<number>\d+(\.\d+)?)(?P<unit>[bkmg]|[kmg]i?b)?", re.IGNORECASE)
_SIZE_GRAMMAR = "a size is a number and a unit, as 512M, 1G or 2GiB"


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Bytes, out of `1G` or of trtexec's `workspace:1024`, whose numbers are MiB where they have no unit."""
    if value is None:
        return None
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r}: {_SIZE_GRAMMAR}", ctx, param)
    pool, unit = match["pool"], (match["unit"] or "").lower().replace("ib", "")
    if pool not in (None, "workspace:"):
        raise click.BadParameter(f"{value!r}: only the pool 'workspace' is adx's to set", ctx, param)
    if not unit and pool is None:
        raise click.BadParameter(f"{value!r} has no unit: {_SIZE_GRAMMAR}", ctx, param)
    size = int(float(match["number"]) * _UNITS[unit or "m"])
    if size < 1:
        raise click.BadParameter(f"{value!r} is less than 1 byte; {_SIZE_GRAMMAR}", ctx, param)
    return size


def plan_options() -> tuple[click.Option, ...]:
    """How plans are built. `--hardwareCompatibilityLevel` is trtexec's spelling of a flag, with a value."""
    shapes = [_shape_option(name) for name in ("min", "opt", "max")]
    return (
        click.Option(
            ["--sm"],
            multiple=True,
            metavar="CC",
            help="Compute capability to build for, as sm89 or 8.9; repeatable, or a list: sm86,sm89. tensorrt builds "
            "for the GPU that is present only.  [default: that of the GPU that is present]",
        ),
        integer_option(
            "--opt-level",
            "0 to 5: how long the builder looks for faster kernels.  [default: the library's]",
            minimum=0,
            maximum=5,
        ),
        click.Option(
            ["--workspace"],
            callback=_size,
            metavar="SIZE",
            help="Most scratch memory of a kernel, as 512M, 1G or 2GiB.  [default: what the GPU has]",
        ),
        click.Option(
            ["--timing-cache"],
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="tensorrt: kernels measured by earlier builds; read if it is there, written after the build.  "
            "[default: beside the plans]",
        ),
        click.Option(
            ["--hardware-compatibility"], is_flag=True, help="tensorrt: plans that also run on other GPUs from sm80 on."
        ),
        click.Option(
            ["hardware_compatibility_level", "--hardwareCompatibilityLevel"],
            type=click.Choice(["none", AMPERE], False),
            hidden=True,
        ),
        click.Option(
            ["--version-compatible"], is_flag=True, help="tensorrt: plans that also run in later releases of TensorRT."
        ),
        click.Option(["--refit"], is_flag=True, help="Plans whose weights can be exchanged; needs a GPU to build."),
        click.Option(["--strip"], is_flag=True, help="Plans without their weights; needs a GPU to build."),
        *shapes,
    )


def _shape_option(corner: str) -> click.Option:
    return click.Option(
        [f"--{corner}-shapes"],
        metavar="SHAPES",
        help=f"{corner.capitalize()} shapes in place of planned ones, in trtexec's grammar: input_ids:1x16,...; "
        "prefill/NAME and decode/NAME name one graph's input.",
    )


def given_plan_options(values: Values) -> tuple[str, ...]:
    """Those of the options that the user gave, as they are spelled."""
    options = {option.name or "": option.opts[0] for option in plan_options()}
    return tuple(spelled for name, spelled in options.items() if _given(values[name]))


def _given(value: object) -> bool:
    return not (value is None or value is False or value == ())  # 0 is a value, and equals False


def plan_request(values: Values) -> PlanRequest:
    """How plans are to be built, from the options.

    Raises:
        UsageError: `--sm` names no compute capability.
    """
    from adx.engines.tensorrt import PlanRequest
    from adx.engines.tensorrt_library import parse_capability
    from adx.engines.tensorrt_options import BuildOptions

    sms = (parse_capability(part) for text in values["sm"] for part in text.split(","))
    return PlanRequest(
        tuple(dict.fromkeys(sms)),
        BuildOptions(
            opt_level=values["opt_level"],
            workspace_bytes=values["workspace"],
            hardware_compatible=values["hardware_compatibility"] or values["hardware_compatibility_level"] == AMPERE,
            version_compatible=values["version_compatible"],
            refit=values["refit"],
            strip=values["strip"],
            timing_cache=values["timing_cache"],
        ),
        min_shapes=values["min_shapes"] or "",
        opt_shapes=values["opt_shapes"] or "",
        max_shapes=values["max_shapes"] or "",
    )
