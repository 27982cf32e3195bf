"""`adx export`: options become one request; what would have no effect is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adx.ci import pipeline
from adx.ci.pipeline import ExportRequest
from adx.cli.export import default_output
from adx.cli.main import main
from adx.export.errors import ParityError

Export = Callable[..., ExportRequest]


def outcome(**changes: Any) -> SimpleNamespace:
    """What an export gives, as far as the command looks at it."""
    facts = {
        "bundle": Path("out"),
        "passed": True,
        "seconds": 1.5,
        "peak_rss_mb": 900.0,
        "bytes": 1000,
        "targets": ("ort-cpu",),
        "parity": {"passed": True},
    }
    facts.update(changes)
    return SimpleNamespace(**facts, summary=["quantized 3 of 4 matmuls"], to_dict=lambda: facts)


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch) -> Export:
    """Runs `adx export` without exporting; gives the request."""

    def run(*args: str, code: int = 0, result: Any = None) -> ExportRequest:
        seen: list[ExportRequest] = []

        def export_bundle(request: ExportRequest, report: Any) -> Any:
            seen.append(request)
            report("trace", 0.5)
            if isinstance(result, Exception):
                raise result
            return result or outcome()

        monkeypatch.setattr(pipeline, "export_bundle", export_bundle)
        assert main(["export", *args]) == code
        return seen[0]

    return run


def refused(*args: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["export", *args]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_defaults(export: Export) -> None:
    request = export("org/model")
    assert (request.model, request.out, request.precision) == ("org/model", Path("model-fp32"), "fp32")
    assert request.targets == ("ort-cpu",)
    assert (request.max_batch_size, request.max_input_len, request.max_seq_len) == (None, None, None)
    assert (request.group_size, request.nodes_to_exclude, request.opset) == (None, (), None)
    flags = ("keep_onnx", "full_logits", "trust_remote_code", "force", "allow_parity_failure")
    assert not any(getattr(request, name) for name in flags)
    assert (request.atol, request.rtol, request.seed, request.threads) == (None, None, 0, None)


def test_every_option_reaches_the_request(export: Export) -> None:
    args = """
        -m m -o o --int4 --group-size 64 --nodes-to-exclude a --nodes-to-exclude b --quant-algo rtn --max-batch-size 2
        --max-input-len 8 --max-seq-len 16 --keep-onnx --full-logits --opset 20 --atol 0.1 --rtol 0.2 --seed 3 --offline
        --trust-remote-code --force --allow-parity-failure --threads 2 --task text-generation
    """
    request = export(*args.split())
    expected = {
        "model": "m",
        "out": Path("o"),
        "precision": "int4",
        "group_size": 64,
        "nodes_to_exclude": ("a", "b"),
        "max_batch_size": 2,
        "max_input_len": 8,
        "max_seq_len": 16,
        "keep_onnx": True,
        "full_logits": True,
        "opset": 20,
        "atol": 0.1,
        "rtol": 0.2,
        "trust_remote_code": True,
        "offline": True,
        "seed": 3,
        "force": True,
        "allow_parity_failure": True,
        "threads": 2,
        "task": "text-generation",
        "targets": ("ort-cpu",),
    }
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_precision_has_a_short_and_a_long_form(precision: str, export: Export) -> None:
    assert export("m", f"--{precision}").precision == precision
    assert export("m", "-p", precision).precision == precision
    assert export("m", f"--precision={precision}", f"--{precision}").precision == precision


@pytest.mark.parametrize("args", [["--int8", "--int4"], ["--int8", "-p", "fp32"]], ids=" ".join)
def test_two_precisions_are_refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "more than one precision was asked for" in refused("m", *args, capsys=capsys)


@pytest.mark.parametrize("args", [[], ["a", "--model", "b"]], ids=str)
def test_one_model_is_named(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "name one MODEL" in refused(*args, capsys=capsys)


@pytest.mark.parametrize(
    "args", [["--group-size", "32"], ["--quant-algo", "rtn"], ["--nodes-to-exclude", "head"]], ids=" ".join
)
def test_quantization_options_need_a_quantized_precision(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{args[0]} applies to --int8 and --int4 only, and the precision is fp32" in refused(
        "m", *args, capsys=capsys
    )


@pytest.mark.parametrize("args", [["--opset", "20"], ["--full-logits"]], ids=" ".join)
def test_options_of_portable_graphs_need_them(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "add --keep-onnx" in refused("m", *args, capsys=capsys)


@pytest.mark.parametrize(
    ("name", "target"),
    [("cuda", "ort-cuda"), ("TensorrtExecutionProvider", "tensorrt"), ("NvTensorRtRtx", "tensorrt-rtx")],
)
def test_targets_have_other_names(name: str, target: str, export: Export) -> None:
    assert export("m", "--int8", "-e", name, "--target", target).targets == (target,)


def test_options_of_tensorrt_reach_the_request(export: Export) -> None:
    args = """
        m --int8 --target tensorrt-rtx --calib-data t.txt --calib-size 4 --calib-seq-len 16 --calib-method percentile
        --sm sm86,sm89 --opt-level 2
    """
    request = export(*args.split())
    assert (request.calib_data, request.calib_size, request.calib_seq_len) == (Path("t.txt"), 4, 16)
    assert (request.calib_method, request.weights_only, request.build) == ("percentile", False, True)
    assert (request.plans.sms, request.plans.options.opt_level) == (("sm86", "sm89"), 2)
    later = export("m", "--int8", "--weights-only", "--target", "tensorrt", "--no-build")
    assert (later.weights_only, later.build, later.calib_method) == (True, False, "minmax")


@pytest.mark.parametrize(
    "args",
    [
        "--dataset t.txt --num-samples 4 --calibration-method max",
        "--calibration_data_path t.txt --num_samples 4 --calibration_method minmax",
    ],
)
def test_calibration_has_the_names_of_other_tools(args: str, export: Export) -> None:
    request = export("m", "--int8", "--target", "tensorrt", *args.split())
    assert (request.calib_data, request.calib_size, request.calib_method) == (Path("t.txt"), 4, "minmax")


@pytest.mark.parametrize(
    "args",
    ["--int8", "--fp16 --target tensorrt", "--fp16 --target ort-cuda", "--int8 --target tensorrt --weights-only"],
)
def test_a_calibration_method_needs_static_scales(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Given on purpose, the default is refused too where it chooses nothing."""
    error = refused("m", *args.split(), "--calib-method", "minmax", capsys=capsys)
    assert "only --int8 on tensorrt and tensorrt-rtx has" in error


