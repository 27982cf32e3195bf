"""The portable graphs: prefill and decode of standard operators only, names and dimensions as optimum's loaders read.

`Attention` over the concatenation of past and new, its mask from `attention_mask` and the queries' places, windows
included; rows may be padded on either side. Opset 23.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from adx.export.linears import LinearLayer, collect_linears, names_of
from adx.export.rewrite import dims, initializer, last_dim, node, prune, replace
from adx.export.rotary import fold_rotary
from adx.export.spec import (
    ATTENTION_MASK,
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    GraphSpec,
    Phase,
    TensorSpec,
    past_name,
    present_name,
)
from adx.export.trace import DOMAIN, OPSET, RotaryTable, SemanticGraph
from adx.export.weights_file import WeightsFile

if TYPE_CHECKING:
    import onnx_ir as ir

FOLDER = "onnx"
WEIGHTS = "weights.data"
IR_VERSION = 11
SMALL_TENSOR = 1024  # bytes; smaller constants stay in the graph's own file
BLOCKED = -1e9  # added to the score of a key that a query must not see: finite, so that no row gives NaN


def write_portable(semantic: SemanticGraph, folder: Path, *, full_logits: bool) -> tuple[GraphSpec, ...]:
    """Write `onnx/prefill.onnx`, `onnx/decode.onnx` and the weights file that they share.

    Args:
        semantic: the traced model; it is not changed.
        folder: the bundle's folder.
        full_logits: prefill keeps the logits of all positions, and not only of each row's last true token.

    Returns:
        The specs of the two graphs.
    """
    import onnx_ir as ir

    out = folder / FOLDER
    out.mkdir(parents=True)
    specs = []
    with WeightsFile(out / WEIGHTS) as weights:
        for phase in ("prefill", "decode"):
            model = _lower(semantic, phase, last_only=phase == "prefill" and not full_logits)
            for name, value in model.graph.initializers.items():
                tensor = value.const_value
                if tensor is not None and tensor.nbytes > SMALL_TENSOR:
                    value.const_value = weights.add(name, np.asarray(tensor.numpy()))
            path = out / f"{phase}.onnx"
            ir.save(model, path)
            specs.append(graph_spec(model, phase, f"{FOLDER}/{phase}.onnx"))
    return tuple(specs)


def graph_spec(model: ir.Model, phase: Phase, file: str) -> GraphSpec:
    """A graph's inputs and outputs as they stand."""

    def spec(value: ir.Value) -> TensorSpec:
        assert value.dtype is not None, f"{value.name} has no type"
        return TensorSpec(str(value.name), value.dtype.numpy().name, tuple(d if d is not None else "?" for d in dims(value)))

    inputs, outputs = (tuple(spec(v) for v in values) for values in (model.graph.inputs, model.graph.outputs))
    return GraphSpec(phase, file, inputs, outputs)


def _lower(semantic: SemanticGraph, phase: Phase, *, last_only: bool) -> ir.Model:
    model = semantic.model.clone()
    fold_rotary(model)
    layers = collect_linears(model)
    mask = _mask_input(model)
    _lower_attention(model, mask, phase, semantic)
    _lower_rotary(model, semantic)
    _lower_linears(model, layers)
    _lower_logits(model, mask, last_only=last_only)
    _finish(model, phase)
    return model


def _mask_input(model: ir.Model) -> ir.Value:
    import onnx_ir as ir

    mask = ir.Value(
        name=ATTENTION_MASK,
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape(["batch_size", "total_sequence_length"]),
    )
    model.graph.inputs.insert(1, mask)
    return mask


def _lower_attention(model: ir.Model, mask: ir.Value, phase: Phase, semantic: SemanticGraph) -> None:
    graph = model.graph
    masks: dict[int, ir.Value] = {}
    for attention in [n for n in graph if n.domain == DOMAIN and n.op_type == "CausalAttention"]:
        query, key, value, past_key, past_value = attention.inputs
        assert query is not None and key is not None
        window = int(attention.attributes["window"].value)
        if window not in masks:
            masks[window] = _additive_mask(model, mask, window)
        pasts = [] if phase == "prefill" else [past_key, past_value]
        attributes = {
            "scale": float(attention.attributes["scale"].value),
            "softcap": float(attention.attributes["softcap"].value),
            "qk_matmul_output_mode": 0,
        }
        lowered = node("Attention", [query, key, value, masks[window], *pasts], attributes, outputs=3, like=query)
        if phase == "prefill":
            # The present is the new keys and values themselves.
            lowered = node("Attention", [query, key, value, masks[window]], attributes, like=query)
            presents = [node("Identity", [v]) for v in (key, value)]
            graph.insert_before(attention, [lowered, *presents])
            results = [lowered.outputs[0], *(p.outputs[0] for p in presents)]
        else:
            graph.insert_before(attention, lowered)
            results = list(lowered.outputs)
        lowered.name = f"layers.{attention.attributes['layer'].value}.attention"
        for old, new in zip(attention.outputs, results, strict=True):
            replace(old, new)
        graph.remove(attention, safe=True)


