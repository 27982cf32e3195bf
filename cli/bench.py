"""`adx bench`: time to first token, time per token, throughput, memory and load time of a bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from adx.cli.command import AdxCommand, Spelling, Values
from adx.cli.figures import number
from adx.cli.options import (
    TARGET_ALIASES,
    TARGET_NAMES,
    THREADS_ALIASES,
    bundle_argument,
    integer_option,
    target_option,
    threads_option,
)
from adx.cli.output import Output, plain

if TYPE_CHECKING:
    from rich.console import RenderableType

    from adx.ci.bench import BenchResult


def run(values: Values, output: Output) -> int:
    """Measure, and print the figures."""
    from adx.ci.bench import bench_bundle

    result = bench_bundle(
        values["bundle"],
        prompt_len=values["prompt_len"],
        new_tokens=values["new_tokens"],
        batch_size=values["batch_size"],
        threads=values["threads"],
        repetitions=values["repetitions"],
        warmup=values["warmup"],
        past=values["past"],
        target=values["target"],
        report=output.report,
    )
    output.result(result, describe(result))
    return 0


def describe(result: BenchResult) -> list[RenderableType]:
    """The figures, for people: series of times as a table, single figures as lines."""
    from rich.table import Table

    table = Table("ms", "median", "p90", "p99", "n")
    lines: list[RenderableType] = [table]
    for name, value in plain(result).items():
        if isinstance(value, dict) and "median" in value:
            figures = (number(value.get(key), "{:.2f}") for key in ("median", "p90", "p99"))
            table.add_row(name.removesuffix("_ms"), *figures, str(value.get("n", "-")))
        elif isinstance(value, float):
            lines.append(f"{name:<22}{value:,.2f}")
        elif isinstance(value, dict):
            lines += [f"step on past {past:<9}{milliseconds:,.2f} ms" for past, milliseconds in value.items()]
        else:
            lines.append(f"{name:<22}{'-' if value is None else value}")
    return lines


command = AdxCommand(
    "bench",
    run,
    help="""Measure how fast a bundle is on this machine.

    The prompt is random token ids, decoding is greedy and nothing stops it early. Shown are the whole loop's times
    and the engine's own step, so that what the loop adds can be seen.""",
    arguments=[bundle_argument()],
    sections={
        "Measurement": [
            integer_option("--prompt-len", "Tokens of each prompt.", default=128),
            integer_option("--new-tokens", "Tokens to generate after each prompt.", default=128),
            integer_option("--batch-size", "Rows that run at once.", default=1),
            integer_option("--repetitions", "Measured runs.", default=5),
            integer_option("--warmup", "Runs before them that are not counted.", minimum=0, default=1),
            click.Option(
                ["--past"],
                type=click.IntRange(min=1),
                multiple=True,
                metavar="N",
                help="Also time the engine's step on a past of N tokens; repeatable.",
            ),
        ],
        "Engine": [target_option(), threads_option()],
    },
    spelling=Spelling(
        aliases={
            **TARGET_ALIASES,
            **THREADS_ALIASES,
            "--max-new-tokens": "--new-tokens",
            "--batch": "--batch-size",
            "--iterations": "--repetitions",
            "--warm-up": "--warmup",
        },
        values={"--target": TARGET_NAMES},
    ),
)
