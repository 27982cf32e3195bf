"""Exports for GPU targets from end to end, without a GPU: recipes, calibration, what the manifest says, refusals."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from traced import trace_once

from adx.ci.pipeline import ExportRequest, ExportResult, export_bundle, plan_export
from adx.cli.main import main
from adx.engines import tensorrt_library
from adx.engines.tensorrt import PlanRequest
from adx.export import trace as tracing
from adx.export.bundle import Bundle
from adx.export.errors import AdxError, BackendError, LoweringError, UnsupportedCheckpointError, UsageError
from adx.runtime import load

RTX = "tensorrt-rtx"
RTX_PACKAGES = ("tensorrt_rtx_bindings", "onnxruntime_ep_nv_tensorrt_rtx")
TEXT = "The quick brown fox jumps over the lazy dog, and nobody knows why it does so every single morning. " * 40

Export = Callable[..., ExportResult]


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "trace", trace_once)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer with a tokenizer."""
    folder = models.tiny_llama(tmp_path_factory.mktemp("static") / "llama", num_hidden_layers=1)
    return models.byte_tokenizer(folder)


@pytest.fixture(scope="module")
def outlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose norms make one channel fifty times larger, and whose next layers take it back: the same function,
    and an input that one scale for all channels disturbs."""
    import torch

    folder = models.tiny_llama(tmp_path_factory.mktemp("static") / "outlier", num_hidden_layers=1, vocab_size=64)
    model = models.load_model(folder)
    layer = model.model.layers[0]
    with torch.no_grad():
        for norm, readers in (
            (layer.input_layernorm, [getattr(layer.self_attn, f"{part}_proj") for part in "qkv"]),
            (layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj]),
        ):
            norm.weight[5] *= 50
            for reader in readers:
                reader.weight[:, 5] /= 50
    model.save_pretrained(folder)
    return folder


def request(checkpoint: Path, out: Path, precision: Any = "int8", **options: Any) -> ExportRequest:
    settings = {"targets": (RTX,), "build": False, "threads": 1, "allow_parity_failure": True, **options}
    return ExportRequest(str(checkpoint), out, precision, **settings)


def export(checkpoint: Path, out: Path, precision: Any = "int8", **options: Any) -> ExportResult:
    return export_bundle(request(checkpoint, out, precision, **options))


@pytest.fixture(scope="module")
def bundles(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Bundle]]:
    """A bundle of each recipe, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("bundles")
    recipes: dict[str, dict[str, Any]] = {
        "fp16": {"precision": "fp16"},
        "int8-activations": {},
        "int8": {"weights_only": True},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "trace", trace_once)

        @functools.cache
        def made(recipe: str) -> Bundle:
            return Bundle.open(export(checkpoint, folder / recipe, **recipes[recipe]).bundle)

        yield made


def layers_of(bundle: Bundle) -> dict[str, Any]:
    return {layer.name: layer for layer in bundle.manifest.quantization.layers}


def operators(bundle: Bundle, phase: str = "decode") -> list[str]:
    import onnx

    proto = onnx.load(bundle.path / f"engines/onnx/{phase}.onnx", load_external_data=False)
    return [node.op_type for node in proto.graph.node]


def calibration(bundle: Path | str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(bundle) / "reports/calibration.json").read_text())
    return found


def engine_bytes(bundle: Path | str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (Path(bundle) / "engines/onnx").iterdir()}


# What a bundle holds.


