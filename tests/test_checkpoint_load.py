"""Loading: float32 whatever is stored, nothing missing or left over; the text files and spec that a bundle needs."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import models
import numpy as np
import pytest

from adx.export.checkpoint import resolve
from adx.export.checkpoint_load import load_config, load_model, load_tokenizer
from adx.export.checkpoint_spec import estimate, model_spec, weights_sha256
from adx.export.checkpoint_text import save_text_files
from adx.export.errors import CheckpointError, UnsupportedCheckpointError, UsageError
from adx.export.families import FAMILIES
from adx.export.spec import ModelSpec

if TYPE_CHECKING:
    import torch

IDS = [[1, 7, 42, 200, 9]]
TEMPLATE = "{% for m in messages %}{{ bos_token }}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **_: Any) -> Any:
        raise AssertionError(f"network: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("models") / "ll")


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "ll"))


def change_tensors(folder: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def logits(model: Any, ids: list[list[int]] = IDS) -> torch.Tensor:
    import torch

    result: torch.Tensor = model(torch.tensor(ids)).logits
    return result


def spec_of(folder: Path, max_seq_len: int | None = None) -> ModelSpec:
    found = resolve(str(folder))
    return model_spec(found, load_config(found), max_seq_len)


# --- weights


@pytest.mark.parametrize("shard", ["5GB", "150KB"])
def test_a_bfloat16_checkpoint_computes_in_float32(llama: Path, tmp_path: Path, shard: str) -> None:
    """Equal to the stored weights cast up, which rounding while computing would not be."""
    import torch
    from transformers import AutoModelForCausalLM

    half = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half", max_shard_size=shard)
    found = resolve(str(tmp_path / "half"))
    assert found.dtype == "bfloat16"
    model = load_model(found)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with torch.no_grad():
        rounded, expected = logits(half).float(), logits(half.float())
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    assert (rounded - expected).abs().max() > 1e-3, "this checkpoint would not show the fault"


def test_a_model_is_ready_to_be_read(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import torch

    model = load_model(resolve(str(folder)))
    assert capfd.readouterr() == ("", "")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(logits(model), logits(models.load_model(folder)), rtol=0, atol=0)


def test_a_missing_weight_is_named(folder: Path) -> None:
    """transformers fills it with random numbers and only warns."""
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks the weight model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(resolve(str(folder)))


def test_a_weight_that_the_model_has_no_place_for_is_named(folder: Path) -> None:
    import torch

    change_tensors(folder, lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.bias": torch.zeros(128)}))
    with pytest.raises(
        CheckpointError, match=r"up_proj\.bias \(in model\.safetensors\), which LlamaForCausalLM has no"
    ):
        load_model(resolve(str(folder)))


def test_a_weight_of_another_shape_is_named(folder: Path) -> None:
    import torch

    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight \(in model\.safetensors\) has shape \[63\].*\[64\]"
    ):
        load_model(resolve(str(folder)))


def test_masks_and_frequencies_of_older_checkpoints_are_no_surplus(tmp_path: Path) -> None:
    import torch

    folder = models.tiny("gpt2", tmp_path / "gpt2")
    before = resolve(str(folder)).parameters
    change_tensors(folder, lambda tensors: tensors.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)}))
    found = resolve(str(folder))
    assert found.parameters == before
    load_model(found)


def test_a_configuration_that_transformers_refuses_is_one_clear_line(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": "wide"}))
    with pytest.raises(CheckpointError, match="transformers cannot load the config of ll") as caught:
        load_config(resolve(str(folder)))
    assert "\n" not in str(caught.value)


def test_code_of_the_checkpoint_runs_only_where_it_is_trusted(folder: Path, tmp_path: Path) -> None:
    sentinel = tmp_path / "ran"
    code = (
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"open({str(sentinel)!r}, 'w').close()\n"
        "class OwnLlama(LlamaForCausalLM):\n    pass\n"
    )
    (folder / "modeling_own.py").write_text(code)
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnLlama"}}))
    with pytest.raises(UnsupportedCheckpointError, match="--trust-remote-code"):
        resolve(str(folder))
    assert not sentinel.exists()
    model = load_model(resolve(str(folder), trust_remote_code=True))
    assert type(model).__name__ == "OwnLlama"
    assert sentinel.exists()


def test_the_hash_covers_every_shard_in_order(llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = resolve(str(llama))
    assert weights_sha256(found) == hashlib.sha256((llama / "model.safetensors").read_bytes()).hexdigest()
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path / "sharded", max_shard_size="150KB")
    parts = resolve(str(tmp_path / "sharded"))
    seen: list[tuple[int, int]] = []
    whole = b"".join(path.read_bytes() for path in sorted((tmp_path / "sharded").glob("*.safetensors")))
    assert weights_sha256(parts, lambda done, total: seen.append((done, total))) == hashlib.sha256(whole).hexdigest()
    assert seen[-1] == (len(whole), len(whole))


# --- GGUF


def write_llama_gguf(folder: Path, path: Path) -> Path:
    """The tiny Llama as llama.cpp's converter would write it in float32: its names, its order of rotary pairs."""
    import gguf
    from safetensors.numpy import load_file

    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(256)
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            stem = f"blk.{layer}.{names[part]}"
            heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(part)
            if heads:
                tensor = tensor.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(tensor.shape)
        else:
            stem = names[stem]
        writer.add_tensor(stem + ".weight", np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_computes_what_its_source_computes(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch

    found = resolve(str(write_llama_gguf(llama, tmp_path / "ll.gguf")))
    model = load_model(found)
    written = save_text_files(found, tmp_path / "out")
    assert capfd.readouterr() == ("", "")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(logits(model), logits(models.load_model(llama)), rtol=0, atol=1e-5)
    assert found.parameters == resolve(str(llama)).parameters
    assert "quantization_config" not in model.config.to_dict()
    assert getattr(model, "hf_quantizer", None) is None
    assert not written.tokenizer
    assert "quantization" not in (tmp_path / "out/config.json").read_text()
    model.save_pretrained(tmp_path / "saved")  # transformers refuses to save what it takes for quantized


@pytest.mark.parametrize(
    ("architecture", "keys", "attribute", "value"),
    [
        ("qwen3", {"attention.key_length": 32}, "head_dim", 32),
        ("phi3", {"attention.sliding_window": 24}, "sliding_window", 24),
        ("gemma2", {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping", 3.0),
        ("gemma2", {"final_logit_softcapping": 8.0}, "final_logit_softcapping", 8.0),
        ("gemma2", {"attention.key_length": 32}, "query_pre_attn_scalar", 32),
        ("gpt2", {}, "n_positions", 96),
    ],
)
def test_gguf_keys_that_transformers_leaves_unread_are_read(
    architecture: str, keys: dict[str, Any], attribute: str, value: float, tmp_path: Path
) -> None:
    """Without them these files load with the defaults of another model."""
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_context_length(96)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(256)
    for key, entry in keys.items():
        add = writer.add_float32 if isinstance(entry, float) else writer.add_uint32
        add(f"{architecture}.{key}", entry)
    writer.add_tensor("token_embd.weight", np.zeros((256, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = load_config(resolve(str(tmp_path / "m.gguf")))
    assert getattr(config, attribute) == value
    assert config.num_hidden_layers == 2


# --- text files


def test_a_bundles_tokenizer_is_the_checkpoints(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    models.byte_tokenizer(folder, merges=[("D", "E")], add_bos=True, chat_template=TEMPLATE)
    written = save_text_files(resolve(str(folder)), tmp_path / "out")
    own, copy = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "é 🙂"}]
    for text in ("", "ABCDE", " é 🙂 日本 ", "<s>x</s>"):
        assert copy(text)["input_ids"] == own(text)["input_ids"]
        assert copy.decode(own(text)["input_ids"]) == own.decode(own(text)["input_ids"])
    assert (
        copy.apply_chat_template(chat, tokenize=False)
        == own.apply_chat_template(chat, tokenize=False)
        == "<s><user>é 🙂"
    )
    assert copy.apply_chat_template(chat)["input_ids"] == own.apply_chat_template(chat)["input_ids"]
    assert (copy.bos_token, copy.eos_token, copy.pad_token) == (own.bos_token, own.eos_token, own.pad_token)
    assert written.tokenizer
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= set(written.files)
    for name in written.files:
        assert str(tmp_path) not in (tmp_path / "out" / name).read_text(), "a path of this machine is in the bundle"


def test_truncation_left_from_training_does_not_cut_prompts(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    models.byte_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    assert len(tokenizer.encode("abcdefgh").ids) == 8
    assert tokenizer.encode("abcdefgh").tokens[-1] == "[PAD]"
    save_text_files(resolve(str(folder)), tmp_path / "out")
    copy = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    assert [len(copy.encode("abcdefghijkl").ids), len(copy.encode("a").ids)] == [12, 1]


def test_a_checkpoint_without_a_tokenizer_is_allowed_and_said(folder: Path, tmp_path: Path) -> None:
    found = resolve(str(folder))
    assert load_tokenizer(found) is None
    written = save_text_files(found, tmp_path / "out")
    assert written.files == ("config.json", "generation_config.json")
    assert not written.tokenizer


def test_the_configuration_that_is_written_is_plain_float32(tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = models.tiny("qwen3", tmp_path / "q")
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    save_text_files(resolve(str(tmp_path / "half")), tmp_path / "out")
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert (raw["dtype"], raw["architectures"], raw["model_type"]) == ("float32", ["Qwen3ForCausalLM"], "qwen3")
    own, copy = (AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("half", "out"))
    for ignored in ("dtype", "_name_or_path"):
        own.pop(ignored), copy.pop(ignored)
    assert own == copy


def test_generation_settings_are_copied_or_derived(folder: Path, tmp_path: Path) -> None:
    from transformers import GenerationConfig

    models.set_generation_config(folder, eos_token_id=[91, 7], repetition_penalty=1.5, max_new_tokens=7)
    save_text_files(resolve(str(folder)), tmp_path / "own")
    assert (tmp_path / "own/generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()
    (folder / "generation_config.json").unlink()
    found = resolve(str(folder))
    save_text_files(found, tmp_path / "derived")
    derived = GenerationConfig.from_pretrained(tmp_path / "derived")
    expected = load_model(found).generation_config
    assert (derived.eos_token_id, derived.bos_token_id) == (expected.eos_token_id, expected.bos_token_id) == (2, 1)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is damaged"):
        save_text_files(found, tmp_path / "broken")


# --- the spec


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_specs_shapes_are_those_of_transformers_own_cache(family: str, tmp_path: Path) -> None:
    import torch

    folder = models.tiny(family, tmp_path / family)
    spec = spec_of(folder)
    model = models.load_model(folder)
    past = model(torch.tensor(IDS), use_cache=True).past_key_values
    shapes = {tuple(layer.keys.shape) for layer in past.layers}
    assert shapes == {(1, spec.kv_cache.kv_heads, len(IDS[0]), spec.kv_cache.head_dim)}
    assert len(past.layers) == spec.kv_cache.layers == len(spec.kv_cache.windows)
    assert (spec.vocab_size, spec.hidden_size, spec.heads) == (logits(model).shape[-1], 64, 4)
    assert (spec.context_length, spec.kv_cache.capacity) == (128, 128)


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("llama", {"sliding_window": 8}, (None, None)),
        ("mistral", {"sliding_window": 8}, (8, 8)),
        ("mistral", {"sliding_window": None}, (None, None)),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}, (None, None)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8)),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, 8)),
        ("gemma2", {"sliding_window": 8}, (8, None, 8, None)),
        ("phi3", {"sliding_window": 8}, (8, 8)),
        ("phi3", {}, (None, None)),
        ("gpt2", {}, (None, None)),
    ],
)
def test_windows_are_those_that_the_model_computes_with(
    family: str, changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    """Seen in transformers' own attention weights: how far back each layer's last token looks."""
    import torch

    folder = models.tiny(family, tmp_path / family, **changes)
    assert spec_of(folder).kv_cache.windows == windows
    model = load_model(resolve(str(folder)))
    weights = model(torch.arange(3, 15)[None], output_attentions=True).attentions
    seen = [int((layer[0, :, -1] > 0).any(0).sum()) for layer in weights]
    assert seen == [window or 12 for window in windows]


@pytest.mark.parametrize(
    ("changes", "heads", "dim"),
    [({"num_key_value_heads": 1}, 1, 16), ({"num_key_value_heads": None}, 4, 16), ({"head_dim": 24}, 2, 24)],
)
def test_heads_are_read_where_they_are_stated(changes: dict[str, Any], heads: int, dim: int, tmp_path: Path) -> None:
    cache = spec_of(models.tiny_llama(tmp_path / "ll", **changes)).kv_cache
    assert (cache.kv_heads, cache.head_dim) == (heads, dim)


def test_the_cache_holds_what_was_asked_for_and_no_more_than_the_model_knows(folder: Path, tmp_path: Path) -> None:
    assert spec_of(folder, 32).kv_cache.capacity == 32
    assert spec_of(folder, 32).context_length == 128
    with pytest.raises(UsageError, match="--max-seq-len 129 is beyond the model's context of 128 positions"):
        spec_of(folder, 129)
    with pytest.raises(UsageError, match="1 or more, found 0"):
        spec_of(folder, 0)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    dynamic = models.tiny_llama(tmp_path / "dynamic", rope_parameters=rope)
    assert spec_of(dynamic).kv_cache.capacity == 128
    with pytest.raises(UsageError, match="dynamic rope"):
        spec_of(dynamic, 200)


def test_long_rope_says_where_the_cache_must_be_computed_again(tmp_path: Path) -> None:
    """Trained on 16 positions: the seventeenth token changes the frequencies of all."""
    folder = models.tiny("phi3", tmp_path / "phi3")
    assert spec_of(folder).kv_cache.recompute_at == 17
    assert spec_of(folder, 17).kv_cache.recompute_at == 17
    assert spec_of(folder, 16).kv_cache.recompute_at is None
    assert spec_of(models.tiny_llama(tmp_path / "ll")).kv_cache.recompute_at is None


def test_layer_types_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = models.tiny("qwen2", tmp_path / "q")
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"layer_types": ["sliding_attention", "full_attention"]}))
    with pytest.raises(UnsupportedCheckpointError, match="do not fit together"):
        spec_of(folder)


def test_an_estimate_grows_with_the_model_and_shrinks_with_the_precision(folder: Path, tmp_path: Path) -> None:
    found = resolve(str(folder))
    spec = spec_of(folder)
    wide, narrow = estimate(found, spec, "fp32"), estimate(found, spec, "int4")
    assert wide.disk_bytes > estimate(found, spec, "int8").disk_bytes > narrow.disk_bytes > found.parameters / 2
    larger = resolve(str(models.tiny_llama(tmp_path / "large", num_hidden_layers=6)))
    bigger = estimate(larger, spec, "fp32")
    assert bigger.peak_memory_bytes - wide.peak_memory_bytes == 12 * (larger.parameters - found.parameters)
    assert bigger.seconds > wide.seconds
