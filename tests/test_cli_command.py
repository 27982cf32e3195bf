"""How options are spelled and refused, and which commands there are."""

from __future__ import annotations

from typing import Any

import click
import pytest

from adx.cli import export, generate
from adx.cli.command import AdxCommand, Spelling
from adx.cli.main import COMMANDS, RELATED, cli, main


def parsed(command: AdxCommand, *args: str) -> dict[str, Any]:
    """The values that a command's function would be called with."""
    return dict(command.make_context("adx", list(args)).params)


def loaded(name: str) -> AdxCommand:
    command = cli.get_command(click.Context(cli), name)
    assert isinstance(command, AdxCommand)
    return command


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_snake_case_spelling(name: str) -> None:
    """--max_seq_len means --max-seq-len; both forms of giving a value work."""
    command = loaded(name)
    positional = ["x"] * sum(isinstance(param, click.Argument) for param in command.params)
    context = click.Context(command)
    for option in command.options(context):
        long = next(spelling for spelling in option.opts if spelling.startswith("--"))
        if "-" not in long[2:] or option.is_flag:
            continue
        snake = "--" + long[2:].replace("-", "_")
        assert list(command.spelled([*positional, snake, "3"], context))[-2:] == [long, "3"]
        assert list(command.spelled([*positional, f"{snake}=3"], context))[-1] == f"{long}=3"


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        (["m", "--output_dir", "o"], "output", "o"),
        (["m", "--engine_dir", "o"], "output", "o"),
        (["--model_name_or_path", "m"], "model", "m"),
        (["m", "--maxBatchSize=4"], "max_batch_size", 4),
        (["m", "--maxKVCacheCapacity", "64"], "max_seq_len", 64),
        (["m", "--block_size", "32"], "group_size", 32),
        (["m", "--group-size", "-1"], "group_size", -1),
        (["m", "-e", "cpu"], "target", ("ort-cpu",)),
        (["m", "-ecpu"], "target", ("ort-cpu",)),
        (["m", "--execution_provider=NvTensorRtRtx"], "target", ("tensorrt-rtx",)),
        (["m", "--provider", "CUDAExecutionProvider"], "target", ("ort-cuda",)),
        (["m", "--dtype", "float16"], "precision", "fp16"),
        (["m", "--weight-format=int4"], "precision", "int4"),
        (["m", "--num-threads", "2"], "threads", 2),
        (["m", "-t2"], "threads", 2),
        (["m", "--trust_remote_code"], "trust_remote_code", True),
    ],
)
def test_names_of_other_tools_are_accepted(given: list[str], name: str, value: object) -> None:
    found = parsed(export.command, *given)[name]
    assert (str(found) if name == "output" else found) == value


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        (["--max_tokens", "5"], "max_new_tokens", 5),
        (["-n", "5"], "max_new_tokens", 5),
        (["--temp", "0.5"], "temperature", 0.5),
        (["--repeat_penalty=1.1"], "repetition_penalty", 1.1),
        (["-s", "7"], "seed", 7),
    ],
)
def test_names_of_other_samplers_are_accepted(given: list[str], name: str, value: object) -> None:
    assert parsed(generate.command, "b", "--prompt", "x", *given)[name] == value


def test_values_are_left_as_they_are() -> None:
    """Text that looks like an option, or is empty, stays the value of the option before it."""
    values = parsed(generate.command, "b", "--prompt", "--max_new_tokens", "--prompt", "", "--stop=a_b", "--prompt=-n")
    assert values["prompt"] == ("--max_new_tokens", "", "-n")
    assert values["stop"] == ("a_b",)


def test_what_follows_two_dashes_is_no_option() -> None:
    assert parsed(export.command, "--", "--model_dir")["checkpoint"] == "--model_dir"


@pytest.mark.parametrize(
    ("option", "closest"),
    [("--precison", "--precision"), ("--max_batchsize", "--max-batch-size"), ("--maxBatchsize", "--maxBatchSize")],
)
def test_an_unknown_option_names_the_closest(option: str, closest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "m", option, "4"]) == 2
    error = capsys.readouterr().err
    assert f"no such option: {option}, the closest is {closest} " in error
    assert error.count("\n") == 1


def test_an_unknown_option_unlike_any_names_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "m", "--zzzzqq"]) == 2
    assert "no such option: --zzzzqq (see adx export --help)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["generate"])
def test_options_without_effect_say_why(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option that users know and that cannot be used is refused in one line, in all its spellings."""
    command = loaded(name)
    assert command.spelling.unavailable
    for option, reason in command.spelling.unavailable.items():
        for spelled in {option, option.replace("--", "**").replace("-", "_").replace("**", "--")}:
            assert main([name, "m", spelled, "1"]) == 2
            error = capsys.readouterr().err
            assert error == f"adx: error: {spelled}: {reason} (see adx {name} --help)\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_tables_of_names_agree_with_the_options(name: str) -> None:
    """An alias leads to an option that is there, and no name is both an option and an alias."""
    command = loaded(name)
    names = {spelling for option in command.options(click.Context(command)) for spelling in option.opts}
    assert set(command.spelling.aliases.values()) <= names
    assert set(command.spelling.values) <= names
    assert not names & (set(command.spelling.aliases) | set(command.spelling.unavailable))
    assert not set(command.spelling.aliases) & set(command.spelling.unavailable)


@pytest.mark.parametrize("name", ["chat", "gate", "diff", "serve"])
def test_an_unknown_command_names_the_closest(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "x"]) == 2
    error = capsys.readouterr().err
    assert f"no such command: {name}; the closest is '{RELATED[name]}'" in error
    assert ", ".join(COMMANDS) in error
    assert error.count("\n") == 1


def test_a_misspelt_command_names_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exprot", "x"]) == 2
    assert "no such command: exprot; the closest is 'export'" in capsys.readouterr().err


def test_flags_do_not_take_values() -> None:
    def run(values: Any, output: Any) -> int:
        return 0

    flag = click.Option(["--on"], is_flag=True)
    command = AdxCommand("x", run, help="", sections={"A": [flag]}, spelling=Spelling())
    with pytest.raises(click.UsageError, match="unexpected extra argument"):
        command.make_context("x", ["--on", "value"])
