"""The `adx` command: finds the command that was named, and turns every error into one line and an exit code."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Sequence

import click

from adx.cli.command import LazyGroup, common_options
from adx.cli.output import to_json
from adx.export.errors import AdxError, Interrupted, UsageError

COMMANDS = {
    "export": "adx.cli.export",
    "compile": "adx.cli.compile",
    "verify": "adx.cli.verify",
    "eval": "adx.cli.eval",
    "generate": "adx.cli.generate",
    "bench": "adx.cli.bench",
    "inspect": "adx.cli.inspect",
    "doctor": "adx.cli.doctor",
}

# What users of other tools type, by the command that comes closest.
RELATED = {
    "benchmark": "bench",
    "build": "compile",
    "chat": "generate",
    "check": "verify",
    "convert": "export",
    "diff": "inspect",
    "gate": "verify",
    "info": "inspect",
    "perplexity": "eval",
    "quantize": "export",
    "run": "generate",
    "serve": "generate",
    "show": "inspect",
}


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"adx {version('adx-toolchain')}")
        ctx.exit()


cli = LazyGroup(
    "adx",
    help="Export, quantize, verify and run autoregressive models as compiled prefill and decode engines.",
    params=[
        *common_options(),
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Show adx's version.",
        ),
    ],
    modules=COMMANDS,
    related=RELATED,
)


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; `args` default to the process's own."""
    given = list(sys.argv[1:] if args is None else args)
    options = given[: given.index("--")] if "--" in given else given
    with warnings.catch_warnings():
        if not sys.warnoptions and "--debug" not in options:
            warnings.simplefilter("ignore")  # libraries' advice to programmers
        return _run(given, json="--json" in options, debug="--debug" in options)


def _run(args: list[str], *, json: bool, debug: bool) -> int:
    try:  # click itself ends the process quietly where whoever read stdout has gone
        code = cli.main(args or ["--help"], prog_name="adx", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", Interrupted.exit_code, json=json)
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, code = describe(error)
        return _fail(message, code, json=json)


def describe(error: Exception) -> tuple[str, int]:
    """What to tell the user of an error, and the exit code."""
    if isinstance(error, click.ClickException):
        path = getattr(getattr(error, "ctx", None), "command_path", "adx")
        return f"{error.format_message().rstrip('.')} (see {path} --help)", UsageError.exit_code
    if isinstance(error, AdxError):
        return str(error), error.exit_code
    if isinstance(error, MemoryError):
        return f"out of memory {error}".rstrip(), AdxError.exit_code
    if isinstance(error, OSError):
        return str(error), AdxError.exit_code
    return f"internal error: {type(error).__name__}: {error} (--debug shows where)", AdxError.exit_code


def _fail(message: str, code: int, *, json: bool) -> int:
    line = " ".join(message.split())
    print(f"adx: error: {line}", file=sys.stderr)
    if json:
        print(to_json({"error": line, "exit_code": code}))
    return code


if __name__ == "__main__":
    sys.exit(main())
