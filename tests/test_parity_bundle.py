"""`verify`, `eval` and `bench` of a bundle on disk; the engine is PyTorch, the files and the checkpoint are real."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest

from adx.ci.bench import bench_bundle
from adx.ci.evaluate import evaluate_bundle
from adx.ci.parity import verify_bundle
from adx.export.bundle import BundleWriter
from adx.export.errors import BundleError, CheckpointError, UsageError
from adx.export.manifest import EngineRecord, Limits, Manifest, QuantizationRecord, provenance
from adx.export.spec import KVCacheSpec, ModelSpec

LIMITS = Limits(4, 128, 128)
CACHE = KVCacheSpec(layers=2, kv_heads=2, head_dim=16, capacity=128, windows=(None, None))
MODEL = ModelSpec("llama", None, "LlamaForCausalLM", "llama", "float32", 1, 256, 64, 4, 128, CACHE, "0" * 64)
ENGINE = EngineRecord("ort-cpu", ("engine.bin",), "engine.bin", "engine.bin", {}, None, None, LIMITS)

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.byte_tokenizer(models.tiny_llama(tmp_path_factory.mktemp("bundle") / "llama"))


@pytest.fixture(autouse=True)
def engine(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What loading any bundle gives: its `session` can be replaced; `loaded` notes how it was asked for."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = SimpleNamespace(session=models.TorchSession(models.load_model(checkpoint)), loaded=[])

    def load(path: Path, **options: Any) -> SimpleNamespace:
        made.loaded.append(options)
        return made

    monkeypatch.setattr("adx.runtime.loading.load", load)
    yield made
    torch.set_num_threads(threads)


@pytest.fixture
def make(tmp_path: Path, checkpoint: Path) -> Make:
    """Writes a bundle of the checkpoint."""

    def write(*, recipe: str = "fp32", tokenizer: bool = True, parity: dict[str, Any] | None = None) -> Path:
        manifest = Manifest(
            adx_version="0",
            model=MODEL,
            graphs=(),
            quantization=QuantizationRecord(recipe, None, ()),
            engines=(ENGINE,),
            limits=LIMITS,
            parity=parity or {"passed": None, "skipped": "not asked for"},
            provenance=provenance([]),
        )
        with BundleWriter(tmp_path / "out") as writer:
            (writer.folder / "engine.bin").write_bytes(b"engine")
            if tokenizer:
                (writer.folder / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
            writer.commit(manifest)
        return tmp_path / "out"

    return write


def test_a_sound_bundle_passes(make: Make, checkpoint: Path, engine: SimpleNamespace) -> None:
    """Hashes, then parity with the checkpoint; progress is reported, JSON has the contract's keys."""
    stages: list[str] = []
    result = verify_bundle(make(), str(checkpoint), threads=1, report=lambda stage, _: stages.append(stage))
    assert result.passed
    assert result.integrity.startswith("2 files")
    assert engine.loaded == [{"target": None, "threads": 1}]
    plain = json.loads(json.dumps(dataclasses.asdict(result), allow_nan=False))
    assert plain["parity"].keys() >= {
        *("kl_mean", "top1", "max_abs_logit_error", "logit_range", "greedy_identical"),
        *("perplexity_ratio", "cases", "bound", "passed"),
    }
    assert plain["parity"]["bound"] == {"precision": "fp32", "rtol": 1e-3, "greedy": True}
    assert plain["parity"]["positions"] >= 2000
    assert stages[0] == "checking files"
    assert stages[-1] == "comparing with PyTorch"


def test_an_engine_that_departs_does_not_pass(make: Make, checkpoint: Path, engine: SimpleNamespace) -> None:
    """Sound files, wrong arithmetic: no exception, but not passed, and the misses say where."""
    import torch

    with torch.no_grad():
        engine.session.model.model.layers[0].self_attn.o_proj.weight.mul_(-1)
    result = verify_bundle(make(recipe="int4-g32"), str(checkpoint))
    assert not result.passed
    assert result.parity["bound"]["precision"] == "int4"
    assert "output logits, row" in result.parity["misses"][-1]


def test_a_changed_file_is_named(make: Make, checkpoint: Path, engine: SimpleNamespace) -> None:
    """One byte of the engine: found by its hash, before anything is loaded."""
    path = make()
    (path / "engine.bin").write_bytes(b"engjne")
    with pytest.raises(BundleError, match=r"engine\.bin: sha256"):
        verify_bundle(path, str(checkpoint))
    assert not engine.loaded


@pytest.mark.parametrize("passed", [True, False, None])
def test_without_a_reference_the_export_s_own_figures_hold(make: Make, passed: bool | None) -> None:
    """The files are those that were measured, so what was measured is the answer, marked as recorded."""
    parity = {"passed": passed, "skipped": "no time"} if passed is None else {"passed": passed, "kl_mean": 0.5}
    result = verify_bundle(make(parity=parity))
    assert result.passed is (passed is not False)
    assert result.parity == {**parity, "recorded": True}


def test_bundles_and_references_that_cannot_be_compared(make: Make, tmp_path: Path) -> None:
    """A recipe without a bound, and a reference that is not there."""
    path = make(recipe="ternary")
    with pytest.raises(BundleError, match="'ternary', which has no parity bound"):
        verify_bundle(path, str(tmp_path / "none"))
    path = path.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="none"):
        verify_bundle(make(), str(tmp_path / "none"))


def test_a_text_is_evaluated(make: Make, checkpoint: Path, tmp_path: Path) -> None:
    """The bundle's own tokenizer reads the text; `max_tokens` cuts it; the reference is the checkpoint."""
    text = tmp_path / "text.txt"
    text.write_text("The sea was grey. " * 6, encoding="utf-8")
    path = make()
    assert evaluate_bundle(path, text).tokens == 18 * 6 - 1
    result = evaluate_bundle(path, text, str(checkpoint), max_tokens=40, window=16)
    assert result.tokens == 39
    assert result.window == 16
    assert result.top1 == 1.0
    assert result.perplexity_ratio == pytest.approx(1, abs=1e-5)
    with pytest.raises(UsageError, match="at least 2"):
        evaluate_bundle(path, text, max_tokens=1)


def test_a_bundle_without_a_tokenizer_reads_no_text(make: Make, tmp_path: Path) -> None:
    """Refused before the engine is loaded."""
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(UsageError, match=r"no tokenizer\.json"):
        evaluate_bundle(make(tokenizer=False), tmp_path / "text.txt")


def test_a_bundle_is_timed(make: Make, engine: SimpleNamespace) -> None:
    """Loading is part of the figures; target and threads reach the loader."""
    result = bench_bundle(make(), prompt_len=4, new_tokens=3, repetitions=2, threads=1, target="ort-cpu")
    assert engine.loaded == [{"target": "ort-cpu", "threads": 1}]
    assert result.load_ms is not None
    assert result.load_ms >= 0
    assert result.tpot_ms is not None
    assert result.tpot_ms["n"] == 4
    assert result.provider == "torch"
