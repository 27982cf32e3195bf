"""Pass for the portable graphs: `CausalAttention` in standard operators, with an additive mask.

Requires an `attention_mask` input. Ensures that no `CausalAttention` is left; a prefill graph reads no past.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from adx.export.rewrite import dims, initializer, last_dim, node, replace
from adx.export.spec import INPUT_IDS, Phase
from adx.export.trace import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir

ONNX_INT64 = 7  # TensorProto.INT64
BLOCKED = -1e9  # added to the score of a key that a query must not see: finite, so that no row gives NaN


def lower_attention(model: ir.Model, mask: ir.Value, phase: Phase) -> None:
    """Run the pass in place.

    Args:
        mask: (batch_size, total_sequence_length), 1 for true tokens, past ones first.
        phase: prefill's present is its new keys and values; decode's is past and new side by side.
    """
    graph = model.graph
    masks: dict[int, ir.Value] = {}
    for attention in [n for n in graph if n.domain == DOMAIN and n.op_type == "CausalAttention"]:
        query, key, value, *past = attention.inputs
        assert key is not None
        assert value is not None
        window = int(attention.attributes["window"].value)
        if window not in masks:
            masks[window] = _additive_mask(model, mask, window)
        scale, softcap = (float(attention.attributes[name].value) for name in ("scale", "softcap"))
        if softcap:
            lowered, presents = _capped_attention(attention, masks[window], past if phase == "decode" else [])
        elif phase == "decode":
            inputs = [query, key, value, masks[window], *past]
            lowered = node("Attention", inputs, {"scale": scale}, outputs=3, like=query)
            graph.insert_before(attention, lowered)
            presents = list(lowered.outputs[1:])
        else:
            # Nothing is past: the present is the new keys and values themselves.
            lowered = node("Attention", [query, key, value, masks[window]], {"scale": scale}, like=query)
            copies = [node("Identity", [v], like=v) for v in (key, value)]
            graph.insert_before(attention, [lowered, *copies])
            presents = [n.outputs[0] for n in copies]
        results = [lowered.outputs[0], *presents]
        lowered.name = f"layers.{attention.attributes['layer'].value}.attention"
        for old, new in zip(attention.outputs, results, strict=True):
            replace(old, new)
        graph.remove(attention, safe=True)


def _capped_attention(
    attention: ir.Node, mask: ir.Value, past: list[ir.Value | None]
) -> tuple[ir.Node, list[ir.Value]]:
    """Attention with a soft cap in elementary operators: the last of its nodes, and its present.

    ONNX's text on whether `Attention` caps before or after it adds the mask has changed under one opset number, and
    capped after, a blocked key is seen; spelled out, it is right in every runtime.
    """
    graph = attention.graph
    assert graph is not None
    query, key, value = attention.inputs[:3]
    assert query is not None
    assert key is not None
    scale, softcap = (float(attention.attributes[name].value) for name in ("scale", "softcap"))
    heads, kv_heads, dim = dims(query)[1], dims(key)[1], last_dim(query)
    assert isinstance(heads, int)
    assert isinstance(kv_heads, int)
    made: list[ir.Node] = []

    def const(name: str, numbers: object, dtype: type = np.int64) -> ir.Value:
        return initializer(graph, f"capped.{name}", np.array(numbers, dtype))

    def add(op: str, inputs: list[ir.Value | None], attributes: dict[str, int | list[int]] | None = None) -> ir.Value:
        made.append(node(op, inputs, attributes))
        return made[-1].outputs[0]

    def joined(old: ir.Value | None, new: ir.Value | None) -> ir.Value:
        return add("Identity", [new]) if old is None else add("Concat", [old, new], {"axis": 2})

    keys, values = (joined(old, new) for old, new in zip(past or (None, None), (key, value), strict=True))
    group = const("group", [2])
    # Query heads that share a key head stand in a dimension of their own: (B, Hkv, H / Hkv, T, D).
    grouped = add("Reshape", [query, const(f"queries.{heads}.{dim}", [0, kv_heads, heads // kv_heads, -1, dim])])
    turned = add("Unsqueeze", [add("Transpose", [keys], {"perm": [0, 1, 3, 2]}), group])
    scores = add("MatMul", [grouped, turned])
    small = add("Mul", [scores, const(f"scale.{scale / softcap:.9g}", scale / softcap, np.float32)])
    capped = add("Mul", [add("Tanh", [small]), const(f"cap.{softcap:.9g}", softcap, np.float32)])
    weights = add("Softmax", [add("Add", [capped, add("Unsqueeze", [mask, group])])], {"axis": -1})
    mixed = add("MatMul", [weights, add("Unsqueeze", [values, group])])
    add("Reshape", [mixed, const(f"heads.{heads}.{dim}", [0, heads, -1, dim])])
    graph.insert_before(attention, made)
    return made[-1], [keys, values]


def _additive_mask(model: ir.Model, mask: ir.Value, window: int) -> ir.Value:
    """(B, 1, T, total) float32: 0 where a query sees a key, `BLOCKED` where not.

    A key is seen if it is no padding, not after the query, and within the window. Order is by place in the row, and
    query t of T stands at place total - T + t; the window counts true tokens only, so that padding between past and
    new tokens does not shorten it. Every query sees itself, so no row of the softmax is empty.
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
    first, last = const("axis.1", [1], np.int64), const("axis.2", [2], np.int64)
    total = add("Shape", [mask], start=1, end=2)
    start = add("Sub", [total, add("Shape", [ids], start=1, end=2)])
    keys = add("Range", [zero, add("Squeeze", [total]), one])  # (total,)
    queries = add("Unsqueeze", [add("Slice", [keys, start, total]), first])  # (T, 1)
    true = add("Greater", [mask, zero])  # (B, total)
    seen = add("And", [add("LessOrEqual", [keys, queries]), add("Unsqueeze", [true, first])])  # (B, T, total)
    if window:
        counts = add("CumSum", [add("Cast", [true], to=ONNX_INT64), one])  # (B, total): true tokens so far
        oldest = add("Sub", [add("Slice", [counts, start, total, first]), const(f"window.{window}", window, np.int64)])
        inside = add("Greater", [add("Unsqueeze", [counts, first]), add("Unsqueeze", [oldest, last])])
        seen = add("And", [seen, inside])
    allowed = add("Unsqueeze", [add("Or", [seen, add("Equal", [keys, queries])]), first])
    result = add("Where", [allowed, const("seen", 0.0, np.float32), const("blocked", BLOCKED, np.float32)])
    graph.insert_before(graph[0], made)
    return result