@pytest.mark.parametrize("recipe", ["fp16", "int8-activations", "int8"])
def test_a_bundle_of_each_recipe(bundles: Callable[[str], Bundle], recipe: str) -> None:
    """Graphs, their weights, the calibration text and a manifest that says so; every hash holds."""
    bundle = bundles(recipe)
    manifest = bundle.manifest
    bundle.verify_files()
    assert manifest.quantization.recipe == recipe
    assert manifest.parity["bound"]["precision"] == recipe
    assert manifest.kv_cache.dtype == "float16"
    assert manifest.kv_cache.bytes_per_token() == 1 * 2 * 2 * 16 * 2
    assert manifest.limits.max_batch_size == 4, "plans need a bound, and it is recorded"
    (engine,) = manifest.engines
    assert (engine.target, engine.compute_capability, engine.cpu_features) == ("onnx", None, None)
    assert engine.prefill == "engines/onnx/prefill.onnx"
    assert engine.decode == "engines/onnx/decode.onnx"
    assert set(engine.files) == {engine.prefill, engine.decode, "engines/onnx/weights.data"}
    assert [graph.phase for graph in manifest.graphs] == ["prefill", "decode"]
    assert not (bundle.path / "onnx").exists()
    samples = calibration(bundle.path)
    assert samples["sha256"] == manifest.quantization.calibration_sha256
    tokens = np.array(samples["rows"], "<i8")
    assert tokens.shape == (16, 128)
    framed = np.concatenate([np.full((16, 1), 128, "<i8"), tokens], 1)
    assert hashlib.sha256(framed.tobytes()).hexdigest() == samples["sha256"], "each row's length, and its ids"
    assert (samples["source"], samples["seed"]) == ("written by the model itself", 0)


def test_layers_say_how_they_are_stored_and_why(bundles: Callable[[str], Bundle]) -> None:
    names = set(layers_of(bundles("fp16")))
    assert len(names) == 8
    for layer in layers_of(bundles("fp16")).values():
        assert (layer.bits, layer.scheme, layer.block_size, layer.reason) == (16, "float", None, None)
    for name, layer in layers_of(bundles("int8")).items():
        assert (name in names, layer.bits, layer.scheme, layer.reason) == (True, 8, "symmetric", None)
    whole = layers_of(bundles("int8-activations"))
    assert set(whole) == names
    assert {layer.bits for layer in whole.values()} == {8}
    assert whole["lm_head"].scheme == "symmetric"
    assert "makes the logits" in str(whole["lm_head"].reason)
    scaled = [layer for layer in whole.values() if layer.scheme == "symmetric, activations too"]
    assert len(scaled) >= 5
    assert all(layer.reason is None for layer in scaled)
    for layer in whole.values():
        assert layer in scaled or "its input stays float" in str(layer.reason)
    assert operators(bundles("int8-activations")).count("QuantizeLinear") == len(scaled)
    assert "QuantizeLinear" not in operators(bundles("int8"))
    assert "DequantizeLinear" not in operators(bundles("fp16"))
    sizes = {name: (bundles(name).path / "engines/onnx/weights.data").stat().st_size for name in ("fp16", "int8")}
    assert sizes["int8"] < 0.62 * sizes["fp16"]


def test_the_same_seed_gives_the_same_bytes(bundles: Callable[[str], Bundle], checkpoint: Path, tmp_path: Path) -> None:
    """Graphs and weights; another seed writes another text, and its scales differ."""
    first = bundles("int8-activations").path
    export(checkpoint, tmp_path / "again")
    export(checkpoint, tmp_path / "other", seed=1)
    assert engine_bytes(tmp_path / "again") == engine_bytes(first)
    assert calibration(tmp_path / "again") == calibration(first)
    assert calibration(tmp_path / "other")["sha256"] != calibration(first)["sha256"]
    assert engine_bytes(tmp_path / "other")["decode.onnx"] != engine_bytes(first)["decode.onnx"]


def test_the_method_and_the_amount_of_calibration_count(
    bundles: Callable[[str], Bundle], checkpoint: Path, tmp_path: Path
) -> None:
    """Scales of the percentile are no larger and some are smaller; fewer and shorter samples are what was asked."""
    smaller = scales_of(bundles("int8-activations").path)
    export(checkpoint, tmp_path / "percentile", calib_method="percentile")
    clipped = scales_of(tmp_path / "percentile")
    shared = set(clipped) & set(smaller)
    assert shared
    assert all(clipped[name] <= smaller[name] * 1.001 for name in shared)
    assert any(clipped[name] < smaller[name] * 0.99 for name in shared)
    export(checkpoint, tmp_path / "short", calib_size=2, calib_seq_len=10)
    assert np.array(calibration(tmp_path / "short")["rows"]).shape == (2, 10)
    assert scales_of(tmp_path / "short") != smaller


