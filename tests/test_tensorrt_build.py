"""Plans that TensorRT for RTX really builds, from tiny graphs and without a GPU, and what is said where it cannot."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adx.engines import tensorrt_failures, tensorrt_library
from adx.engines.profiles import ShapeProfile
from adx.engines.tensorrt_build import PlanFacts, build_plan, count_attentions, read_graph, write_atomically
from adx.engines.tensorrt_library import (
    TensorRTLibrary,
    capabilities,
    check_capability,
    load_library,
    local_capability,
    parse_capability,
)
from adx.engines.tensorrt_log import BuildLog, make_logger, without_noise
from adx.engines.tensorrt_options import BuildOptions, check_options, configure
from adx.engines.tensorrt_progress import BuildProgress, watch
from adx.export.errors import AdxError, BackendError, Interrupted, LoweringError, UsageError
from adx.export.interrupt import interruptible

HEADS, VOCAB, CACHE = 4, 64, 32
RTX = ("tensorrt_rtx_bindings", "onnxruntime_ep_nv_tensorrt_rtx")
DRIVER = "[checkMacros.cpp] Error Code 1: Cuda Runtime (cudaError 35: CUDA driver version is insufficient)"

needs_rtx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in RTX),
    reason="TensorRT for RTX is not installed: pip install 'adx-toolchain[tensorrt-rtx]'",
)


def int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def tiny_graph(
    path: Path, head: int = 16, layers: int = 1, last: str | None = None, dtype: int = 10, heads: int = HEADS
) -> Path:
    """A decoder's graph, (B, T) ids to logits, its weights beside it: projections, cache and attention, a head.

    Args:
        path: of the ONNX file.
        head: elements of a head.
        layers: attention layers.
        last: operator of a node before the head, named as a layer of the model, to be refused.
        dtype: element type of all but the logits, as ONNX counts (10: float16, 1: float32).
        heads: of queries, keys and values.
    """
    from onnx import helper, numpy_helper, save

    rng, width = np.random.default_rng(0), heads * head
    real = np.float16 if dtype == 10 else np.float32
    node, info = helper.make_node, helper.make_tensor_value_info
    cache = ["batch_size", heads, "cache_length", head]
    inputs = [info("input_ids", 7, ["batch_size", "sequence_length"]), info("write_indices", 7, ["batch_size"])]
    outputs = [info("logits", 1, ["batch_size", "sequence_length", VOCAB])]
    weights = {
        "table": rng.standard_normal((VOCAB, width)).astype(real),
        "lm_head.weight": rng.standard_normal((width, VOCAB)).astype(real),
        "scalar": int64(),
        "zero": np.array(0),
        "one": np.array(1),
        "axis": int64(1),
        "axes": int64(1, 3),
        "split": int64(0, 0, heads, head),
        "join": int64(0, 0, width),
    }
    nodes = [
        node("Gather", ["table", "input_ids"], ["x0"], name="model.embed_tokens"),
        node("Shape", ["input_ids"], ["t1"], start=1, end=2),
        node("Reshape", ["t1", "scalar"], ["t"]),
        node("Range", ["zero", "t", "one"], ["offsets"]),
        node("Unsqueeze", ["write_indices", "axis"], ["first"]),
        node("Add", ["first", "offsets"], ["places"]),
        node("Unsqueeze", ["places", "axes"], ["rows"]),
        node("Shape", ["past_key_values.0.key"], ["c1"], start=2, end=3),
        node("Reshape", ["c1", "scalar"], ["c"]),
        node("Range", ["zero", "c", "one"], ["columns"]),
        node("LessOrEqual", ["columns", "rows"], ["mask"]),
    ]
    for layer in range(layers):
        for part in "qkv":
            name = f"model.layers.{layer}.self_attn.{part}_proj"
            weights[f"{name}.weight"] = (rng.standard_normal((width, width)) / 8).astype(real)
            nodes += [
                node("MatMul", [f"x{layer}", f"{name}.weight"], [f"{part}{layer}_flat"], name=name),
                node("Reshape", [f"{part}{layer}_flat", "split"], [f"{part}{layer}_heads"]),
                node("Transpose", [f"{part}{layer}_heads"], [f"{part}{layer}"], perm=[0, 2, 1, 3]),
            ]
        for part in ("key", "value"):
            past, present = f"past_key_values.{layer}.{part}", f"present.{layer}.{part}"
            inputs.append(info(past, dtype, cache))
            outputs.append(info(present, dtype, cache))
            scattered = [past, f"{part[0]}{layer}", "write_indices"]
            nodes.append(node("TensorScatter", scattered, [present], name=f"layers.{layer}.cache.{part}", axis=2))
        attended = [f"q{layer}", f"present.{layer}.key", f"present.{layer}.value", "mask"]
        nodes += [
            node("Attention", attended, [f"a{layer}"], name=f"layers.{layer}.attention", scale=head**-0.5),
            node("Transpose", [f"a{layer}"], [f"a{layer}_rows"], perm=[0, 2, 1, 3]),
            node("Reshape", [f"a{layer}_rows", "join"], [f"x{layer + 1}"]),
        ]
    hidden = f"x{layers}"
    if last is not None:
        nodes.append(node(last, [hidden], ["strange"], name="model.layers.0.mlp.down_proj"))
        hidden = "strange"
    nodes += [
        node("MatMul", [hidden, "lm_head.weight"], ["half_logits"], name="lm_head"),
        node("Cast", ["half_logits"], ["logits"], to=1),
    ]
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, initializer=initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(model, str(path), save_as_external_data=True, location="weights.data", size_threshold=256)
    return path


def profile(head: int = 16, layers: int = 1, batch: int = 2, tokens: int = 4, heads: int = HEADS) -> ShapeProfile:
    """One row and one token up to `batch` rows and `tokens` tokens."""

    def shapes(of: Callable[[int, int], tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return of(1, 1), of(1, 1), of(batch, tokens)

    result: dict[str, Any] = {"input_ids": shapes(lambda b, t: (b, t)), "write_indices": shapes(lambda b, t: (b,))}
    for layer in range(layers):
        for part in ("key", "value"):
            result[f"past_key_values.{layer}.{part}"] = shapes(lambda b, t: (b, heads, CACHE, head))
    return ShapeProfile("step", result)


@pytest.fixture(scope="module")
def rtx() -> TensorRTLibrary:
    return load_library("tensorrt-rtx")


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_graph(tmp_path_factory.mktemp("onnx") / "decode.onnx")


@pytest.fixture
def twin(rtx: TensorRTLibrary, monkeypatch: pytest.MonkeyPatch) -> TensorRTLibrary:
    """The module of TensorRT for RTX in the place of `tensorrt`, which has the same API, and a GPU to build for."""
    monkeypatch.setattr(tensorrt_library, "local_capability", lambda: "sm89")
    return TensorRTLibrary("tensorrt", rtx.module, "11.0.0.1", "13")


@pytest.fixture
def without_cache() -> Iterator[None]:
    """Libraries are looked for anew, and what was found is forgotten."""
    tensorrt_library._load.cache_clear()
    yield
    tensorrt_library._load.cache_clear()


def build(
    library: TensorRTLibrary,
    graph: Path,
    out: Path,
    report: Callable[[str, float | None], None] = lambda stage, fraction: None,
    **changes: Any,
) -> PlanFacts:
    """Build with the tests' defaults."""
    arguments: dict[str, Any] = {
        "profiles": (profile(),),
        "fixed_dims": {"cache_length": CACHE},
        "sm": "sm89",
        "options": BuildOptions(),
        "log": out.parent / "build.log",
    }
    return build_plan(library, graph, out, report=report, **{**arguments, **changes})


