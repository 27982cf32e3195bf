"""`export_bundle` from end to end: what a bundle holds, what is replaced, and what a failure or a signal leaves."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from traced import engine, trace_once, traced

from adx.ci.pipeline import ExportRequest, ExportResult, export_bundle, plan_export
from adx.engines.ort_cpu import GRAPH_FILE, WEIGHTS_FILE
from adx.export import trace as tracing
from adx.export.bundle import Bundle
from adx.export.errors import (
    BackendError,
    ContextLengthError,
    LoweringError,
    OutputExistsError,
    UnsupportedCheckpointError,
    UsageError,
)
from adx.runtime import load

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
ENGINE = (GRAPH_FILE, WEIGHTS_FILE)
NEVER = 1e-12  # an absolute bound that no engine keeps

Export = Callable[..., ExportResult]


@pytest.fixture(scope="module", autouse=True)
def _traced_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "trace", trace_once)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer with a tokenizer, a chat template and settings of its own."""
    folder = models.tiny_llama(tmp_path_factory.mktemp("paths") / "llama", num_hidden_layers=1)
    models.set_generation_config(folder, eos_token_id=2, bos_token_id=1, repetition_penalty=1.5)
    return models.byte_tokenizer(folder, chat_template=TEMPLATE)


def export(checkpoint: Path, out: Path, precision: Any = "fp32", **options: Any) -> ExportResult:
    if precision in ("int8", "int4"):
        options = {"calib_size": 4, "calib_seq_len": 32, **options}
    return export_bundle(ExportRequest(str(checkpoint), out, precision, threads=1, **options))


@pytest.fixture(scope="module")
def bundles(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ExportResult]:
    """A bundle of each precision; random weights may miss the bounds of the quantized ones."""
    folder = tmp_path_factory.mktemp("bundles")
    precisions = ("fp32", "int8", "int4")
    return {p: export(checkpoint, folder / p, p, allow_parity_failure=p != "fp32") for p in precisions}


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def operators(bundle: Path) -> dict[str, int]:
    """How many nodes of each type the engine has."""
    import onnx

    counts: dict[str, int] = {}
    for node in onnx.load(bundle / GRAPH_FILE, load_external_data=False).graph.node:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return counts


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_bundle_of_each_precision_is_whole_and_generates(bundles: dict[str, ExportResult], precision: str) -> None:
    """Files are the manifest's, hashes hold, figures agree everywhere, text comes out."""
    result = bundles[precision]
    bundle = Bundle.open(result.bundle)
    bundle.verify_files()
    manifest = bundle.manifest
    assert manifest.quantization.recipe == precision
    assert manifest.parity["passed"] is result.passed
    assert result.bytes == bundle.total_bytes() == sum(p.stat().st_size for p in bundle.path.rglob("*") if p.is_file())
    report = json.loads((bundle.path / "reports" / "parity.json").read_text())
    assert report["kl_mean"] == result.parity["kl_mean"] == manifest.parity["kl_mean"]
    assert report["decode_steps"] >= 32
    assert {f.path for f in manifest.files} == set(contents(bundle.path)) - {"adx.json"}
    with load(result.bundle, threads=1) as model:
        answer = model.generate("hello", max_new_tokens=5, temperature=0, ignore_eos=True)
    assert len(answer.token_ids) == 5


def test_precisions_store_what_they_say(bundles: dict[str, ExportResult]) -> None:
    """Integers in the graph where integers were asked for, and the figure of how many layers in the summary."""
    said = {"fp32": ("MatMul", "8 linear layers in float32"), "int8": ("MatMulNBits", "quantized 8 of 8")}
    for precision, (product, words) in said.items():
        assert operators(Path(bundles[precision].bundle)).get(product, 0) > 0
        assert words in bundles[precision].summary[0]
    bits = {layer.name: layer.bits for layer in Bundle.open(bundles["int4"].bundle).manifest.quantization.layers}
    assert bits.pop("lm_head") == 8
    assert set(bits.values()) == {4}
    assert "MatMul" not in operators(Path(bundles["int8"].bundle))
    sizes = {p: (Path(r.bundle) / WEIGHTS_FILE).stat().st_size for p, r in bundles.items()}
    assert sizes["fp32"] > sizes["int8"] > sizes["int4"]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"num_hidden_layers": 1, "tie_word_embeddings": True, "vocab_size": 4000}),
        ("llama", {"num_hidden_layers": 1, "vocab_size": 4000}),
        ("gpt2", {"n_layer": 1, "vocab_size": 4000}),
    ],
)
def test_no_weight_stays_float_unnoticed(
    tmp_path_factory: pytest.TempPathFactory, family: str, overrides: dict[str, Any]
) -> None:
    """Bytes of a quantized engine against float32's: tied or untied tables, and GPT-2's (in, out) layout."""
    import onnx

    source = traced(tmp_path_factory, family, **overrides)
    unique = 4 * source.spec.parameters
    sizes = {}
    for precision in ("fp32", "int8", "int4"):
        engine(source, precision, 32 if precision != "fp32" else None)
        folder = source.scratch / f"{precision}-{32 if precision != 'fp32' else None}"
        sizes[precision] = sum((folder / name).stat().st_size for name in ENGINE)
        if precision == "fp32":
            continue
        graph = onnx.load(folder / GRAPH_FILE, load_external_data=False).graph
        floats = [t for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT and "scales" not in t.name]
        assert [t.name for t in floats if np.prod(t.dims) * 4 > 65536] == []
    assert sizes["fp32"] <= 1.15 * unique
    assert sizes["int8"] <= 0.35 * sizes["fp32"]
    assert sizes["int4"] <= sizes["int8"]


