"""`adx export` with options of quantization: what they mean, what is refused, and what the exports then do."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
from traced import trace_once

from adx.ci import calibration, pipeline, quantization_options
from adx.ci.pipeline import ExportRequest
from adx.cli import export_options
from adx.cli.main import main
from adx.cli.output import Output
from adx.export import trace as tracing
from adx.export.bundle import Bundle
from adx.export.errors import UsageError

Request = Callable[..., ExportRequest]
Stages = list[tuple[str, float | None]]

TINY = ("--calib-size", "6", "--calib-seq-len", "16", "--threads", "1")
MEASURING = "measuring the layers' inputs"


@pytest.fixture
def request_of(monkeypatch: pytest.MonkeyPatch) -> Request:
    """What `adx export m ARGS` asks for; nothing is exported."""

    def run(args: str) -> ExportRequest:
        seen: list[ExportRequest] = []

        def plan_export(request: ExportRequest) -> pipeline.ExportPlan:
            seen.append(request)
            return pipeline.ExportPlan((), 0, 0, 0.0)

        monkeypatch.setattr(pipeline, "plan_export", plan_export)
        assert main(["export", "m", "--dry-run", *args.split()]) == 0
        return seen[0]

    return run


# What the options mean.


@pytest.mark.parametrize(
    ("args", "algorithm"),
    [
        ("--int8", "smoothquant"),
        ("--int4", "gptq"),
        ("--int4 --quant-algo rtn", "rtn"),
        ("--int4 --quant_algo=smoothquant", "smoothquant"),
        ("--int4 --awq", "awq"),
        ("--int4 --gptq", "gptq"),
        ("--int4 --awq --quant-algo awq", "awq"),
        ("--int4 --smooth-quant-alpha 0.4", "smoothquant"),
        ("--int8 --weights-only --target tensorrt --no-build --awq", "awq"),
        ("--fp32", None),
    ],
)
def test_the_algorithm_is_named_or_follows_from_the_precision(
    args: str, algorithm: str | None, request_of: Request
) -> None:
    assert request_of(args).algorithm == algorithm


@pytest.mark.parametrize(
    ("args", "field", "value"),
    [
        ("", "smooth_quant_alpha", None),
        ("--smooth_quant_alpha 0", "smooth_quant_alpha", 0.0),
        ("--smooth-quant-alpha=1", "smooth_quant_alpha", 1.0),
        ("--smooth-quant-alpha auto", "smooth_quant_alpha", "auto"),
        ("--quant-algo rtn", "clip", False),
        ("--quant-algo rtn --clip", "clip", True),
        ("", "symmetric", None),
        ("--symmetric", "symmetric", True),
        ("--asymmetric", "symmetric", False),
        ("", "max_ppl_increase", None),
        ("--max-ppl-increase 5", "max_ppl_increase", 0.05),
        ("--max-ppl-increase 5%", "max_ppl_increase", 0.05),
        ("--max_ppl_increase=0.5%", "max_ppl_increase", 0.005),
        ("", "max_kl", None),
        ("--max-kl 0.02", "max_kl", 0.02),
        ("", "uniform", False),
        ("--uniform", "uniform", True),
        ("--calib-cache c", "calib_cache", Path("c")),
        ("--calib-data texts/", "calib_data", Path("texts")),
        ("", "calib_cache", None),
    ],
)
def test_every_option_reaches_the_request(args: str, field: str, value: object, request_of: Request) -> None:
    assert getattr(request_of(f"--int4 {args}"), field) == pytest.approx(value)


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ("minmax", "minmax"),
        ("max", "minmax"),
        ("moving-average", "moving-average"),
        ("moving_average", "moving-average"),
        ("percentile", "percentile"),
        ("entropy", "entropy"),
        ("mse", "mse"),
    ],
)
def test_every_method_of_calibration(given: str, method: str, request_of: Request) -> None:
    assert request_of(f"--int8 --target tensorrt --no-build --calib-method {given}").calib_method == method


def test_the_help_states_the_defaults_that_are_there() -> None:
    """Samples, their length, SmoothQuant's share and the algorithms, against the constants of the code."""
    from adx.calibration import samples, smoothing, sources
    from adx.ci import export_request

    said = {option.opts[0]: option.help or "" for group in export_options.SECTIONS.values() for option in group}
    assert f"{sources.DATA_ROWS} of data" in said["--calib-size"]
    assert f"writes {samples.ROWS} for gptq, else {calibration.FEW_ROWS}]" in said["--calib-size"]
    assert samples.LENGTH == sources.DATA_LENGTH
    assert f"[default: {samples.LENGTH}," in said["--calib-seq-len"]
    assert f"[default: {smoothing.ALPHA}]" in said["--smooth-quant-alpha"]
    expected = ", ".join(f"{algorithm} for {name}" for name, algorithm in export_request.ALGORITHMS.items())
    assert f"[default: {expected}]" in said["--quant-algo"]


# What is refused.