def scales_of(bundle: Path) -> dict[str, float]:
    """Scales of inputs by layer."""
    import onnx
    from onnx import numpy_helper

    proto = onnx.load(bundle / "engines/onnx/decode.onnx", load_external_data=False)
    found = {t.name: t for t in proto.graph.initializer if t.name.endswith(".input_scale")}
    return {name: float(numpy_helper.to_array(tensor)) for name, tensor in found.items()}


def test_layers_can_be_excluded(checkpoint: Path, tmp_path: Path) -> None:
    result = export(checkpoint, tmp_path / "out", nodes_to_exclude=("down_proj", "head"))
    bundle = Bundle.open(result.bundle)
    found = layers_of(bundle)
    kept = {name for name, layer in found.items() if layer.bits == 16}
    assert kept == {"model.layers.0.mlp.down_proj", "lm_head"}
    assert found["lm_head"].reason == "excluded by 'head'"
    assert {node.name for node in bundle.manifest.quantization.excluded} == kept
    with pytest.raises(UsageError, match="matches no layer"):
        export(checkpoint, tmp_path / "none", nodes_to_exclude=("nothing_like_it",))
    with pytest.raises(UsageError, match="no layer would be quantized"):
        export(checkpoint, tmp_path / "all", nodes_to_exclude=(".",))
    with pytest.raises(UsageError, match="--nodes-to-exclude applies to --int8 and --int4 only"):
        export(checkpoint, tmp_path / "float", "fp16", nodes_to_exclude=("down_proj",))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_smoothing_saves_a_model_with_an_outlier(
    outlier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounding alone misses its bound: nothing is written, and the exit code is 3; SmoothQuant passes."""
    args = ["export", str(outlier), "--int8", "--target", RTX, "--no-build", "--threads", "1", "--json", "--uniform"]
    assert main([*args, "--quant-algo", "rtn", "-o", str(tmp_path / "rtn")]) == 3
    said = json.loads(capsys.readouterr().out)
    assert said["passed"] is False
    assert said["parity"]["top1"] < 0.92
    assert not (tmp_path / "rtn").exists()
    assert main([*args, "-o", str(tmp_path / "smooth")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["passed"] is True
    assert said["parity"]["kl_mean"] < 0.01
    assert Bundle.open(tmp_path / "smooth").manifest.parity["passed"] is True


def test_a_float16_cache_that_overflows_fails_loudly(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values of 1e5 in float32: no scale can bring them into the cache."""
    import torch

    model = models.load_model(checkpoint)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1e5)
        model.model.layers[0].self_attn.o_proj.weight.mul_(1e-5)
    model.save_pretrained(tmp_path / "model")
    args = ["export", str(tmp_path / "model"), "--fp16", "--target", RTX, "--no-build", "--threads", "1", "--json"]
    assert main([*args, "-o", str(tmp_path / "out")]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is False
    assert any("NaN or infinite" in miss for miss in found["parity"]["misses"])
    assert not (tmp_path / "out").exists()


# Calibration on the user's text.


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in texts) + "\n\n", encoding="utf-8")
    return path


