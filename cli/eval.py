"""`adx eval`: a bundle's perplexity on a text, and how far it is from the reference's."""

from __future__ import annotations

from pathlib import Path
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
    reference_option,
    target_option,
    threads_option,
)
from adx.cli.output import Output, plain

if TYPE_CHECKING:
    from adx.ci.evaluate import EvalResult

COMPARED = ("kl_mean", "top1", "perplexity_ratio")  # figures that a reference is needed for


def run(values: Values, output: Output) -> int:
    """Read the text with the engine and, where one is named, with the reference."""
    from adx.ci.evaluate import evaluate_bundle

    result = evaluate_bundle(
        values["bundle"],
        values["text"],
        values["reference"],
        target=values["target"],
        threads=values["threads"],
        max_tokens=values["max_tokens"],
        window=values["window"],
        report=output.report,
    )
    measured = {key: value for key, value in plain(vars(result)).items() if key not in COMPARED or compared(result)}
    output.result(measured, describe(result))
    return 0


def compared(result: EvalResult) -> bool:
    """Whether there was a reference."""
    return result.kl_mean is not None


def describe(result: EvalResult) -> list[str]:
    """The figures, for people."""
    lines = [
        f"tokens            {result.tokens:,} (in windows of {result.window:,})",
        f"perplexity        {result.perplexity:.4f}",
    ]
    if compared(result):
        lines += [
            f"perplexity ratio  {number(result.perplexity_ratio, '{:.4f}')}",
            f"mean KL           {number(result.kl_mean, '{:.3g}')}",
            f"top-1 agreement   {number(result.top1, '{:.2%}')}",
        ]
    return lines


command = AdxCommand(
    "eval",
    run,
    help="""Measure a bundle's perplexity on a text.

    With --reference also the perplexity ratio, the KL divergence and the top-1 agreement with PyTorch float32.""",
    arguments=[bundle_argument()],
    sections={
        "Text": [
            click.Option(
                ["--text"],
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                required=True,
                metavar="FILE",
                help="UTF-8 text to read.",
            ),
            integer_option("--max-tokens", "Read only the text's first N tokens.", minimum=2),
            integer_option("--window", "Tokens that are read in one go.", minimum=2, default=512),
        ],
        "Comparison": [reference_option("none, only perplexity"), target_option(), threads_option()],
    },
    spelling=Spelling(aliases={**TARGET_ALIASES, **THREADS_ALIASES}, values={"--target": TARGET_NAMES}),
)
