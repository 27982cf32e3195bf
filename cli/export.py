"""`adx export`: a checkpoint becomes a bundle, verified against PyTorch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from adx.cli.command import AdxCommand, Spelling, Values
from adx.cli.options import (
    TARGET_ALIASES,
    TARGET_NAMES,
    TARGETS,
    THREADS_ALIASES,
    available,
    finite,
    integer_option,
    threads_option,
)
from adx.cli.output import Output
from adx.export.errors import ParityError, UsageError

if TYPE_CHECKING:
    from adx.ci.pipeline import ExportPlan, ExportRequest
    from adx.export.spec import Precision

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8", "int4")
QUANTIZED = ("int8", "int4")
ALGORITHMS = ("rtn", "smoothquant", "awq", "gptq")
AVAILABLE_ALGORITHMS = ALGORITHMS[:2]
TASKS = ("text-generation", "text-generation-with-past")

_TENSORRT = "applies to TensorRT targets, which this release of adx does not build; ort-cpu has no such setting"
_SHAPES = f"{_TENSORRT}: its shapes are limited by --max-batch-size, --max-input-len and --max-seq-len"
_CALIBRATION = (
    "this release calibrates on text that the model writes itself from --seed, enough for smoothquant; it reads no "
    "calibration data"
)
_ALGORITHM = "this release has rtn and smoothquant"

SPELLING = Spelling(
    aliases={
        **TARGET_ALIASES,
        **THREADS_ALIASES,
        "--model-name-or-path": "--model",
        "--model-dir": "--model",
        "--input": "--model",
        "--output-dir": "--output",
        "--output-path": "--output",
        "--engine-dir": "--output",
        "--dtype": "--precision",
        "--weight-format": "--precision",
        "--block-size": "--group-size",
        "--maxBatchSize": "--max-batch-size",
        "--maxInputLen": "--max-input-len",
        "--maxKVCacheCapacity": "--max-seq-len",
    },
    values={
        "--target": TARGET_NAMES,
        "--precision": {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"},
    },
    unavailable={
        **dict.fromkeys(
            ("--calib-data", "--calib-size", "--calib-seq-len", "--calib-method", "--dataset", "--num-samples"),
            _CALIBRATION,
        ),
        **dict.fromkeys(("--calibration-data-path", "--calibration-method"), _CALIBRATION),
        **dict.fromkeys(("--awq", "--gptq", "--smooth-quant-alpha"), _ALGORITHM),
        "--max-ppl-increase": "needs a search that this release does not make; --nodes-to-exclude spares layers",
        "--weights-only": "applies to int8 on TensorRT targets; ort-cpu stores only weights in 8 bits anyway",
        **dict.fromkeys(("--sm", "--timing-cache", "--timingCacheFile", "--opt-level"), _TENSORRT),
        **dict.fromkeys(("--builderOptimizationLevel", "--workspace", "--memPoolSize"), _TENSORRT),
        **dict.fromkeys(("--hardware-compatibility", "--hardwareCompatibilityLevel"), _TENSORRT),
        **dict.fromkeys(("--version-compatible", "--versionCompatible", "--vc"), _TENSORRT),
        **dict.fromkeys(("--min-shapes", "--opt-shapes", "--max-shapes"), _SHAPES),
        **dict.fromkeys(("--minShapes", "--optShapes", "--maxShapes"), _SHAPES),
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


def default_output(model: str, precision: str) -> Path:
    """The bundle's folder where none was named: the model's own name and the precision, in the current folder."""
    name = Path(model.rstrip("/")).resolve().name if Path(model).exists() else model.rstrip("/").split("/")[-1]
    return Path(f"{name.removesuffix('.gguf')}-{precision}")


def chosen_precision(values: Values) -> Precision:
    """The one precision that `--precision` and its shorthands name; float32 where none does.

    Raises:
        UsageError: they name more than one.
    """
    named = dict.fromkeys(name for name in PRECISIONS if values[name] or values["precision"] == name)
    if len(named) > 1:
        raise UsageError(
            f"more than one precision was asked for: {', '.join(named)}; name one of {', '.join(PRECISIONS)}"
        )
    return next(iter(named), "fp32")


def chosen_model(values: Values) -> str:
    """The checkpoint, named as an argument or by `--model`.

    Raises:
        UsageError: it is named twice, or not at all.
    """
    named = dict.fromkeys(name for name in (values["checkpoint"], values["model"]) if name)
    if len(named) != 1:
        given = " and ".join(named) or "none"
        raise UsageError(
            f"name one MODEL, a folder, a hub id or a .gguf file, as argument or with --model: got {given}"
        )
    return str(next(iter(named)))


def check_applicable(values: Values, precision: str) -> None:
    """Refuse options that would change nothing.

    Raises:
        UsageError: with the option and the reason.
    """
    if precision not in QUANTIZED:
        for option in ("group_size", "quant_algo", "nodes_to_exclude"):
            if values[option]:
                spelled = option.replace("_", "-")
                raise UsageError(f"--{spelled} applies to --int8 and --int4 only, and the precision is {precision}")
    if values["quant_algo"] not in (None, *AVAILABLE_ALGORITHMS):
        raise UsageError(f"--quant-algo {values['quant_algo']}: {_ALGORITHM}")
    if not values["keep_onnx"]:
        for option in ("opset", "full_logits"):
            if values[option]:
                spelled = option.replace("_", "-")
                raise UsageError(
                    f"--{spelled} changes the portable graphs only: add --keep-onnx to have them in the bundle"
                )


def request_from(values: Values) -> ExportRequest:
    """What to export, from the options.

    Raises:
        UsageError: options that contradict each other or have no effect.
    """
    precision, model = chosen_precision(values), chosen_model(values)
    targets = available(values["target"], UsageError)
    check_applicable(values, precision)
    from adx.ci.pipeline import ExportRequest

    return ExportRequest(
        model=model,
        out=values["output"] or default_output(model, precision),
        precision=precision,
        targets=targets,
        max_batch_size=values["max_batch_size"],
        max_input_len=values["max_input_len"],
        max_seq_len=values["max_seq_len"],
        quant_algo=values["quant_algo"],
        group_size=values["group_size"],
        nodes_to_exclude=values["nodes_to_exclude"],
        keep_onnx=values["keep_onnx"],
        full_logits=values["full_logits"],
        task=values["task"],
        opset=values["opset"],
        atol=values["atol"],
        rtol=values["rtol"],
        trust_remote_code=values["trust_remote_code"],
        offline=values["offline"],
        seed=values["seed"],
        force=values["force"],
        allow_parity_failure=values["allow_parity_failure"],
        threads=values["threads"],
    )


def run(values: Values, output: Output) -> int:
    """Export, or say what would be exported."""
    request = request_from(values)
    from adx.ci import pipeline

    if values["dry_run"]:
        plan = pipeline.plan_export(request)
        output.result(plan, plan_lines(plan))
        return 0
    result = pipeline.export_bundle(request, output.report)
    output.result(result, result.summary)
    if result.passed:
        return 0
    if request.allow_parity_failure:
        output.note("adx: parity failed, and the bundle was kept as --allow-parity-failure asks")
        return 0
    output.error("parity failed")
    return ParityError.exit_code


def plan_lines(plan: ExportPlan) -> list[str]:
    """An export that was not run, for people."""
    return [
        *plan.lines,
        f"disk:   {plan.disk_bytes / 1e6:,.0f} MB",
        f"memory: {plan.memory_bytes / 1e6:,.0f} MB at the peak",
        f"time:   {plan.seconds:,.0f} s on this machine",
    ]


command = AdxCommand(
    "export",
    run,
    help="""Export a checkpoint to a bundle and verify it against PyTorch.

    MODEL is a local Hugging Face folder (safetensors), a hub id, or a .gguf file. The bundle is complete or absent: it
    is written beside OUT and renamed when its parity with PyTorch float32 is proven (exit code 3 if it is not).""",
    arguments=[click.Argument(["checkpoint"], required=False, metavar="MODEL")],
    spelling=SPELLING,
    sections={
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
            click.Option(
                ["--task"], type=click.Choice(TASKS), help="What the model does.  [default: as its class says]"
            ),
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
            click.Option(["--fp16"], is_flag=True, help="Float16, on targets that have it."),
            click.Option(["--bf16"], is_flag=True, help="Bfloat16, on targets that have it."),
            click.Option(
                ["--int8"],
                is_flag=True,
                help="ort-cpu: 8-bit weights, activations quantized on the fly inside the kernel.",
            ),
            click.Option(
                ["--int4"], is_flag=True, help="ort-cpu: 4-bit weights in groups, embedding and head in 8 bits."
            ),
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
                type=click.Choice(list(TARGETS)),
                multiple=True,
                default=["ort-cpu"],
                help="Backend to build for; repeatable. This release builds ort-cpu.  [default: ort-cpu]",
            ),
            integer_option("--max-batch-size", "Rows that a batch may have at most."),
            integer_option("--max-input-len", "Tokens that a prompt may have at most."),
            integer_option(
                "--max-seq-len", "Tokens, prompt and reply, that the KV cache holds.  [default: the model's]"
            ),
            click.Option(["--keep-onnx"], is_flag=True, help="Keep the portable ONNX graphs in the bundle."),
            click.Option(["--full-logits"], is_flag=True, help="Portable prefill graph: logits of every position."),
            integer_option("--opset", "ONNX opset of the portable graphs."),
            threads_option(),
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
            click.Option(
                ["--allow-parity-failure"], is_flag=True, help="Keep a bundle that misses its bound, marked so."
            ),
        ],
    },
)
