"""ONNX Runtime on CPU: one graph that serves prefill and decode, lowered from the semantic graph.

One graph and not two, since each session packs its own copy of the weights: the phases differ only in the number of
new tokens and in the rows whose logits are wanted, and both are inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from adx.calibration.quantizers import WeightQuantizer, round_to_nearest
from adx.calibration.recipe import QuantRecipe
from adx.calibration.smoothing import Choose, smooth
from adx.engines.compiled import CompiledEngine
from adx.engines.ort_attention import MICROSOFT, AttentionLowering
from adx.engines.ort_fusions import fuse_gates, fuse_norms, fuse_silu, select_logits_rows
from adx.engines.ort_linears import LinearLowering
from adx.export.errors import LoweringError, UnsupportedCheckpointError
from adx.export.linears import LinearLayer, collect_linears, groups_by_input
from adx.export.portable import graph_spec
from adx.export.rewrite import prune, seal
from adx.export.rotary import fold_rotary
from adx.export.spec import KVCacheSpec
from adx.export.trace import DOMAIN, SemanticGraph
from adx.export.weights_file import WeightsFile

if TYPE_CHECKING:
    import onnx_ir as ir

TARGET = "ort-cpu"
GRAPH_FILE = f"engines/{TARGET}/model.onnx"
WEIGHTS_FILE = f"engines/{TARGET}/weights.data"
IR_VERSION = 10
OPSETS = {"": 21, MICROSOFT: 1}
SMALL_TENSOR = 1024  # bytes; smaller constants stay in the graph's own file


def compile(
    semantic: SemanticGraph,
    recipe: Callable[[dict[str, LinearLayer]], QuantRecipe],
    folder: Path,
    *,
    choose: Choose | None = None,
    quantizer: WeightQuantizer = round_to_nearest,
    progress: Callable[[str], None] = lambda name: None,
) -> CompiledEngine:
    """Lower a semantic graph for ONNX Runtime on CPU and write it.

    Args:
        semantic: the traced model; it is not changed.
        recipe: from the linear layers to how each is stored.
        choose: how layers are smoothed before they are quantized; None: they are not.
        quantizer: what makes integers of a layer's weight.
        folder: the bundle's folder; `engines/ort-cpu/` in it must not exist.
        progress: called with the name of each linear layer as it is stored.

    Raises:
        LoweringError: a node has no counterpart in ONNX Runtime.
    """
    import onnx_ir as ir

    model = semantic.model.clone()
    fold_rotary(model)
    layers = collect_linears(model)
    if choose is not None:
        smooth(model, layers, choose)
    AttentionLowering(model, layers, semantic.rotary, semantic.kv_cache.recompute_at).run()
    fuse_gates(model)
    fuse_silu(model)
    fuse_norms(model)
    select_logits_rows(model)
    _static_cache(model, semantic.kv_cache)
    prune(model)
    path = folder / GRAPH_FILE
    path.parent.mkdir(parents=True)
    with WeightsFile(folder / WEIGHTS_FILE) as weights:
        LinearLowering(model, layers, recipe(layers), quantizer, weights, progress).run()
        prune(model)
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            if tensor is not None and not isinstance(tensor, ir.ExternalTensor) and tensor.nbytes > SMALL_TENSOR:
                value.const_value = weights.add(name, np.asarray(tensor.numpy()))
    _finish(model)
    ir.save(model, path)
    files = (GRAPH_FILE, WEIGHTS_FILE)
    graphs = tuple(graph_spec(model, phase, GRAPH_FILE) for phase in ("prefill", "decode"))
    return CompiledEngine(TARGET, files, graphs, {name: layer.shape for name, layer in layers.items()})


def plan_layers(
    semantic: SemanticGraph, choose: Choose | None = None
) -> tuple[dict[str, LinearLayer], list[tuple[str, ...]]]:
    """Linear layers as `compile` quantizes them, in the checkpoint's order of rows, and which read the same input."""
    model = semantic.model.clone()
    fold_rotary(model)
    layers = collect_linears(model)
    if choose is not None:
        smooth(model, layers, choose)
    return layers, groups_by_input(model)


def check_supported(kv_cache: KVCacheSpec) -> None:
    """Refuse, before any work, a model whose attention the kernels do not take.

    Raises:
        UnsupportedCheckpointError: with what they take.
    """
    if kv_cache.head_dim % 8:
        raise UnsupportedCheckpointError(
            f"attention heads of {kv_cache.head_dim} elements: ONNX Runtime's GroupQueryAttention takes multiples of 8"
        )


def _static_cache(model: ir.Model, kv_cache: KVCacheSpec) -> None:
    """Past and present are the caller's buffers, (B, kv_heads, cache_length, head_dim)."""
    import onnx_ir as ir

    shape: list[int | str | None] = ["batch_size", kv_cache.kv_heads, "cache_length", kv_cache.head_dim]
    for value in (*model.graph.inputs, *model.graph.outputs):
        if str(value.name).startswith(("past_key_values.", "present.")):
            value.shape = ir.Shape(shape)
        elif len(value.shape or ()) == 2 and value.type == ir.TensorType(ir.DataType.INT64):
            value.shape = ir.Shape(["batch_size", "sequence_length"])


def _finish(model: ir.Model) -> None:
    """Drop what only the lowering needed, and check that every node is one that the target has."""
    graph = model.graph
    strange = sorted({n.op_type for n in graph if n.domain == DOMAIN})
    if strange:
        raise LoweringError(f"no ONNX Runtime counterpart for the nodes {', '.join(strange)}")
    for unused in [v for v in graph.inputs if not list(v.uses())]:
        graph.inputs.remove(unused)
    seal(model, IR_VERSION, OPSETS)
