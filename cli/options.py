"""Options that several commands share. The environment is read here and nowhere else in adx."""

from __future__ import annotations

import math
from pathlib import Path

import click

THREADS_VARIABLE = "ADX_THREADS"

TARGETS = ("ort-cpu", "ort-cuda", "tensorrt", "tensorrt-rtx")
RUN_TARGETS = (*TARGETS, "onnx")  # onnx: the graphs that GPU engines are built from, on the CPU

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
LIMIT_ALIASES = {
    "--maxBatchSize": "--max-batch-size",
    "--maxInputLen": "--max-input-len",
    "--maxKVCacheCapacity": "--max-seq-len",
}


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
        type=click.Choice(RUN_TARGETS),
        help="Engine of the bundle to run; there is no falling back to another. onnx: the graphs that GPU engines are "
        "built from, run on the CPU, for checks.  [default: the bundle's first]",
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


def limit_options(*, batch: str, prompt: str, sequence: str) -> tuple[click.Option, ...]:
    """The three shape limits; the arguments say what each is where it is not given."""
    return (
        integer_option("--max-batch-size", f"Rows that a batch may have at most.  [default: {batch}]"),
        integer_option("--max-input-len", f"Tokens that a prompt may have at most.  [default: {prompt}]"),
        integer_option("--max-seq-len", f"Tokens, prompt and reply, that the KV cache holds.  [default: {sequence}]"),
    )
