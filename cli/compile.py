"""`adx compile`: plans for another target or GPU, from a bundle alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from adx.cli.command import AdxCommand, Spelling, Values
from adx.cli.options import LIMIT_ALIASES, TARGET_ALIASES, TARGET_NAMES, TARGETS, bundle_argument, limit_options
from adx.cli.output import Output
from adx.cli.plan_options import PLAN_ALIASES, plan_options, plan_request
from adx.export.errors import UsageError

if TYPE_CHECKING:
    from adx.ci.compile_bundle import CompileRequest


def request_from(values: Values) -> CompileRequest:
    """What to compile, from the options.

    Raises:
        UsageError: options that have no effect, or name no compute capability.
    """
    from adx.ci.compile_bundle import CompileRequest

    if values["force"] and values["output"] is None:
        raise UsageError("--force replaces a bundle at -o OUT, and without -o BUNDLE itself is replaced: leave it out")
    return CompileRequest(
        values["bundle"],
        tuple(dict.fromkeys(values["target"])),
        out=values["output"],
        plans=plan_request(values),
        max_batch_size=values["max_batch_size"],
        max_input_len=values["max_input_len"],
        max_seq_len=values["max_seq_len"],
        force=values["force"],
    )


def run(values: Values, output: Output) -> int:
    """Compile, and say what parity the bundle's graphs had."""
    from adx.ci.compile_bundle import compile_bundle

    result = compile_bundle(request_from(values), output.report)
    output.result(result, result.summary)
    if not result.passed:
        state = "was not measured" if result.passed is None else "FAILED"
        output.note(f"adx: parity of these graphs {state} when they were exported; adx verify shows it")
    return 0


command = AdxCommand(
    "compile",
    run,
    help="""Build TensorRT plans from the graphs in a bundle.

    BUNDLE was exported for tensorrt or tensorrt-rtx; nothing else is needed, not the checkpoint and not PyTorch. The
    plans are added to it: it is replaced in one step, or stays as it was. Exit code 5 says that the target's library or
    GPU is not here.""",
    arguments=[bundle_argument()],
    sections={
        "Engines": [
            click.Option(
                ["-e", "--target"],
                type=click.Choice(TARGETS),
                multiple=True,
                required=True,
                help="Library to build for, tensorrt or tensorrt-rtx; repeatable.",
            ),
            click.Option(
                ["-o", "--output"],
                type=click.Path(path_type=Path),
                metavar="OUT",
                help="Write a bundle with the plans there, and leave BUNDLE as it is.",
            ),
            click.Option(["--force"], is_flag=True, help="Replace OUT if it exists, once the new bundle is complete."),
            *limit_options(batch="the bundle's", prompt="the bundle's", sequence="the bundle's"),
        ],
        "TensorRT plans": [*plan_options()],
    },
    spelling=Spelling(
        aliases={
            **TARGET_ALIASES,
            **LIMIT_ALIASES,
            **PLAN_ALIASES,
            "--output-dir": "--output",
            "--output-path": "--output",
            "--engine-dir": "--output",
        },
        values={"--target": TARGET_NAMES},
        unavailable=dict.fromkeys(
            ("--fp16", "--fp32", "--bf16", "--int8", "--int4", "--precision", "--weights-only"),
            "the precision is that of the bundle's graphs, chosen when the model is exported",
        ),
    ),
)
