"""The options of `adx export` and what other tools call them."""

from __future__ import annotations

import math
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
ALGORITHMS = ("rtn", "smoothquant", "awq", "gptq")
TASKS = ("text-generation", "text-generation-with-past")
CALIBRATION_METHODS = ("minmax", "moving-average", "percentile", "entropy", "mse")

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
        "--calib-method": {"max": "minmax", "moving_average": "moving-average"},
    },
)


def _fraction(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """A percentage with or without its sign as a fraction: `5` and `5%` are 0.05."""
    if value is None:
        return None
    try:
        found = float(value.strip().removesuffix("%"))
    except ValueError:
        found = math.nan
    if not (found > 0 and math.isfinite(found)):
        raise click.BadParameter(f"{value!r} is no percentage above 0, as 5 or 0.5%", ctx, param)
    return found / 100


def _regex(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise click.BadParameter(f"{pattern!r} is not a regular expression: {error}", ctx, param) from error
    return value


def _alpha(ctx: click.Context, param: click.Parameter, value: str | None) -> float | str | None:
    if value is None or value == "auto":
        return value
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise click.BadParameter(f"{value!r} is neither a number from 0 to 1 nor auto", ctx, param)
    return share


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
            help="ort-cpu: 8-bit weights, activations quantized on the fly inside the kernel. ort-cuda: 8-bit weights. "
            "tensorrt, tensorrt-rtx: 8-bit weights and activations, with scales from calibration.",
        ),
        click.Option(
            ["--weights-only"],
            is_flag=True,
            help="With --int8 on tensorrt, tensorrt-rtx: activations stay in float16.",
        ),
        click.Option(
            ["--int4"], is_flag=True, help="ort-cpu, ort-cuda: 4-bit weights in groups, embedding and head in 8 bits."
        ),
        click.Option(
            ["--quant-algo"],
            type=click.Choice(ALGORITHMS),
            help="How weights are quantized. rtn: rounding to nearest. smoothquant: outliers of activations move into "
            "the weights first. awq: channels are scaled so that weights that matter round better. gptq: each column's "
            "rounding error is made up for by the columns after it. Int8 has rtn and smoothquant, int4 all; awq also "
            "goes with int8 on ort-cuda and with --weights-only.  [default: smoothquant for int8, gptq for int4]",
        ),
        click.Option(["--awq"], is_flag=True, help="As --quant-algo awq."),
        click.Option(["--gptq"], is_flag=True, help="As --quant-algo gptq."),
        click.Option(
            ["--smooth-quant-alpha"],
            callback=_alpha,
            metavar="X",
            help="Share of the outliers that smoothquant moves into the weights, 0 to 1, the same for every layer; "
            "auto: for each layer the one that leaves the least error in its output. Chooses smoothquant.  "
            "[default: 0.6]",
        ),
        click.Option(
            ["--clip"],
            is_flag=True,
            help="With rtn and smoothquant at int4: cut a range short where that leaves less squared error. awq and "
            "gptq always do.",
        ),
        click.Option(
            ["--symmetric/--asymmetric"],
            default=None,
            help="ort-cpu, ort-cuda: weights without or with zero points.  [default: without at int8, with at int4]",
        ),
        click.Option(
            ["--group-size"],
            type=int,
            callback=_group_size,
            metavar="N",
            help="Weights that share a scale, a power of two of at least 16, -1: a whole channel; ort-cuda: 16 to 128.",
        ),
        click.Option(
            ["--nodes-to-exclude"],
            multiple=True,
            callback=_regex,
            metavar="REGEX",
            help="Keep matching layers unquantized; repeatable.",
        ),
    ],
    "Quality": [
        click.Option(
            ["--max-ppl-increase"],
            callback=_fraction,
            metavar="PCT",
            help="Largest increase of perplexity over PyTorch float32, in percent, in place of the precision's own "
            "bound: the fewest layers are kept more precise that meet it.",
        ),
        click.Option(
            ["--max-kl"],
            type=click.FloatRange(min=0, min_open=True),
            callback=finite,
            metavar="X",
            help="The same for the mean KL divergence from PyTorch float32, in nats, as 0.05.",
        ),
        click.Option(
            ["--uniform"],
            is_flag=True,
            help="Every layer at the precision asked for: none is kept more precise to meet the bound (exit code 3 if "
            "it is missed).",
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
            metavar="PATH",
            help="Text to calibrate on: a file (.txt, .md, .json, .jsonl, .parquet; texts or chat messages), a folder "
            "of these, or a bundle's reports/calibration.json.  [default: text that the model writes]",
        ),
        integer_option(
            "--calib-size",
            "Samples at most.  [default: 128 of data; of text that the model writes 64 for gptq, else 16]",
            maximum=2**16,
        ),
        integer_option(
            "--calib-seq-len", "Tokens of a sample at most.  [default: 128, or what a sequence holds]", maximum=2**20
        ),
        click.Option(
            ["--calib-method"],
            type=click.Choice(CALIBRATION_METHODS),
            help="How static scales of activations are chosen.  [default: minmax]",
        ),
        click.Option(
            ["--calib-cache"],
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="Keep what is measured on the samples there, for later exports of the same model and data.  "
            "[default: OUT.calibration, until the export is done]",
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