def test_the_bundle_serves_without_its_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """The source is gone: text equals transformers' with the model's own settings, the tokenizer is as before."""
    from transformers import AutoTokenizer

    source = Path(shutil.copytree(checkpoint, tmp_path / "source"))
    result = export(source, tmp_path / "out")
    expected = models.reference_tokens(models.load_model(source), models.byte_ids("hello"), max_new_tokens=8)
    shutil.rmtree(source)
    with load(result.bundle, threads=1) as model:
        assert list(model.generate("hello", max_new_tokens=8, temperature=0).token_ids) == expected
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (result.bundle, checkpoint))
    text, chat = "ab é 🙂 日本", [{"role": "user", "content": "hi"}]
    assert ours.encode(text) == theirs.encode(text)
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False) == "hi"


def test_an_output_that_exists_is_refused_untouched(bundles: dict[str, ExportResult], tmp_path: Path) -> None:
    """Before any work: the model named does not even exist."""
    out = Path(shutil.copytree(bundles["fp32"].bundle, tmp_path / "out"))
    before = contents(out)
    with pytest.raises(OutputExistsError, match="--force"):
        export(tmp_path / "no-such-model", out)
    assert contents(out) == before
    other = tmp_path / "notes"
    other.mkdir()
    (other / "diary.txt").write_text("mine")
    with pytest.raises(UsageError, match="not an adx bundle"):
        export(tmp_path / "no-such-model", other, force=True)
    assert (other / "diary.txt").read_text() == "mine"


def test_force_replaces_everything(checkpoint: Path, bundles: dict[str, ExportResult], tmp_path: Path) -> None:
    """Over a bundle of another precision: the files of a fresh export, of the same sizes, and nothing beside it."""
    out = Path(shutil.copytree(bundles["fp32"].bundle, tmp_path / "out"))
    result = export(checkpoint, out, "int8", force=True, allow_parity_failure=True)
    fresh = Path(bundles["int8"].bundle)
    assert contents(out).keys() == contents(fresh).keys()
    changed = {name for name, digest in contents(out).items() if contents(fresh)[name] != digest}
    timed = {"adx.json", *(f"reports/{name}" for name in ("parity.json", "quantization.json", "quantization.html"))}
    assert changed <= timed, "times of their own, all else equal"
    assert abs(result.bytes - bundles["int8"].bytes) <= 200
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_second_export_gives_the_same_engine(checkpoint: Path, tmp_path: Path) -> None:
    """Bytes of graphs and weights, portable ones too, and no gap in a data file that nothing refers to."""
    import onnx

    for name in ("first", "second"):
        export(checkpoint, tmp_path / name, "int4", keep_onnx=True, allow_parity_failure=True)
    first, second = (contents(tmp_path / name) for name in ("first", "second"))
    graphs = [*ENGINE, "onnx/prefill.onnx", "onnx/decode.onnx", "onnx/weights.data"]
    assert {n: first[n] for n in graphs} == {n: second[n] for n in graphs}
    for graph, data in ((GRAPH_FILE, WEIGHTS_FILE), ("onnx/prefill.onnx", "onnx/weights.data")):
        model = onnx.load(tmp_path / "first" / graph, load_external_data=False)
        places = [{e.key: e.value for e in t.external_data} for t in model.graph.initializer if t.external_data]
        used = {int(place["offset"]): int(place["length"]) for place in places}
        assert sum(used.values()) >= 0.99 * (tmp_path / "first" / data).stat().st_size
    assert [g.file for g in Bundle.open(tmp_path / "first").manifest.graphs] == [
        "onnx/prefill.onnx",
        "onnx/decode.onnx",
        GRAPH_FILE,
        GRAPH_FILE,
    ]