RTX = "--target tensorrt-rtx"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--int4 --awq --gptq", "more than one algorithm was asked for: --awq, --gptq"),
        ("--int4 --quant-algo rtn --awq", "--quant-algo rtn, --awq; name one"),
        ("--int4 --gptq --smooth-quant-alpha 0.4", "--gptq, --smooth-quant-alpha; name one"),
        ("--awq", "--quant-algo applies to --int8 and --int4 only, and the precision is fp32"),
        ("--smooth-quant-alpha 0.5", "applies to --int8 and --int4 only"),
        ("--clip", "--clip applies to --int8 and --int4 only"),
        ("--asymmetric", "--symmetric and --asymmetric apply to --int8 and --int4 only"),
        ("--max-kl 0.1", "--max-kl applies to --int8 and --int4 only"),
        ("--max-ppl-increase 1", "--max-ppl-increase applies to --int8 and --int4 only"),
        ("--uniform", "--uniform applies to --int8 and --int4 only"),
        ("--int8 --awq", "--quant-algo awq at int8 on ort-cpu: its 8-bit weights add little error"),
        ("--int8 --gptq", "smoothquant, the default, makes that smaller; accepted are rtn, smoothquant"),
        (f"--int8 --awq {RTX}", "add --weights-only, and here activations are quantized too"),
        (f"--int8 --gptq {RTX}", "8 bits with one per channel; accepted are rtn, smoothquant"),
        (f"--int8 --weights-only --gptq {RTX}", "accepted are rtn, smoothquant, awq"),
        (f"--int8 --weights-only --smooth-quant-alpha 0.5 {RTX}", "leave one of the two out"),
        ("--int8 --clip", "--clip applies to --int4"),
        ("--int4 --clip", "--clip: gptq clips ranges anyway"),
        ("--int4 --awq --clip", "--clip: awq clips ranges anyway"),
        (f"--int8 --symmetric {RTX}", "TensorRT targets store weights without zero points"),
        (
            f"--int8 --group-size 32 {RTX}",
            "--group-size: TensorRT targets store 8-bit weights with one scale per channel",
        ),
        ("--int4 --group-size -1 --target ort-cuda", "--group-size -1 on ort-cuda: its kernels take 16, 32, 64, 128"),
        ("--int8 --gptq --target ort-cuda", "on ort-cuda: rounding to 8 bits leaves it little to make up for"),
        ("--int8 --weights-only --target ort-cuda", "--weights-only applies to --int8 on TensorRT targets"),
        ("--int4 --uniform --max-kl 0.1", "--max-kl is met by keeping layers more precise, and --uniform keeps none"),
        ("--int4 --uniform --max-ppl-increase 1", "--uniform keeps none"),
        ("--int4 --max-kl 0.1 --allow-parity-failure", "--allow-parity-failure accepts any loss"),
        ("--int8 --max-ppl-increase 1 --allow-parity-failure", "leave one of the two out"),
        ("--calib-size 4", "--calib-size has no effect: fp32 with no quantization measures nothing on samples"),
        ("--calib-cache c", "--calib-cache has no effect: fp32"),
        ("--int8 --quant-algo rtn --calib-data d", "int8 with rtn measures nothing on samples; choose --quant-algo"),
        ("--int4 --quant-algo rtn --calib-seq-len 9", "choose --quant-algo gptq"),
        ("--int4 --calib-method max", "only --int8 on tensorrt and tensorrt-rtx has"),
        ("--int4 --calib-cache file", "--calib-cache file is a file: name a folder"),
        ("--int4 -o out --calib-cache out", "--calib-cache out lies in the bundle's folder out"),
        ("--int4 -o out --calib-cache a/../out/c", "lies in the bundle's folder out"),
    ],
)
def test_what_has_no_effect_or_no_kernel_is_refused(
    args: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, before the checkpoint is looked for: there is none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["export", "no-such-model", *args.split()]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("option", ["--max-kl", "--max-ppl-increase", "--smooth-quant-alpha"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "x", "", "%"])
def test_values_out_of_range_name_the_option(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "m", "--int4", f"{option}={value}"]) == 2
    assert f"'{option}'" in capsys.readouterr().err


