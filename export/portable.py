"""The portable graphs: prefill and decode of standard operators only, names and dimensions as optimum's loaders read.

`Attention` over the concatenation of past and new; its additive mask says causality, windows and padding, so rows may
be padded on either side. Opset 23.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from adx.export.errors import LoweringError
from adx.export.linears import LinearLayer, collect_linears, names_of
from adx.export.portable_attention import lower_attention
from adx.export.rewrite import consumers, dims, initializer, last_dim, node, prune, replace, seal
from adx.export.rotary import fold_rotary
from adx.export.spec import (
    ATTENTION_MASK,
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    GraphSpec,
    Phase,
    TensorSpec,
)
from adx.export.trace import DOMAIN, OPSET, RotaryTable, SemanticGraph
from adx.export.weights_file import WeightsFile

if TYPE_CHECKING:
    import onnx_ir as ir

FOLDER = "onnx"
WEIGHTS = "weights.data"
IR_VERSION = 11
SMALL_TENSOR = 1024  # bytes; smaller constants stay in the graph's own file


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
            model = _lower(semantic, phase, weights, last_only=phase == "prefill" and not full_logits)
            for name, value in model.graph.initializers.items():
                tensor = value.const_value
                if tensor is not None and not isinstance(tensor, ir.ExternalTensor) and tensor.nbytes > SMALL_TENSOR:
                    value.const_value = weights.add(name, np.asarray(tensor.numpy()))
            path = out / f"{phase}.onnx"
            ir.save(model, path)
            specs.append(graph_spec(model, phase, f"{FOLDER}/{phase}.onnx"))
    return tuple(specs)


def graph_spec(model: ir.Model, phase: Phase, file: str) -> GraphSpec:
    """A graph's inputs and outputs as they stand."""

    def spec(value: ir.Value) -> TensorSpec:
        assert value.dtype is not None, f"{value.name} has no type"
        return TensorSpec(
            str(value.name), value.dtype.numpy().name, tuple(d if d is not None else "?" for d in dims(value))
        )

    inputs, outputs = (tuple(spec(v) for v in values) for values in (model.graph.inputs, model.graph.outputs))
    return GraphSpec(phase, file, inputs, outputs)


def _lower(semantic: SemanticGraph, phase: Phase, weights: WeightsFile, *, last_only: bool) -> ir.Model:
    model = semantic.model.clone()
    fold_rotary(model)
    layers = collect_linears(model)
    mask = _mask_input(model)
    lower_attention(model, mask, phase)
    _lower_rotary(model, mask, semantic)
    _lower_linears(model, layers, weights)
    _lower_logits(model, mask, last_only=last_only)
    if phase == "prefill":
        _forget_past(model)
    _finish(model, phase, last_only=last_only)
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


def _lower_rotary(model: ir.Model, mask: ir.Value, semantic: SemanticGraph) -> None:
    graph = model.graph
    rows: dict[str, ir.Value] = {}
    for rotary in [n for n in graph if n.domain == DOMAIN and n.op_type == "Rotary"]:
        name = str(rotary.attributes["name"].value)
        table = semantic.rotary[name]
        x, position_ids = rotary.inputs
        assert position_ids is not None
        if name not in rows:
            rows[name] = _table_rows(model, name, table, position_ids, mask)
        dim = int(rotary.attributes["dim"].value)
        part = {} if dim == last_dim(rotary.outputs[0]) else {"rotary_embedding_dim": dim}
        inputs = [
            x,
            initializer(graph, f"{name}.cos", table.cos),
            initializer(graph, f"{name}.sin", table.sin),
            rows[name],
        ]
        lowered = node("RotaryEmbedding", inputs, part, like=rotary.outputs[0])
        graph.insert_before(rotary, lowered)
        replace(rotary.outputs[0], lowered.outputs[0])
        graph.remove(rotary, safe=True)