def test_a_missed_bound_leaves_no_bundle(checkpoint: Path, tmp_path: Path) -> None:
    """The result says so; with leave to keep it, the bundle is there and its manifest says failed."""
    result = export(checkpoint, tmp_path / "out", atol=NEVER)
    assert not result.passed
    assert result.parity["passed"] is False
    assert result.parity["misses"]
    assert (result.bytes, list(tmp_path.iterdir())) == (0, [])
    assert any("--allow-parity-failure" in line for line in result.summary)
    kept = export(checkpoint, tmp_path / "out", atol=NEVER, allow_parity_failure=True)
    assert not kept.passed
    assert Bundle.open(tmp_path / "out").manifest.parity["passed"] is False


def test_a_good_bundle_survives_a_failed_replacement(
    checkpoint: Path, bundles: dict[str, ExportResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missed bound, then an error in the middle of the work: every byte is as it was, and nothing lies beside it."""
    out = Path(shutil.copytree(bundles["fp32"].bundle, tmp_path / "out"))
    before = contents(out)
    assert not export(checkpoint, out, atol=NEVER, force=True).passed
    assert contents(out) == before

    def fail(*args: Any, **options: Any) -> None:
        raise LoweringError("put in by the test")

    monkeypatch.setattr("adx.engines.ort_cpu.compile", fail)
    with pytest.raises(LoweringError):
        export(checkpoint, out, force=True)
    assert contents(out) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


INTERRUPTED = """
import os, signal, sys, threading
from pathlib import Path
from adx.ci.pipeline import ExportRequest, export_bundle
from adx.export.errors import Interrupted

def report(stage, fraction):
    if stage == "tracing the model":
        print(stage, flush=True)
        threading.Timer(0.3, os.kill, (os.getpid(), int(sys.argv[3]))).start()

try:
    export_bundle(ExportRequest(sys.argv[1], Path(sys.argv[2]), "fp32", force=True, threads=1), report)
except Interrupted as error:
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_good_bundle_survives_an_export_that_is_killed(
    checkpoint: Path, bundles: dict[str, ExportResult], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """During the trace. A signal that can be handled leaves nothing; what SIGKILL leaves, the next export removes."""
    out = Path(shutil.copytree(bundles["fp32"].bundle, tmp_path / "out"))
    before = contents(out)
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(checkpoint), str(out), str(int(number))],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "tracing the model\n", done.stderr
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert contents(out) == before
    Bundle.open(out).verify_files()
    if number == signal.SIGKILL:
        assert len(list(tmp_path.iterdir())) > 1
        export(checkpoint, out, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_excluded_layers_stay_float_with_their_reason(checkpoint: Path, tmp_path: Path) -> None:
    """In the graph, the manifest and the summary."""
    patterns = ("down_proj$", "^lm_head$")
    result = export(checkpoint, tmp_path / "out", "int8", nodes_to_exclude=patterns, allow_parity_failure=True)
    manifest = Bundle.open(tmp_path / "out").manifest
    assert {n.name for n in manifest.quantization.excluded} == {"model.layers.0.mlp.down_proj", "lm_head"}
    assert all("excluded by" in n.reason for n in manifest.quantization.excluded)
    bits = {layer.name: layer.bits for layer in manifest.quantization.layers}
    assert sorted(bits.values()) == [8] * 6 + [32] * 2
    assert "quantized 6 of 8" in result.summary[0]
    counts = operators(tmp_path / "out")
    assert counts.get("MatMul", 0) + counts.get("Gemm", 0) == 2


@pytest.mark.parametrize(
    ("precision", "options", "message"),
    [
        ("int8", {"nodes_to_exclude": ("no_such_layer",)}, "no_such_layer.*matches no layer"),
        ("int8", {"nodes_to_exclude": ("(",)}, "not a regular expression"),
        ("int4", {"nodes_to_exclude": (".",)}, "no layer would be quantized"),
        ("fp32", {"group_size": 32}, "--group-size applies to --int8 and --int4 only"),
        ("int8", {"max_seq_len": 129}, "129.*128"),
        ("int8", {"max_input_len": 129}, "129.*128"),
        ("int8", {"max_batch_size": 0}, "at least 1"),
        ("int8", {"opset": 17}, "opset"),
    ],
)
def test_options_without_effect_or_sense_are_refused(
    checkpoint: Path, tmp_path: Path, precision: str, options: dict[str, Any], message: str
) -> None:
    """By name, and with nothing left behind."""
    with pytest.raises(UsageError, match=message):
        export(checkpoint, tmp_path / "out", precision, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_group_size_minus_one_takes_whole_rows(checkpoint: Path, tmp_path: Path, precision: str) -> None:
    """64 and 128 columns, one scale for each row; the engine runs."""
    export(checkpoint, tmp_path / "out", precision, group_size=-1, allow_parity_failure=True)
    layers = {layer.name: layer for layer in Bundle.open(tmp_path / "out").manifest.quantization.layers}
    assert layers["model.layers.0.mlp.down_proj"].block_size == 128
    assert layers["model.layers.0.self_attn.q_proj"].block_size == 64
    with load(tmp_path / "out", threads=1) as model:
        assert len(model.generate([5, 6, 7], max_new_tokens=3, temperature=0, ignore_eos=True).token_ids) == 3


def test_a_shorter_sequence_limits_cache_and_prompts(checkpoint: Path, tmp_path: Path) -> None:
    """In the manifest and in the engine, which is right up to its last place."""
    export(checkpoint, tmp_path / "out", max_seq_len=48)
    manifest = Bundle.open(tmp_path / "out").manifest
    assert (manifest.limits.max_seq_len, manifest.kv_cache.capacity) == (48, 48)
    prompt = np.random.default_rng(0).integers(3, 256, 46).tolist()
    reference = models.reference_tokens(models.load_model(checkpoint), prompt, max_new_tokens=3)
    with load(tmp_path / "out", threads=1) as model:
        answer = model.generate(prompt, temperature=0, ignore_eos=True, repetition_penalty=1.5, max_new_tokens=99)
        assert list(answer.token_ids) == reference
        with pytest.raises(ContextLengthError, match=r"49.*48"):
            model.generate([5] * 49)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_sixteen_bits_are_refused_at_once_with_the_reason(tmp_path: Path, precision: str) -> None:
    """Before the checkpoint is looked at."""
    start = time.perf_counter()
    with pytest.raises(UsageError, match=f"{precision} on ort-cpu.*--fp32, --int8 or --int4"):
        export(tmp_path / "no-such-model", tmp_path / "out", precision)
    assert time.perf_counter() - start < 1.0
    with pytest.raises(BackendError, match=r"TensorRT is not installed.*adx compile"):
        export(tmp_path / "no-such-model", tmp_path / "out", "fp16", targets=("tensorrt",))


def test_a_plan_says_what_an_export_takes(checkpoint: Path, bundles: dict[str, ExportResult], tmp_path: Path) -> None:
    """Without writing: disk covers the bundle and a few MB of text, grows with the precision and the extra graphs."""
    plans = {p: plan_export(ExportRequest(str(checkpoint), tmp_path / "out", p)) for p in ("int4", "int8", "fp32")}  # type: ignore[arg-type]
    for precision, plan in plans.items():
        assert bundles[precision].bytes <= plan.disk_bytes <= bundles[precision].bytes + 10e6
        assert plan.seconds > 0
        assert plan.memory_bytes > 3 * 4 * Bundle.open(bundles[precision].bundle).manifest.model.parameters
        assert any(precision in line for line in plan.lines)
    disks = [plan.disk_bytes for plan in plans.values()]
    assert disks == sorted(disks)
    request = ExportRequest(str(checkpoint), tmp_path / "out", "int8", keep_onnx=True)
    more = plan_export(request).disk_bytes - plan_export(dataclasses.replace(request, keep_onnx=False)).disk_bytes
    assert more >= 4 * Bundle.open(bundles["int8"].bundle).manifest.model.parameters
    assert list(tmp_path.iterdir()) == []


def test_progress_names_the_stages_in_order(checkpoint: Path, tmp_path: Path) -> None:
    """Fractions lie between 0 and 1 and grow within a stage."""
    seen: dict[str, list[float | None]] = {}
    request = ExportRequest(str(checkpoint), tmp_path / "out", "fp32", threads=1, keep_onnx=True)
    export_bundle(request, lambda stage, fraction: seen.setdefault(stage, []).append(fraction))
    order = [stage for stage in seen if stage.split()[0] in {"reading", "hashing", "loading", "tracing", "comparing"}]
    assert order == [
        "reading the checkpoint",
        "hashing the weights",
        "loading the weights",
        "tracing the model",
        "loading the engine",
        "comparing with PyTorch",
        "hashing the bundle",
    ]
    for fractions in seen.values():
        known = [f for f in fractions if f is not None]
        assert known == sorted(known)
        assert all(0 <= f <= 1 for f in known)


def test_an_unsupported_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "foo", "architectures": ["FooForCausalLM"]}))
    with pytest.raises(UnsupportedCheckpointError, match="foo"):
        export(folder, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