def _additive_mask(model: ir.Model, mask: ir.Value, window: int) -> ir.Value:
    """(B, 1, T, total) float32: 0 where a query sees a key, `BLOCKED` where not.

    A key is seen if it is no padding, not after the query, and within the window. Places count along the row, padding
    included: query t of T stands at place total - T + t. Padding queries see themselves, so no row is empty.
    """
    graph = model.graph
    ids = next(v for v in graph.inputs if v.name == INPUT_IDS)

    def const(name: str, value: object, dtype: type) -> ir.Value:
        return initializer(graph, f"mask.{name}", np.array(value, dtype))

    made: list[ir.Node] = []

    def add(op: str, inputs: list[ir.Value], **attributes: int) -> ir.Value:
        made.append(node(op, inputs, attributes))
        return made[-1].outputs[0]

    zero, one = const("zero", 0, np.int64), const("one", 1, np.int64)
    total = add("Squeeze", [add("Shape", [mask], start=1, end=2)])
    length = add("Squeeze", [add("Shape", [ids], start=1, end=2)])
    keys = add("Range", [zero, total, one])  # (total,)
    queries = add("Unsqueeze", [add("Range", [add("Sub", [total, length]), total, one]), const("last", [1], np.int64)])
    seen = add("LessOrEqual", [keys, queries])  # (T, total)
    if window:
        first = add("Sub", [queries, const(f"window.{window}", window - 1, np.int64)])
        seen = add("And", [seen, add("GreaterOrEqual", [keys, first])])
    true_keys = add("Unsqueeze", [add("Greater", [mask, zero]), const("axes", [1, 2], np.int64)])  # (B, 1, 1, total)
    itself = add("Equal", [keys, queries])
    allowed = add("Or", [add("And", [seen, true_keys]), itself])
    result = add("Where", [allowed, const("seen", 0.0, np.float32), const("blocked", BLOCKED, np.float32)])
    graph.insert_before(graph[0], made)
    return result


def _lower_rotary(model: ir.Model, semantic: SemanticGraph) -> None:
    graph = model.graph
    rows: dict[str, ir.Value] = {}
    for rotary in [n for n in graph if n.domain == DOMAIN and n.op_type == "Rotary"]:
        name = str(rotary.attributes["name"].value)
        table = semantic.rotary[name]
        x, position_ids = rotary.inputs
        assert position_ids is not None
        if name not in rows:
            rows[name] = _table_rows(model, name, table, position_ids)
        dim = int(rotary.attributes["dim"].value)
        attributes: Mapping[str, int] = {"rotary_embedding_dim": 0 if dim == last_dim(rotary.outputs[0]) else dim}
        inputs = [
            x,
            initializer(graph, f"{name}.cos", table.cos),
            initializer(graph, f"{name}.sin", table.sin),
            rows[name],
        ]
        lowered = node("RotaryEmbedding", inputs, attributes, like=rotary.outputs[0])
        graph.insert_before(rotary, lowered)
        replace(rotary.outputs[0], lowered.outputs[0])
        graph.remove(rotary, safe=True)


def _table_rows(model: ir.Model, name: str, table: RotaryTable, position_ids: ir.Value) -> ir.Value:
    """Rows of the table: a row of tokens that reaches the long values' length reads those (long rope)."""
    if table.long_from is None:
        return position_ids
    graph = model.graph
    threshold = initializer(graph, f"{name}.threshold", np.array(table.long_from, np.int64))
    zero = initializer(graph, f"{name}.zero", np.array(0, np.int64))
    axes = initializer(graph, f"{name}.axes", np.array([1], np.int64))
    furthest = node("ReduceMax", [position_ids, axes], {"keepdims": 1})
    long = node("GreaterOrEqual", [furthest.outputs[0], threshold])
    offset = node("Where", [long.outputs[0], threshold, zero])
    rows = node("Add", [position_ids, offset.outputs[0]])
    graph.insert_before(graph[0], [furthest, long, offset, rows])
    return rows.outputs[0]


