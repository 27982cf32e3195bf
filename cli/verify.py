"""`adx verify`: every file of a bundle is what was written, and the engine computes what PyTorch computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from adx.cli.command import AdxCommand, Spelling, Values
from adx.cli.figures import parity_lines
from adx.cli.options import (
    TARGET_ALIASES,
    TARGET_NAMES,
    THREADS_ALIASES,
    bundle_argument,
    reference_option,
    target_option,
    threads_option,
)
from adx.cli.output import Output
from adx.export.errors import ParityError, UsageError

if TYPE_CHECKING:
    from adx.ci.parity import VerifyResult


def run(values: Values, output: Output) -> int:
    """Check the files, then measure parity, or say what the export measured."""
    from adx.ci.parity import verify_bundle

    if values["full"] and values["reference"] is None:
        raise UsageError("--full compares at more positions: name the checkpoint to compare with by --reference")
    if values["target"] and values["reference"] is None:
        raise UsageError("--target chooses the engine to compare: name the checkpoint to compare with by --reference")
    result = verify_bundle(
        values["bundle"],
        values["reference"],
        target=values["target"],
        threads=values["threads"],
        full=values["full"],
        report=output.report,
    )
    output.result(result, describe(result))
    if values["reference"] is None:
        output.note("adx: nothing was compared now; --reference MODEL measures parity again")
    if result.passed:
        return 0
    output.error("the engine does not compute what PyTorch computes within the bounds of its precision")
    return ParityError.exit_code


def describe(result: VerifyResult) -> list[str]:
    """The verdict, for people."""
    return [f"integrity: {result.integrity}", *parity_lines(result.parity), "passed" if result.passed else "FAILED"]


command = AdxCommand(
    "verify",
    run,
    help="""Check a bundle's files, then with --reference its parity with PyTorch float32.

    Exit code 1 where a file is damaged, 3 where a bound is missed.""",
    arguments=[bundle_argument()],
    sections={
        "Comparison": [
            reference_option("none, the files are checked and the export's own figures shown"),
            click.Option(["--full"], is_flag=True, help="Compare at four times as many positions."),
            target_option(),
            threads_option(),
        ],
    },
    spelling=Spelling(aliases={**TARGET_ALIASES, **THREADS_ALIASES}, values={"--target": TARGET_NAMES}),
)
