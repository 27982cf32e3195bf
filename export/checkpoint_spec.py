"""From a checkpoint and its configuration to a `ModelSpec`, and an estimate of what an export will take."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adx.export.checkpoint import Checkpoint
from adx.export.errors import UnsupportedCheckpointError, UsageError
from adx.export.families import Family
from adx.export.spec import KVCacheSpec, ModelSpec, Precision

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_BLOCK = 1 << 22
_SLIDING, _FULL = "sliding_attention", "full_attention"

# Bytes that a weight of a matrix takes on disk, its share of the scales and zero points included.
_BYTES_PER_WEIGHT: dict[Precision, float] = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.16, "int4": 0.66}
# Measured with SmolLM2-135M on two cores: interpreter and libraries, then what a parameter adds.
_BASE_BYTES, _BASE_SECONDS = 700_000_000, 30.0
_WEIGHTS_IN_MEMORY = 3.0  # float32 copies at the peak: PyTorch's, the graph's, the one that is written or loaded
_SECONDS_PER_PARAMETER = 2.5e-7
_TEXT_BYTES = 8_000_000


@dataclass(frozen=True)
class Estimate:
    """What an export will take: bytes of the bundle, bytes of memory at the peak, seconds. Rough, and meant to be."""

    disk_bytes: int
    peak_memory_bytes: int
    seconds: float


def weights_sha256(checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None) -> str:
    """SHA-256 over the weight files one after the other, in the order of their names.

    Args:
        progress: called with bytes read and bytes in all.
    """
    paths = [checkpoint.path / name for name in sorted(checkpoint.weight_files)]
    total, done = sum(path.stat().st_size for path in paths), 0
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
                done += len(block)
                if progress:
                    progress(done, total)
    return digest.hexdigest()


def model_spec(
    checkpoint: Checkpoint, config: PreTrainedConfig, max_seq_len: int | None = None, *, weights_sha256: str = ""
) -> ModelSpec:
    """What adx needs to know of the model.

    Args:
        config: `load_config(checkpoint)`.
        max_seq_len: tokens that a row's cache shall hold; None for the whole context.
        weights_sha256: from the function of that name; empty where nothing will be written.

    Raises:
        UsageError: `max_seq_len` is less than 1 or beyond the context.
        UnsupportedCheckpointError: the configuration contradicts itself.
    """
    context = int(config.max_position_embeddings)
    capacity = _capacity(config, context, max_seq_len)
    heads = int(config.num_attention_heads)
    layers = int(config.num_hidden_layers)
    cache = KVCacheSpec(
        layers=layers,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        capacity=capacity,
        windows=_windows(checkpoint.family, config, layers),
        recompute_at=_recompute_at(config, capacity),
    )
    return ModelSpec(
        source=checkpoint.source,
        revision=checkpoint.revision,
        architecture=checkpoint.architecture,
        model_type=checkpoint.model_type,
        dtype=checkpoint.dtype,
        parameters=checkpoint.parameters,
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        heads=heads,
        context_length=context,
        kv_cache=cache,
        weights_sha256=weights_sha256,
    )


def estimate(checkpoint: Checkpoint, spec: ModelSpec, precision: Precision) -> Estimate:
    """Roughly what an export with one target takes, parity check included."""
    disk = checkpoint.parameters * _BYTES_PER_WEIGHT[precision]
    # int4 keeps the embedding and the head at 8 bits.
    if precision == "int4":
        copies = 1 if checkpoint.tied else 2
        wide = copies * spec.vocab_size * spec.hidden_size
        disk += wide * (_BYTES_PER_WEIGHT["int8"] - _BYTES_PER_WEIGHT["int4"])
    cache = spec.kv_cache.bytes_per_token() * min(spec.kv_cache.capacity, 4096)
    return Estimate(
        disk_bytes=int(disk) + _TEXT_BYTES,
        peak_memory_bytes=int(_BASE_BYTES + _WEIGHTS_IN_MEMORY * 4 * checkpoint.parameters + cache),
        seconds=_BASE_SECONDS + _SECONDS_PER_PARAMETER * checkpoint.parameters,
    )


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def _capacity(config: PreTrainedConfig, context: int, max_seq_len: int | None) -> int:
    if max_seq_len is None:
        return context
    if max_seq_len < 1:
        raise UsageError(f"--max-seq-len must be 1 or more, found {max_seq_len}")
    if max_seq_len > context:
        dynamic = _rope(config).get("rope_type") == "dynamic"
        reason = (
            "; beyond it the dynamic rope changes its frequencies, and cached keys would be wrong" if dynamic else ""
        )
        raise UsageError(f"--max-seq-len {max_seq_len} is beyond the model's context of {context} positions{reason}")
    return max_seq_len


def _recompute_at(config: PreTrainedConfig, capacity: int) -> int | None:
    """Where long rope changes its frequencies, if a row can grow that far.

    Source: transformers' `Phi3ForCausalLM.prepare_inputs_for_generation`, which drops the cache at this length.
    """
    rope = _rope(config)
    if rope.get("rope_type") != "longrope":
        return None
    trained = int(rope["original_max_position_embeddings"])
    return trained + 1 if capacity > trained else None


def _windows(family: Family, config: PreTrainedConfig, layers: int) -> tuple[int | None, ...]:
    """Per layer the window that transformers' modeling code uses, which is not always what config.json holds."""
    window = getattr(config, "sliding_window", None)
    if family.windows == "none":
        return (None,) * layers
    if family.windows == "every_layer":
        return (window,) * layers
    types = list(config.layer_types)
    if len(types) != layers or not set(types) <= {_SLIDING, _FULL} or (_SLIDING in types and window is None):
        raise UnsupportedCheckpointError(
            f"config.json has {layers} layers, sliding_window {window} and layer_types {types}, which do not fit "
            "together"
        )
    return tuple(window if kind == _SLIDING else None for kind in types)
