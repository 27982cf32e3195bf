"""Exported engines against transformers: ragged batches, shapes, the cache in place, sizes, what a bundle holds."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from models import (
    byte_tokenizer,
    find_gap_prompt,
    load_model,
    reference_logits,
    reference_tokens,
    set_generation_config,
    tiny,
    tiny_llama,
)
from numpy.typing import NDArray
from traced import Traced, trace_folder, traced

from adx.calibration.recipe import make_recipe
from adx.ci.pipeline import ExportRequest, ExportResult, export_bundle
from adx.cli.main import main
from adx.engines import ort_cpu
from adx.export.bundle import Bundle
from adx.export.errors import OutputExistsError, UsageError
from adx.export.spec import past_name, present_name
from adx.runtime import Generator, load, ort_session
from adx.runtime.ort_session import OrtSession

Precision = Literal["fp32", "int8", "int4"]
LENGTHS = (3, 7, 12)
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """PyTorch on one thread: the models are tiny."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def compiled(source: Traced, precision: Precision, out: Path) -> Path:
    """The folder `out` with an engine in it."""
    ort_cpu.compile(source.semantic, lambda layers: make_recipe(precision, layers), out)
    return out


def opened(source: Traced, out: Path) -> OrtSession:
    return OrtSession(out / ort_cpu.GRAPH_FILE, source.spec.kv_cache, source.vocab_size, threads=1)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory, "llama")


@pytest.fixture(scope="module")
def engine(llama: Traced, work: Path) -> OrtSession:
    return opened(llama, compiled(llama, "fp32", work / "llama-fp32"))


