"""What a model and its graphs are, as frozen values: the one place where tensor names are spelled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["prefill", "decode"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]

GRAPHS = "onnx"  # target of the engine that holds the graphs which plans are built from

INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
POSITION_IDS = "position_ids"
LOGITS = "logits"

# Inputs of engines with a preallocated KV cache, in place of the attention mask.
SEQLENS_K = "seqlens_k"  # (B,) int32: tokens in the cache after this step, less one
TOTAL_SEQUENCE_LENGTH = "total_sequence_length"  # () int32: the longest row after this step
LOGITS_INDICES = "logits_indices"  # (N,) int64: rows of the flattened (B*T) tokens whose logits are wanted

# The same for engines of standard operators: three numbers a row, from which places, positions and masks follow.
WRITE_INDICES = "write_indices"  # (B,) int64: place in the cache of this call's first token
ROW_LENGTHS = "row_lengths"  # (B,) int64: places that the row holds after this call, without what pads it on the right
PAD_LENGTHS = "pad_lengths"  # (B,) int64: places at the row's start that hold no true token (left padding)


def past_name(layer: int, part: Literal["key", "value"]) -> str:
    """Name of a graph's past key or value input, as optimum spells it."""
    return f"past_key_values.{layer}.{part}"


def present_name(layer: int, part: Literal["key", "value"]) -> str:
    """Name of a graph's present key or value output, as optimum spells it."""
    return f"present.{layer}.{part}"


CACHE_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}  # bytes of an element


@dataclass(frozen=True)
class KVCacheSpec:
    """Shape of a model's KV cache: per layer one key and one value buffer `(B, kv_heads, capacity, head_dim)`.

    Attributes:
        layers: number of attention layers.
        kv_heads: key and value heads of a layer.
        head_dim: elements of a head.
        capacity: tokens that a row can hold at most.
        windows: per layer, how many tokens (the current one counted) a query sees, or None for all.
        dtype: element type of the buffers.
        layout: order of the dimensions.
        recompute_at: a row that grows to this many tokens must have its whole cache computed again (long rope
            changes its frequencies there), or None.
    """

    layers: int
    kv_heads: int
    head_dim: int
    capacity: int
    windows: tuple[int | None, ...]
    dtype: str = "float32"
    layout: str = "BHTD"
    recompute_at: int | None = None

    def bytes_per_token(self) -> int:
        """Bytes that one token of one row takes in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * CACHE_DTYPES[self.dtype]


@dataclass(frozen=True)
class TensorSpec:
    """A graph's input or output: name, element type, and dimensions (a string names a dynamic one)."""

    name: str
    dtype: str
    dims: tuple[str | int, ...]


@dataclass(frozen=True)
class GraphSpec:
    """One compiled or portable graph: its phase, its file in the bundle, its inputs and outputs in order."""

    phase: Phase
    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class ModelSpec:
    """What adx knows of a checkpoint, enough to build and to run it without the checkpoint.

    Attributes:
        source: what the user named (a folder's name, a hub id or a file's name; never an absolute path).
        revision: the hub's commit, or None.
        architecture: the class in `config.json`, as `LlamaForCausalLM`.
        model_type: `config.json`'s model_type, as `llama`.
        dtype: the checkpoint's own element type.
        parameters: unique parameters (a tied weight counts once).
        vocab_size: width of the logits.
        hidden_size: width of the residual stream.
        heads: query heads of a layer.
        context_length: positions that the model was made for.
        kv_cache: shape of the cache.
        weights_sha256: over the source's weight files.
    """

    source: str
    revision: str | None
    architecture: str
    model_type: str
    dtype: str
    parameters: int
    vocab_size: int
    hidden_size: int
    heads: int
    context_length: int
    kv_cache: KVCacheSpec
    weights_sha256: str