@pytest.mark.parametrize("args", ["--max-kl 0", "--max-ppl-increase 0%", "--smooth-quant-alpha 1.01"])
def test_the_ends_of_the_ranges(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "m", "--int4", *args.split()]) == 2
    assert f"'{args.split()[0]}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_kl": 0.0}, "--max-kl: got 0.0, accepted are finite numbers above 0"),
        ({"max_kl": float("nan")}, "--max-kl: got nan"),
        ({"max_ppl_increase": float("inf")}, "--max-ppl-increase: got inf"),
        ({"quant_algo": "smoothquant", "smooth_quant_alpha": -0.1}, "--smooth-quant-alpha -0.1"),
        ({"smooth_quant_alpha": 0.5}, "is SmoothQuant's, and the algorithm is gptq"),
        ({"quant_algo": "magic"}, "accepted are rtn, smoothquant, awq, gptq"),
    ],
)
def test_requests_made_in_python_are_checked_too(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        quantization_options.check_quantization(ExportRequest("m", tmp_path / "out", "int4", **options))


# What exports do.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("quantization") / "llama", num_hidden_layers=1, vocab_size=64)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    """What exports report; a checkpoint is traced once."""
    monkeypatch.setattr(tracing, "trace", trace_once)
    seen: Stages = []
    monkeypatch.setattr(Output, "report", lambda self, stage, fraction=None: seen.append((stage, fraction)))
    return seen


def run_export(checkpoint: Path, out: Path, *args: str) -> int:
    return main(["export", str(checkpoint), "--int4", "-o", str(out), "--json", *TINY, *args])


def engine_bytes(bundle: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (bundle / "engines/ort-cpu").iterdir()}


def test_a_budget_is_met_by_keeping_the_fewest_layers_more_precise(
    checkpoint: Path, stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights at random lose more at 4 bits than the bound allows: alike for all layers that fails with 3 and writes
    nothing, with a budget some layers stay at 4 bits, and the budget is the bound that was proven."""
    assert run_export(checkpoint, tmp_path / "uniform", "--uniform") == 3
    said = json.loads(capsys.readouterr().out)
    assert said["passed"] is False
    assert said["parity"]["kl_mean"] > 0.1
    assert list(tmp_path.iterdir()) == []
    assert run_export(checkpoint, tmp_path / "out", "--max-kl", "0.1") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["passed"] is True
    assert said["parity"]["bound"]["kl_mean"] == 0.1
    assert said["parity"]["kl_mean"] <= 0.1
    manifest = Bundle.open(tmp_path / "out").manifest
    bits = {layer.name: layer.bits for layer in manifest.quantization.layers}
    del bits["lm_head"]
    assert 4 in bits.values()
    raised = [layer for layer in manifest.quantization.layers if layer.name in bits and layer.bits > 4]
    assert raised
    assert all(layer.reason and "bytes more" in layer.reason for layer in raised)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interrupted_calibration_goes_on_where_it_was(
    checkpoint: Path, stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of the measuring leaves no bundle and what was measured; the next run takes that, and gives
    the bytes of a run that nothing stopped. Then nothing is left beside the bundle."""
    assert run_export(checkpoint, tmp_path / "whole", "--allow-parity-failure") == 0
    fractions = [fraction for stage, fraction in stages if stage == MEASURING]
    assert fractions[0] == 0.0
    out, kept = tmp_path / "out", tmp_path / "out.calibration"

    def stop(self: Output, stage: str, fraction: float | None = None) -> None:
        if stage == MEASURING and fraction and fraction >= 0.5:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Output, "report", stop)
        assert run_export(checkpoint, out, "--allow-parity-failure") == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.calibration", "whole"]
    # Ranges, which were finished, and second moments, which were not.
    assert [path.suffix for path in kept.iterdir()] == [".npz", ".npz"]
    stages.clear()
    assert run_export(checkpoint, out, "--allow-parity-failure") == 0
    first = next(fraction for stage, fraction in stages if stage == MEASURING)
    assert first == 0.5, "three of six samples were kept"
    assert engine_bytes(out) == engine_bytes(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_a_cache_of_statistics_is_used_by_later_exports(checkpoint: Path, stages: Stages, tmp_path: Path) -> None:
    """Of the same model and data; other data is measured. The cache stays, and the engines are the same bytes."""
    cache = tmp_path / "cache"
    measured: list[bool] = []
    for name, options in (("first", ()), ("second", ()), ("other", ("--seed", "1"))):
        stages.clear()
        args = ("--calib-cache", str(cache), "--allow-parity-failure", *options)
        assert run_export(checkpoint, tmp_path / name, *args) == 0
        measured.append(any(fraction is not None for stage, fraction in stages if stage == MEASURING))
    assert measured == [True, False, True]
    assert len(list(cache.iterdir())) == 4, "ranges and second moments of two sets of samples"
    assert engine_bytes(tmp_path / "first") == engine_bytes(tmp_path / "second") != engine_bytes(tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "first", "other", "second"]


def test_the_symmetry_of_weights_is_stored(checkpoint: Path, stages: Stages, tmp_path: Path) -> None:
    """Zero points or none in the engine's file, and the manifest's word for it."""
    import onnx

    for option, points in (("--symmetric", False), ("--asymmetric", True)):
        out = tmp_path / option
        assert run_export(checkpoint, out, option, "--allow-parity-failure") == 0
        graph = onnx.load(out / "engines/ort-cpu/model.onnx", load_external_data=False).graph
        products = [node for node in graph.node if node.op_type == "MatMulNBits" and "lm_head" not in node.input[1]]
        assert products
        assert all((len(node.input) > 3 and node.input[3] != "") == points for node in products)
        shutil.rmtree(out)
