"""Small verbs on onnx_ir graphs that every pass is written with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

Attribute = int | float | str | Sequence[int] | Sequence[float] | Sequence[str]


def node(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Attribute] | None = None,
    *,
    domain: str = "",
    outputs: int = 1,
    like: ir.Value | None = None,
    name: str | None = None,
) -> ir.Node:
    """A new node; `like` gives its first output's type and shape."""
    import onnx_ir as ir

    made = ir.node(op_type, list(inputs), dict(attributes or {}), domain=domain, num_outputs=outputs, name=name)
    if like is not None:
        made.outputs[0].type, made.outputs[0].shape = like.type, like.shape
    return made


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The array that a value always holds, or None if it is computed."""
    import onnx_ir as ir

    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else np.asarray(tensor.numpy())


def initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """The graph's initializer of that name, made from `array` unless it is there already."""
    import onnx_ir as ir

    if name in graph.initializers:
        return graph.initializers[name]
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    graph.register_initializer(value)
    return value


def producer(value: ir.Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """The node that computes a value, if it is of that type."""
    made_by = value.producer() if value is not None else None
    return made_by if made_by is not None and made_by.op_type == op_type and made_by.domain == domain else None


def consumers(value: ir.Value, op_type: str, domain: str = "") -> list[ir.Node]:
    """The nodes of that type that read a value, in no order."""
    return [
        user
        for user in dict.fromkeys(use.node for use in value.uses())
        if (user.op_type, user.domain) == (op_type, domain)
    ]


def replace(old: ir.Value, new: ir.Value) -> None:
    """Make every reader of `old` read `new`; an output of the graph hands on its name, type and shape."""
    import onnx_ir as ir

    if old.is_graph_output():
        name, old.name = old.name, f"{old.name}.replaced"
        new.name, new.type, new.shape = name, old.type, old.shape
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def dims(value: ir.Value) -> list[int | str | None]:
    """A value's dimensions: numbers where they are fixed, None or a name where not. Empty if unknown."""
    if value.shape is None:
        return []
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape]


def last_dim(value: ir.Value) -> int:
    """The fixed last dimension of a value."""
    size = dims(value)[-1]
    assert isinstance(size, int), f"{value.name}: last dimension is not fixed"
    return size


def part_of(value: ir.Value | None, source: ir.Value) -> tuple[int, int] | None:
    """(start, end) if the value is that part of the source's last dimension, by Slice or by Split."""
    size = last_dim(source)
    cut = producer(value, "Slice")
    if cut is not None and cut.inputs[0] is source:
        start, end, axis = (constant(v) for v in cut.inputs[1:4])
        rank = len(source.shape or ())
        if start is not None and end is not None and axis is not None and int(axis.item()) % rank == rank - 1:
            return int(start.item()), min(int(end.item()), size)
        return None
    split = producer(value, "Split")
    if split is not None and split.inputs[0] is source and value is not None:
        sizes = [last_dim(out) for out in split.outputs]
        index = list(split.outputs).index(value)
        return int(np.sum(sizes[:index])), int(np.sum(sizes[: index + 1]))
    return None


def prune(model: ir.Model) -> None:
    """Remove nodes and initializers that nothing reads, and order the rest topologically."""
    import onnx_ir.passes.common as common

    model.graph.sort()
    common.RemoveUnusedNodesPass()(model)
    for name in [
        n for n, value in model.graph.initializers.items() if not value.uses() and not value.is_graph_output()
    ]:
        del model.graph.initializers[name]


def seal(model: ir.Model, ir_version: int, opsets: Mapping[str, int]) -> None:
    """Make a lowered graph ready to be written: versions set, notes of the trace and inner shapes dropped.

    Shapes of inner values described the semantic graph; whoever loads the file infers them anew.
    """
    outputs = set(model.graph.outputs)
    for each in model.graph:
        each.metadata_props.clear()
        each.doc_string = None
        for value in each.outputs:
            value.metadata_props.clear()
            if value not in outputs:
                value.shape, value.type = None, None
    model.metadata_props.clear()
    model.ir_version = ir_version
    model.graph.opset_imports.clear()
    model.graph.opset_imports.update(opsets)
    model.producer_name = "adx"
