"""What a checkpoint is, said within seconds: found, classified, its files checked, or refused by name."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest

from adx.export.checkpoint import Checkpoint, resolve
from adx.export.errors import BackendError, CheckpointError, UnsupportedCheckpointError, UsageError
from adx.export.families import FAMILIES

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 538090408\n"
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every attempt to reach a network is recorded and refused."""
    attempts: list[str] = []

    def refuse(*args: Any, **_: Any) -> Any:
        attempts.append(str(args))
        raise OSError("the network is blocked in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return attempts


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("models") / "ll")


@pytest.fixture(scope="module")
def sharded_source(llama: Path) -> Path:
    from transformers import AutoModelForCausalLM

    folder = llama.parent / "sharded"
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(folder, max_shard_size="150KB")
    return folder


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "ll"))


@pytest.fixture
def sharded(sharded_source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded_source, tmp_path / "sharded"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def configure(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return folder


def only_config(folder: Path, **fields: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


# --- what is found


def test_a_local_folder_is_read_without_torch_or_network(folder: Path) -> None:
    """Measured in a fresh process: under two seconds, none of the heavy packages, no connection."""
    code = (
        "import socket, sys, time\n"
        "def refuse(*args, **kwargs): raise SystemExit('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "start = time.monotonic()\n"
        "from adx.export.checkpoint import resolve\n"
        "found = resolve(sys.argv[1])\n"
        "heavy = {'torch', 'transformers', 'onnx', 'onnxruntime'} & set(sys.modules)\n"
        "print(found.model_type, found.parameters, sorted(heavy), time.monotonic() - start < 2)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    # embedding and head 2 * 256*64; per layer q, o 2 * 64*64, k, v 2 * 32*64, mlp 3 * 128*64, two norms; last norm
    count = 2 * 256 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64 + 2 * 64) + 64
    assert run.stdout == f"llama {count} [] True\n", run.stderr


@pytest.mark.parametrize("spelling", ["ll", "ll/", "./ll", "./ll/", "../x/ll"])
def test_spellings_of_a_local_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[str], spelling: str
) -> None:
    (folder.parent / "x").mkdir()
    if spelling.startswith("../"):
        monkeypatch.chdir(folder.parent / "x")
        spelling = "../ll"
    else:
        monkeypatch.chdir(folder.parent)
    found = resolve(spelling)
    assert (found.source, found.revision, found.kind) == ("ll", None, "safetensors")
    assert no_network == []


def test_a_folder_named_like_a_hub_id_wins(
    folder: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    (folder.parent / "gpt2").mkdir()
    shutil.copytree(folder, folder.parent / "openai-community/gpt2")
    assert resolve("openai-community/gpt2").model_type == "llama"
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve("gpt2")
    assert no_network == []


def test_sizes_and_types_come_from_the_headers(folder: Path, sharded: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    whole, parts = resolve(str(folder)), resolve(str(sharded))
    assert len(parts.weight_files) == len(shards(sharded)) > 2
    assert whole.parameters == parts.parameters
    assert whole.weight_bytes == parts.weight_bytes == 4 * whole.parameters
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder.parent / "half")
    half = resolve(str(folder.parent / "half"))
    assert (half.dtype, half.weight_bytes, half.parameters) == ("bfloat16", 2 * whole.parameters, whole.parameters)
    assert whole.dtype == "float32"


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_known_and_counted_as_torch_counts_it(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = models.tiny(family, tmp_path / family)
    found = resolve(str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.tied == model.config.tie_word_embeddings
    assert found.architecture == type(model).__name__
    assert isinstance(found, Checkpoint)
    untold = configure(folder, tie_word_embeddings=None)
    assert resolve(str(untold)).tied == model.config_class().tie_word_embeddings


def test_a_tied_head_that_is_stored_twice_counts_once(folder: Path) -> None:
    assert (
        resolve(str(folder)).parameters - resolve(str(configure(folder, tie_word_embeddings=True))).parameters
        == 256 * 64
    )


# --- what is refused, by name


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "foo"}, "'foo'.*supported are: gemma2, gpt2, gpt_neox, llama"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "'mamba'"),
        ({"model_type": "llava", "vision_config": {}}, "a vision or audio model of type 'llava'"),
        ({"model_type": "vit", "image_size": 224}, "vision"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder-decoder model of type 't5'"),
        ({"architectures": ["LlamaForCausalLM"]}, "of type None"),
        ({"model_type": ["llama"]}, "cannot export"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "no language-model head"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "awq"}}, "awq.*unquantized checkpoint"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "gptq.*unquantized"),
        ({"model_type": "llama", "quantization_config": {"load_in_4bit": True}}, "bitsandbytes.*unquantized"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, "fp8.*unquantized"),
        ({"model_type": "llama", "compression_config": {"a": 1}}, "unquantized"),
        ({"model_type": "llama", "auto_map": {"AutoModel": "code.X"}}, "--trust-remote-code"),
        ({"model_type": "llama", "auto_map": {"AutoModel": "some/repo--code.X"}}, "another repository"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_what_would_help(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    """The folder holds nothing but config.json: the answer does not wait for the weights."""
    start = time.monotonic()
    with pytest.raises(UnsupportedCheckpointError, match=words) as caught:
        resolve(str(only_config(tmp_path / "m", **fields)))
    assert time.monotonic() - start < 2
    assert "\n" not in str(caught.value)


def test_code_of_the_checkpoint_is_not_run(tmp_path: Path) -> None:
    """The modeling file leaves a trace when it runs; unknown models stay refused even where code is trusted."""
    folder = only_config(tmp_path / "m", model_type="foo", auto_map={"AutoConfig": "modeling_foo.C"})
    sentinel = tmp_path / "ran"
    (folder / "modeling_foo.py").write_text(f"open({str(sentinel)!r}, 'w')\nclass C: pass\n")
    for trust in (False, True):
        with pytest.raises(UnsupportedCheckpointError, match="'foo'"):
            resolve(str(folder), trust_remote_code=trust)
    configure(folder, model_type="llama")
    with pytest.raises(UnsupportedCheckpointError, match=r"modeling_foo\.C.*--trust-remote-code"):
        resolve(str(folder))
    assert not sentinel.exists()


def test_an_adapter_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedCheckpointError, match=r"LORA adapter of org/base.*merge_and_unload"):
        resolve(str(tmp_path / "lora"))


def test_an_adapter_beside_a_model_is_not_ignored(folder: Path) -> None:
    """transformers would apply it (and fetch its base) where peft is installed."""
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedCheckpointError, match="merge it first"):
        resolve(str(folder))


def test_old_quantization_files_are_noticed(folder: Path) -> None:
    (folder / "quantize_config.json").write_text("{}")
    with pytest.raises(UnsupportedCheckpointError, match="unquantized checkpoint"):
        resolve(str(folder))


def test_missing_places_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve(str(tmp_path / "empty"))
    (tmp_path / "empty/model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"holds model\.gguf: give that file"):
        resolve(str(tmp_path / "empty"))
    (tmp_path / "empty/model.gguf").unlink()
    (tmp_path / "empty/adx.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is an adx bundle"):
        resolve(str(tmp_path / "empty"))
    for missing in (str(tmp_path / "none"), "./none", "none/", "a/b/c", "x.gguf"):
        with pytest.raises(CheckpointError, match="there is no folder or file"):
            resolve(missing)
    with pytest.raises(UsageError, match="neither a Hugging Face folder nor"):
        resolve(str(tmp_path / "notes.txt"))
    with pytest.raises(UsageError, match="is empty"):
        resolve(" ")
    with pytest.raises(UsageError, match="--revision main has no effect"):
        resolve(str(tmp_path), revision="main")


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", POINTER])
def test_a_damaged_config_is_one_clear_line(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        resolve(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickles_are_not_opened(folder: Path, name: str) -> None:
    """The pickle here would write a file when opened."""
    sentinel = folder / "ran"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cbuiltins\nopen\n(V" + str(sentinel).encode() + b"\nVw\ntR.")
    with pytest.raises(UnsupportedCheckpointError, match=r"pickles.*convert them to safetensors"):
        resolve(str(folder))
    assert not sentinel.exists()


# --- damaged weights


@pytest.mark.parametrize("cut", ["byte", "half", "header", "stub", "empty"])
def test_a_truncated_shard_is_named_with_both_sizes(sharded: Path, cut: str) -> None:
    path = shards(sharded)[1]
    data = path.read_bytes()
    kept = {"byte": len(data) - 1, "half": len(data) // 2, "header": 20, "stub": 5, "empty": 0}[cut]
    path.write_bytes(data[:kept])
    words = rf"{path.name} is truncated: it has {kept} bytes" if kept >= 8 else rf"{path.name} is not a safetensors"
    with pytest.raises(CheckpointError, match=words) as caught:
        resolve(str(sharded))
    if cut in ("byte", "half"):
        assert str(len(data)) in str(caught.value)


def test_a_shard_with_bytes_too_many_is_named(sharded: Path) -> None:
    with shards(sharded)[0].open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(CheckpointError, match="longer than it should be"):
        resolve(str(sharded))


def test_missing_shards_are_named(sharded: Path) -> None:
    path = shards(sharded)[2]
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"the shard {path.name} is missing"):
        resolve(str(sharded))
    path.symlink_to("../blobs/gone")
    with pytest.raises(CheckpointError, match=rf"the shard {path.name} is missing"):
        resolve(str(sharded))


def test_a_pointer_in_place_of_weights_is_named(folder: Path, sharded: Path) -> None:
    (folder / "model.safetensors").write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a git-lfs pointer.*538090408.*git lfs pull"):
        resolve(str(folder))
    shards(sharded)[1].write_text(POINTER)
    with pytest.raises(CheckpointError, match="git-lfs pointer"):
        resolve(str(sharded))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"model.layers.7.ghost.weight": "{first}"}, "says that the tensor model.layers.7.ghost.weight is in"),
        ({"x": "../../etc/passwd"}, "no safetensors file beside it"),
        ({"x": "/etc/x.safetensors"}, "no safetensors file beside it"),
        ({"x": "sub/x.safetensors"}, "no safetensors file beside it"),
        ({"x": "pytorch_model.bin"}, "no safetensors file beside it"),
        ({"x": 3}, "no safetensors file beside it"),
    ],
)
def test_an_index_that_lies_is_refused(sharded: Path, entry: dict[str, Any], words: str) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = shards(sharded)[0].name
    index["weight_map"] |= {key: first if value == "{first}" else value for key, value in entry.items()}
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=words):
        resolve(str(sharded))


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "XX", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1]}}',
    ],
)
def test_damaged_headers_are_one_clear_error(folder: Path, header: bytes) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has a damaged"):
        resolve(str(folder))
    path.write_bytes(struct.pack("<Q", 2**60) + header)
    with pytest.raises(CheckpointError, match="its header is damaged"):
        resolve(str(folder))


