"""Tiny models traced once a test session, and engines compiled from them."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import models
import numpy as np
import pytest
from numpy.typing import NDArray

from adx.calibration.recipe import make_recipe
from adx.engines import ort_cpu
from adx.export.checkpoint import resolve
from adx.export.checkpoint_load import load_model
from adx.export.checkpoint_spec import model_spec
from adx.export.spec import KVCacheSpec, ModelSpec, Precision
from adx.export.trace import SemanticGraph, trace
from adx.runtime.ort_session import OrtSession
from adx.runtime.session import Session

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Logits = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Traced:
    """A checkpoint, the model that transformers makes of it, and its semantic graph.

    Attributes:
        checkpoint: the Hugging Face folder.
        scratch: a folder for what is compiled from it.
    """

    checkpoint: Path
    scratch: Path
    model: PreTrainedModel
    spec: ModelSpec
    semantic: SemanticGraph

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size


def traced(factory: pytest.TempPathFactory, family: str, **overrides: Any) -> Traced:
    """`models.tiny(family, ..., **overrides)`, traced the first time that it is asked for."""
    return _traced(factory.getbasetemp(), family, json.dumps(overrides, sort_keys=True))


@functools.cache
def _traced(parent: Path, family: str, overrides: str) -> Traced:
    folder = Path(tempfile.mkdtemp(prefix=f"{family}-", dir=parent))
    return trace_folder(models.tiny(family, folder / "checkpoint", **json.loads(overrides)), folder)


def trace_folder(checkpoint: Path, scratch: Path, max_seq_len: int | None = None) -> Traced:
    """Trace any checkpoint."""
    resolved = resolve(str(checkpoint))
    model = load_model(resolved)
    spec = model_spec(resolved, model.config, max_seq_len)
    return Traced(checkpoint, scratch, model, spec, trace(model, spec.kv_cache))


def trace_once(model: Any, kv_cache: KVCacheSpec) -> SemanticGraph:
    """In place of `trace.trace`: models with the same weights share a graph, which exports read and do not change."""
    weights = hashlib.sha256()
    for _, parameter in sorted(model.state_dict().items()):
        weights.update(parameter.numpy().tobytes())
    return _traced_once(_Model(model, weights.hexdigest()), kv_cache)


class _Model:
    """A model that is equal to another with the same weights."""

    def __init__(self, model: Any, digest: str) -> None:
        self.model, self.digest = model, digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Model) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@functools.cache
def _traced_once(model: _Model, kv_cache: KVCacheSpec) -> SemanticGraph:
    return trace(model.model, kv_cache)


@functools.cache
def engine(source: Traced, precision: Precision = "fp32", group_size: int | None = None) -> OrtSession:
    """The ONNX Runtime CPU session of a traced model."""
    folder = source.scratch / f"{precision}-{group_size}"
    ort_cpu.compile(source.semantic, lambda layers: make_recipe(precision, layers, group_size=group_size), folder)
    return OrtSession(folder / ort_cpu.GRAPH_FILE, source.spec.kv_cache, source.vocab_size, threads=1)


def reference(model: PreTrainedModel, ids: NDArray[np.int64]) -> Logits:
    """(B, T, V) logits of transformers, rows of one length, no cache."""
    import torch

    with torch.inference_mode():
        logits: Logits = model(torch.from_numpy(ids), use_cache=False).logits.numpy()
    return logits


def engine_logits(session: Session, ids: NDArray[np.int64], past: int = 0) -> Logits:
    """(B, T - past, V): the first `past` tokens of every row by prefill, the others by one decode call."""
    batch, length = ids.shape
    cache = session.new_cache(batch)
    if not past:
        return session.prefill(ids, np.full(batch, length), cache, "all").copy()
    session.prefill(ids[:, :past], np.full(batch, past), cache)
    return session.decode(ids[:, past:], cache).copy()


def tokens(seed: int, *shape: int, vocab_size: int = 256) -> NDArray[np.int64]:
    """Random token ids that are no special tokens."""
    return np.random.default_rng(seed).integers(3, vocab_size, shape)
