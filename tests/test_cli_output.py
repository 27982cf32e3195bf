"""Results on stdout, everything else on stderr."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from adx.cli.figures import parity_lines, size
from adx.cli.output import Output, plain, to_json


@dataclass(frozen=True)
class Figures:
    median: float
    where: Path
    shapes: tuple[int, ...]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_result_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    """What libraries print meanwhile does not get into it."""
    with Output(json=True) as output:
        print("a library's chatter")
        output.report("work", 0.5)
        output.result(Figures(1.5, Path("a/b"), (1, 2)), ["for people"])
    found = capsys.readouterr()
    assert json.loads(found.out) == {"median": 1.5, "where": "a/b", "shapes": [1, 2]}
    assert found.out.count("\n") == 1
    assert "a library's chatter" in found.err
    assert "work" in found.err


def test_numbers_that_json_cannot_hold_are_null() -> None:
    value = {
        "a": math.nan,
        "b": [math.inf, 1.0],
        "c": np.float32(0.5),
        "d": np.array([1, 2]),
        "e": np.float64(math.nan),
    }
    assert plain(value) == {"a": None, "b": [None, 1.0], "c": 0.5, "d": [1, 2], "e": None}
    assert json.loads(to_json({"text": "é🙂"})) == {"text": "é🙂"}


def test_progress_without_a_terminal_is_a_line_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with Output(json=False) as output:
        for fraction in (0.0, 0.5, 1.0):
            output.report("trace", fraction)
        output.report("lower", None)
    found = capsys.readouterr()
    assert found.out == ""
    assert [line.split("] ")[1] for line in found.err.splitlines()] == ["trace", "lower"]


def test_progress_on_a_terminal_shows_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    with Output(json=False) as output:
        output.report("trace [1]", 0.5)
        output.report("lower", None)
        output.note("a note")
        output.report("parity", 0.1)
    text = screen.getvalue()
    assert all(stage in text for stage in ("trace [1]", "lower", "a note", "parity"))


def test_quiet_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with Output(json=False, level=-1) as output:
        output.report("trace", 0.5)
        output.note("note")
        output.error("but errors")
    assert capsys.readouterr().err == "adx: error: but errors\n"


def test_stdout_is_put_back_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="x"), Output(json=False):
        raise ValueError("x")
    print("here")
    assert capsys.readouterr().out == "here\n"


def test_square_brackets_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Not markup that disappears, as in pip install 'adx-toolchain[gpu]'."""
    from rich.table import Table

    table = Table("missing")
    table.add_row("pip install 'adx-toolchain[gpu]'")
    with Output(json=False) as output:
        output.result({}, [table])
    assert "adx-toolchain[gpu]" in capsys.readouterr().out


def test_parity_shows_figures_beside_their_bounds() -> None:
    parity = {
        "passed": False,
        "kl_mean": 0.02,
        "top1": 0.97,
        "perplexity_ratio": None,
        "max_abs_logit_error": 0.5,
        "logit_range": 40.0,
        "greedy_identical": False,
        "bound": {"kl_mean": 0.01, "top1": 0.95},
        "cases": [{}, {}],
    }
    text = "\n".join(parity_lines(parity))
    assert "FAILED over 2 cases" in text
    assert "0.02  (bound <= 0.01)" in text
    assert "97.00%  (bound >= 95.00%)" in text
    assert "perplexity ratio      -" in text
    assert "0.5, the logits span 40" in text
    assert "greedy tokens         differ" in text


def test_parity_that_was_skipped_says_why() -> None:
    assert parity_lines({"passed": None, "skipped": "no reference"}) == ["parity: not measured (no reference)"]
    assert parity_lines(None) == ["parity: not measured"]


def test_sizes_read_well() -> None:
    assert [size(count) for count in (12, 46_080, 134_500_000, 2.5e9)] == ["12 bytes", "46.1 kB", "134.5 MB", "2.5 GB"]