def test_weights_in_eight_bits_are_refused(folder: Path) -> None:
    """A float8 checkpoint without a quantization_config."""
    header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(UnsupportedCheckpointError, match=r"F8_E4M3.*unquantized"):
        resolve(str(folder))


# --- the hub


@pytest.fixture
def cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds org/tiny; returns the snapshot's folder."""
    from huggingface_hub import constants

    repo = tmp_path / "cache/models--org--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return repo / "snapshots" / commit


@pytest.mark.parametrize("how", ["option", "environment"])
def test_a_cached_model_is_found_offline(
    cache: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[str], how: str
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "environment")
    found = resolve("org/tiny", offline=how == "option")
    assert (found.source, found.revision, found.path) == ("org/tiny", cache.name, cache)
    assert no_network == []


@pytest.mark.parametrize(
    ("gone", "words"), [("model.safetensors", "model.safetensors"), ("config.json", "config.json")]
)
def test_offline_names_the_file_that_is_missing(cache: Path, no_network: list[str], gone: str, words: str) -> None:
    (cache / gone).unlink()
    with pytest.raises(CheckpointError, match=rf"offline.*{words} of org/tiny is not in the cache.*hf download"):
        resolve("org/tiny", offline=True)
    with pytest.raises(CheckpointError, match=r"offline.*config\.json of org/other is not in the cache"):
        resolve("org/other", offline=True)
    assert no_network == []


