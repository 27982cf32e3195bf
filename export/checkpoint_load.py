"""Load a checkpoint through transformers: configuration, float32 model, tokenizer; quietly, and never half."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any
from unittest import mock

from adx.export.checkpoint import Checkpoint
from adx.export.checkpoint_files import stored_tensors
from adx.export.errors import AdxError, CheckpointError, UnsupportedCheckpointError
from adx.export.gguf_header import read_gguf_header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars, log lines and warnings off the user's screen inside the block."""
    from transformers import modeling_gguf_pytorch_utils as gguf_utils
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    try:
        # The GGUF reader's bar has no switch of its own.
        with warnings.catch_warnings(), mock.patch.object(gguf_utils, "tqdm", lambda items, **_: items):
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # as above


def load_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The configuration as transformers reads it, defaults filled in; a GGUF's gaps filled from its metadata.

    Raises:
        CheckpointError: transformers refuses it.
    """
    from transformers import AutoConfig

    with quiet_transformers(), _as_checkpoint_error(checkpoint, "config"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(checkpoint.path, **_common(checkpoint))
    if config.model_type != checkpoint.model_type:
        raise UnsupportedCheckpointError(
            f"transformers reads {checkpoint.source} as {config.model_type!r}, and its files say "
            f"{checkpoint.model_type!r}: use the model's safetensors checkpoint"
        )
    if checkpoint.gguf_file:
        header = read_gguf_header(checkpoint.path / checkpoint.gguf_file)
        for key, attribute in checkpoint.family.gguf_fields:
            value = header.get(key)
            if value is not None:
                setattr(config, attribute, value)
        config.architectures = [checkpoint.architecture]
    # A file name that config.json may choose: the weights are the ones that were checked.
    if getattr(config, "transformers_weights", None):
        config.transformers_weights = None
    return config


def load_model(
    checkpoint: Checkpoint, *, config: PreTrainedConfig | None = None, attn_implementation: str = "eager"
) -> PreTrainedModel:
    """The model in float32 whatever the checkpoint's element type, in evaluation mode, without gradients.

    Args:
        config: `load_config(checkpoint)`, where it was read before (a GGUF's takes seconds).
        attn_implementation: a name that transformers' attention registry knows.

    Raises:
        CheckpointError: a weight is missing, left over or of another shape, or transformers cannot load it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(checkpoint) if config is None else config
    with quiet_transformers(), _as_checkpoint_error(checkpoint, "weights"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            config=config,
            dtype=torch.float32,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to name them, rather than stop at the first
            **_common(checkpoint),
        )
    model, info = loaded
    _refuse_incomplete(checkpoint, info)
    if checkpoint.gguf_file:
        _forget_quantization(model)
    result: PreTrainedModel = model.eval().requires_grad_(False)
    return result


def has_tokenizer(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint brings a tokenizer; one without is used with token ids only."""
    if checkpoint.gguf_file:
        return "tokenizer.ggml.model" in checkpoint.config
    return any((checkpoint.path / name).is_file() for name in _TOKENIZER_FILES)


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    """The tokenizer as transformers makes it, or None if the checkpoint has none.

    Raises:
        CheckpointError: it is damaged.
        UnsupportedCheckpointError: it has no fast form, which a bundle needs.
    """
    from transformers import AutoTokenizer

    if not has_tokenizer(checkpoint):
        return None
    with quiet_transformers(), _as_checkpoint_error(checkpoint, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint.path, **_common(checkpoint))
    if not tokenizer.is_fast:
        raise UnsupportedCheckpointError(
            f"{checkpoint.source} has a {type(tokenizer).__name__}, which has no tokenizer.json form: convert it to a "
            "fast tokenizer first"
        )
    return tokenizer


def _common(checkpoint: Checkpoint) -> dict[str, Any]:
    """What every transformers loader is told: no network, and no code but what was allowed."""
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": checkpoint.trust_remote_code}
    return options | ({"gguf_file": checkpoint.gguf_file} if checkpoint.gguf_file else {})


@contextmanager
def _as_checkpoint_error(checkpoint: Checkpoint, what: str) -> Iterator[None]:
    try:
        yield
    except (AdxError, MemoryError):
        raise
    except Exception as error:  # transformers, safetensors and tokenizers raise whatever they meet
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"transformers cannot load the {what} of {checkpoint.source}: {lines[0]}") from error


def _refuse_incomplete(checkpoint: Checkpoint, info: Mapping[str, Any]) -> None:
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        name, stored, wanted = mismatched[0]
        raise CheckpointError(
            f"{_where(checkpoint, name)} has shape {list(stored)}, and config.json asks for {list(wanted)}"
            f"{_and_more(mismatched)}: configuration and weights do not belong together"
        )
    advice = "configuration and weights do not belong together, or a file is incomplete"
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"{checkpoint.source} lacks the weight {missing[0]}{_and_more(missing)}: {advice}")
    if unexpected := sorted(info["unexpected_keys"]):
        raise CheckpointError(
            f"{checkpoint.source} holds {_where(checkpoint, unexpected[0])}{_and_more(unexpected)}, which "
            f"{checkpoint.architecture} has no place for: {advice}"
        )
    if info.get("error_msgs"):
        raise CheckpointError(f"{checkpoint.source}: {str(info['error_msgs'][0]).splitlines()[0]}")


def _where(checkpoint: Checkpoint, name: str) -> str:
    """A tensor and the file that holds it."""
    if checkpoint.gguf_file:
        return name
    tensors = stored_tensors(checkpoint.path, checkpoint.weight_files)
    files = [tensor.file for tensor in tensors if tensor.name == name or tensor.name.endswith("." + name)]
    return f"{name} (in {files[0]})" if files else name


def _and_more(items: list[Any]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def _forget_quantization(model: PreTrainedModel) -> None:
    """Remove what transformers left of the GGUF's quantization: its weights are plain float32 now."""
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer"), (model, "quantization_method")):
        if name in vars(owner):
            delattr(owner, name)


def cache_argument(model: PreTrainedModel) -> str:
    """What this version of transformers calls the cache: `past_key_values` became `cache`."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