def test_text_and_lines_of_json_are_cut_into_windows(checkpoint: Path, tmp_path: Path) -> None:
    """Each document from its start, begun by the beginning-of-text token; the byte tokenizer's ids are bytes."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:150], encoding="utf-8")
    for data, parts in (
        (text, [TEXT[:150]]),
        (write_jsonl(tmp_path / "lines.jsonl", [TEXT[:70], TEXT[400:460]]), [TEXT[:70], TEXT[400:460]]),
    ):
        out = tmp_path / f"out{data.suffix}"
        export(checkpoint, out, calib_data=data, calib_size=9, calib_seq_len=32)
        found = calibration(out)
        assert (found["source"], found["seed"], found["asked"], found["length"]) == (data.name, 0, 9, 32)
        documents = [[models.BOS, *models.byte_ids(part)] for part in parts]
        rows = [ids[at : at + 32] for ids in documents for at in range(0, len(ids), 32)]
        assert found["rows"] == [row for row in rows if len(row) >= 8]
        assert Bundle.open(out).manifest.quantization.calibration_sha256 == found["sha256"]
    assert str(tmp_path) not in (out / "reports/calibration.json").read_text()


def test_data_is_read_once_and_before_the_weights(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibration takes what was drawn then, and says what it is."""
    from adx.calibration import sources
    from adx.export import checkpoint_load

    events: list[str] = []
    read, load_model = sources.read_samples, checkpoint_load.load_model
    monkeypatch.setattr(sources, "read_samples", lambda *args, **keys: events.append("read") or read(*args, **keys))
    monkeypatch.setattr(
        checkpoint_load, "load_model", lambda *args, **keys: events.append("load") or load_model(*args, **keys)
    )
    data = write_jsonl(tmp_path / "lines.jsonl", [TEXT[:70], "", TEXT[400:460]])
    stages: list[str] = []
    options = {"calib_data": data, "calib_size": 2}
    export_bundle(request(checkpoint, tmp_path / "out", "fp16", **options), lambda stage, _: stages.append(stage))
    assert events == ["read", "load"]
    assert calibration(tmp_path / "out")["skipped"] == {"empty": 1}
    assert "calibration: 2 samples (132 tokens) from lines.jsonl; skipped 1: 1 empty" in stages


def test_the_seed_says_which_windows_are_drawn(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    options = {"calib_data": tmp_path / "text.txt", "calib_size": 3, "calib_seq_len": 16}
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        export(checkpoint, tmp_path / name, "fp16", seed=seed, **options)
    first = calibration(tmp_path / "first")
    assert calibration(tmp_path / "again") == first
    assert calibration(tmp_path / "other")["sha256"] != first["sha256"]
    assert [len(row) for row in first["rows"]] == [16] * 3


@pytest.mark.parametrize("written", [True, False], ids=["by the model", "by the user"])
def test_the_samples_of_a_bundle_repeat_its_run(checkpoint: Path, tmp_path: Path, written: bool) -> None:
    """Given as data to an export with another seed: the same samples, the same bytes."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    options: dict[str, Any] = {} if written else {"calib_data": tmp_path / "text.txt"}
    export(checkpoint, tmp_path / "first", calib_size=4, calib_seq_len=20, **options)
    export(checkpoint, tmp_path / "again", calib_data=tmp_path / "first/reports/calibration.json", seed=5)
    assert calibration(tmp_path / "again") == calibration(tmp_path / "first")
    assert engine_bytes(tmp_path / "again") == engine_bytes(tmp_path / "first")


@pytest.mark.parametrize("written", [True, False], ids=["by the model", "by the user"])
@pytest.mark.parametrize("length", [1, 41])
def test_a_sample_fits_a_sequence_and_holds_some_of_the_text(
    checkpoint: Path, tmp_path: Path, written: bool, length: int
) -> None:
    """What was asked for is refused with the limit, and not cut; one token would be the beginning of a text alone."""
    data = tmp_path / "text.txt"
    data.write_text(TEXT, encoding="utf-8")
    options = {"calib_seq_len": length, "max_seq_len": 40, "calib_data": None if written else data}
    with pytest.raises(UsageError, match=rf"--calib-seq-len {length}: .* 2 or more .* 40 tokens"):
        export(checkpoint, tmp_path / "out", "fp16", **options)


def test_what_data_gives_without_being_asked(checkpoint: Path, tmp_path: Path) -> None:
    """Windows of 128 tokens, 128 at most; no longer than the cache, and as many as the text has."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    count = 1 + len(TEXT)  # tokens
    export(checkpoint, tmp_path / "out", "fp16", calib_data=text)
    lengths = [len(row) for row in calibration(tmp_path / "out")["rows"]]
    assert lengths == [128] * (count // 128) + [count % 128]
    text.write_text(TEXT * 2, encoding="utf-8")
    export(checkpoint, tmp_path / "short", "fp16", calib_data=text, max_seq_len=40)
    lengths = [len(row) for row in calibration(tmp_path / "short")["rows"]]
    assert len(lengths) == 128
    assert set(lengths) <= {40, (1 + 2 * len(TEXT)) % 40}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", "", "is empty"),
        ("short.txt", "a" * 6, r"skipped 1: 1 too short \(first: short.txt\)"),
        ("bad.jsonl", '{"text": "a"}\nnot json\n', r"1 not JSON \(first: bad.jsonl, line 2\), 1 too short"),
        ("text.csv", "a,b\n", r"accepted are \.txt and \.md"),
        ("text", "a", r"accepted are \.txt and \.md"),
    ],
)
def test_data_that_cannot_be_used_is_refused(
    checkpoint: Path, tmp_path: Path, no_work: None, name: str, content: str, words: str
) -> None:
    """With the file, the line, and what is expected, before any weight is loaded; nothing is left behind."""
    data = tmp_path / name
    data.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=words) as caught:
        export(checkpoint, tmp_path / "out", calib_data=data)
    assert name in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_data_that_is_no_text_or_not_there_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Größe".encode("latin-1"))
    for name, words in (("latin.txt", "1 not UTF-8"), ("absent.txt", "is not there")):
        with pytest.raises(UsageError, match=rf"{name}.*{words}"):
            export(checkpoint, tmp_path / "out", calib_data=tmp_path / name)


