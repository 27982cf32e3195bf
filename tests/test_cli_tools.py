"""`adx verify`, `eval`, `bench`, `inspect` and `doctor`: what they ask of the stages below, and what they print."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adx.ci.bench import BenchResult
from adx.ci.evaluate import EvalResult
from adx.ci.parity import VerifyResult
from adx.cli import machine
from adx.cli.main import main
from adx.engines import tensorrt_library
from adx.engines.devices import Gpu
from adx.engines.tensorrt_library import TensorRTLibrary
from adx.export.bundle import BundleWriter
from adx.export.errors import BackendError, BundleError
from adx.export.manifest import (
    EngineRecord,
    ExcludedNode,
    LayerQuantization,
    Limits,
    Manifest,
    Provenance,
    QuantizationRecord,
)
from adx.export.spec import GraphSpec, KVCacheSpec, ModelSpec, TensorSpec

PARITY = {
    "passed": True,
    "kl_mean": 0.003,
    "top1": 0.975,
    "max_abs_logit_error": 0.4,
    "logit_range": 50.0,
    "greedy_identical": True,
    "perplexity_ratio": 1.001,
    "cases": [{"kind": "decode"}],
    "bound": {"precision": "int8", "kl_mean": 0.01},
    "misses": [],
}


class Call:
    """A function that notes how it was called and gives a fixed result."""

    def __init__(self, result: object) -> None:
        self.result = result
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        self.args, self.kwargs = args, kwargs
        kwargs["report"]("work", 0.5)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


# --- verify


def verify(monkeypatch: pytest.MonkeyPatch, result: object) -> Call:
    call = Call(result)
    monkeypatch.setattr("adx.ci.parity.verify_bundle", call)
    return call


def test_verify_asks_and_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    call = verify(monkeypatch, VerifyResult(True, "3 files", PARITY))
    assert main(["verify", "b", "--reference", "m", "--threads", "2", "--full"]) == 0
    assert call.args == (Path("b"), "m")
    assert (call.kwargs["threads"], call.kwargs["full"]) == (2, True)
    found = capsys.readouterr()
    assert "integrity: 3 files" in found.out
    assert "mean KL divergence    0.003  (bound <= 0.01)" in found.out
    assert "work" in found.err


def test_verify_json_has_the_keys_that_stay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verify(monkeypatch, VerifyResult(True, "3 files", PARITY))
    assert main(["verify", "b", "--reference", "m", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= {"passed", "integrity", "parity"}
    keys = {"kl_mean", "top1", "max_abs_logit_error", "logit_range", "greedy_identical", "perplexity_ratio"}
    assert set(found["parity"]) >= keys | {"cases", "bound"}


def test_verify_fails_with_3_and_says_what_was_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missed = {**PARITY, "passed": False, "misses": ["kl_mean is 0.5, at most 0.01 is accepted"]}
    verify(monkeypatch, VerifyResult(False, "3 files", missed))
    assert main(["verify", "b", "--reference", "m"]) == 3
    found = capsys.readouterr()
    assert "missed: kl_mean is 0.5" in found.out
    assert "adx: error: the engine does not compute what PyTorch computes" in found.err


def test_verify_of_a_damaged_bundle_fails_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verify(monkeypatch, BundleError("weights.data: sha256 differs"))
    assert main(["verify", "b"]) == 1
    assert "adx: error: weights.data: sha256 differs" in capsys.readouterr().err


def test_verify_without_a_reference_says_that_nothing_was_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verify(monkeypatch, VerifyResult(True, "3 files", {**PARITY, "recorded": True}))
    assert main(["verify", "b"]) == 0
    found = capsys.readouterr()
    assert "as recorded at the export" in found.out
    assert "nothing was compared now; --reference MODEL" in found.err


def test_verify_full_needs_a_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "b", "--full"]) == 2
    assert "--reference" in capsys.readouterr().err


# --- eval and bench


def test_eval_asks_and_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words")
    call = Call(EvalResult(100, 12.5, 64, 0.01, 0.9, 1.02))
    monkeypatch.setattr("adx.ci.evaluate.evaluate_bundle", call)
    assert main(["eval", "b", "--text", str(text), "--reference", "m", "--max-tokens", "9", "--window", "64"]) == 0
    assert call.args == (Path("b"), text, "m")
    assert (call.kwargs["max_tokens"], call.kwargs["window"], call.kwargs["threads"]) == (9, 64, None)
    out = capsys.readouterr().out
    assert all(figure in out for figure in ("100", "12.5000", "0.01", "90.00%", "1.0200"))


def test_eval_json_without_a_reference_has_no_comparison(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words")
    monkeypatch.setattr("adx.ci.evaluate.evaluate_bundle", Call(EvalResult(100, 12.5, 64)))
    assert main(["eval", "b", "--text", str(text), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tokens": 100, "perplexity": 12.5, "window": 64}


def test_eval_needs_a_text_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "b", "--text", "/does/not/exist"]) == 2
    assert "/does/not/exist" in capsys.readouterr().err


SERIES = {"median": 6.5, "p90": 7.0, "p99": 8.0, "n": 10}
BENCH = BenchResult(
    ttft_ms=SERIES,
    tpot_ms=None,
    tokens_per_s=150.0,
    tokens_per_s_per_row=75.0,
    decode_tokens_per_s=None,
    load_ms=400.0,
    peak_rss_mb=500.0,
    loop_overhead_pct=1.5,
    prefill_ms=SERIES,
    step_ms=None,
    past_step_ms={"1900": 9.5},
    threads=2,
    provider="CPUExecutionProvider",
    batch_size=2,
    prompt_len=16,
    new_tokens=1,
    repetitions=3,
)


def test_bench_asks_and_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    call = Call(BENCH)
    monkeypatch.setattr("adx.ci.bench.bench_bundle", call)
    args = ["--prompt-len", "16", "--new-tokens", "1", "--batch-size", "2", "--repetitions", "3", "--warmup", "0"]
    assert main(["bench", "b", *args, "--past", "128", "--past", "1900", "-t", "2", "--target", "ort-cpu"]) == 0
    call.kwargs.pop("report")
    assert call.args == (Path("b"),)
    assert call.kwargs == {
        "prompt_len": 16,
        "new_tokens": 1,
        "batch_size": 2,
        "repetitions": 3,
        "warmup": 0,
        "past": (128, 1900),
        "threads": 2,
        "target": "ort-cpu",
    }
    out = capsys.readouterr().out
    assert all(text in out for text in ("ttft", "6.50", "tokens_per_s", "150.00", "step on past 1900", "9.50 ms"))


def test_bench_json_has_the_keys_that_stay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("adx.ci.bench.bench_bundle", Call(BENCH))
    assert main(["bench", "b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = {"ttft_ms", "tpot_ms", "tokens_per_s", "load_ms", "peak_rss_mb", "loop_overhead_pct", "threads"}
    assert set(found) >= keys
    assert (found["ttft_ms"], found["tpot_ms"]) == (SERIES, None)


@pytest.mark.parametrize("option", ["--prompt-len", "--new-tokens", "--batch-size", "--repetitions", "--past"])
def test_bench_refuses_numbers_below_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "b", option, "0"]) == 2
    assert option in capsys.readouterr().err


# --- inspect


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    engine = "engines/ort-cpu/model.onnx"
    limits = Limits(None, 128, 128)
    cache = KVCacheSpec(layers=3, kv_heads=2, head_dim=16, capacity=128, windows=(None, 8, 8))
    inputs = tuple(TensorSpec(f"in{n}", "int64", ("batch_size", 1)) for n in range(8))
    kept = LayerQuantization("lm_head", 8, "symmetric", 32, "kept at 8 bits")
    layers = (*(LayerQuantization(f"layers.{n}", 4, "asymmetric", 32, None) for n in range(4)), kept)
    with BundleWriter(tmp_path / "out") as writer:
        (writer.folder / "engines/ort-cpu").mkdir(parents=True)
        (writer.folder / engine).write_bytes(b"g" * 2000)
        writer.commit(
            Manifest(
                adx_version="0.1.0",
                model=ModelSpec(
                    "ll", "abc", "LlamaForCausalLM", "llama", "bfloat16", 10, 256, 64, 4, 128, cache, "0" * 64
                ),
                graphs=(GraphSpec("decode", engine, inputs, ()),),
                quantization=QuantizationRecord("int4", None, layers, (ExcludedNode("layers.9", "by name"),)),
                engines=(
                    EngineRecord("ort-cpu", (engine,), engine, engine, {"onnxruntime": "1.32"}, None, None, limits),
                ),
                limits=limits,
                parity=PARITY,
                provenance=Provenance({"torch": "2.13"}, ("adx", "export", "ll"), "2026-01-01T00:00:00+00:00"),
            )
        )
    return tmp_path / "out"


def test_inspect_shows_what_is_in_a_bundle(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle)]) == 0
    out = capsys.readouterr().out
    for text in (
        "ll at abc: LlamaForCausalLM",
        "checkpoint in bfloat16",
        "3 layers of 2 heads of 16, float32, layout BHTD, 128 tokens a row",
        "768 bytes a token; tokens that each layer sees: 1 x all, 2 x 8",
        "batch any, prompt 128, sequence 128",
        "int4: 4 x 4 bits asymmetric, groups of 32; 1 x 8 bits symmetric, groups of 32",
        "lm_head: kept at 8 bits",
        "excluded layers.9: by name",
        "ort-cpu: 2.0 kB, built with onnxruntime 1.32, for any CPU",
        "in0 int64[batch_size, 1]",
        "and 2 more",
        "parity with PyTorch float32: passed",
        "adx export ll",
    ):
        assert text in out
    assert "layers.3" not in out


def test_inspect_shows_layers_and_files_when_asked(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle), "--layers", "--files"]) == 0
    out = capsys.readouterr().out
    assert "layers.3" in out
    assert "sha256" in out


def test_inspect_json_is_the_manifest(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    manifest = json.loads((bundle / "adx.json").read_text())
    assert {key: found[key] for key in manifest} == manifest
    assert found["bytes"] == 2000 + (bundle / "adx.json").stat().st_size


def test_inspect_json_takes_no_options_of_display(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle), "--json", "--files"]) == 2


def test_inspect_of_something_else_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 1
    assert "is not an adx bundle" in capsys.readouterr().err


# --- doctor


def test_doctor_knows_every_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["targets"]) == ["ort-cpu", "ort-cuda", "tensorrt", "tensorrt-rtx"]
    assert found["targets"]["ort-cpu"]["usable"]
    assert found["targets"]["ort-cuda"]["builds"]
    assert found["cpu"]["usable_cpus"] <= found["cpu"]["affinity_cpus"] <= found["cpu"]["host_cpus"]
    assert found["memory_bytes"] > found["memory_available_bytes"] > 0


def test_doctor_shows_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    missing(monkeypatch)
    assert main(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "pip install 'tensorrt>=10.14'" in out
    assert "ort-cpu" in out


def test_doctor_of_a_target_that_is_missing_fails_with_5(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing(monkeypatch)
    assert main(["doctor", "--target", "tensorrt", "--json"]) == 5
    found = capsys.readouterr()
    assert json.loads(found.out)["targets"]["tensorrt"]["usable"] is False
    assert "adx: error: tensorrt cannot be run here: TensorRT is not installed" in found.err
    assert main(["doctor", "--target", "ort-cpu"]) == 0


def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a TensorRT library."""

    def load(target: str, hint: str = "") -> TensorRTLibrary:
        raise BackendError(f"TensorRT is not installed: {tensorrt_library.INSTALL['tensorrt']}")

    monkeypatch.setattr(tensorrt_library, "load_library", load)