# The library.


@needs_rtx
def test_the_wheels_of_tensorrt_for_rtx_are_one_library(rtx: TensorRTLibrary) -> None:
    from importlib.metadata import version

    assert rtx.version == version("tensorrt-rtx-cu13-bindings")
    assert rtx.cuda is not None
    assert re.fullmatch(r"13\.\d+", rtx.cuda)
    assert load_library("tensorrt-rtx") is rtx
    accepted = capabilities(rtx)
    assert accepted is not None
    assert {"sm75", "sm80", "sm86", "sm89", "sm120"} <= set(accepted)
    assert accepted.index("sm89") < accepted.index("sm120"), "in the order of numbers, not of letters"


@pytest.mark.usefixtures("without_cache")
@pytest.mark.parametrize(
    ("target", "package"), [("tensorrt", "'tensorrt>=10.14'"), ("tensorrt-rtx", "'tensorrt-rtx-cu13-bindings==1.7.*'")]
)
def test_a_missing_library_says_what_to_install_and_what_to_run_elsewhere(
    target: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(BackendError) as caught:
        load_library(target, "adx compile bundle --target " + target)
    assert caught.value.exit_code == 5
    assert "is not installed" in str(caught.value)
    assert f"pip install {package}" in str(caught.value)
    assert str(caught.value).endswith(f"or run this on a host that has it: adx compile bundle --target {target}")


@pytest.mark.usefixtures("without_cache")
@pytest.mark.parametrize(
    ("version", "accepted"), [("10.13.3.9", False), ("8.6.1", False), ("10.14.1.48", True), ("11.0.0", True)]
)
def test_an_older_tensorrt_is_refused_by_its_version(
    version: str, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10.9 is older than 10.14, though it sorts after it as text."""
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__=version, Builder=object))
    if accepted:
        assert load_library("tensorrt").version == version
        return
    with pytest.raises(BackendError, match=rf"{re.escape(version)} is installed, and 10\.14 or later is needed: pip"):
        load_library("tensorrt")


@pytest.mark.usefixtures("without_cache")
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ImportError('libnvinfer.so.11: cannot open')", "libnvinfer.so.11: cannot open"),
        ("import a_module_that_is_not_there", "a_module_that_is_not_there"),
        ("", "has no Builder"),
    ],
    ids=["shared library", "dependency", "something else"],
)
def test_a_library_that_does_not_load_says_why(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    with pytest.raises(BackendError, match="installed but does not load") as caught:
        load_library("tensorrt")
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    assert words in str(caught.value)


@needs_rtx
@pytest.mark.usefixtures("without_cache")
def test_wheels_of_different_releases_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python API calls into the library by fixed offsets: with another release it would crash."""
    monkeypatch.setattr(tensorrt_library, "_soname_version", lambda folder, stem: "1.6.0")
    with pytest.raises(BackendError, match=r"Python API is 1\.7.*library 1\.6\.0: pip install"):
        load_library("tensorrt-rtx")


def test_only_tensorrt_targets_have_a_library() -> None:
    with pytest.raises(UsageError, match="ort-cpu"):
        load_library("ort-cpu")


@pytest.mark.parametrize("text", ["sm89", "SM_89", "89", "8.9", " sm89 "])
def test_a_capability_is_read_as_users_write_it(text: str) -> None:
    assert parse_capability(text) == "sm89"
    assert parse_capability(text.replace("8", "12").replace("9", "0")) == "sm120"


@needs_rtx
def test_a_capability_that_the_library_lacks_is_refused_with_those_that_it_has(
    rtx: TensorRTLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("sm90", "9.0"):
        with pytest.raises(UsageError, match=r"sm75, sm80, sm86, sm89, sm120"):
            check_capability(rtx, text)
    for text in ("ada", "sm", "8-9", "sm90a"):
        with pytest.raises(UsageError, match="write it as sm89"):
            check_capability(rtx, text)
    monkeypatch.setattr(tensorrt_library, "local_capability", lambda: None)
    with pytest.raises(UsageError, match="no GPU here"):
        check_capability(rtx, None)
    monkeypatch.setattr(tensorrt_library, "local_capability", lambda: "sm86")
    assert check_capability(rtx, None) == "sm86"
    assert check_capability(rtx, "8.9") == "sm89", "RTX builds for other GPUs than the one that is present"


def test_tensorrt_builds_for_the_gpu_that_is_present_only(monkeypatch: pytest.MonkeyPatch) -> None:
    library = TensorRTLibrary("tensorrt", None, "11.0.0", "13")
    assert capabilities(library) is None
    monkeypatch.setattr(tensorrt_library, "local_capability", lambda: "sm90")
    assert check_capability(library, None) == check_capability(library, "9.0") == "sm90"
    with pytest.raises(UsageError, match=r"sm89 cannot be built here.*present, sm90"):
        check_capability(library, "sm89")
    monkeypatch.setattr(tensorrt_library, "local_capability", lambda: None)
    with pytest.raises(BackendError, match="no CUDA device"):
        check_capability(library, "sm90")


def test_the_driver_tells_the_capability_or_there_is_no_device() -> None:
    found = local_capability()
    assert found is None or re.fullmatch(r"sm\d{2,3}", found)


# What it builds.


@needs_rtx
def test_a_plan_is_built_and_described(rtx: TensorRTLibrary, tmp_path: Path) -> None:
    """Layers are those of the graph: two cache updates and one whole attention each, three projections, a head."""
    source = tiny_graph(tmp_path / "onnx/decode.onnx", layers=2)
    out = tmp_path / "engines/decode.plan"
    reports: list[tuple[str, float | None]] = []
    facts = build(rtx, source, out, report=lambda *said: reports.append(said), profiles=(profile(layers=2),))
    assert out.stat().st_size == facts.bytes > 100_000
    assert facts.kv_cache_updates == 4
    assert (facts.attentions, facts.attentions_decomposed, facts.plugins) == (2, 0, 0)
    assert facts.layers["MATRIX_MULTIPLY"] == 2 * 3 + 1
    assert facts.precisions["HALF"] > 0
    assert sum(facts.layers.values()) == sum(facts.precisions.values())
    width = HEADS * 16
    weights = 2 * (2 * VOCAB * width + 2 * 3 * width * width)  # float16: the embedding, the head, the projections
    assert facts.weights_bytes is not None
    assert weights <= facts.weights_bytes < weights + 4096
    assert facts.activation_bytes
    assert facts.scratch_bytes
    assert facts.peak_rss_mb > 50
    assert facts.warnings == ()
    assert reports[0] == ("building decode.plan for sm89", None)
    assert reports[-1] == ("building decode.plan for sm89", 1.0)
    parts = [part for _, part in reports if part is not None]
    assert parts == sorted(parts)
    assert sorted(path.name for path in out.parent.iterdir()) == ["build.log", "decode.plan"]


@needs_rtx
def test_what_the_library_says_is_kept_without_paths_of_this_machine(
    rtx: TensorRTLibrary, graph: Path, tmp_path: Path
) -> None:
    log = tmp_path / "build.log"
    for name in ("prefill.plan", "decode.plan"):
        build(rtx, graph, tmp_path / name, log=log)
    text = log.read_text()
    assert len(text) < 20_000, "thousands of VERBOSE lines do not belong in it"
    assert re.search(r"^\d{4}-\d\d-\d\dT\S+ BUILD prefill.plan from decode.onnx for sm89 with TensorRT for RTX", text)
    assert text.count(" BUILD ") == 2
    assert "INFO Total Weights Memory" in text
    assert "VERBOSE" not in text
    assert str(graph.parent) not in text


@needs_rtx
@pytest.mark.parametrize("sm", ["sm75", "8.0", "86", "sm120"])
def test_other_gpus_than_the_one_here_are_built_for(rtx: TensorRTLibrary, graph: Path, tmp_path: Path, sm: str) -> None:
    assert build(rtx, graph, tmp_path / "decode.plan", sm=sm).bytes > 0


@needs_rtx
def test_attention_that_may_be_taken_apart_is_told_from_whole_one(
    rtx: TensorRTLibrary, graph: Path, tmp_path: Path
) -> None:
    """The builder takes apart, without a word, what has no kernel and is marked so: seconds a token, not a failure."""
    module = rtx.module
    with BuildLog(tmp_path / "build.log", graph.parent) as log:
        logger = make_logger(module, log)
        builder = module.Builder(logger)
        network = builder.create_network(0)
        parser = module.OnnxParser(network, logger)
        assert parser.parse(read_graph(graph, {"cache_length": CACHE}).SerializeToString(), str(graph))
        assert count_attentions(module, network, 1) == (1, 0)
        assert count_attentions(module, network, 2) == (1, 1), "the parser itself took one apart"
        layers = [network.get_layer(index) for index in range(network.num_layers)]
        layer = next(layer for layer in layers if layer.type.name == "ATTENTION_INPUT")
        layer.__class__ = module.IAttentionInputLayer
        layer.attention.decomposable = True
        assert count_attentions(module, network, 1) == (0, 1)


@needs_rtx
def test_several_profiles_share_a_plan(rtx: TensorRTLibrary, graph: Path, tmp_path: Path) -> None:
    one = build(rtx, graph, tmp_path / "one.plan", profiles=(profile(tokens=1),))
    two = build(rtx, graph, tmp_path / "two.plan", profiles=(profile(tokens=1), profile(tokens=8)))
    assert two.kv_cache_updates == one.kv_cache_updates == 2
    assert two.bytes > one.bytes


def test_named_dimensions_are_fixed_in_memory_only(tmp_path: Path) -> None:
    path = tiny_graph(tmp_path / "decode.onnx")
    before = path.read_bytes()
    model = read_graph(path, {"cache_length": CACHE})
    past = next(value for value in model.graph.input if value.name == "past_key_values.0.key")
    present = next(value for value in model.graph.output if value.name == "present.0.key")
    for value in (past, present):
        assert value.type.tensor_type.shape.dim[2].dim_value == CACHE
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch_size"
    assert path.read_bytes() == before
    with pytest.raises(UsageError, match="no dimension named cache_size"):
        read_graph(path, {"cache_size": 1})
    path.write_bytes(b"no graph")
    with pytest.raises(LoweringError, match="cannot be read as an ONNX graph"):
        read_graph(path, {})


@needs_rtx
def test_a_profile_that_does_not_fit_is_refused(rtx: TensorRTLibrary, graph: Path, tmp_path: Path) -> None:
    good = dict(profile().shapes)
    lacking = ShapeProfile("lacking", {name: shape for name, shape in good.items() if name != "write_indices"})
    reverse = ShapeProfile("reverse", {**good, "input_ids": ((2, 1), (1, 1), (2, 4))})
    other = ShapeProfile("other", {**good, "past_key_values.0.key": ((1, HEADS, 8, 16),) * 3})
    for bad, words in (
        (lacking, "no shape for the input write_indices"),
        (reverse, "min <= opt <= max"),
        (other, r"past_key_values\.0\.key.*its shapes do not fit"),
    ):
        with pytest.raises(AdxError, match=words):
            build(rtx, graph, tmp_path / "decode.plan", profiles=(bad,))
        assert not (tmp_path / "decode.plan").exists()


# Options.


@needs_rtx
@pytest.mark.parametrize(
    "options", [BuildOptions(opt_level=0), BuildOptions(opt_level=5), BuildOptions(workspace_bytes=1 << 30)], ids=str
)
def test_options_that_rtx_has(rtx: TensorRTLibrary, graph: Path, tmp_path: Path, options: BuildOptions) -> None:
    assert build(rtx, graph, tmp_path / "decode.plan", options=options).bytes > 0


@needs_rtx
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (BuildOptions(opt_level=6), "--opt-level 6: it is 0 to 5"),
        (BuildOptions(opt_level=-1), "--opt-level -1"),
        (BuildOptions(workspace_bytes=0), "--workspace 0"),
        (BuildOptions(hardware_compatible=True), "--hardware-compatibility.*repeat --sm"),
        (BuildOptions(version_compatible=True), "--version-compatible.*lean runtime"),
        (BuildOptions(timing_cache=Path("timing.cache")), "--timing-cache.*measures no kernels"),
    ],
    ids=str,
)
def test_options_without_effect_are_refused_before_any_work(
    rtx: TensorRTLibrary, options: BuildOptions, words: str
) -> None:
    """The library takes the last three and only logs that it does nothing, or fails half way."""
    with pytest.raises(UsageError, match=words):
        check_options(rtx, options)


@needs_rtx
def test_too_little_workspace_is_said_to_be_that(rtx: TensorRTLibrary, graph: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"1000 bytes of workspace are too few.*larger --workspace"):
        build(rtx, graph, tmp_path / "decode.plan", options=BuildOptions(workspace_bytes=1000))


@needs_rtx
@pytest.mark.skipif(local_capability() is not None, reason="this machine has a GPU, and the build succeeds there")
@pytest.mark.parametrize("options", [BuildOptions(refit=True), BuildOptions(strip=True)], ids=["refit", "strip"])
def test_a_plan_without_its_own_weights_needs_a_gpu(
    rtx: TensorRTLibrary, graph: Path, tmp_path: Path, options: BuildOptions
) -> None:
    """The builder's own words are an internal check of its compiler that CUDA answered."""
    with pytest.raises(BackendError, match="only on a machine with a GPU") as caught:
        build(rtx, graph, tmp_path / "decode.plan", options=options)
    assert caught.value.exit_code == 5
    assert not (tmp_path / "decode.plan").exists()


@needs_rtx
def test_a_flag_that_a_release_does_not_have_is_refused(rtx: TensorRTLibrary) -> None:
    old = dataclasses.replace(rtx, module=SimpleNamespace(BuilderFlag=SimpleNamespace(REFIT=1)))
    check_options(old, BuildOptions(refit=True))
    with pytest.raises(UsageError, match="it has no STRIP_PLAN"):
        check_options(old, BuildOptions(strip=True))


@needs_rtx
def test_version_compatibility_needs_the_lean_runtime(twin: TensorRTLibrary, graph: Path, tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match="pip install tensorrt-lean"):
        build(twin, graph, tmp_path / "decode.plan", sm=None, options=BuildOptions(version_compatible=True))


@needs_rtx
@pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX:DeprecationWarning")
def test_the_timing_cache_is_written_whole_and_no_other_file_written_over(
    twin: TensorRTLibrary, graph: Path, tmp_path: Path
) -> None:
    """The library starts afresh on a file that it cannot read, and would write its own over it."""
    cache = tmp_path / "engines/timing.cache"
    options = BuildOptions(timing_cache=cache)
    build(twin, graph, tmp_path / "decode.plan", sm=None, options=options)
    assert cache.stat().st_size > 0
    assert [path.name for path in cache.parent.iterdir()] == ["timing.cache"]
    cache.write_text("somebody's notes")
    (tmp_path / "decode.plan").unlink()
    with pytest.raises(UsageError, match=r"timing\.cache is damaged, or was written for another GPU"):
        build(twin, graph, tmp_path / "decode.plan", sm=None, options=options)
    assert cache.read_text() == "somebody's notes"
    assert not (tmp_path / "decode.plan").exists()


@needs_rtx
@pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX:DeprecationWarning")
def test_a_second_build_is_given_what_the_first_measured(twin: TensorRTLibrary, graph: Path, tmp_path: Path) -> None:
    """Seen at the library's own call: without a GPU it reads no cache, so the module is asked to give an empty one."""
    given: list[bytes] = []

    class Config:
        """A configuration that takes what it is handed for a cache."""

        def __init__(self, real: Any) -> None:
            object.__setattr__(self, "real", real)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def create_timing_cache(self, content: bytes) -> Any:
            given.append(content)
            return self.real.create_timing_cache(b"")

    cache = tmp_path / "timing.cache"
    options = BuildOptions(timing_cache=cache)
    build(twin, graph, tmp_path / "decode.plan", sm=None, options=options)
    with BuildLog(tmp_path / "build.log", graph.parent) as log:
        builder = twin.module.Builder(make_logger(twin.module, log))
        configure(twin, Config(builder.create_builder_config()), "sm89", options, log)
    assert given == [cache.read_bytes()]


@needs_rtx
@pytest.mark.parametrize("answer", ["no cache", "other device"])
def test_a_timing_cache_that_the_library_rejects_is_named(twin: TensorRTLibrary, answer: str, tmp_path: Path) -> None:
    config = SimpleNamespace(
        create_timing_cache=lambda content: None if answer == "no cache" else object(),
        set_timing_cache=lambda cache, ignore_mismatch: ignore_mismatch,
    )
    options = BuildOptions(timing_cache=tmp_path / "timing.cache")
    with pytest.raises(UsageError, match="delete it, or name another file"):
        configure(twin, config, "sm89", options, BuildLog(tmp_path / "build.log", tmp_path))


# What it refuses.


@needs_rtx
@pytest.mark.parametrize("operator", ["Det", "NoSuchOperator"])
def test_a_refused_node_is_named_by_its_layer(rtx: TensorRTLibrary, tmp_path: Path, operator: str) -> None:
    source = tiny_graph(tmp_path / "onnx/decode.onnx", last=operator)
    with pytest.raises(LoweringError) as caught:
        build(rtx, source, tmp_path / "decode.plan")
    message = str(caught.value)
    assert f"cannot take decode.onnx: the node model.layers.0.mlp.down_proj ({operator}): " in message
    assert "another target" in message
    assert "\n" not in message
    assert "CUDA driver" not in message, "the absence of a GPU is not why"


@needs_rtx
def test_a_cache_of_no_fixed_length_says_what_to_fix(rtx: TensorRTLibrary, graph: Path, tmp_path: Path) -> None:
    with pytest.raises(
        LoweringError, match=r"layers\.0\.cache\.key \(TensorScatter\).*give the dimension a fixed size"
    ):
        build(rtx, graph, tmp_path / "decode.plan", fixed_dims={})


@needs_rtx
@pytest.mark.parametrize(
    ("head", "heads", "dtype", "tokens", "words"),
    [
        (8, 4, 10, 4, "4 query heads of size 8 in HALF"),
        (16, 4, 1, 4, "4 query heads of size 16 in FLOAT"),
        (16, 2, 10, 1, "2 query heads of size 16 in HALF"),
    ],
)
def test_attention_without_a_kernel_is_named_with_its_heads(
    rtx: TensorRTLibrary, tmp_path: Path, head: int, heads: int, dtype: int, tokens: int, words: str
) -> None:
    """The builder names neither the layer nor what it has no kernel for."""
    source = tiny_graph(tmp_path / "onnx/decode.onnx", head=head, layers=2, dtype=dtype, heads=heads)
    shapes = profile(head, layers=2, tokens=tokens, heads=heads)
    with pytest.raises(LoweringError) as caught:
        build(rtx, source, tmp_path / "decode.plan", profiles=(shapes,))
    message = str(caught.value)
    assert f"no kernel for layers.0.attention and 1 more like it: attention with {words};" in message
    assert "one new token a row with 4 query heads or more" in message
    assert "multiples of 8 from 16 to 256" in message


@needs_rtx
@pytest.mark.parametrize("fault", ["missing", "truncated"])
def test_damaged_weights_are_said_to_be_that(rtx: TensorRTLibrary, tmp_path: Path, fault: str) -> None:
    source = tiny_graph(tmp_path / "onnx/decode.onnx")
    weights = source.with_name("weights.data")
    if fault == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(LoweringError, match=r"weights\.data.*its weights file is missing or damaged"):
        build(rtx, source, tmp_path / "decode.plan")


@needs_rtx
@pytest.mark.parametrize("operator", ["Det", None], ids=["parser", "builder"])
def test_an_error_keeps_nothing_of_the_library_alive(
    rtx: TensorRTLibrary, tmp_path: Path, operator: str | None
) -> None:
    """A builder that was freed with a caught error, inside a callback of the next build, hung that build for ever."""
    source = tiny_graph(tmp_path / "onnx/decode.onnx", last=operator, head=16 if operator else 8)
    with pytest.raises(LoweringError) as caught:
        build(rtx, source, tmp_path / "decode.plan", profiles=(profile(16 if operator else 8),))
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert "_run" in [frame.f_code.co_name for frame in frames]
    held = [value for frame in frames for value in frame.f_locals.values()]
    held += [vars(value) for value in held if type(value).__name__ == "_Build"]
    kinds = {type(value).__module__ for value in [*held, *(v for d in held if isinstance(d, dict) for v in d.values())]}
    assert not [kind for kind in kinds if kind.startswith("tensorrt")]


def test_a_builder_failure_names_the_layer_that_the_error_names(tmp_path: Path) -> None:
    """An error of `tensorrt` itself, as it writes it, with what a machine without a GPU and a lack of memory add."""
    names = ["model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj", "lm_head"]
    kinds = {"node": "CONSTANT"}  # a constant of that name: not meant by the word in the message
    layers = [
        SimpleNamespace(name=name, type=SimpleNamespace(name=kinds.get(name, "MATRIX_MULTIPLY")))
        for name in (*names, *kinds)
    ]
    network = SimpleNamespace(num_layers=len(layers), get_layer=lambda index: layers[index])
    library = TensorRTLibrary("tensorrt", None, "11.0.0", None)
    log = BuildLog(tmp_path / "build.log", tmp_path)
    log.add(
        "ERROR",
        "Error Code 10: Could not find any implementation for node "
        "{ForeignNode[model.layers.11.mlp.up_proj...lm_head]}.",
    )
    log.add("ERROR", "Requested amount of GPU memory (9 bytes) could not be allocated. Skipping tactic 3.")
    log.add("ERROR", DRIVER)
    error = tensorrt_failures.builder_failure(library, network, "decode.plan", log, refit=False, workspace=None)
    assert type(error) is LoweringError
    assert "Could not find any implementation" in str(error)
    assert " at lm_head, model.layers.11.mlp.up_proj: " in str(error)
    assert "driver" not in str(error)
    assert "Skipping tactic" not in str(error)


def test_without_another_error_memory_or_the_device_is_the_cause(tmp_path: Path) -> None:
    network = SimpleNamespace(num_layers=0)
    library = TensorRTLibrary("tensorrt", None, "11.0.0", None)
    log = BuildLog(tmp_path / "build.log", tmp_path)
    log.add("ERROR", DRIVER)
    error = tensorrt_failures.builder_failure(library, network, "decode.plan", log, refit=False, workspace=None)
    assert type(error) is BackendError
    log.add("ERROR", "Requested amount of GPU memory (9 bytes) could not be allocated.")
    error = tensorrt_failures.builder_failure(library, network, "decode.plan", log, refit=False, workspace=None)
    assert type(error) is LoweringError
    assert "--max-batch-size" in str(error)


# The log.


def test_warnings_are_told_once_and_without_those_that_mean_nothing(tmp_path: Path) -> None:
    log = BuildLog(tmp_path / "build.log", Path("/somewhere"))
    for text in (
        "Unused Input: row_lengths",
        "Unused Input:\n row_lengths",
        "Make sure input input_ids has Int64 binding.",
    ):
        log.add("WARNING", text)
    assert list(log.warnings) == ["Unused Input: row_lengths"]
    log.add("VERBOSE", "Total Weights Memory: 12 bytes")
    assert log.figures == {"weights": 12}
    assert without_noise(f"a\n{DRIVER}\n  b") == "a b"
    assert without_noise(DRIVER) == DRIVER, "never nothing at all"


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "build.log").mkdir()
    with pytest.raises(AdxError, match=r"build\.log cannot be written"), BuildLog(tmp_path / "build.log", tmp_path):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_after_the_build_and_not_out_of_the_callback() -> None:
    """TensorRT drops an exception out of a logger, so it must come later."""
    with pytest.raises(AdxError, match=r"/dev/full cannot be written \(No space left"):
        _fill(BuildLog(Path("/dev/full"), Path("/somewhere")))