def test_data_needs_a_tokenizer(outlier: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    with pytest.raises(UsageError, match=r"no tokenizer\.json to read it with; leave --calib-data out"):
        export(outlier, tmp_path / "out", calib_data=tmp_path / "text.txt")


# What is refused before any work.


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test fails if a weight is loaded."""

    def never(*args: Any, **settings: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("adx.export.checkpoint_load.load_model", never)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("fp32", {}, "fp32 on tensorrt-rtx: it is built in --fp16 or --int8"),
    ("bf16", {}, "bf16 on tensorrt-rtx: it is built in --fp16 or --int8"),
    ("int4", {}, "int4 on tensorrt-rtx: it is built in --fp16 or --int8"),
    ("fp32", {"targets": ("tensorrt",)}, "fp32 on tensorrt: it is built in"),
    ("fp32", {"targets": ("ort-cuda",), "build": True}, "fp32 on ort-cuda: it is built in"),
    ("int8", {"targets": (RTX, "ort-cuda")}, "int8 on tensorrt-rtx and ort-cuda in one bundle: .* export two bundles"),
    ("int8", {"targets": ("ort-cpu", RTX)}, "export two bundles"),
    ("fp16", {"targets": ("ort-cpu",), "build": True}, "fp16 on ort-cpu"),
    ("int8", {"group_size": 32}, "one scale per channel"),
    ("fp16", {"weights_only": True}, "--weights-only applies to --int8 on TensorRT"),
    ("int8", {"targets": ("ort-cpu",), "build": True, "weights_only": True}, "--weights-only applies"),
    (
        "int8",
        {"targets": ("ort-cpu",), "build": True, "calib_method": "percentile"},
        "only --int8 on TensorRT targets has",
    ),
    ("int8", {"weights_only": True, "calib_method": "percentile"}, "not with --weights-only"),
    ("fp32", {"targets": ("ort-cpu",), "build": True, "calib_size": 3}, "no effect: fp32"),
    ("int8", {"targets": ("ort-cpu",), "build": False}, "TensorRT targets only"),
    ("fp16", {"targets": ("ort-cuda",), "build": True, "plans": PlanRequest(sms=("sm89",))}, "--sm"),
    ("fp16", {"plans": PlanRequest(sms=("sm89",))}, "--no-build"),
    ("fp16", {"build": True, "plans": PlanRequest(sms=("sm89",), max_shapes="input_ids=1x2")}, "--max-shapes"),
]


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("precision", "options", "words"), REFUSED)
def test_combinations_without_an_engine_are_refused(
    checkpoint: Path, tmp_path: Path, precision: str, options: dict[str, Any], words: str
) -> None:
    for attempt in (export_bundle, plan_export):
        with pytest.raises(UsageError, match=words):
            attempt(request(checkpoint, tmp_path / "out", precision, **options))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("head_dim", [8, 20, 264])
def test_a_head_size_without_a_kernel_is_refused_by_name(tmp_path: Path, head_dim: int) -> None:
    folder = models.tiny_llama(tmp_path / "model", num_hidden_layers=1, head_dim=head_dim)
    with pytest.raises(UnsupportedCheckpointError, match=rf"heads of {head_dim} elements.*multiples of 8 from 16 to"):
        export(folder, tmp_path / "out", "fp16")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_work")
def test_few_query_heads_are_refused_where_plans_are_wanted(tmp_path: Path) -> None:
    """TensorRT has no kernel for one new token with fewer than four; the graphs themselves run."""
    folder = models.tiny_llama(
        tmp_path / "model", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32
    )
    with pytest.raises(UnsupportedCheckpointError, match="2 query heads"):
        plan_export(request(folder, tmp_path / "out", "fp16"))
    assert plan_export(request(folder, tmp_path / "out", "fp16", targets=("ort-cuda",), build=True)).lines


def test_a_weight_that_float16_cannot_hold_is_told_by_its_name(checkpoint: Path, tmp_path: Path) -> None:
    """The export stops; no bundle, and no folder beside it."""
    import torch

    model = models.load_model(checkpoint)
    with torch.no_grad():
        model.model.embed_tokens.weight[5, 2] = 7e6
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(LoweringError, match=r"embed_tokens.* holds a weight of 7e\+06"):
        export(tmp_path / "model", tmp_path / "out", "fp16")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# The commands.


@pytest.fixture(scope="module")
def kept(bundles: Callable[[str], Bundle]) -> Path:
    return bundles("fp16").path


def said(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main([*args, "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_graphs_run_on_the_cpu_where_asked_for(
    kept: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`verify`, `eval`, `generate` and `bench` with `--target onnx`: against PyTorch, and the text of `generate`."""
    on = [str(kept), "--target", "onnx", "--threads", "1"]
    verified = said(capsys, "verify", *on, "--reference", str(checkpoint))
    assert verified["passed"] is True
    assert verified["parity"]["kl_mean"] <= 1e-4
    assert verified["parity"]["bound"]["precision"] == "fp16"
    (tmp_path / "text.txt").write_text(TEXT[:400], encoding="utf-8")
    evaluated = said(capsys, "eval", *on, "--text", str(tmp_path / "text.txt"), "--reference", str(checkpoint))
    assert evaluated["kl_mean"] <= 1e-4
    assert evaluated["perplexity_ratio"] == pytest.approx(1, abs=1e-2)
    model = models.load_model(checkpoint)
    prompt = models.find_gap_prompt(model, 6, new_tokens=8, accept=lambda new: models.EOS not in new)
    expected = models.reference_tokens(model, prompt, max_new_tokens=8)
    with load(kept, target="onnx", threads=1) as generator:
        assert list(generator.generate(prompt, max_new_tokens=8, temperature=0).token_ids) == expected
    generated = said(capsys, "generate", *on, "--prompt", "hello", "-n", "4", "--temperature", "0", "--ignore-eos")
    assert generated["completion_tokens"] == 4
    benched = said(capsys, "bench", *on, "--prompt-len", "8", "--new-tokens", "4", "--repetitions", "2")
    assert benched["tpot_ms"]["median"] > 0


@pytest.mark.parametrize("target", [["--target", RTX], []], ids=["named", "default"])
@pytest.mark.parametrize("command", ["generate", "verify", "bench"])
def test_nothing_runs_in_the_place_of_a_missing_engine(
    kept: Path, checkpoint: Path, command: str, target: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A bundle for TensorRT for RTX that has no plan yet: exit code 5 and what to do, never the CPU unasked."""
    more = {"generate": ["--prompt", "a"], "verify": ["--reference", str(checkpoint)], "bench": []}[command]
    assert main([command, str(kept), *target, "--threads", "1", *more]) == 5
    captured = capsys.readouterr()
    assert not captured.out
    assert not target or RTX in captured.err


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in RTX_PACKAGES),
    reason="TensorRT for RTX is not installed: pip install 'adx-toolchain[tensorrt-rtx]'",
)
@pytest.mark.skipif(tensorrt_library.local_capability() is not None, reason="there is a GPU here")
def test_a_bundle_with_plans_needs_their_gpu(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plans come first among the engines, so they are the default; without a GPU they do not run, and nothing else
    does in their place. The graphs that they were built from run where they are asked for."""
    out = tmp_path / "out"
    export(checkpoint, out, build=True, plans=PlanRequest(sms=("sm89",)), max_seq_len=64)
    manifest = Bundle.open(out).manifest
    assert [(engine.target, engine.compute_capability) for engine in manifest.engines] == [
        (RTX, "sm89"),
        ("onnx", None),
    ]
    for args in (["generate", "--prompt", "a"], ["verify", "--reference", str(checkpoint)], ["bench"]):
        assert main([args[0], str(out), *args[1:]]) == 5
        captured = capsys.readouterr()
        assert not captured.out
        assert any(word in captured.err for word in ("GPU", "CUDA", "driver")), captured.err
    answer = said(capsys, "generate", str(out), "--target", "onnx", "--prompt", "a", "-n", "2", "--ignore-eos")
    assert answer["completion_tokens"] == 2


def test_a_bundle_of_the_cuda_provider_does_not_run_on_the_cpu(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first engine is ort-cuda: without a GPU the default is exit code 5 and not another provider; `onnx` runs."""
    export(checkpoint, tmp_path / "cuda", "fp16", targets=("ort-cuda",), build=True)
    manifest = Bundle.open(tmp_path / "cuda").manifest
    assert [engine.target for engine in manifest.engines] == ["ort-cuda", "onnx"]
    assert manifest.limits.max_batch_size is None
    with load(tmp_path / "cuda", target="onnx", threads=1) as generator:
        assert generator.session.provider == "CPUExecutionProvider"
    if tensorrt_library.local_capability() is None:
        with pytest.raises(BackendError) as caught:
            load(tmp_path / "cuda")
        assert caught.value.exit_code == 5
        assert main(["generate", str(tmp_path / "cuda"), "--prompt", "a"]) == 5
        assert "no NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.usefixtures("no_work")
@pytest.mark.skipif(tensorrt_library.local_capability() is not None, reason="there is a GPU here")
def test_an_export_that_must_build_says_what_is_missing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorRT itself is not here, and without `--sm` there is no GPU to build for: before any weight is loaded."""
    out = tmp_path / "out"
    assert main(["export", str(checkpoint), "--fp16", "--target", "tensorrt", "-o", str(out)]) == 5
    error = capsys.readouterr().err
    assert "pip install" in error
    assert "--no-build" in error
    assert "adx compile" in error
    with pytest.raises(AdxError, match=r"no GPU here|not installed") as caught:
        export_bundle(request(checkpoint, out, "fp16", build=True))
    assert caught.value.exit_code in (2, 5)
    assert not out.exists()


def test_a_fault_in_the_prefill_graph_alone_fails_parity(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill sees only the last twenty keys, decode sees all: logits of all positions come from decode's graph, and
    would not show it."""
    from adx.engines.static_cache import StaticCacheLowering

    honest = StaticCacheLowering._mask

    def narrow(self: StaticCacheLowering, window: int, *, additive: bool = False) -> Any:
        return honest(self, 20 if self.phase == "prefill" and not window else window, additive=additive)

    monkeypatch.setattr(StaticCacheLowering, "_mask", narrow)
    result = export(checkpoint, tmp_path / "out", "fp16")
    assert not result.passed
    monkeypatch.undo()
    assert export(checkpoint, tmp_path / "sound", "fp16").passed