def loaded(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """A machine with both TensorRT libraries, RTX's for sm86 and sm89, and these distributions."""
    module = SimpleNamespace(ComputeCapability=SimpleNamespace(__members__={"SM89": 1, "SM86": 0, "NONE": 2}))

    def load(target: str, hint: str = "") -> TensorRTLibrary:
        assert target in ("tensorrt", "tensorrt-rtx")
        return TensorRTLibrary(target, module, "11.0", "13")  # type: ignore[arg-type]  # asserted above

    monkeypatch.setattr(tensorrt_library, "load_library", load)
    monkeypatch.setattr(machine, "installed", lambda *names: {name: "1.0" for name in packages if name in names})


def test_a_missing_library_is_named_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    missing(monkeypatch)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    (cpu, *_) = machine.backends(())
    assert (cpu.usable, cpu.missing) == (False, ("pip install 'adx-toolchain[cpu]'",))


def test_a_library_that_does_not_load_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed is not usable: a broken shared library says so when it is loaded."""
    missing(monkeypatch)
    monkeypatch.setattr(machine, "_providers", lambda: ([], "onnxruntime does not load: bad ELF"))
    (cpu, *_) = machine.backends(())
    assert (cpu.usable, cpu.missing) == (False, ("onnxruntime does not load: bad ELF",))


def test_a_device_alone_does_not_make_a_target_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    missing(monkeypatch)
    monkeypatch.setattr(machine, "_providers", lambda: (["CPUExecutionProvider"], None))
    _, cuda, tensorrt, _ = machine.backends((Gpu("GPU", "sm89"),))
    assert (cuda.builds, cuda.runs, cuda.usable) == (True, False, False)
    assert cuda.missing == ("pip install 'adx-toolchain[gpu]'",)
    assert (tensorrt.builds, tensorrt.runs) == (False, False)
    assert tensorrt.missing == ("TensorRT is not installed: pip install 'tensorrt>=10.14'",)


def test_to_build_is_not_to_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU, TensorRT for RTX builds for those that it knows, and TensorRT does not; neither runs."""
    loaded(monkeypatch, "cuda-bindings")
    *_, tensorrt, rtx = machine.backends(())
    assert (tensorrt.builds, tensorrt.runs, tensorrt.builds_for) == (False, False, ())
    assert (rtx.builds, rtx.runs, rtx.builds_for) == (True, False, ("sm86", "sm89"))
    assert tensorrt.missing == rtx.missing == ("no CUDA device or driver was found",)
    monkeypatch.setattr("adx.cli.doctor.gpus", lambda: ())
    assert main(["doctor", "--target", "tensorrt-rtx"]) == 5
    found = capsys.readouterr()
    assert "sm86, sm89" in found.out
    assert "tensorrt-rtx cannot be run here (it can be built): no CUDA device" in found.err


def test_plans_run_on_the_gpu_that_is_there_if_the_library_is_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(monkeypatch, "cuda-bindings")
    *_, tensorrt, rtx = machine.backends((Gpu("GPU", "sm90"),))
    assert (tensorrt.usable, tensorrt.builds_for, tensorrt.missing) == (True, ("sm90",), ())
    assert (rtx.builds, rtx.runs) == (True, False)
    assert rtx.missing == ("TensorRT for RTX 11.0 does not support sm90, it is for sm86, sm89",)
    assert machine.backends((Gpu("GPU", "sm89"),))[-1].usable


def test_plans_need_the_cuda_bindings_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(monkeypatch)
    for backend in machine.backends((Gpu("GPU", "sm89"),))[2:]:
        assert (backend.builds, backend.runs) == (True, False)
        assert backend.missing == ("to run plans: pip install cuda-bindings",)


def test_features_are_read_from_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first processor's flags count; names are whole words (avx512f is not avx512_vnni)."""
    fields = {"model name": "A CPU", "flags": "fpu avx2 avx512f amx_tile"}
    monkeypatch.setattr(machine, "_cpuinfo", lambda: fields)
    found = machine.cpu()
    assert (found.model, found.features) == ("A CPU", ("avx2", "avx512", "amx"))
    assert dataclasses.asdict(found)["usable"] >= 1
