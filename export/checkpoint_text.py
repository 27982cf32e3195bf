"""The text files that a bundle carries from its checkpoint: configurations, tokenizer, chat template."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adx.export.checkpoint import Checkpoint
from adx.export.checkpoint_files import read_json
from adx.export.checkpoint_load import load_config, load_tokenizer, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

GENERATION_CONFIG = "generation_config.json"

# Keys that say where or how this process loaded something, and nothing of the model.
_CONFIG_NOISE = ("quantization_config", "auto_map", "_name_or_path", "transformers_weights", "gguf_file")
_TOKENIZER_NOISE = ("is_local", "local_files_only", "name_or_path", "auto_map", "gguf_file", "trust_remote_code")


@dataclass(frozen=True)
class TextFiles:
    """What was written: the files' names, and whether a tokenizer is among them (without: token ids only)."""

    files: tuple[str, ...]
    tokenizer: bool


def save_text_files(checkpoint: Checkpoint, out: Path, *, config: PreTrainedConfig | None = None) -> TextFiles:
    """Write config.json (float32, not quantized), generation_config.json and, if there is one, the tokenizer to `out`.

    `AutoTokenizer.from_pretrained(out)` encodes and renders chats as the checkpoint's own does.

    Args:
        config: `load_config(checkpoint)`, where it was read before (a GGUF's takes seconds).

    Raises:
        CheckpointError: a file of the checkpoint is damaged.
    """
    out.mkdir(parents=True, exist_ok=True)
    before = {path.name for path in out.iterdir()}
    config = load_config(checkpoint) if config is None else config
    with quiet_transformers():
        fields = json.loads(config.to_json_string(use_diff=True))
    fields = {key: value for key, value in fields.items() if key not in _CONFIG_NOISE}
    fields |= {"architectures": [checkpoint.architecture], "dtype": "float32"}
    _write_json(out / "config.json", fields)
    _save_generation_config(checkpoint, config, out)
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is not None:
        _save_tokenizer(tokenizer, out)
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} - before
    return TextFiles(tuple(sorted(written)), tokenizer is not None)


def _save_generation_config(checkpoint: Checkpoint, config: PreTrainedConfig, out: Path) -> None:
    """The checkpoint's own, byte for byte; without one, what transformers derives from the configuration."""
    from transformers import GenerationConfig

    own = checkpoint.path / GENERATION_CONFIG
    if checkpoint.kind == "safetensors" and own.is_file():
        read_json(own)
        shutil.copyfile(own, out / GENERATION_CONFIG)
        return
    with quiet_transformers():
        GenerationConfig.from_model_config(config).save_pretrained(out)


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    # A tokenizer.json may carry truncation or padding from training; transformers ignores both unless asked, and what
    # reads the bundle's tokenizer.json directly must not cut prompts.
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    with quiet_transformers():
        tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    fields = read_json(path)
    _write_json(path, {key: value for key, value in fields.items() if key not in _TOKENIZER_NOISE})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
