"""`adx compile`: options become one request; and the options of plans that it shares with `adx export`."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adx.ci import compile_bundle as module
from adx.ci import pipeline
from adx.ci.compile_request import CompiledPlan, CompileRequest, CompileResult, compile_command
from adx.cli.main import main
from adx.engines.tensorrt import PlanRequest
from adx.engines.tensorrt_options import BuildOptions
from adx.export.errors import BackendError, BundleError

Compile = Callable[..., CompileRequest]

PLAN = CompiledPlan("tensorrt-rtx", "sm89", "decode", "engines/tensorrt-rtx/sm89/decode.plan", 1000, 2.5)
RESULT = CompileResult("b", True, 3.5, 900.0, 2000, ("tensorrt-rtx",), (PLAN,), ("decode: 1 kB",))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compile:
    """Runs `adx compile` without compiling; gives the request."""

    def run(*args: str, code: int = 0, result: object = RESULT) -> CompileRequest:
        seen: list[CompileRequest] = []

        def compile_bundle(request: CompileRequest, report: Any) -> object:
            seen.append(request)
            report("building", 0.5)
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(module, "compile_bundle", compile_bundle)
        assert main(["compile", *args]) == code
        return seen[0]

    return run


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PlanRequest]:
    """What options of plans ask for: the same through either command."""

    def run(*args: str) -> PlanRequest:
        seen: list[Any] = []

        def stop(request: Any, report: Any) -> None:
            seen.append(request.plans)
            raise BundleError("stop here")

        monkeypatch.setattr(module, "compile_bundle", stop)
        monkeypatch.setattr(pipeline, "export_bundle", stop)
        assert main(["compile", "b", "--target", "tensorrt", *args]) == 1
        assert main(["export", "m", "--int8", "--target", "tensorrt", *args]) == 1
        compiled, exported = seen
        assert compiled == exported
        assert isinstance(compiled, PlanRequest)
        return compiled

    return run


def refused(*args: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(list(args)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_defaults(compiled: Compile) -> None:
    request = compiled("b", "--target", "tensorrt-rtx")
    assert (request.bundle, request.targets, request.out) == (Path("b"), ("tensorrt-rtx",), None)
    assert request.plans == PlanRequest()
    assert (request.max_batch_size, request.max_input_len, request.max_seq_len) == (None, None, None)
    assert request.in_place
    assert not request.force


def test_every_option_reaches_the_request(compiled: Compile) -> None:
    args = """
        b --target tensorrt --target tensorrt-rtx --target tensorrt -o o --force --max-batch-size 2 --max-input-len 8
        --max-seq-len 16 --sm sm89 --sm 8.6,12.0 --sm 89 --opt-level 5 --workspace 1G --timing-cache t
        --hardware-compatibility --version-compatible --refit --strip --min-shapes a:1 --opt-shapes a:2 --max-shapes a:3
    """
    request = compiled(*args.split())
    options = BuildOptions(5, 1 << 30, True, True, True, True, Path("t"))
    assert request.targets == ("tensorrt", "tensorrt-rtx")
    assert (request.out, request.force, request.in_place) == (Path("o"), True, False)
    assert (request.max_batch_size, request.max_input_len, request.max_seq_len) == (2, 8, 16)
    assert request.plans == PlanRequest(("sm89", "sm86", "sm120"), options, "a:1", "a:2", "a:3")


def test_the_command_for_another_host_is_the_same_request(compiled: Compile) -> None:
    args = """
        my\\ bundle --target tensorrt -o o --force --max-batch-size 2 --max-input-len 8 --max-seq-len 16 --sm sm89,sm86
        --opt-level 0 --workspace 1G --timing-cache t --hardware-compatibility --version-compatible --refit --strip
        --min-shapes a:1 --opt-shapes a:2 --max-shapes a:3
    """
    request = compiled(*shlex.split(args))
    line = compile_command(request)
    assert line.startswith("adx compile 'my bundle' --target tensorrt -o o --max-batch-size 2")
    again = compiled(*shlex.split(line)[2:])
    assert dataclasses.replace(again, command=()) == dataclasses.replace(request, command=())
    assert compile_command(CompileRequest(Path("b"), ("tensorrt",))) == "adx compile b --target tensorrt"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("--workspace 512M", BuildOptions(workspace_bytes=512 << 20)),
        ("--workspace 2GiB", BuildOptions(workspace_bytes=2 << 30)),
        ("--workspace 1.5k", BuildOptions(workspace_bytes=1536)),
        ("--workspace 1GB", BuildOptions(workspace_bytes=10**9)),
        ("--workspace 4096B", BuildOptions(workspace_bytes=4096)),
        ("--memPoolSize=workspace:1024", BuildOptions(workspace_bytes=1 << 30)),
        ("--memPoolSize workspace:0.5", BuildOptions(workspace_bytes=1 << 19)),
        ("--memPoolSize=workspace:1G", BuildOptions(workspace_bytes=1 << 30)),
        ("--timingCacheFile=t", BuildOptions(timing_cache=Path("t"))),
        ("--builderOptimizationLevel=4", BuildOptions(opt_level=4)),
        ("--hardwareCompatibilityLevel=ampere+", BuildOptions(hardware_compatible=True)),
        ("--hardwareCompatibilityLevel=none", BuildOptions()),
        ("--versionCompatible", BuildOptions(version_compatible=True)),
        ("--vc", BuildOptions(version_compatible=True)),
        ("--stripWeights", BuildOptions(strip=True)),
    ],
)
def test_spellings_of_trtexec(args: str, expected: BuildOptions, plans: Callable[..., PlanRequest]) -> None:
    """trtexec's sizes are MiB where they have no unit; its K, M and G are powers of 1024, as ours."""
    assert plans(*args.split()).options == expected