def test_only_safe_files_are_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    calls: list[dict[str, Any]] = []
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()

    def download(repo: str, **options: Any) -> str:
        calls.append(options)
        if len(calls) == 2:
            (folder / "model.safetensors").write_bytes(weights)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/tiny").source == "org/tiny"
    assert "*.py" not in calls[0]["allow_patterns"]
    assert calls[1]["allow_patterns"] == ["model.safetensors"]
    assert all({"*.bin", "*.pt", "*.pth"} <= set(call["ignore_patterns"]) for call in calls)
    assert calls[1]["revision"] == folder.name, "the weights must be of the commit that the configuration is of"


def test_what_cannot_be_exported_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    folder = only_config(tmp_path / "m", model_type="foo")
    calls: list[str] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: calls.append(repo) or str(folder))
    with pytest.raises(UnsupportedCheckpointError, match="'foo'"):
        resolve("org/tiny")
    assert calls == ["org/tiny"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("GatedRepoError", "is gated: accept its licence.*HF_TOKEN"),
        ("RepositoryNotFoundError", "no such model on the hub"),
        ("RevisionNotFoundError", "has no revision 'v9'"),
        ("LocalEntryNotFoundError", "the hub cannot be reached"),
        ("HfHubHTTPError", "did not give org/tiny"),
    ],
)
def test_hub_errors_are_one_clear_line(monkeypatch: pytest.MonkeyPatch, error: str, words: str) -> None:
    import huggingface_hub
    from huggingface_hub import constants, errors

    kind = getattr(errors, error)
    problem = kind.__new__(kind)
    Exception.__init__(problem, "401 Client Error\nlong story")

    def fail(*_: Any, **__: Any) -> str:
        raise problem

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=words) as caught:
        resolve("org/tiny", revision="v9")
    assert "\n" not in str(caught.value)


