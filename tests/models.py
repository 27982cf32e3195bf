"""Tiny Hugging Face folders whose output is known, and a `Session` over a PyTorch model.

Each builder writes one complete folder (config, generation config, safetensors; tokenizers apart) and returns its path,
so a test names what it needs in one line: `folder = tiny_llama(tmp_path / "ll", vocab_size=320)`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.runtime.cache import KVCache

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedModel

PAD, BOS, EOS = 0, 1, 2

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}

# What makes each family different from Llama, as its own configuration spells it.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 8},
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 32},
    "gpt2": {
        "vocab_size": 256,
        "n_embd": 64,
        "n_positions": 128,
        "n_layer": 2,
        "n_head": 4,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    },
    "gemma2": {
        **_GROUPED,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": 8,
        "query_pre_attn_scalar": 37,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 8.0,
    },
    "phi3": {
        **_GROUPED,
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0, 1.3, 1.7, 2.0],
            "long_factor": [1.5, 2.5, 4.0, 6.0],
        },
    },
    "gpt_neox": {
        **_COMMON,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "use_parallel_residual": True,
    },
}
FAMILIES = tuple(_FAMILIES)


def tiny(family: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A random model of a family (one of `FAMILIES`), vocabulary 256, hidden 64, 128 positions, saved in float32.

    Weights are large (0.2), biases random and norm weights away from 1, so that a fault in masks, positions, scales,
    biases or norms changes the logits. `overrides` are keys of the family's configuration.
    """
    from transformers import AutoConfig

    return _save_random(AutoConfig.for_model(family, **{**_FAMILIES[family], **overrides}), folder, seed)