def _lower_linears(model: ir.Model, layers: dict[str, LinearLayer]) -> None:
    """(in, out) weights for MatMul; a head tied to the embedding reads that table through a Transpose."""
    graph = model.graph
    for linear in [n for n in graph if n.domain == DOMAIN and n.op_type == "Linear"]:
        (name,) = names_of(linear)
        layer = layers[name]
        made = []
        if layer.tied_to is not None:
            turned = node("Transpose", [graph.initializers[layer.tied_to]], {"perm": [1, 0]})
            made.append(turned)
            weight = turned.outputs[0]
        else:
            weight = initializer(graph, f"{name}.weight", np.ascontiguousarray(layer.weight().T))
        made.append(node("MatMul", [linear.inputs[0], weight], name=name))
        bias = layer.bias()
        if bias is not None:
            made.append(node("Add", [made[-1].outputs[0], initializer(graph, f"{name}.bias", bias)]))
        made[-1].outputs[0].type, made[-1].outputs[0].shape = linear.outputs[0].type, linear.outputs[0].shape
        graph.insert_before(linear, made)
        replace(linear.outputs[0], made[-1].outputs[0])
        graph.remove(linear, safe=True)


def _lower_logits(model: ir.Model, mask: ir.Value, *, last_only: bool) -> None:
    """All rows, or of each row of tokens the last one that is no padding: (B, 1, hidden)."""
    graph = model.graph
    (marker,) = [n for n in graph if n.domain == DOMAIN and n.op_type == "LogitsRows"]
    hidden = marker.inputs[0]
    assert hidden is not None
    if last_only:
        places = initializer(graph, "logits.one", np.array(1, np.int64))
        axes = initializer(graph, "logits.axes", np.array([1], np.int64))
        zero = initializer(graph, "logits.zero", np.array(0, np.int64))
        end = node("Squeeze", [node("Shape", [mask], {"start": 1, "end": 2}).outputs[0]])
        shape = end.inputs[0].producer() if end.inputs[0] is not None else None
        assert shape is not None
        order = node("Range", [zero, end.outputs[0], places])
        marked = node("Mul", [mask, order.outputs[0]])
        last = node("ArgMax", [marked.outputs[0]], {"axis": 1, "keepdims": 1})
        gathered = node("GatherND", [hidden, last.outputs[0]], {"batch_dims": 1})
        rows = node("Unsqueeze", [gathered.outputs[0], axes])
        graph.insert_before(marker, [shape, end, order, marked, last, gathered, rows])
        replace(marker.outputs[0], rows.outputs[0])
    else:
        replace(marker.outputs[0], hidden)
    graph.remove(marker, safe=True)


def _finish(model: ir.Model, phase: Phase) -> None:
    """Dimensions and order of the contract; metadata of the trace dropped."""
    import onnx_ir as ir

    graph = model.graph
    past = phase == "decode"
    for value in list(graph.inputs):
        name = str(value.name)
        if name in (INPUT_IDS, POSITION_IDS):
            value.shape = ir.Shape(["batch_size", "sequence_length"])
        elif name.startswith("past_key_values."):
            if not past:
                graph.inputs.remove(value)
            value.shape = ir.Shape(["batch_size", dims(value)[1], "past_sequence_length", dims(value)[3]])
    length = "total_sequence_length" if past else "sequence_length"
    for value in graph.outputs:
        sizes = dims(value)
        if value.name == LOGITS:
            value.shape = ir.Shape(["batch_size", "sequence_length" if sizes[1] != 1 else 1, sizes[-1]])
        else:
            value.shape = ir.Shape(["batch_size", sizes[1], length, sizes[3]])
    prune(model)
    kept = set(graph.outputs)
    for n in graph:
        n.metadata_props.clear()
        n.doc_string = None
        for value in n.outputs:
            value.metadata_props.clear()
            if value not in kept:
                value.shape, value.type = None, None
    model.metadata_props.clear()
    model.ir_version = IR_VERSION
    graph.opset_imports.clear()
    graph.opset_imports.update({"": OPSET})
    model.producer_name = "adx"


__all__ = ["graph_spec", "past_name", "present_name", "write_portable"]