def test_what_is_no_hub_id_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="nor a hub id"):
        resolve("what is this?")


# --- GGUF headers


def write_gguf(path: Path, architecture: str = "llama", *, tensor: str = "token_embd.weight", **keys: Any) -> Path:
    """A GGUF file with one tensor and the metadata that a classification reads."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    for key, value in keys.items():
        name = key.replace("__", ".")
        if isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_tensor(tensor, np.zeros((64, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(33, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_read_from_its_header(tmp_path: Path) -> None:
    found = resolve(str(write_gguf(tmp_path / "m.gguf")))
    assert (found.kind, found.gguf_file, found.source, found.model_type) == ("gguf", "m.gguf", "m.gguf", "llama")
    assert (found.parameters, found.weight_bytes, found.dtype) == (64 * 32 + 33, 64 * 32 * 4 + 66, "F32")
    assert found.tied
    assert found.config["llama.embedding_length"] == 64
    assert not resolve(str(write_gguf(tmp_path / "n.gguf", tensor="output.weight"))).tied


def test_quantized_blocks_are_counted_as_the_gguf_package_counts_them(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    data = gguf.quantize(np.ones((4, 256), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = resolve(str(tmp_path / "q.gguf"))
    assert (found.parameters, found.weight_bytes, found.dtype) == (1024, 32 * 34, "Q8_0")


def test_damaged_gguf_files_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    sound = resolve(str(path))
    assert sound.weight_bytes < len(data)
    # The writer pads the last tensor to 32 bytes, which readers do not need.
    for kept, words in (
        (len(data) - 40, r"m\.gguf is truncated: it has"),
        (len(data) // 2, r"is truncated|damaged GGUF header"),
        (40, "damaged GGUF header"),
        (2, "not a GGUF file"),
    ):
        path.write_bytes(data[:kept])
        with pytest.raises(CheckpointError, match=words):
            resolve(str(path))
    for changed, words in (
        (b"GGML" + data[4:], "not a GGUF file"),
        (data[:4] + struct.pack("<I", 1) + data[8:], "GGUF version 1"),
        (data[:4] + struct.pack(">I", 3) + data[8:], "GGUF version"),
        (data[:8] + struct.pack("<Q", 2**50) + data[16:], "damaged GGUF header"),
        (data[:16] + struct.pack("<Q", 2**63) + data[24:], "damaged GGUF header"),
        (POINTER.encode(), "git-lfs pointer"),
    ):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=words):
            resolve(str(path))


@pytest.mark.parametrize(
    ("architecture", "keys", "words"),
    [
        ("mamba", {}, "'mamba'.*gemma2, gpt2, llama"),
        ("gptneox", {}, "'gptneox'"),
        ("llama", {"general__type": "adapter"}, "a GGUF adapter, not a whole model"),
        ("llama", {"split__count": 2}, "llama-gguf-split --merge"),
        ("llama", {"llama__expert_count": 8}, "mixture of experts"),
        ("llama", {"llama__rope__scaling__type": "yarn"}, r"scales its rotary positions \(yarn\)"),
        ("llama", {"tensor": "rope_freqs.weight"}, r"scales its rotary positions \(rope_freqs"),
        ("phi3", {"phi3__rope__dimension_count": 8}, "rotates 8 of 16 elements"),
        ("gemma2", {"gemma2__block_count": 46}, "query scale of Gemma 2 27B"),
    ],
)
def test_gguf_files_that_would_load_as_another_model_are_refused(
    tmp_path: Path, architecture: str, keys: dict[str, Any], words: str
) -> None:
    """transformers drops what it does not read of a GGUF, and computes something else without a word."""
    with pytest.raises(UnsupportedCheckpointError, match=words):
        resolve(str(write_gguf(tmp_path / "m.gguf", architecture, **keys)))


def test_a_missing_gguf_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"adx-toolchain\[gguf\]"):
        resolve(str(path))
