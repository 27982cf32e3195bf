"""The model families that adx exports: per family only what its own configuration does not say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Windows = Literal["none", "every_layer", "layer_types"]


@dataclass(frozen=True)
class Family:
    """One row: how transformers' own modeling code reads this family's configuration and files.

    Attributes:
        model_type: `config.json`'s model_type.
        architecture: the class with the language-model head.
        base_architecture: the class without it, which some checkpoints name.
        windows: which layers `config.sliding_window` applies to.
        tied_by_default: whether the head shares the embedding's weight where `config.json` does not say.
        head_weight: name of the head's weight, which a tied checkpoint may hold a second time.
        buffers: endings of tensors in older checkpoints that are masks or frequencies, no parameters.
        gguf: `general.architecture` of its GGUF files, or None where transformers reads none.
        gguf_fields: GGUF keys (less the architecture) that transformers leaves unread, and the configuration's
            attribute each one is.
        gguf_refused: (GGUF key, value, reason) of files that would load as a different model.
    """

    model_type: str
    architecture: str
    base_architecture: str
    windows: Windows = "none"
    tied_by_default: bool = False
    head_weight: str = "lm_head.weight"
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)
    gguf: str | None = None
    gguf_fields: tuple[tuple[str, str], ...] = ()
    gguf_refused: tuple[tuple[str, int, str], ...] = ()


_ROWS = (
    Family("llama", "LlamaForCausalLM", "LlamaModel", gguf="llama"),
    Family("mistral", "MistralForCausalLM", "MistralModel", windows="every_layer"),
    Family("qwen2", "Qwen2ForCausalLM", "Qwen2Model", windows="layer_types", gguf="qwen2"),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        "Qwen3Model",
        windows="layer_types",
        gguf="qwen3",
        gguf_fields=(("attention.key_length", "head_dim"),),
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Model",
        tied_by_default=True,
        buffers=(".attn.bias", ".attn.masked_bias"),
        gguf="gpt2",
        gguf_fields=(("context_length", "n_positions"),),
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Model",
        windows="layer_types",
        tied_by_default=True,
        gguf="gemma2",
        gguf_fields=(
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
            ("attention.key_length", "query_pre_attn_scalar"),
        ),
        # llama.cpp scales this one's queries by another figure, which the file does not hold.
        gguf_refused=(("block_count", 46, "the file does not hold the query scale of Gemma 2 27B"),),
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        "Phi3Model",
        windows="every_layer",
        gguf="phi3",
        gguf_fields=(("attention.sliding_window", "sliding_window"),),
    ),
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        "GPTNeoXModel",
        head_weight="embed_out.weight",
        buffers=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
    ),
)

FAMILIES = {row.model_type: row for row in _ROWS}
GGUF_FAMILIES = {row.gguf: row for row in _ROWS if row.gguf}


def supported() -> str:
    """The families in one phrase, for messages."""
    return ", ".join(sorted(FAMILIES))
