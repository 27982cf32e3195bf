"""The graphs that TensorRT compiles and ONNX Runtime runs: prefill and decode over a preallocated KV cache.

Float16 products and attention, standard operators of opset 24 but for weights in blocks, which are ONNX Runtime's own.
Both graphs share one weights file. The cache's length is a named dimension here; TensorRT's builder fixes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from adx.calibration.quantizers import WeightQuantizer, round_to_nearest
from adx.calibration.ranges import LayerRange
from adx.calibration.recipe import QuantRecipe
from adx.calibration.smoothing import Choose, smooth
from adx.engines.cast_motion import move_casts
from adx.engines.compiled import CompiledEngine
from adx.engines.half_linears import HalfLinears
from adx.engines.ort_attention import MICROSOFT
from adx.engines.static_cache import StaticCacheLowering
from adx.engines.tensorrt_failures import HEAD_SIZES, MIN_HEADS
from adx.export.errors import LoweringError, UnsupportedCheckpointError
from adx.export.linears import LinearLayer, collect_linears, groups_by_input
from adx.export.portable import graph_spec
from adx.export.rewrite import prune, seal
from adx.export.rotary import fold_rotary
from adx.export.spec import GRAPHS, ModelSpec, Phase
from adx.export.trace import DOMAIN, SemanticGraph
from adx.export.weights_file import WeightsFile

if TYPE_CHECKING:
    import onnx_ir as ir

TARGET = GRAPHS
FOLDER = f"engines/{TARGET}"
WEIGHTS = "weights.data"
IR_VERSION = 11
OPSET = 24  # the first with TensorScatter
SMALL_TENSOR = 1024  # bytes; smaller constants stay in the graph's own file
PHASES: tuple[Phase, ...] = ("prefill", "decode")


def check_supported(spec: ModelSpec, *, plans: bool) -> None:
    """Refuse, before any work, a model whose attention has no kernel.

    Args:
        plans: TensorRT is to build plans.

    Raises:
        UnsupportedCheckpointError: with what is taken.
    """
    head_dim = spec.kv_cache.head_dim
    if head_dim not in HEAD_SIZES:
        raise UnsupportedCheckpointError(
            f"attention heads of {head_dim} elements: TensorRT's attention takes multiples of 8 from {HEAD_SIZES[0]} "
            f"to {HEAD_SIZES[-1]}; ort-cpu takes this model"
        )
    if plans and spec.heads < MIN_HEADS:
        raise UnsupportedCheckpointError(
            f"attention with {spec.heads} query heads: TensorRT's attention has no kernel for one new token with fewer "
            f"than {MIN_HEADS}; ort-cpu and ort-cuda take this model"
        )


def plan_layers(
    semantic: SemanticGraph, choose: Choose | None = None
) -> tuple[dict[str, LinearLayer], list[tuple[str, ...]]]:
    """Linear layers as `write_graphs` quantizes them, and which read the same input.

    A layer's `input_scale`, (in,) float32, is what smoothing divides its input by; None where it cannot reach it.
    """
    model, layers = _smoothed(semantic, choose)
    return layers, groups_by_input(model)


def write_graphs(
    semantic: SemanticGraph,
    recipe: Callable[[dict[str, LinearLayer]], QuantRecipe],
    folder: Path,
    *,
    ranges: Mapping[str, LayerRange],
    choose: Choose | None = None,
    quantizer: WeightQuantizer = round_to_nearest,
    progress: Callable[[str], None] = lambda name: None,
) -> CompiledEngine:
    """Lower a semantic graph and write both phases.

    Args:
        semantic: the traced model; it is not changed.
        recipe: from the linear layers to how each is stored.
        folder: the bundle's folder; `engines/onnx/` in it must not exist.
        ranges: largest magnitudes at each layer on the calibration samples.
        choose: divisors to smooth the layers with first, or None.
        quantizer: what makes integers of the weight of a layer in blocks.
        progress: called with the name of each linear layer as it is stored, once a phase.

    Raises:
        LoweringError: a node or a number has no counterpart.
    """
    import onnx_ir as ir

    out = folder / FOLDER
    out.mkdir(parents=True)
    graphs, shapes = [], {}
    with WeightsFile(out / WEIGHTS) as weights:
        for phase in PHASES:
            model, layers = _smoothed(semantic, choose)
            HalfLinears(model, layers, recipe(layers), quantizer, ranges, weights, progress).run()
            StaticCacheLowering(model, semantic.rotary, semantic.kv_cache, phase).run()
            move_casts(model)
            _finish(model, weights)
            file = f"{FOLDER}/{phase}.onnx"
            ir.save(model, folder / file)
            graphs.append(graph_spec(model, phase, file))
            shapes = {name: layer.shape for name, layer in layers.items()}
    files = (*(graph.file for graph in graphs), f"{FOLDER}/{WEIGHTS}")
    return CompiledEngine(TARGET, files, tuple(graphs), shapes)


def _smoothed(semantic: SemanticGraph, choose: Choose | None) -> tuple[ir.Model, dict[str, LinearLayer]]:
    model = semantic.model.clone()
    fold_rotary(model)
    layers = collect_linears(model)
    if choose is not None:
        smooth(model, layers, choose, head=True)
    return model, layers


def _finish(model: ir.Model, weights: WeightsFile) -> None:
    """Inputs that nothing reads go, large constants move to the weights file, float16 constants are finite."""
    import onnx_ir as ir

    graph = model.graph
    prune(model)
    strange = sorted({n.op_type for n in graph if n.domain == DOMAIN})
    if strange:
        raise LoweringError(f"no standard operators for the nodes {', '.join(strange)}")
    for unused in [v for v in graph.inputs if not list(v.uses())]:
        graph.inputs.remove(unused)
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None or isinstance(tensor, ir.ExternalTensor):
            continue
        array = np.asarray(tensor.numpy())
        if array.dtype == np.float16 and not np.isfinite(array).all():
            raise LoweringError(f"the constant {name} is infinite in float16")
        if tensor.nbytes > SMALL_TENSOR:
            value.const_value = weights.add(name, array)
    own = any(n.domain == MICROSOFT for n in graph)
    seal(model, IR_VERSION, {"": OPSET, MICROSOFT: 1} if own else {"": OPSET})