@pytest.mark.parametrize(
    ("args", "option"),
    [
        ("--sm sm89", "--sm"),
        ("--opt-level 0", "--opt-level"),
        ("--workspace 1G", "--workspace"),
        ("--timing-cache t", "--timing-cache"),
        ("--hardware-compatibility", "--hardware-compatibility"),
        ("--hardwareCompatibilityLevel=none", "--hardwareCompatibilityLevel"),
        ("--version-compatible", "--version-compatible"),
        ("--refit", "--refit"),
        ("--strip", "--strip"),
        ("--min-shapes input_ids:1x1", "--min-shapes"),
        ("--opt-shapes input_ids:1x1", "--opt-shapes"),
        ("--max-shapes input_ids:1x1", "--max-shapes"),
        ("--no-build", "--no-build"),
    ],
)
def test_options_of_plans_need_a_target_that_has_plans(
    args: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused("m", "--int8", *args.split(), capsys=capsys)
    assert f"{option} applies to plans, which ort-cpu does not have" in error
    error = refused("m", "--fp16", "--target", "ort-cuda", *args.split(), capsys=capsys)
    assert f"{option} applies to plans, which ort-cuda does not have" in error


def test_no_build_takes_no_options_of_a_build(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["m", "--int8", "--target", "tensorrt", "--no-build", "--opt-level", "2"]
    error = refused(*args, capsys=capsys)
    assert "--opt-level says how plans are built, and --no-build builds none: give it to adx compile" in error


@pytest.mark.parametrize(
    "args",
    [
        ["--group-size", "24"],
        ["--group-size", "0"],
        ["--max-batch-size", "0"],
        ["--atol", "nan"],
        ["--rtol", "-1"],
        ["--seed", "-1"],
        ["--threads", "0"],
        ["--nodes-to-exclude", "("],
        ["--task", "translation"],
        ["-p", "int2"],
    ],
    ids=" ".join,
)
def test_values_out_of_range_name_the_option(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert f"'{args[0]}'" in refused("m", "--int4", *args, capsys=capsys).replace(
        "'-p' / '--precision'", "'-p'"
    ).replace("'-t' / '--threads'", "'--threads'")


def test_the_environment_sets_threads_and_offline(export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option goes before its variable."""
    monkeypatch.setenv("ADX_THREADS", "3")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert (export("m").threads, export("m").offline, export("m", "-t", "1").threads) == (3, True, 1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert not export("m").offline


@pytest.mark.parametrize(
    ("model", "name"),
    [("org/model", "model"), ("model", "model"), ("a/b/model-Q4.gguf", "model-Q4"), ("./a/model/", "model")],
)
def test_a_bundle_is_named_after_its_model(model: str, name: str) -> None:
    assert default_output(model, "int8") == Path(f"{name}-int8")


def test_a_bundle_of_the_current_folder_is_named_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model")
    assert default_output(".", "fp32") == Path("model-fp32")


def test_the_result_is_printed(export: Export, capsys: pytest.CaptureFixture[str]) -> None:
    export("m")
    found = capsys.readouterr()
    assert "quantized 3 of 4 matmuls" in found.out
    assert "trace" in found.err


def test_json_has_the_keys_that_stay(export: Export, capsys: pytest.CaptureFixture[str]) -> None:
    export("m", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "bundle": "out",
        "passed": True,
        "seconds": 1.5,
        "peak_rss_mb": 900.0,
        "bytes": 1000,
        "targets": ["ort-cpu"],
        "parity": {"passed": True},
    }


def test_a_missed_bound_fails_with_3(export: Export, capsys: pytest.CaptureFixture[str]) -> None:
    export("m", code=3, result=ParityError("kl_mean is 0.5"))
    assert "adx: error: kl_mean is 0.5" in capsys.readouterr().err
    export("m", code=3, result=outcome(passed=False))
    assert "adx: error: parity failed" in capsys.readouterr().err


def test_a_missed_bound_can_be_allowed(export: Export, capsys: pytest.CaptureFixture[str]) -> None:
    export("m", "--allow-parity-failure", result=outcome(passed=False))
    assert "the bundle was kept as --allow-parity-failure asks" in capsys.readouterr().err


def test_dry_run_builds_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"lines": ("one graph",), "disk_bytes": 2_000_000, "memory_bytes": 3_000_000, "seconds": 60.0}
    monkeypatch.setattr(pipeline, "plan_export", lambda request: SimpleNamespace(**plan, to_dict=lambda: plan))
    monkeypatch.setattr(pipeline, "export_bundle", None)
    assert main(["export", "m", "--dry-run"]) == 0
    assert capsys.readouterr().out == (
        "one graph\ndisk:   2 MB\nmemory: 3 MB at the peak\ntime:   60 s on this machine\n"
    )
    assert main(["export", "m", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["disk_bytes"] == 2_000_000