def _fill(log: BuildLog) -> None:
    with log:
        for _ in range(2000):
            log.add("INFO", "x" * 100)


# Progress and interruption.


def test_progress_counts_phases_inside_phases_and_never_falls() -> None:
    now = [0.0]
    progress = BuildProgress(clock=lambda: now[0])
    assert progress.fraction() is None
    progress.start("Building engine", None, 4)
    progress.step("Building engine", 0)
    assert progress.fraction() == pytest.approx(1 / 4)
    progress.start("Timing graph nodes", "Building engine", 20)
    progress.step("Timing graph nodes", 9)
    assert progress.fraction() == pytest.approx((1 + 10 / 20) / 4)
    assert progress.stage() == "timing graph nodes"
    now[0] = 30.0
    assert progress.stage() == "timing graph nodes, about 30 s more", "ten of twenty steps took 30 s"
    progress.finish("Timing graph nodes")
    assert progress.fraction() == pytest.approx((1 + 10 / 20) / 4)
    progress.start("Determining refit engines", "Building engine", 1)
    now[0] = 36.0
    assert progress.stage() == "determining refit engines, for 6 s", "one step tells no rate"
    progress.finish("Determining refit engines")
    progress.finish("Building engine")
    assert progress.fraction() == 1.0


def _until_cancelled(progress: BuildProgress, ended: threading.Event) -> Callable[[], None]:
    """Work that takes steps until it is told to stop."""

    def work() -> None:
        deadline = time.monotonic() + 20
        progress.start("Building engine", None, 10_000)
        step = 0
        while progress.step("Building engine", step) and time.monotonic() < deadline:
            step += 1
            time.sleep(0.001)
        assert progress.cancelled.is_set()
        ended.set()

    return work