def tiny_llama(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """`tiny("llama", ...)`: 2 layers, 4 heads, 2 KV heads, bos 1, eos 2, pad 0."""
    return tiny("llama", folder, seed=seed, **overrides)


def _save_random(config: PreTrainedConfig, folder: Path, seed: int) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return _save(model, folder)


def _save(model: PreTrainedModel, folder: Path) -> Path:
    model.eval().save_pretrained(folder)
    return Path(folder)


def scripted_gpt2(
    folder: Path,
    script: Sequence[int],
    *,
    prompt_tokens: int = 1,
    vocab_size: int = 320,
    positions: int = 64,
    **overrides: Any,
) -> Path:
    """A GPT-2 that answers any prompt of `prompt_tokens` tokens with `script`, whatever the tokens were.

    The choice depends on the position alone (margin about 8): after `script` the last of its tokens repeats, and
    positions before the prompt's last choose its first. float32 only.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    keys = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, **overrides}
    config = GPT2Config(
        vocab_size=vocab_size, n_embd=64, n_positions=positions, n_layer=1, n_head=2, tie_word_embeddings=False, **keys
    )
    assert positions <= 64, "one hidden unit per position"
    assert all(0 <= token < vocab_size for token in script)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(64)[:positions])
        model.transformer.ln_f.weight.fill_(1.0)
        for position in range(positions):
            chosen = script[min(max(position - prompt_tokens + 1, 0), len(script) - 1)]
            model.lm_head.weight[chosen, position] += 1.0
    return _save(model, folder)


def fixed_gpt2(folder: Path, logits: Sequence[float], *, positions: int = 64, **overrides: Any) -> Path:
    """A GPT-2 whose logits are exactly `logits` at every step; no token ends the text unless `overrides` says so."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    keys = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **overrides}
    config = GPT2Config(
        vocab_size=len(logits), n_embd=64, n_positions=positions, n_layer=1, n_head=2, tie_word_embeddings=False, **keys
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.ln_f.weight.fill_(1.0)
        model.transformer.ln_f.bias[0] = 1.0
        model.lm_head.weight[:, 0] = torch.tensor(logits)
    return _save(model, folder)


def set_generation_config(folder: Path, **settings: Any) -> None:
    """Replace the folder's generation_config.json by these settings alone."""
    (Path(folder) / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")


def byte_tokenizer(
    folder: Path,
    *,
    merges: Sequence[tuple[str, str]] = (),
    add_bos: bool = False,
    bos: bool = True,
    chat_template: str | None = None,
    **config: Any,
) -> Path:
    """A byte-level tokenizer into `folder`: `<pad> <s> </s>` are 0, 1, 2, byte b is 3 + b, merged words from 259 on.

    Valid UTF-8 has no byte above 0xF4, so its ids stay below 256 and fit the tiny models.

    Args:
        folder: made where missing; a model's files may be there.
        merges: pairs to merge, in rank order, as `("D", "E")`; ASCII without spaces.
        add_bos: the post-processor puts `<s>` before every text.
        bos: the tokenizer has a bos token at all.
        chat_template: written as chat_template.jinja.
        config: more keys of tokenizer_config.json.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<pad>": PAD, "<s>": BOS, "</s>": EOS}
    for char in _byte_chars():
        vocab[char] = len(vocab)
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _save_tokenizer(tokenizer, folder, add_bos, bos, chat_template, config)


def metaspace_tokenizer(
    folder: Path,
    words: Sequence[str] = ("hello", "big", "world"),
    *,
    add_bos: bool = False,
    bos: bool = True,
    chat_template: str | None = None,
    **config: Any,
) -> Path:
    """A sentencepiece-like tokenizer into `folder`, decoded as Llama 2's: spaces are `▁`, other bytes fall back.

    `<pad> <s> </s>` are 0, 1, 2, byte b is 3 + b, then `▁` (259), ASCII letters, and the prefixes of `▁word` for
    each word.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<pad>": PAD, "<s>": BOS, "</s>": EOS}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    letters = [chr(code) for code in range(33, 127)]
    for piece in ["▁", *letters]:
        vocab[piece] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in words:
        left = "▁"
        for char in word:
            if (left, char) not in merges:
                merges.append((left, char))
            left += char
            vocab.setdefault(left, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save_tokenizer(tokenizer, folder, add_bos, bos, chat_template, config)


def _save_tokenizer(
    tokenizer: Tokenizer, folder: Path, add_bos: bool, bos: bool, chat_template: str | None, config: Mapping[str, Any]
) -> Path:
    from tokenizers import AddedToken, processors

    specials = ["<pad>", "<s>", "</s>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    keys: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "</s>"}
    if bos:
        keys["bos_token"] = "<s>"
    settings = {**keys, "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return folder


def _byte_chars() -> list[str]:
    """The printable character that stands for each byte in byte-level tokenizers (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def byte_ids(text: str) -> list[int]:
    """Ids of a text in `byte_tokenizer` without merges."""
    return [3 + byte for byte in text.encode()]


def load_model(folder: Path) -> PreTrainedModel:
    """The folder's model in float32, eager attention, evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def reference_logits(model: PreTrainedModel, ids: Sequence[int]) -> NDArray[np.float32]:
    """(T, V) logits of one prompt, without a cache."""
    import torch

    with torch.inference_mode():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0].float().numpy()


def reference_tokens(model: PreTrainedModel, ids: Sequence[int], **settings: Any) -> list[int]:
    """What `model.generate` adds to one prompt (greedy and of `max_new_tokens` 16 unless `settings` says otherwise)."""
    import torch

    keys = {"do_sample": False, "max_new_tokens": 16, **settings}
    tokens = torch.tensor([list(ids)])
    with torch.inference_mode():
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), **keys)
    return out[0, len(ids) :].tolist()


def smallest_gap(model: PreTrainedModel, ids: Sequence[int], generated: Sequence[int]) -> float:
    """Least distance of the best two logits over the steps that gave `generated`: token equality is fair above 0.01."""
    logits = reference_logits(model, [*ids, *generated])[len(ids) - 1 : -1]
    best = np.sort(logits, axis=-1)
    return float((best[:, -1] - best[:, -2]).min())


class TorchSession:
    """A `Session` that runs a transformers model over each row's whole history at every step: slow and right.

    Attributes:
        prefills, decodes: number of calls so far.
    """

    def __init__(self, model: PreTrainedModel, *, capacity: int | None = None, max_batch_size: int | None = None):
        self.model = model
        self.vocab_size = int(model.config.vocab_size)
        self.capacity = capacity or int(model.config.max_position_embeddings)
        self.max_batch_size = max_batch_size
        self.recompute_at: int | None = None
        self.two_graphs = False
        self.max_input_len: int | None = None
        self.provider = "torch"
        self.threads = 1
        self.prefills = 0
        self.decodes = 0

    def new_cache(self, batch_size: int, capacity: int | None = None) -> KVCache:
        """Rows of token ids stand for keys and values: the one buffer is (B, capacity)."""
        rows = np.zeros((batch_size, capacity or self.capacity), np.float32)
        return KVCache(buffers=[rows], lengths=np.zeros(batch_size, np.int64), capacity=rows.shape[1])

    def close(self) -> None:
        """Nothing to free."""

    def prefill(
        self, tokens: NDArray[np.int64], lengths: NDArray[np.int64], cache: KVCache, wanted: str = "last"
    ) -> NDArray[np.float32]:
        """As `Session.prefill`; a padded position's logits are 0."""
        assert not cache.lengths.any(), "prefill into a cache that holds tokens"
        self.prefills += 1
        out = np.zeros((*tokens.shape, self.vocab_size), np.float32)
        for row, length in enumerate(lengths):
            assert 1 <= length <= min(tokens.shape[1], cache.capacity)
            cache.buffers[0][row, :length] = tokens[row, :length]
            out[row, :length] = self._logits(cache, row, int(length))
        cache.lengths[:] = lengths
        return out if wanted == "all" else out[np.arange(len(out)), lengths - 1]

    def decode(self, tokens: NDArray[np.int64], cache: KVCache) -> NDArray[np.float32]:
        """As `Session.decode`."""
        self.decodes += 1
        new = tokens.shape[1]
        assert (cache.lengths + new <= cache.capacity).all(), "a row has no room"
        out = np.empty((*tokens.shape, self.vocab_size), np.float32)
        for row, length in enumerate(cache.lengths):
            cache.buffers[0][row, length : length + new] = tokens[row]
            out[row] = self._logits(cache, row, int(length) + new)[length:]
        cache.lengths += new
        return out

    def _logits(self, cache: KVCache, row: int, length: int) -> NDArray[np.float32]:
        return reference_logits(self.model, cache.buffers[0][row, :length].astype(np.int64).tolist())


def find_gap_prompt(
    model: PreTrainedModel,
    length: int,
    *,
    new_tokens: int = 16,
    gap: float = 0.01,
    accept: Callable[..., bool] | None = None,
) -> list[int]:
    """A prompt of `length` tokens whose greedy continuation by `generate` keeps a gap above `gap` at every step.

    Args:
        accept: further demand on the generated tokens.
    """
    for seed in range(200):
        ids = np.random.default_rng(seed).integers(3, model.config.vocab_size, length).tolist()
        generated = reference_tokens(model, ids, max_new_tokens=new_tokens)
        if smallest_gap(model, ids, generated) > gap and (accept is None or accept(generated)):
            return ids
    raise AssertionError("no prompt keeps the gap")