def test_shapes_of_trtexec(plans: Callable[..., PlanRequest]) -> None:
    found = plans("--minShapes=a:1x1", "--optShapes=a:1x2", "--maxShapes=a:1x3")
    assert (found.min_shapes, found.opt_shapes, found.max_shapes) == ("a:1x1", "a:1x2", "a:1x3")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--workspace 1024", "'1024' has no unit: a size is a number and a unit, as 512M, 1G or 2GiB"),
        ("--workspace 0M", "less than 1 byte"),
        ("--workspace much", "a size is a number and a unit"),
        ("--memPoolSize=dlaSRAM:1", "only the pool 'workspace'"),
        ("--opt-level 6", "'--opt-level': 6 is not in the range 0<=x<=5"),
        ("--sm ada", "--sm 'ada' is no compute capability: write it as sm89, 89 or 8.9"),
        ("--sm sm89,", "--sm '' is no compute capability"),
        ("--hardwareCompatibilityLevel=turing", "ampere+"),
    ],
)
@pytest.mark.parametrize("command", ["compile b", "export m --int8"])
def test_values_that_are_none_are_refused(
    command: str, args: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(*command.split(), "--target", "tensorrt", *args.split(), capsys=capsys)


@pytest.mark.parametrize(("name", "target"), [("NvTensorRtRtx", "tensorrt-rtx"), ("tensorrt", "tensorrt")])
def test_targets_have_other_names(name: str, target: str, compiled: Compile) -> None:
    assert compiled("b", "--execution_provider", name).targets == (target,)


def test_a_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Missing option '-e' / '--target'" in refused("compile", "b", capsys=capsys)


def test_force_needs_an_output(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused("compile", "b", "--target", "tensorrt", "--force", capsys=capsys)
    assert "without -o BUNDLE itself is replaced" in error


def test_the_result_is_printed(compiled: Compile, capsys: pytest.CaptureFixture[str]) -> None:
    compiled("b", "--target", "tensorrt-rtx")
    found = capsys.readouterr()
    assert found.out == "decode: 1 kB\n"
    assert "building" in found.err
    assert "parity" not in found.err


def test_json_has_the_keys_that_stay(compiled: Compile, capsys: pytest.CaptureFixture[str]) -> None:
    compiled("b", "--target", "tensorrt-rtx", "--json")
    found = json.loads(capsys.readouterr().out)
    assert {key: found[key] for key in ("bundle", "passed", "seconds", "peak_rss_mb", "bytes", "targets")} == {
        "bundle": "b",
        "passed": True,
        "seconds": 3.5,
        "peak_rss_mb": 900.0,
        "bytes": 2000,
        "targets": ["tensorrt-rtx"],
    }
    assert found["plans"][0]["sm"] == "sm89"


@pytest.mark.parametrize(("passed", "words"), [(False, "FAILED"), (None, "was not measured")])
def test_parity_that_is_not_proven_is_told(
    passed: bool | None, words: str, compiled: Compile, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled("b", "--target", "tensorrt-rtx", result=dataclasses.replace(RESULT, passed=passed))
    assert f"parity of these graphs {words} when they were exported" in capsys.readouterr().err


def test_what_is_missing_fails_with_5(compiled: Compile, capsys: pytest.CaptureFixture[str]) -> None:
    compiled("b", "--target", "tensorrt", code=5, result=BackendError("TensorRT is not installed"))
    assert "adx: error: TensorRT is not installed" in capsys.readouterr().err
