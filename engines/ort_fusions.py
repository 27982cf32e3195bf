"""Passes for ONNX Runtime: parallel projections, norms with their residual sum, activations, the rows of the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from adx.engines.ort_attention import MICROSOFT, fuse_linears
from adx.export.rewrite import constant, dims, initializer, last_dim, node, producer, replace
from adx.export.spec import LOGITS_INDICES
from adx.export.trace import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir


def select_logits_rows(model: ir.Model) -> None:
    """The head computes only the rows that `logits_indices` names, of the (B*T) tokens in order: logits are (N, V)."""
    import onnx_ir as ir

    graph = model.graph
    indices = ir.Value(name=LOGITS_INDICES, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["logits_rows"]))
    graph.inputs.append(indices)
    (marker,) = [n for n in graph if n.domain == DOMAIN and n.op_type == "LogitsRows"]
    hidden = marker.inputs[0]
    assert hidden is not None
    shape = initializer(graph, f"shape.all.{last_dim(hidden)}", np.array([-1, last_dim(hidden)], np.int64))
    flat = node("Reshape", [hidden, shape])
    rows = node("Gather", [flat.outputs[0], indices], {"axis": 0})
    rows.outputs[0].type, rows.outputs[0].shape = hidden.type, ir.Shape(["logits_rows", last_dim(hidden)])
    graph.insert_before(marker, [flat, rows])
    replace(marker.outputs[0], rows.outputs[0])
    graph.remove(marker, safe=True)
    (logits,) = [v for v in graph.outputs if len(dims(v)) == 3]
    logits.shape = ir.Shape(["logits_rows", last_dim(logits)])


def fuse_gates(model: ir.Model) -> None:
    """activation(gate(x)) * up(x): one projection computes gate and up side by side."""
    graph = model.graph
    for product in [n for n in graph if n.op_type == "Mul"]:
        for gated, up in (product.inputs, tuple(reversed(product.inputs))):
            gate = _activation_source(gated)
            if gate is None or up is None or gate is up or producer(up, "Linear", DOMAIN) is None:
                continue
            fused = fuse_linears(model, product, [gate, up])
            if fused is None:
                continue
            sizes = initializer(
                graph, f"sizes.{last_dim(gate)}.{last_dim(up)}", np.array([last_dim(gate), last_dim(up)], np.int64)
            )
            split = node("Split", [fused, sizes], {"axis": -1}, outputs=2)
            made_by = fused.producer()
            assert made_by is not None
            graph.insert_after(made_by, split)
            for old, new in ((gate, split.outputs[0]), (up, split.outputs[1])):
                new.type, new.shape = old.type, old.shape
                replace(old, new)
            break


def _activation_source(value: ir.Value | None) -> ir.Value | None:
    """The `Linear` output that an activation was computed from, if that is all that a value depends on."""
    seen: list[ir.Value] = [value] if value is not None else []
    sources: set[ir.Value] = set()
    for _ in range(16):
        if not seen:
            break
        current = seen.pop()
        made_by = current.producer()
        if made_by is None:
            if constant(current) is None:
                return None
        elif made_by.domain == DOMAIN:
            if made_by.op_type != "Linear":
                return None
            sources.add(current)
        elif made_by.op_type in {"Sigmoid", "Mul", "Tanh", "Erf", "Add", "Pow", "Div", "Gelu", "Relu", "Swish"}:
            seen += [v for v in made_by.inputs if v is not None]
        else:
            return None
    return sources.pop() if len(sources) == 1 and not seen else None


def fuse_silu(model: ir.Model) -> None:
    """x * sigmoid(x) is one node."""
    graph = model.graph
    for product in [n for n in graph if n.op_type == "Mul"]:
        first, second = product.inputs
        for x, gate in ((first, second), (second, first)):
            sigmoid = producer(gate, "Sigmoid")
            if x is not None and sigmoid is not None and sigmoid.inputs[0] is x:
                silu = node("QuickGelu", [x], {"alpha": 1.0}, domain=MICROSOFT, like=product.outputs[0])
                graph.insert_before(product, silu)
                replace(product.outputs[0], silu.outputs[0])
                graph.remove(product, safe=True)
                break


def fuse_norms(model: ir.Model) -> None:
    """A norm of a sum becomes one node that gives both the norm and the sum; a norm alone, one node."""
    graph = model.graph
    for norm in [n for n in graph if n.op_type in {"RMSNormalization", "LayerNormalization"}]:
        x = norm.inputs[0]
        assert x is not None
        residual = producer(x, "Add")
        if residual is not None and _same_shape(residual) and len(dims(x)) == 3 and residual.graph is graph:
            _fuse_residual(graph, norm, residual)
        elif norm.op_type == "RMSNormalization":
            epsilon = {"axis": -1, "epsilon": _epsilon(norm), "stash_type": 1}
            simple = node("SimplifiedLayerNormalization", norm.inputs[:2], epsilon, like=norm.outputs[0])
            graph.insert_before(norm, simple)
            replace(norm.outputs[0], simple.outputs[0])
            graph.remove(norm, safe=True)


def _fuse_residual(graph: ir.Graph, norm: ir.Node, residual: ir.Node) -> None:
    rms = norm.op_type == "RMSNormalization"
    weights = list(norm.inputs[1:2]) if rms else list(norm.inputs[1:3])
    fused = node(
        "SkipSimplifiedLayerNormalization" if rms else "SkipLayerNormalization",
        [*residual.inputs, *weights],
        {"epsilon": _epsilon(norm)},
        domain=MICROSOFT,
        outputs=4,
        like=norm.outputs[0],
    )
    total = residual.outputs[0]
    fused.outputs[3].type, fused.outputs[3].shape = total.type, total.shape
    for unused in fused.outputs[1:3]:
        unused.name = ""
    graph.insert_before(residual, fused)
    replace(norm.outputs[0], fused.outputs[0])
    replace(total, fused.outputs[3])
    graph.remove([norm, residual], safe=True)


def _epsilon(norm: ir.Node) -> float:
    attribute = norm.attributes.get("epsilon")
    return 1e-5 if attribute is None else float(attribute.value)


def _same_shape(add: ir.Node) -> bool:
    """Are both operands computed, and of one shape (so that neither is a bias)?"""
    first, second = add.inputs
    return (
        first is not None
        and second is not None
        and len(dims(first)) == 3
        and dims(first) == dims(second)
        and constant(first) is None
        and constant(second) is None
    )
