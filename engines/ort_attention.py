"""Pass for ONNX Runtime: `CausalAttention` becomes `GroupQueryAttention`, rotary inside it where it can be.

Requires folded rotary nodes and collected linear layers. Ensures that past and present are buffers of one shape that
the caller may bind to the same memory, that rows are padded on the right with a length each, and that query, key and
value come packed from one projection where the model allows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from adx.export.linears import LinearLayer, names_of
from adx.export.rewrite import consumers, dims, initializer, last_dim, node, part_of, producer, replace
from adx.export.spec import SEQLENS_K, TOTAL_SEQUENCE_LENGTH
from adx.export.trace import DOMAIN, RotaryTable

if TYPE_CHECKING:
    import onnx_ir as ir

HEADS_AND_TOKENS = [0, 2, 1, 3]  # the permutation between (B, H, T, D) and (B, T, H, D)
MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class _Rotation:
    table: RotaryTable
    name: str
    dim: int
    position_ids: ir.Value


@dataclass
class AttentionLowering:
    """The pass, over one graph."""

    model: ir.Model
    layers: dict[str, LinearLayer]
    tables: Mapping[str, RotaryTable]
    recompute_at: int | None

    def run(self) -> None:
        """Run the pass in place."""
        graph = self.model.graph
        self._seqlens = _input(graph, SEQLENS_K, ["batch_size"])
        self._total = _input(graph, TOTAL_SEQUENCE_LENGTH, [])
        for attention in [n for n in graph if n.domain == DOMAIN and n.op_type == "CausalAttention"]:
            self._lower(attention)

    def _lower(self, attention: ir.Node) -> None:
        graph = self.model.graph
        query, key, value, past_key, past_value = attention.inputs
        assert query is not None
        assert key is not None
        assert value is not None
        heads, kv_heads, dim = _fixed(query, 1), _fixed(key, 1), last_dim(query)
        query, rotation = self._unrotated(query)
        key, key_rotation = self._unrotated(key)
        inside = rotation is not None and rotation == key_rotation and _fits_inside(rotation.table)
        packed = self._packed(attention, query, key, value) if inside or rotation is None else None
        if packed is not None:
            tensors: list[ir.Value | None] = [packed, None, None]
        else:
            tensors = [
                _tokens_major(attention, v, n * dim) for v, n in ((query, heads), (key, kv_heads), (value, kv_heads))
            ]
            if rotation is not None and key_rotation is not None and not inside:
                tensors[0] = self._rotated(attention, tensors[0], rotation, heads)
                tensors[1] = self._rotated(attention, tensors[1], key_rotation, kv_heads)
        caches: list[ir.Value | None] = []
        if inside and rotation is not None:
            caches = [
                initializer(graph, f"{rotation.name}.cos", rotation.table.cos),
                initializer(graph, f"{rotation.name}.sin", rotation.table.sin),
            ]
        window = int(attention.attributes["window"].value)
        attributes = {
            "num_heads": heads,
            "kv_num_heads": kv_heads,
            "scale": float(attention.attributes["scale"].value),
            "local_window_size": window or -1,
            "softcap": float(attention.attributes["softcap"].value),
            "do_rotary": int(inside),
        }
        inputs = [*tensors, past_key, past_value, self._seqlens, self._total, *caches]
        lowered = node("GroupQueryAttention", inputs, attributes, domain=MICROSOFT, outputs=3)
        lowered.name = f"layers.{attention.attributes['layer'].value}.attention"
        graph.insert_before(attention, lowered)
        for old, new in zip(attention.outputs[1:], lowered.outputs[1:], strict=True):
            replace(old, new)
        _replace_output(attention, lowered, heads, dim)
        graph.remove(attention, safe=True)

    def _unrotated(self, value: ir.Value) -> tuple[ir.Value, _Rotation | None]:
        rotary = producer(value, "Rotary", DOMAIN)
        if rotary is None:
            return value, None
        source, position_ids = rotary.inputs
        assert source is not None
        assert position_ids is not None
        name = str(rotary.attributes["name"].value)
        return source, _Rotation(self.tables[name], name, int(rotary.attributes["dim"].value), position_ids)

    def _rotated(self, before: ir.Node, value: ir.Value | None, rotation: _Rotation, heads: int) -> ir.Value:
        """`RotaryEmbedding` on (B, T, H*D), for tables whose row depends on the length of the sequence."""
        graph = self.model.graph
        attributes = {"num_heads": heads, "rotary_embedding_dim": rotation.dim}
        inputs = [
            value,
            self._table_rows(rotation),
            initializer(graph, f"{rotation.name}.cos", rotation.table.cos),
            initializer(graph, f"{rotation.name}.sin", rotation.table.sin),
        ]
        rotated = node("RotaryEmbedding", inputs, attributes, domain=MICROSOFT)
        graph.insert_before(before, rotated)
        return rotated.outputs[0]

    def _table_rows(self, rotation: _Rotation) -> ir.Value:
        """Rows of the table: positions, moved to the long values for sequences that have reached `recompute_at`."""
        graph = self.model.graph
        if rotation.table.long_from is None:
            return rotation.position_ids
        name = f"{rotation.name}.rows"
        for made in graph:
            if made.outputs[0].name == name:
                return made.outputs[0]
        assert self.recompute_at is not None
        threshold = initializer(graph, f"{rotation.name}.threshold", np.array(self.recompute_at - 1, np.int32))
        offset = initializer(graph, f"{rotation.name}.offset", np.array(rotation.table.long_from, np.int64))
        zero = initializer(graph, f"{rotation.name}.zero", np.array(0, np.int64))
        axis = initializer(graph, "axis.1", np.array([1], np.int64))
        long = node("GreaterOrEqual", [self._seqlens, threshold])
        chosen = node("Where", [long.outputs[0], offset, zero])
        column = node("Unsqueeze", [chosen.outputs[0], axis])
        rows = node("Add", [rotation.position_ids, column.outputs[0]])
        rows.outputs[0].name = name
        graph.insert_before(graph[0], [long, chosen, column, rows])
        return rows.outputs[0]

    def _packed(self, before: ir.Node, query: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value | None:
        """One (B, T, (H + 2 Hkv) * D) value that holds query, key and value, or None."""
        interleaved = self._interleaved(query, key, value)
        if interleaved is not None:
            return interleaved
        flat = [_existing_tokens_major(v) for v in (query, key, value)]
        if any(v is None for v in flat):
            return None
        parts = [v for v in flat if v is not None]
        made_by = parts[0].producer()
        if made_by is not None and made_by.op_type in {"Split", "Slice"} and made_by.inputs[0] is not None:
            whole = made_by.inputs[0]
            spans = [part_of(v, whole) for v in parts]
            ends = [span[1] for span in spans if span is not None]
            if len(ends) == 3 and [s[0] for s in spans if s] == [0, *ends[:2]] and ends[2] == last_dim(whole):
                return whole
        return fuse_linears(self.model, before, parts)

    def _interleaved(self, query: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value | None:
        """A projection whose features lie as (head, q|k|v, D): reorder its rows to (q|k|v, head, D)."""
        made_by = query.producer()
        whole = made_by.inputs[0] if made_by is not None and made_by.op_type in {"Split", "Slice"} else None
        if whole is None or len(dims(whole)) != 4:
            return None
        dim = last_dim(query)
        if [part_of(v, whole) for v in (query, key, value)] != [(i * dim, (i + 1) * dim) for i in range(3)]:
            return None
        flat = _existing_tokens_major(whole)
        linear = producer(flat, "Linear", DOMAIN)
        if flat is None or linear is None or len(list(flat.uses())) != 1:
            return None
        (name,) = names_of(linear)
        heads = _fixed(whole, 1)
        rows = np.arange(heads * 3 * dim).reshape(heads, 3, dim).transpose(1, 0, 2).reshape(-1)
        self.layers[name] = self.layers[name].reordered(rows)
        return flat


def _fits_inside(table: RotaryTable) -> bool:
    """Can GroupQueryAttention rotate with this table? Its kernel takes multiples of 8, and rows by position alone."""
    return table.long_from is None and table.cos.shape[1] % 8 == 0


def fuse_linears(model: ir.Model, before: ir.Node, values: list[ir.Value]) -> ir.Value | None:
    """One `Linear` whose output is the given values side by side; None unless each is a `Linear` on the same input."""
    import onnx_ir as ir

    nodes = [producer(v, "Linear", DOMAIN) for v in values]
    made = [n for n in nodes if n is not None]
    if len(made) != len(values) or len({id(n.inputs[0]) for n in made}) != 1:
        return None
    names = [name for n in made for name in names_of(n)]
    fused = node("Linear", [made[0].inputs[0]], {"names": names}, domain=DOMAIN)
    fused.outputs[0].type = values[0].type
    fused.outputs[0].shape = ir.Shape([*dims(values[0])[:-1], sum(last_dim(v) for v in values)])
    model.graph.insert_after(made[0], fused)
    del before
    return fused.outputs[0]


def _input(graph: ir.Graph, name: str, shape: list[str]) -> ir.Value:
    import onnx_ir as ir

    value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(shape))
    graph.inputs.append(value)
    return value


def _fixed(value: ir.Value, axis: int) -> int:
    size = dims(value)[axis]
    assert isinstance(size, int), f"{value.name}: dimension {axis} is not fixed"
    return size


def _existing_tokens_major(value: ir.Value) -> ir.Value | None:
    """The (B, T, H*D) value that a (B, H, T, D) one was reshaped and transposed from, if there is one."""
    transpose = producer(value, "Transpose")
    if transpose is None or list(transpose.attributes["perm"].value) != HEADS_AND_TOKENS:
        return None
    reshape = producer(transpose.inputs[0], "Reshape")
    source = reshape.inputs[0] if reshape is not None else None
    if source is None or len(dims(source)) != 3 or last_dim(source) != _fixed(value, 1) * last_dim(value):
        return None
    return source


def _tokens_major(before: ir.Node, value: ir.Value, width: int) -> ir.Value:
    """(B, H, T, D) as (B, T, H*D), by undoing what made it or by a transposition."""
    existing = _existing_tokens_major(value)
    if existing is not None:
        return existing
    graph = before.graph
    assert graph is not None
    transpose = producer(value, "Transpose")
    if transpose is not None and list(transpose.attributes["perm"].value) == HEADS_AND_TOKENS:
        tokens = transpose.inputs[0]
    else:
        swapped = node("Transpose", [value], {"perm": HEADS_AND_TOKENS})
        graph.insert_before(before, swapped)
        tokens = swapped.outputs[0]
    shape = initializer(graph, f"shape.0.0.{width}", np.array([0, 0, width], np.int64))
    flat = node("Reshape", [tokens, shape])
    graph.insert_before(before, flat)
    return flat.outputs[0]


def _replace_output(attention: ir.Node, lowered: ir.Node, heads: int, dim: int) -> None:
    """Readers of (B, H, T, D) read (B, T, H*D): directly where they only transposed and flattened it."""
    graph = attention.graph
    assert graph is not None
    out = lowered.outputs[0]
    old = attention.outputs[0]
    for transpose in consumers(old, "Transpose"):
        for reshape in consumers(transpose.outputs[0], "Reshape"):
            flattened = reshape.outputs[0]
            if len(dims(flattened)) == 3 and last_dim(flattened) == heads * dim:
                out.type, out.shape = flattened.type, flattened.shape
                replace(flattened, out)
                graph.remove(reshape, safe=True)
        if not list(transpose.outputs[0].uses()):
            graph.remove(transpose, safe=True)
    if list(old.uses()):
        shape = initializer(graph, f"shape.0.0.{heads}.{dim}", np.array([0, 0, heads, dim], np.int64))
        split = node("Reshape", [out, shape])
        swapped = node("Transpose", [split.outputs[0]], {"perm": HEADS_AND_TOKENS}, like=old)
        graph.insert_after(lowered, [split, swapped])
        replace(old, swapped.outputs[0])