def padded(prompts: list[list[int]], pad: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Right-padded tokens (B, T) and lengths (B,)."""
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.full((len(prompts), lengths.max()), pad, np.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def teacher_forced(session: OrtSession, prompts: list[list[int]], forced: NDArray[np.int64]) -> NDArray[np.float32]:
    """(B, 1 + N, V) logits after each prompt and after each of the forced tokens (B, N), one step a token."""
    cache = session.new_cache(len(prompts))
    out = [session.prefill(*padded(prompts), cache).copy()]
    out += [session.decode(forced[:, step : step + 1], cache)[:, 0].copy() for step in range(forced.shape[1])]
    return np.stack(out, axis=1)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_of_a_batch_answer_as_each_alone(
    family: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Prompts of 3, 7 and 12 tokens in one batch: positions counted from padding, or padding that is attended to,
    change every row but the longest. Prefill, 16 teacher-forced steps, and the greedy answer."""
    source = traced(tmp_path_factory, family)
    session = opened(source, compiled(source, "fp32", tmp_path))
    model = source.model
    prompts = [find_gap_prompt(model, length) for length in LENGTHS]
    expected = [reference_tokens(model, prompt, eos_token_id=None) for prompt in prompts]
    forced = np.array(expected)
    logits = teacher_forced(session, prompts, forced)
    for row, prompt in enumerate(prompts):
        wanted = reference_logits(model, [*prompt, *expected[row]])[len(prompt) - 1 :]
        np.testing.assert_allclose(logits[row], wanted, atol=1e-4)
    generator = Generator(session, None, {})
    answers = generator.generate(prompts, max_new_tokens=16, do_sample=False)
    assert [list(answer.token_ids) for answer in answers] == expected


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_8_bit_rows_of_a_batch_are_as_each_alone(
    family: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Inputs are quantized inside the kernel: one scale for a whole batch would let its rows change each other."""
    source = traced(tmp_path_factory, family)
    session = opened(source, compiled(source, "int8", tmp_path))
    model = source.model
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 250, length).tolist() for length in LENGTHS]
    forced = rng.integers(3, 250, (3, 16))
    together = teacher_forced(session, prompts, forced)
    for row, prompt in enumerate(prompts):
        alone = teacher_forced(session, [prompt], forced[row : row + 1])[0]
        np.testing.assert_allclose(together[row], alone, atol=1e-4)
        wanted = reference_logits(model, [*prompt, *forced[row].tolist()])[len(prompt) - 1 :]
        assert np.std(together[row] - wanted) <= 0.06 * np.std(wanted)
    changed = [prompts[0], rng.integers(3, 250, 7).tolist(), rng.integers(3, 250, 20).tolist()]
    other = teacher_forced(session, changed, np.stack([forced[0], forced[2], forced[1]]))
    np.testing.assert_allclose(other[0], together[0], atol=1e-4)


@pytest.mark.parametrize(
    ("family", "overrides", "kv_heads", "head_dim"),
    [
        ("qwen3", {"head_dim": 32}, 2, 32),
        ("llama", {"head_dim": 24}, 2, 24),
        ("llama", {"num_key_value_heads": 1}, 1, 16),
        ("llama", {"num_key_value_heads": 4}, 4, 16),
    ],
    ids=["qwen3 32", "llama 24", "one KV head", "no grouping"],
)
def test_heads_are_those_of_the_configuration(
    family: str, overrides: dict[str, Any], kv_heads: int, head_dim: int, tmp_path: Path
) -> None:
    """Not hidden / heads for a head's size, nor as many KV heads as heads, where it says otherwise."""
    folder = tiny(family, tmp_path / "model", **overrides)
    model = load_model(folder)
    prompt = find_gap_prompt(model, 7)
    result = export_bundle(ExportRequest(str(folder), tmp_path / "out", "fp32", threads=1))
    assert result.passed
    manifest = Bundle.open(tmp_path / "out").manifest
    assert (manifest.kv_cache.kv_heads, manifest.kv_cache.head_dim) == (kv_heads, head_dim)
    for graph in manifest.graphs:
        dims = {t.name: t.dims for t in (*graph.inputs, *graph.outputs)}
        for name in (past_name(1, "key"), present_name(1, "value")):
            assert dims[name] == ("batch_size", kv_heads, "cache_length", head_dim)
    with load(tmp_path / "out", threads=1) as generator:
        assert generator.session.new_cache(2).buffers[0].shape == (2, kv_heads, 128, head_dim)
        answer = generator.generate(prompt, max_new_tokens=16, do_sample=False, ignore_eos=True)
    assert list(answer.token_ids) == reference_tokens(model, prompt, eos_token_id=None)


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
@pytest.mark.parametrize("new", [1, 2, 7, 33])
def test_every_batch_length_and_past(batch: int, new: int, llama: Traced, engine: OrtSession) -> None:
    """Sizes that an exporter likes to take for constants, 1 and the example's own above all; rows of one token too."""
    import torch

    model = llama.model
    rng = np.random.default_rng(batch * 100 + new)
    for past in (0, 1, 2, 7, 40):
        ids = rng.integers(3, 256, (batch, past + new))
        with torch.inference_mode():
            wanted = model(torch.from_numpy(ids), use_cache=False).logits.numpy()
        cache = engine.new_cache(batch)
        if past:
            logits = engine.prefill(ids[:, :past], np.full(batch, past), cache, "all")
            np.testing.assert_allclose(logits, wanted[:, :past], atol=1e-4)
            np.testing.assert_allclose(engine.decode(ids[:, past:], cache), wanted[:, past:], atol=1e-4)
        else:
            last = engine.prefill(ids, np.full(batch, new), cache)
            assert last.shape == (batch, 256)
            np.testing.assert_allclose(last, wanted[:, -1], atol=1e-4)
        assert cache.lengths.tolist() == [past + new] * batch


def test_dimensions_that_vary_are_named(llama: Traced, engine: OrtSession, work: Path) -> None:
    """In the graph and in its spec alike; what is a number there is a property of the model."""
    import onnx

    graph = onnx.load(work / "llama-fp32" / ort_cpu.GRAPH_FILE, load_external_data=False).graph
    specs = ort_cpu.compile(llama.semantic, lambda layers: make_recipe("fp32", layers), work / "again").graphs
    assert [spec.phase for spec in specs] == ["prefill", "decode"]
    for spec in specs:
        for declared, values in ((spec.inputs, graph.input), (spec.outputs, graph.output)):
            found = {v.name: tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim) for v in values}
            assert {tensor.name: tensor.dims for tensor in declared} == found
    names = {dim for tensor in specs[0].inputs for dim in tensor.dims if isinstance(dim, str)}
    assert names == {"batch_size", "sequence_length", "cache_length", "logits_rows"}
    assert {dim for tensor in specs[0].inputs for dim in tensor.dims if isinstance(dim, int)} == {2, 16}


def test_a_step_writes_the_cache_in_place(engine: OrtSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's present is the next step's past, the same memory: no copy of the cache, and nothing is bound twice."""
    bound: dict[str, list[int]] = {}

    def remember(binding: Any, name: str, array: NDArray[Any], *, bind: Any) -> None:
        bound.setdefault(name, []).append(array.ctypes.data)
        bind(binding, name, array)

    for name in ("_bind_input", "_bind_output"):
        bind = getattr(ort_session, name)
        monkeypatch.setattr(ort_session, name, lambda b, n, a, bind=bind: remember(b, n, a, bind=bind))
    cache = engine.new_cache(2)
    addresses = [buffer.ctypes.data for buffer in cache.buffers]
    engine.prefill(*padded([[5, 6, 7], [8, 9, 10, 11, 12]]), cache)
    bindings = []
    for _ in range(20):
        before = [buffer.copy() for buffer in cache.buffers]
        lengths = cache.lengths.copy()
        engine.decode(np.array([[20], [21]]), cache)
        bindings.append(len(bound[past_name(0, "key")]))
        for buffer, old in zip(cache.buffers, before, strict=True):
            for row, length in enumerate(lengths):
                np.testing.assert_array_equal(buffer[row, :, :length], old[row, :, :length])
                np.testing.assert_array_equal(buffer[row, :, length + 1 :], old[row, :, length + 1 :])
                assert buffer[row, :, length].any()
    assert bindings == [2] * 20  # prefill's and the step's
    assert [buffer.ctypes.data for buffer in cache.buffers] == addresses
    for layer in range(2):
        for index, part in enumerate(("key", "value")):
            name, now = past_name(layer, part), present_name(layer, part)  # type: ignore[arg-type]
            assert bound[name] == bound[now] == [addresses[2 * layer + index]] * 2


MEASURE = """
import json, sys
from pathlib import Path
import numpy as np
from adx.export.spec import KVCacheSpec
from adx.runtime.ort_session import OrtSession

path, wanted = sys.argv[1:]
kv = KVCacheSpec(layers=8, kv_heads=2, head_dim=64, capacity=2048, windows=(None,) * 8)
session = OrtSession(Path(path), kv, 16384, threads=1)
cache = session.new_cache(1)
for buffer in cache.buffers:
    buffer[:] = 0
session.prefill(np.full((1, 16), 7), np.array([16]), cache)
cache.clear()

def peak():
    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM')) / 1024

Path('/proc/self/clear_refs').write_text('5')
before = peak()
logits = session.prefill(np.arange(1500)[None] % 16384, np.array([1500]), cache, wanted)
print(json.dumps({'growth': peak() - before, 'shape': logits.shape}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="a process's peak memory is read from /proc")
def test_a_long_prompt_takes_little_memory(tmp_path: Path) -> None:
    """1,500 tokens over 8 layers: no logits but the last token's, no scores of all tokens by all tokens.

    The cache is counted before. Logits of all positions alone are 98 MB, and asking for them shows that.
    """
    folder = tiny_llama(
        tmp_path / "model",
        vocab_size=16384,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=8,
        max_position_embeddings=2048,
    )
    path = compiled(trace_folder(folder, tmp_path), "fp32", tmp_path / "out") / ort_cpu.GRAPH_FILE
    growth = {}
    for wanted, shape in (("last", [1, 16384]), ("all", [1, 1500, 16384])):
        command = [sys.executable, "-c", MEASURE, str(path), wanted]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        measured = json.loads(done.stdout)
        assert measured["shape"] == shape
        growth[wanted] = measured["growth"]
    assert growth["last"] <= 40
    assert growth["all"] >= 98


@pytest.fixture(scope="module")
def complete(work: Path) -> Path:
    """A checkpoint with everything that belongs to its text: added tokens, a chat template, generation defaults."""
    from transformers import AddedToken, AutoTokenizer

    folder = byte_tokenizer(tiny_llama(work / "complete", vocab_size=320), add_bos=True, chat_template=TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("<|turn|>", special=True), AddedToken("word", special=False)])
    tokenizer.save_pretrained(folder)
    set_generation_config(folder, bos_token_id=1, eos_token_id=[2, 300], pad_token_id=0, repetition_penalty=1.5)
    return folder


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_bundle_needs_nothing_beside_it(precision: Precision, complete: Path, tmp_path: Path) -> None:
    """The source is gone and the hub out of reach: the bundle generates, and its tokenizer is the source's."""
    from transformers import AutoTokenizer

    source = shutil.copytree(complete, tmp_path / "model")
    request = ExportRequest(str(source), tmp_path / "out", precision, allow_parity_failure=True, threads=1)
    out = Path(export_bundle(request).bundle)
    before = AutoTokenizer.from_pretrained(complete)
    shutil.rmtree(source)
    after = AutoTokenizer.from_pretrained(out)
    text = "A word<|turn|> of 🙂 and </s> more"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]
    assert after(text)["input_ids"] == before(text)["input_ids"]
    assert 259 in before(text)["input_ids"]
    for add in (True, False):
        rendered = [t.apply_chat_template(messages, tokenize=False, add_generation_prompt=add) for t in (before, after)]
        assert rendered[0] == rendered[1]
        assert "[user]" in rendered[0]
    bundle = Bundle.open(out)
    listed = {record.path for record in bundle.manifest.files}
    lying = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert lying - listed == {"adx.json"}
    assert listed < lying
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= listed
    bundle.verify_files()
    assert json.loads((out / "generation_config.json").read_text())["repetition_penalty"] == 1.5
    command = [sys.executable, "-m", "adx.cli.main", "generate", str(out), "--prompt", "hello", "--chat", "-n", "4"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "no-cache")}
    done = subprocess.run(
        [*command, "--json", "--threads", "1"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["prompt_tokens"] == len(
        before.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)["input_ids"]
    )
    assert answer["completion_tokens"] == 4


def external(path: Path) -> dict[str, tuple[int, int, tuple[int, ...], int]]:
    """Of every initializer in an external file: offset, length, shape and ONNX's element type."""
    import onnx

    found = {}
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = {item.key: item.value for item in tensor.external_data}
            found[tensor.name] = (int(entry["offset"]), int(entry["length"]), tuple(tensor.dims), tensor.data_type)
    return found


def referenced_bytes(paths: list[Path]) -> int:
    """Bytes that graphs refer to in the file that they share; what two of them share counts once."""
    return sum(length for _, length in {place[:2] for path in paths for place in external(path).values()})


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def unique_float_bytes(folder: Path) -> int:
    """Of a checkpoint's parameters in float32; a tied one counts once."""
    return 4 * sum(parameter.numel() for parameter in load_model(folder).parameters())


LARGE = {
    "llama tied": ("llama", {"vocab_size": 32000, "tie_word_embeddings": True}),
    "llama untied": ("llama", {"vocab_size": 32000}),
    "gpt2": ("gpt2", {"vocab_size": 32000, "n_positions": 1024}),
}
POSITIONS = {"gpt2": {(1024, 64)}}  # float tables above 64 KiB that stay: learned positions are added, not multiplied


@pytest.mark.parametrize("name", LARGE)
def test_quantized_weights_are_small_and_stored_once(name: str, work: Path) -> None:
    """A vocabulary of 32,000: tied tables once, no float copy of what is quantized, no float matrix left behind.

    8 bits take at most 0.35 of float32. At 4 bits head and embedding, most of this model, keep 8 bits, so the rest of
    the linear layers is looked at: at most 0.20.
    """
    import onnx

    family, overrides = LARGE[name]
    source = trace_folder(tiny(family, work / f"{name}-model", **overrides), work)
    sizes: dict[str, int] = {}
    for precision in ("fp32", "int8", "int4"):
        out = compiled(source, precision, work / f"{name}-large-{precision}")
        graph, data = out / ort_cpu.GRAPH_FILE, out / ort_cpu.WEIGHTS_FILE
        sizes[precision] = folder_bytes(out)
        assert referenced_bytes([graph]) >= 0.99 * data.stat().st_size
        if precision == "fp32":
            assert sizes["fp32"] <= 1.15 * unique_float_bytes(source.checkpoint)
            continue
        floats = {
            shape
            for key, (_, length, shape, kind) in external(graph).items()
            if kind == onnx.TensorProto.FLOAT and length > 64 << 10 and not key.endswith(".scales")
        }
        assert floats == POSITIONS.get(name, set())
        nodes = onnx.load(graph, load_external_data=False).graph.node
        assert not [node.name for node in nodes if node.op_type in {"MatMul", "Gemm"}]
        (head,) = (node for node in nodes if node.op_type == "MatMulNBits" and "head" in node.name)
        assert {a.name: a.i for a in head.attribute if a.type == onnx.AttributeProto.INT}["bits"] == 8
    assert sizes["int8"] <= 0.35 * sizes["fp32"]
    body = 4 * sum(p.numel() for n, p in source.model.named_parameters() if p.ndim == 2 and "0.m" in n)
    packed = sum(
        length
        for key, (_, length, _, _) in external(work / f"{name}-large-int4" / ort_cpu.GRAPH_FILE).items()
        if "layers.0.m" in key or "h.0.m" in key
    )
    assert 0 < packed <= 0.20 * body


def export(folder: Path, out: Path, precision: Precision, **options: Any) -> ExportResult:
    return export_bundle(
        ExportRequest(str(folder), out, precision, allow_parity_failure=True, threads=1, **options), lambda *_: None
    )


def test_a_summary_counts_what_was_quantized(llama: Traced, tmp_path: Path) -> None:
    """15 linear layers; those that are excluded are in the manifest with the reason, and really float."""
    import onnx

    result = export(llama.checkpoint, tmp_path / "out", "int8", nodes_to_exclude=("down_proj$",))
    assert "quantized 13 of 15 linear layers" in result.summary[0]
    manifest = Bundle.open(tmp_path / "out").manifest
    names = [node.name for node in manifest.quantization.excluded]
    assert names == [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]
    graph = onnx.load(tmp_path / "out" / ort_cpu.GRAPH_FILE, load_external_data=False).graph
    assert sorted(node.name for node in graph.node if node.op_type == "MatMul") == names


def test_quantizing_nothing_is_an_error(llama: Traced, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every layer excluded: refused, and no bundle is written."""
    args = ["export", str(llama.checkpoint), "--int8", "-o", str(tmp_path / "out"), "--nodes-to-exclude", "."]
    assert main(args) == UsageError.exit_code
    assert "no layer would be quantized" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
def test_a_bfloat16_checkpoint_computes_in_float32(sharded: bool, tmp_path: Path) -> None:
    """CPU kernels for bfloat16 are missing: the weights are widened, and no bfloat16 tensor is left in the graph."""
    import onnx
    import torch

    folder = tiny_llama(tmp_path / "model")
    model = load_model(folder).to(torch.bfloat16)
    shutil.rmtree(folder)
    model.save_pretrained(folder, max_shard_size="100KB" if sharded else "1GB")
    assert (len(list(folder.glob("*.safetensors"))) > 1) == sharded
    reference = load_model(folder)
    prompt = find_gap_prompt(reference, 7)
    out = tmp_path / "out"
    result = export(folder, out, "fp32")
    assert result.passed
    manifest = Bundle.open(out).manifest
    assert manifest.model.dtype == "bfloat16"
    kinds = {t.data_type for t in onnx.load(out / ort_cpu.GRAPH_FILE, load_external_data=False).graph.initializer}
    assert onnx.TensorProto.FLOAT in kinds
    assert onnx.TensorProto.BFLOAT16 not in kinds
    with load(out, threads=1) as generator:
        session = generator.session
        logits = session.prefill(*padded([prompt]), session.new_cache(1), "all")[0]
        np.testing.assert_allclose(logits, reference_logits(reference, prompt), atol=1e-4)
        answer = generator.generate(prompt, max_new_tokens=16, do_sample=False, ignore_eos=True)
    assert list(answer.token_ids) == reference_tokens(reference, prompt, eos_token_id=None)


def test_a_bfloat16_checkpoint_is_quantized(tmp_path: Path) -> None:
    """From its widened weights: 8 bits are as near to the reference as from a float32 checkpoint."""
    import onnx
    import torch

    folder = tiny_llama(tmp_path / "model")
    load_model(folder).to(torch.bfloat16).save_pretrained(folder)
    source = trace_folder(folder, tmp_path)
    path = compiled(source, "int8", tmp_path / "out") / ort_cpu.GRAPH_FILE
    kinds = {tensor.data_type for tensor in onnx.load(path, load_external_data=False).graph.initializer}
    assert onnx.TensorProto.BFLOAT16 not in kinds
    session = opened(source, tmp_path / "out")
    prompt = np.random.default_rng(0).integers(3, 256, 20).tolist()
    wanted = reference_logits(source.model, prompt)
    logits = session.prefill(*padded([prompt]), session.new_cache(1), "all")[0]
    assert np.std(logits - wanted) <= 0.06 * np.std(wanted)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_16_bit_arithmetic_on_cpu_is_refused(
    precision: str, llama: Traced, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any work, with the reason and what to choose."""
    args = ["export", str(llama.checkpoint), f"--{precision}", "-o", str(tmp_path / "out")]
    assert main(args) == UsageError.exit_code
    said = capsys.readouterr().err
    assert f"{precision} on ort-cpu" in said
    assert "choose --fp32, --int8 or --int4" in said
    assert not list(tmp_path.iterdir())


def test_portable_graphs_share_one_file_and_store_a_tied_weight_once(tmp_path: Path) -> None:
    """A bundle without them is not larger than the checkpoint; with them it holds the weights twice, not four times."""
    folder = tiny_llama(tmp_path / "model", vocab_size=32000, tie_word_embeddings=True)
    floats = unique_float_bytes(folder)
    result = export(folder, tmp_path / "out", "fp32", keep_onnx=True)
    assert result.bytes == folder_bytes(tmp_path / "out") <= 2.1 * floats
    assert folder_bytes(tmp_path / "out" / "engines") <= 1.15 * floats
    onnx_folder = tmp_path / "out" / "onnx"
    assert folder_bytes(onnx_folder) <= 1.15 * floats
    data = (onnx_folder / "weights.data").stat().st_size
    assert referenced_bytes([onnx_folder / "prefill.onnx", onnx_folder / "decode.onnx"]) >= 0.99 * data


def test_a_second_export_leaves_nothing_of_the_first(llama: Traced, tmp_path: Path) -> None:
    """Without --force refused; with it the folder is as a fresh one, also at another precision: no appended data."""
    out = tmp_path / "out"
    first = export(llama.checkpoint, out, "fp32", keep_onnx=True)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(OutputExistsError, match="--force"):
        export(llama.checkpoint, out, "int8")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    second = export(llama.checkpoint, out, "int8", force=True)
    assert second.bytes == folder_bytes(out) < first.bytes
    fresh = tmp_path / "fresh"
    export(llama.checkpoint, fresh, "int8")
    assert not (out / "onnx").exists()
    assert {path.name for path in (out / "engines").rglob("*")} == {
        path.name for path in (fresh / "engines").rglob("*")
    }
    data = out / ort_cpu.WEIGHTS_FILE
    hashes = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (data, fresh / ort_cpu.WEIGHTS_FILE)}
    assert len(hashes) == 1
    assert referenced_bytes([out / ort_cpu.GRAPH_FILE]) >= 0.99 * data.stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out"]
