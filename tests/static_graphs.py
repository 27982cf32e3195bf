"""Tiny models as prefill and decode graphs over a preallocated cache, and sessions over them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import models
import numpy as np
from numpy.typing import NDArray
from traced import Logits, Traced

from adx.calibration.activations import InputQuantization
from adx.calibration.ranges import LayerRange
from adx.calibration.recipe import make_channel_recipe
from adx.calibration.smoothing import Choose
from adx.engines.compiled import CompiledEngine
from adx.engines.static_graphs import write_graphs
from adx.export.spec import Phase, Precision
from adx.runtime.ort_graphs import OrtGraphs, load_graph
from adx.runtime.static_session import StaticSession

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Buffers = list[NDArray[np.float16]]


@functools.cache
def written(source: Traced) -> CompiledEngine:
    """The graphs of a traced model in its scratch folder, linear layers in float16."""
    return lowered(source, source.scratch)


def lowered(
    source: Traced,
    folder: Path,
    precision: Precision = "fp16",
    *,
    ranges: Mapping[str, LayerRange] | None = None,
    inputs: Mapping[str, InputQuantization] | None = None,
    choose: Choose | None = None,
) -> CompiledEngine:
    """The graphs of a traced model in any folder; without `ranges` nothing is taken for large."""
    return write_graphs(
        source.semantic,
        lambda layers: make_channel_recipe(precision, layers, inputs=inputs),
        folder,
        ranges=ranges or {},
        choose=choose,
    )


def reweighted(source: Traced, scratch: Path, change: Callable[[PreTrainedModel], None]) -> Traced:
    """The same graph with other weights: `change` edits a new copy of the model in place. For Llama and GPT-2, whose
    graphs hold every parameter as it is."""
    import onnx_ir as ir
    import torch

    model = models.load_model(source.checkpoint)
    with torch.no_grad():
        change(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    graph = source.semantic.model.clone()
    for name, value in graph.graph.initializers.items():
        parameter = parameters.get(name.removeprefix("model."))
        if parameter is not None:
            value.const_value = ir.tensor(parameter.detach().numpy().copy(), name=name)
    semantic = dataclasses.replace(source.semantic, model=graph)
    return dataclasses.replace(source, scratch=scratch, model=model, semantic=semantic)


def files_of(engine: CompiledEngine, folder: Path) -> dict[Phase, Path]:
    """The file of each phase, of graphs in any folder."""
    return {graph.phase: folder / graph.file for graph in engine.graphs}


def session_over(engine: CompiledEngine, folder: Path, source: Traced, **settings: Any) -> StaticSession:
    """A session over graphs in any folder."""
    files, cache = files_of(engine, folder), source.spec.kv_cache
    executor = OrtGraphs(files["prefill"], files["decode"], cache, source.vocab_size, threads=1)
    return StaticSession(executor, cache, source.vocab_size, **settings)


def paths(source: Traced) -> dict[Phase, Path]:
    """The file of each phase, of the graphs in a model's scratch folder."""
    return files_of(written(source), source.scratch)


def executor(source: Traced) -> OrtGraphs:
    files = paths(source)
    return OrtGraphs(files["prefill"], files["decode"], source.spec.kv_cache, source.vocab_size, threads=1)


def session(source: Traced, **settings: Any) -> StaticSession:
    return StaticSession(executor(source), source.spec.kv_cache, source.vocab_size, **settings)


@dataclass(frozen=True)
class RawGraph:
    """One graph in ONNX Runtime without adx's session around it: every input is the caller's, left padding too."""

    session: Any

    @staticmethod
    def load(path: Path) -> RawGraph:
        return RawGraph(load_graph(path, 1))

    def run(self, ids: NDArray[np.int64], cache: Buffers, **rows: NDArray[np.int64]) -> tuple[Logits, Buffers]:
        """Logits and the new cache.

        Args:
            ids: (B, T).
            cache: (B, kv_heads, places, head_dim), key and value of each layer in turn.
            rows: (B,) each, by the inputs' names; those that the graph lacks are passed over.
        """
        names = [each.name for each in self.session.get_inputs()]
        caches = [name for name in names if name.startswith("past_key_values.")]
        given = {"input_ids": ids, **rows, **dict(zip(caches, cache, strict=True))}
        logits, *presents = self.session.run(None, {name: given[name] for name in names})
        return logits, presents