def test_an_exception_out_of_the_report_stops_the_build_and_goes_on_when_it_has_ended() -> None:
    progress, ended = BuildProgress(), threading.Event()

    def report(stage: str, fraction: float | None) -> None:
        raise BrokenPipeError("nobody reads")

    with pytest.raises(BrokenPipeError):
        watch(_until_cancelled(progress, ended), progress, report, "building")
    assert ended.is_set()


def test_a_signal_while_waiting_ends_the_wait_only_when_the_build_has_ended() -> None:
    """Python marks a thread as finished whose `join` a signal interrupts, and the builder would go on unseen."""
    progress, stepping, ended = BuildProgress(), threading.Event(), threading.Event()
    until_cancelled = _until_cancelled(progress, stepping)

    def work() -> None:
        until_cancelled()
        time.sleep(0.3)
        ended.set()

    timer = threading.Timer(0.25, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(Interrupted), interruptible():
        watch(work, progress, lambda stage, fraction: None, "building")
    assert ended.is_set()
    timer.join()


def test_an_error_of_the_build_is_raised_where_it_is_waited_for() -> None:
    def work() -> None:
        raise LoweringError("no")

    with pytest.raises(LoweringError, match="no"):
        watch(work, BuildProgress(), lambda stage, fraction: None, "building")


@needs_rtx
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_build_leaves_nothing_and_can_be_run_again(
    rtx: TensorRTLibrary, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """The signal comes while the builder works; out of its callbacks it would be printed and dropped."""
    layers = 6
    source = tiny_graph(tmp_path / "onnx/decode.onnx", layers=layers)
    out = tmp_path / "engines/decode.plan"
    sent: list[str] = []

    def report(stage: str, fraction: float | None) -> None:
        if not sent:
            os.kill(os.getpid(), number)
        sent.append(stage)

    with pytest.raises(Interrupted) as caught:
        build(rtx, source, out, report=report, profiles=(profile(layers=layers),))
    assert caught.value.exit_code == code
    assert sent[-1] == "building decode.plan for sm89: stopping at the builder's next step"
    assert [path.name for path in out.parent.iterdir()] == ["build.log"]
    assert "BuildCanceled" in (out.parent / "build.log").read_text().splitlines()[-1], "it has ended, nothing runs on"
    assert build(rtx, source, out, profiles=(profile(layers=layers),)).kv_cache_updates == 2 * layers


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_atomically(tmp_path / "new/decode.plan", b"plan")
    assert (tmp_path / "new/decode.plan").read_bytes() == b"plan"
    (tmp_path / "taken").mkdir()
    with pytest.raises(AdxError, match="taken cannot be written"):
        write_atomically(tmp_path / "taken", b"plan")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["decode.plan", "new", "taken"]