def _table_rows(model: ir.Model, name: str, table: RotaryTable, position_ids: ir.Value, mask: ir.Value) -> ir.Value:
    """Rows of the table: a row with more true tokens than the short values serve reads the long ones (long rope)."""
    if table.long_from is None:
        return position_ids
    graph = model.graph
    offset = initializer(graph, f"{name}.long_from", np.array(table.long_from, np.int64))
    zero = initializer(graph, f"{name}.zero", np.array(0, np.int64))
    axes = initializer(graph, f"{name}.axes", np.array([1], np.int64))
    tokens = node("ReduceSum", [mask, axes], {"keepdims": 1})
    long = node("Greater", [tokens.outputs[0], offset])
    shift = node("Where", [long.outputs[0], offset, zero])
    rows = node("Add", [position_ids, shift.outputs[0]])
    graph.insert_before(graph[0], [tokens, long, shift, rows])
    return rows.outputs[0]


def _lower_linears(model: ir.Model, layers: dict[str, LinearLayer], weights: WeightsFile) -> None:
    """(in, out) weights for MatMul, written as they are made; a head tied to the embedding turns that table."""
    import onnx_ir as ir

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
            turned_weight = np.ascontiguousarray(layer.weight().T)
            weight = initializer(graph, f"{name}.weight", turned_weight[:0])
            weight.const_value = weights.add(f"{name}.weight", turned_weight)
            weight.shape = ir.Shape(turned_weight.shape)
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
        zero = initializer(graph, "logits.zero", np.array(0, np.int64))
        one = initializer(graph, "logits.one", np.array(1, np.int64))
        axes = initializer(graph, "logits.axes", np.array([1], np.int64))
        shape = node("Shape", [mask], {"start": 1, "end": 2})
        total = node("Squeeze", [shape.outputs[0]])
        order = node("Range", [zero, total.outputs[0], one])
        marked = node("Mul", [mask, order.outputs[0]])
        last = node("ArgMax", [marked.outputs[0]], {"axis": 1, "keepdims": 1})
        gathered = node("GatherND", [hidden, last.outputs[0]], {"batch_dims": 1})
        rows = node("Unsqueeze", [gathered.outputs[0], axes])
        graph.insert_before(marker, [shape, total, order, marked, last, gathered, rows])
        replace(marker.outputs[0], rows.outputs[0])
    else:
        replace(marker.outputs[0], hidden)
    graph.remove(marker, safe=True)


def _forget_past(model: ir.Model) -> None:
    """Take the past out of a prefill graph: its batch size is that of the tokens, its length is 0."""
    graph = model.graph
    ids = next(v for v in graph.inputs if v.name == INPUT_IDS)
    for past in [v for v in graph.inputs if str(v.name).startswith("past_key_values.")]:
        for shape in consumers(past, "Shape"):
            start, end = (int(shape.attributes[name].value) for name in ("start", "end"))
            if (start, end) == (0, 1):
                shape.replace_input_with(0, ids)
            elif (start, end) == (2, 3):
                replace(shape.outputs[0], initializer(graph, "past.length", np.array([0], np.int64)))
        prune(model)
        if past.uses():
            users = ", ".join(sorted({use.node.op_type for use in past.uses()}))
            raise LoweringError(f"{past.name} is read by {users} and not by attention alone: it cannot be left out")
        graph.inputs.remove(past)


def _finish(model: ir.Model, phase: Phase, *, last_only: bool) -> None:
    """Dimensions and order of the contract; metadata of the trace dropped."""
    import onnx_ir as ir

    graph = model.graph
    for value in graph.inputs:
        name = str(value.name)
        if name in (INPUT_IDS, POSITION_IDS):
            value.shape = ir.Shape(["batch_size", "sequence_length"])
        elif name.startswith("past_key_values."):
            value.shape = ir.Shape(["batch_size", dims(value)[1], "past_sequence_length", dims(value)[3]])
    length = "total_sequence_length" if phase == "decode" else "sequence_length"
    for value in graph.outputs:
        sizes = dims(value)
        if value.name == LOGITS:
            value.shape = ir.Shape(["batch_size", 1 if last_only else "sequence_length", sizes[-1]])
        else:
            value.shape = ir.Shape(["batch_size", sizes[1], length, sizes[3]])
    prune(model)
    seal(model, IR_VERSION, {"": OPSET})
