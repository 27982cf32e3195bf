"""The options of `adx export` and what other tools call them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from adx.cli.command import Sections, Spelling
from adx.cli.options import (
    LIMIT_ALIASES,
    TARGET_ALIASES,
    TARGET_NAMES,
    TARGETS,
    THREADS_ALIASES,
    finite,
    integer_option,
    limit_options,
    threads_option,
)
from adx.cli.plan_options import PLAN_ALIASES, plan_options

if TYPE_CHECKING:
    from adx.export.spec import Precision

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8", "int4")
QUANTIZED = ("int8", "int4")
ALGORITHMS = ("rtn", "smoothquant", "awq", "gptq")
AVAILABLE_ALGORITHMS = ALGORITHMS[:2]
TASKS = ("text-generation", "text-generation-with-past")

CALIBRATION_METHODS = ("minmax", "percentile", "entropy", "mse")
AVAILABLE_METHODS = CALIBRATION_METHODS[:2]

_ALGORITHM = "this release has rtn and smoothquant"

SPELLING = Spelling(
    aliases={
        **TARGET_ALIASES,
        **THREADS_ALIASES,
        **LIMIT_ALIASES,
        **PLAN_ALIASES,
        "--model-name-or-path": "--model",
        "--model-dir": "--model",
        "--input": "--model",
        "--output-dir": "--output",
        "--output-path": "--output",
        "--engine-dir": "--output",
        "--dtype": "--precision",
        "--weight-format": "--precision",
        "--block-size": "--group-size",
        "--dataset": "--calib-data",
        "--calibration-data-path": "--calib-data",
        "--num-samples": "--calib-size",
        "--calibration-method": "--calib-method",
    },
    values={
        "--target": TARGET_NAMES,
        "--precision": {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"},
        "--calib-method": {"max": "minmax"},
    },
    unavailable={
        **dict.fromkeys(("--awq", "--gptq", "--smooth-quant-alpha"), _ALGORITHM),
        "--max-ppl-increase": "needs a search that this release does not make; --nodes-to-exclude spares layers",
    },
)


def _regex(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise click.BadParameter(f"{pattern!r} is not a regular expression: {error}", ctx, param) from error
    return value


def _group_size(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
    if value is not None and value != -1 and (value < 16 or value & (value - 1)):
        raise click.BadParameter(f"{value} is neither a power of two of at least 16 nor -1 (per channel)", ctx, param)
    return value


SECTIONS: Sections = {
    "Model and bundle": [
        click.Option(["-m", "--model"], metavar="MODEL", help="The checkpoint, where it is not given as argument."),
        click.Option(
            ["-o", "--output"],
            type=click.Path(path_type=Path),
            metavar="OUT",
            help="The bundle's folder.  [default: NAME-PRECISION]",
        ),
        click.Option(["--force"], is_flag=True, help="Replace OUT if it exists, once the new bundle is complete."),
        click.Option(["--dry-run"], is_flag=True, help="Say what would be built, and its disk, memory and time."),
        click.Option(["--task"], type=click.Choice(TASKS), help="What the model does.  [default: as its class says]"),
        click.Option(["--trust-remote-code"], is_flag=True, help="Run Python code that comes with the checkpoint."),
        click.Option(
            ["--offline"],
            is_flag=True,
            envvar="HF_HUB_OFFLINE",
            help="Use no network; HF_HUB_OFFLINE=1 sets it too.",
        ),
    ],
    "Precision": [
        click.Option(
            ["-p", "--precision"],
            type=click.Choice(PRECISIONS),
            help="What the engines compute in, whatever the checkpoint is stored in.  [default: fp32]",
        ),
        click.Option(["--fp32"], is_flag=True, help="Float32."),
        click.Option(["--fp16"], is_flag=True, help="Float16: ort-cuda, tensorrt, tensorrt-rtx."),
        click.Option(["--bf16"], is_flag=True, help="Bfloat16, which no target computes in yet."),
        click.Option(
            ["--int8"],
            is_flag=True,
            help="ort-cpu: 8-bit weights, activations quantized on the fly inside the kernel. tensorrt, "
            "tensorrt-rtx: 8-bit weights and activations, with scales from calibration.",
        ),
        click.Option(
            ["--weights-only"],
            is_flag=True,
            help="With --int8 on tensorrt, tensorrt-rtx: activations stay in float16.",
        ),
        click.Option(["--int4"], is_flag=True, help="ort-cpu: 4-bit weights in groups, embedding and head in 8 bits."),
        click.Option(
            ["--quant-algo"],
            type=click.Choice(ALGORITHMS),
            help="How weights are quantized: rtn (rounding) or smoothquant (outliers of activations move into the "
            "weights first).  [default: smoothquant for int8, rtn for int4]",
        ),
        click.Option(
            ["--group-size"],
            type=int,
            callback=_group_size,
            metavar="N",
            help="Weights that share a scale, a power of two of at least 16; -1: a whole channel.",
        ),
        click.Option(
            ["--nodes-to-exclude"],
            multiple=True,
            callback=_regex,
            metavar="REGEX",
            help="Keep matching layers unquantized; repeatable.",
        ),
    ],
    "Engines": [
        click.Option(
            ["-e", "--target"],
            type=click.Choice(TARGETS),
            multiple=True,
            default=["ort-cpu"],
            help="Backend to build for; repeatable, but ort-cpu stands alone.  [default: ort-cpu]",
        ),
        *limit_options(batch="no limit; 4 in plans", prompt="what the KV cache holds", sequence="the model's context"),
        click.Option(["--keep-onnx"], is_flag=True, help="Keep the portable ONNX graphs in the bundle."),
        click.Option(["--full-logits"], is_flag=True, help="Portable prefill graph: logits of every position."),
        integer_option("--opset", "ONNX opset of the portable graphs."),
        threads_option(),
    ],
    "Calibration": [
        click.Option(
            ["--calib-data"],
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Text to calibrate on: .txt, or .jsonl with the key text.  [default: text that the model writes]",
        ),
        integer_option(
            "--calib-size", "Samples at most.  [default: 32 of a file, 8 that the model writes]", maximum=2**16
        ),
        integer_option(
            "--calib-seq-len", "Tokens of a sample.  [default: 128 of a file, 64 that the model writes]", maximum=2**20
        ),
        click.Option(
            ["--calib-method"],
            type=click.Choice(CALIBRATION_METHODS),
            help="How static scales of activations are chosen.  [default: minmax]",
        ),
    ],
    "TensorRT plans": [
        *plan_options(),
        click.Option(
            ["--no-build"],
            is_flag=True,
            help="Build no plans now: write the graphs and prove them, for adx compile on the host that has the "
            "library or the GPU.",
        ),
    ],
    "Parity": [
        click.Option(
            ["--atol"],
            type=click.FloatRange(min=0),
            callback=finite,
            metavar="X",
            help="Bound of the logits' absolute error, in place of the precision's own.",
        ),
        click.Option(
            ["--rtol"],
            type=click.FloatRange(min=0),
            callback=finite,
            metavar="X",
            help="Bound of the logits' error relative to their range, in place of the precision's own.",
        ),
        integer_option(
            "--seed",
            "Seed of the calibration text, and of the inputs that parity compares.",
            minimum=0,
            maximum=2**63 - 1,
            default=0,
        ),
        click.Option(["--allow-parity-failure"], is_flag=True, help="Keep a bundle that misses its bound, marked so."),
    ],
}
