"""The command as a whole: help, exit codes, errors in one line, interruption, pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import click
import pytest

from adx.cli import main as module
from adx.cli.command import AdxCommand
from adx.cli.main import COMMANDS, cli, main
from adx.export import errors

Install = Callable[[Callable[[Any, Any], int]], None]
NOT_NEEDED = (
    "torch",
    "transformers",
    "onnxruntime",
    "onnx",
    "onnx_ir",
    "tensorrt",
    "tokenizers",
    "numpy",
    "rich",
    "psutil",
)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a function in the place of `adx probe`'s."""

    def put(run: Callable[[Any, Any], int]) -> None:
        command = AdxCommand("probe", run, help="Probe.", sections={})
        found = cli.get_command
        monkeypatch.setattr(cli, "get_command", lambda ctx, name: command if name == "probe" else found(ctx, name))

    return put


def raising(error: BaseException) -> Callable[[Any, Any], int]:
    def run(values: Any, output: Any) -> int:
        raise error

    return run


@pytest.mark.parametrize("args", [["--help"], *([name, "--help"] for name in COMMANDS), ["--version"]], ids=" ".join)
def test_help_is_fast_and_light(args: list[str]) -> None:
    """The best of five runs takes less than 0.3 s, and nothing heavy was imported for it."""
    code = (
        "import sys\nfrom adx.cli.main import main\ncode = main(sys.argv[1:])\n"
        f"print([name for name in {NOT_NEEDED} if name in sys.modules], file=sys.stderr)\nsys.exit(code)"
    )
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=30)
        best = min(best, time.perf_counter() - began)
        assert (done.returncode, done.stderr) == (0, "[]\n")
        if best < 0.3:
            break
    assert best < 0.3


def test_help_lists_the_commands_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out.split("Commands:")[1]
    assert [line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2] != " "] == list(
        COMMANDS
    )


def test_help_of_export_says_what_int8_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--int8 ort-cpu: 8-bit weights, activations quantized on the fly inside the kernel. " in text
    assert "tensorrt, tensorrt-rtx: 8-bit weights and activations, with scales from calibration." in text


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: adx" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.AdxError("it broke"), 1),
        (errors.BundleError("it broke"), 1),
        (errors.UsageError("it broke"), 2),
        (errors.ParityError("it broke"), 3),
        (errors.BackendError("it broke"), 5),
        (click.UsageError("it broke"), 2),
        (OSError(28, "it broke"), 1),
        (MemoryError("it broke"), 1),
        (RuntimeError("it broke"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_an_error_is_one_line_and_a_code(
    error: Exception, code: int, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(raising(error))
    assert main(["probe"]) == code
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("adx: error: ")
    assert "it broke" in found.err
    assert found.err.count("\n") == 1


@pytest.mark.parametrize("args", [["--debug", "probe"], ["probe", "--debug"]], ids=" ".join)
def test_debug_shows_the_traceback(args: list[str], install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(raising(errors.BundleError("it broke")))
    assert main(args) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_error_under_json_is_one_object(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever reads stdout as JSON can do so after a failure too."""
    install(raising(errors.BundleError("two\nlines")))
    assert main(["probe", "--json"]) == 1
    found = capsys.readouterr()
    assert json.loads(found.out) == {"error": "two lines", "exit_code": 1}
    assert found.err == "adx: error: two lines\n"


def test_interruption_ends_with_130(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(raising(KeyboardInterrupt()))
    assert main(["probe"]) == 130
    assert "adx: error: stopped by SIGINT" in capsys.readouterr().err


def test_sigterm_unwinds_the_stack(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    """Clean-up code runs, so that nothing unfinished is left; afterwards the handler is what it was."""
    cleaned = []

    def run(values: Any, output: Any) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            cleaned.append(True)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    install(run)
    assert main(["probe"]) == 143
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_reader_that_left_is_no_error() -> None:
    """`adx ... | head -1` ends without a traceback or a complaint about a broken pipe."""
    code = "import sys; from adx.cli.main import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "doctor", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 1
    assert error == ""


@pytest.mark.parametrize("args", [["-v", "probe", "-q"], ["probe", "-v", "-q"]], ids=" ".join)
def test_verbose_and_quiet_exclude_each_other(
    args: list[str], install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(lambda values, output: 0)
    assert main(args) == 2
    assert "--verbose and --quiet exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["probe"], ["note"]),
        (["probe", "-v"], ["note", "detail"]),
        (["-v", "probe"], ["note", "detail"]),
        (["-q", "probe"], []),
    ],
    ids=str,
)
def test_levels_of_talk(
    args: list[str], shown: list[str], install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(values: Any, output: Any) -> int:
        output.note("note")
        output.detail("detail")
        return 0

    install(run)
    assert main(args) == 0
    assert capsys.readouterr().err.split() == shown


def test_warnings_of_libraries_are_for_programmers(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    """They are kept from users, and from users only: the filters are put back."""
    import warnings

    def run(values: Any, output: Any) -> int:
        warnings.warn("old function", DeprecationWarning, stacklevel=1)
        return 0

    install(run)
    before = list(warnings.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["probe"]) == 0
    assert "old function" not in capsys.readouterr().err
    assert list(warnings.filters) == before


def test_the_table_of_commands_is_true() -> None:
    for name, path in COMMANDS.items():
        command = cli.get_command(click.Context(cli), name)
        assert isinstance(command, AdxCommand)
        assert (command.name, path) == (name, f"adx.cli.{name}")
    assert set(module.RELATED.values()) <= set(COMMANDS)
    assert not set(module.RELATED) & set(COMMANDS)
