"""Pass for engines with a preallocated KV cache: `CausalAttention` becomes `TensorScatter` and `Attention`.

Every row of the cache has `cache_length` places. New tokens are scattered into it from `write_indices` on, and
attention reads the whole row through an explicit mask, so past and present are one buffer that nothing copies.
Positions, causality, windows, padding on either side and the choice of the logits' rows all follow from three numbers
a row (`write_indices`, `row_lengths`, `pad_lengths`). Attention computes in float16, rotary arithmetic in float32.

Requires the semantic graph with its rotary arithmetic folded. Ensures standard operators of opset 24 only, but for
`Linear` nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adx.engines.made_nodes import MadeNodes
from adx.export.rewrite import dims, initializer, last_dim, node, replace
from adx.export.spec import (
    INPUT_IDS,
    LOGITS,
    PAD_LENGTHS,
    POSITION_IDS,
    ROW_LENGTHS,
    WRITE_INDICES,
    KVCacheSpec,
    Phase,
)
from adx.export.trace import DOMAIN, RotaryTable

if TYPE_CHECKING:
    import onnx_ir as ir

BLOCKED = -30000.0  # added to a capped score that a query must not see: finite in float16


@dataclass
class StaticCacheLowering:
    """The pass, over one graph of one phase.

    Attributes:
        model: a semantic graph, its rotary arithmetic folded.
        tables: its rotary tables by name.
        kv_cache: shape of its cache.
        phase: prefill gives the logits of each row's last true token, (B, 1, V); decode those of all new tokens.
    """

    model: ir.Model
    tables: dict[str, RotaryTable]
    kv_cache: KVCacheSpec
    phase: Phase
    _masks: dict[tuple[int, bool], ir.Value] = field(default_factory=dict)
    _rotary: dict[str, tuple[ir.Value, ir.Value]] = field(default_factory=dict)

    def run(self) -> None:
        """Run the pass in place."""
        graph = self.model.graph
        self._ids = next(v for v in graph.inputs if v.name == INPUT_IDS)
        self._past = next(v for v in graph.inputs if str(v.name).startswith("past_key_values."))
        self._write, self._rows, self._pads = (self._row_input(n) for n in (WRITE_INDICES, ROW_LENGTHS, PAD_LENGTHS))
        self._shape_inputs_and_outputs()
        self._head = MadeNodes(self.model)
        self._places, self._positions = self._place_arithmetic()
        for rotary in [n for n in graph if n.domain == DOMAIN and n.op_type == "Rotary"]:
            self._lower_rotary(rotary)
        for attention in [n for n in graph if n.domain == DOMAIN and n.op_type == "CausalAttention"]:
            self._lower_attention(attention)
        self._lower_logits()
        self._head.insert_first()

    def _row_input(self, name: str) -> ir.Value:
        import onnx_ir as ir

        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch_size"]))
        first_past = next(i for i, v in enumerate(self.model.graph.inputs) if str(v.name).startswith("past_"))
        self.model.graph.inputs.insert(first_past, value)
        return value

    def _shape_inputs_and_outputs(self) -> None:
        import onnx_ir as ir

        length = 1 if self.phase == "prefill" else "sequence_length"
        cache: list[int | str] = ["batch_size", self.kv_cache.kv_heads, "cache_length", self.kv_cache.head_dim]
        for value in (*self.model.graph.inputs, *self.model.graph.outputs):
            if str(value.name).startswith(("past_key_values.", "present.")):
                value.shape, value.type = ir.Shape(cache), ir.TensorType(ir.DataType.FLOAT16)
            elif value.name in (INPUT_IDS, POSITION_IDS):
                value.shape = ir.Shape(["batch_size", "sequence_length"])
            elif value.name == LOGITS:
                value.shape = ir.Shape(["batch_size", length, last_dim(value)])

    def _place_arithmetic(self) -> tuple[ir.Value, ir.Value]:
        """Places in the cache of the new tokens, and their positions, both (B, T); a pad's position is 0."""
        add, int64 = self._head.add, self._head.int64
        self._length = add("Squeeze", [add("Shape", [self._ids], start=1, end=2)])
        offsets = add("Range", [int64(0), self._length, int64(1)])  # (T,)
        places = add("Add", [add("Unsqueeze", [self._write, int64([1])]), offsets])
        positions = add("Max", [add("Sub", [places, add("Unsqueeze", [self._pads, int64([1])])]), int64(0)])
        given = next(v for v in self.model.graph.inputs if v.name == POSITION_IDS)
        positions.type, positions.shape = given.type, given.shape
        replace(given, positions)
        self.model.graph.inputs.remove(given)
        return places, positions

    def _lower_rotary(self, rotary: ir.Node) -> None:
        """(x1 cos - x2 sin, x2 cos + x1 sin) on the halves of the rotated part; the rest of the head passes."""
        source = rotary.inputs[0]
        assert source is not None
        cos, sin = self._rotary_rows(str(rotary.attributes["name"].value))
        dim, size = int(rotary.attributes["dim"].value), last_dim(source)
        sizes = [dim // 2, dim // 2, *([size - dim] if size > dim else [])]
        made = MadeNodes(self.model)
        cut = node("Split", [source, made.int64(sizes)], {"axis": -1}, outputs=len(sizes))
        made.nodes.append(cut)
        low, high, *rest = cut.outputs
        first = made.add("Sub", [made.add("Mul", [low, cos]), made.add("Mul", [high, sin])])
        second = made.add("Add", [made.add("Mul", [high, cos]), made.add("Mul", [low, sin])])
        made.replace(rotary, [made.add("Concat", [first, second, *rest], axis=-1)])

    def _rotary_rows(self, name: str) -> tuple[ir.Value, ir.Value]:
        """Cosines and sines of the new tokens, each (B, 1, T, dim / 2) float32; made once a table."""
        if name in self._rotary:
            return self._rotary[name]
        add, int64 = self._head.add, self._head.int64
        table, rows = self.tables[name], self._positions
        if table.long_from is not None:
            assert self.kv_cache.recompute_at is not None
            # A row of `recompute_at` true tokens or more, this call's counted, reads the long values.
            count = add("Unsqueeze", [add("Sub", [self._rows, self._pads]), int64([1])])
            long = add("GreaterOrEqual", [count, int64(self.kv_cache.recompute_at)])
            rows = add("Add", [rows, add("Where", [long, int64(table.long_from), int64(0)])])
        graph = self.model.graph
        cos, sin = (
            add("Unsqueeze", [add("Gather", [initializer(graph, f"{name}.{part}", array), rows]), int64([1])])
            for part, array in (("cos", table.cos), ("sin", table.sin))
        )
        self._rotary[name] = cos, sin
        return cos, sin

    def _lower_attention(self, attention: ir.Node) -> None:
        query, key, value, past_key, past_value = attention.inputs
        scale, softcap = (float(attention.attributes[n].value) for n in ("scale", "softcap"))
        layer, window = (int(attention.attributes[n].value) for n in ("layer", "window"))
        made = MadeNodes(self.model)
        half = made.cast(query, "FLOAT16")
        caches = []
        for part, past, new in (("key", past_key, key), ("value", past_value, value)):
            caches.append(
                made.add("TensorScatter", [past, made.cast(new, "FLOAT16"), self._write], axis=2, mode="linear")
            )
            made.nodes[-1].name = f"layers.{layer}.cache.{part}"
        if softcap:
            out = self._capped(made, half, caches, scale, softcap, self._mask(window, additive=True))
        else:
            out = made.add("Attention", [half, *caches, self._mask(window)], scale=scale)
        made.nodes[-1].name = f"layers.{layer}.attention"
        made.replace(attention, [made.cast(out, "FLOAT"), *caches])

    def _capped(
        self, made: MadeNodes, query: ir.Value, caches: list[ir.Value], scale: float, softcap: float, mask: ir.Value
    ) -> ir.Value:
        """Attention with a soft cap, spelled out: ONNX has changed under one opset whether `Attention` caps before or
        after it adds the mask, and capped after, a blocked key is seen. Scores are scaled before they are made, so
        that they stay within float16; the softmax computes in float32."""
        heads, dim = dims(query)[1], last_dim(query)
        kv_heads = self.kv_cache.kv_heads
        assert isinstance(heads, int)
        keys, values = (made.add("Unsqueeze", [cache, made.int64([2])]) for cache in caches)
        # Query heads that share a key head stand in a dimension of their own: (B, Hkv, H / Hkv, T, D).
        small = made.cast(made.add("Mul", [made.cast(query, "FLOAT"), made.float32(scale / softcap)]), "FLOAT16")
        grouped = made.add("Reshape", [small, made.int64([0, kv_heads, heads // kv_heads, -1, dim])])
        scores = made.add("MatMul", [grouped, made.add("Transpose", [keys], perm=[0, 1, 2, 4, 3])])
        capped = made.add("Mul", [made.add("Tanh", [made.cast(scores, "FLOAT")]), made.float32(softcap)])
        masked = made.add("Add", [capped, made.add("Unsqueeze", [mask, made.int64([2])])])
        weights = made.cast(made.add("Softmax", [masked], axis=-1), "FLOAT16")
        mixed = made.add("MatMul", [weights, values])
        return made.add("Reshape", [mixed, made.int64([0, heads, -1, dim])])

    def _mask(self, window: int, *, additive: bool = False) -> ir.Value:
        """(B, 1, T, cache_length): whether a query sees a key, or 0 and `BLOCKED` in float32 to be added.

        A key is seen if it stands at or before the query's place, within the window (the query counted), and is no
        left padding. Every query sees itself, so no row of the softmax is empty.
        """
        key = (window, additive)
        if key in self._masks:
            return self._masks[key]
        add, int64 = self._head.add, self._head.int64
        if additive:
            zero, blocked = self._head.float32(0.0), self._head.float32(BLOCKED)
            self._masks[key] = add("Where", [self._mask(window), zero, blocked])
            return self._masks[key]
        cache_length = add("Squeeze", [add("Shape", [self._past], start=2, end=3)])
        keys = add("Range", [int64(0), cache_length, int64(1)])  # (S,)
        queries = add("Unsqueeze", [self._places, int64([1, 3])])  # (B, 1, T, 1)
        seen = add("LessOrEqual", [keys, queries])
        true = add("GreaterOrEqual", [keys, add("Unsqueeze", [self._pads, int64([1, 2, 3])])])
        if window:
            true = add("And", [true, add("Greater", [keys, add("Sub", [queries, int64(window)])])])
        self._masks[key] = add("And", [seen, add("Or", [true, add("Equal", [keys, queries])])])
        return self._masks[key]

    def _lower_logits(self) -> None:
        """All rows, or of each row the last of this call's true tokens: (B, 1, hidden)."""
        graph = self.model.graph
        (marker,) = [n for n in graph if n.domain == DOMAIN and n.op_type == "LogitsRows"]
        hidden = marker.inputs[0]
        assert hidden is not None
        made = MadeNodes(self.model)
        if self.phase == "prefill":
            last = made.add("Sub", [made.add("Sub", [self._rows, self._write]), made.int64(1)])
            # A row that ends in another call (a long prompt is read in chunks) gives the logits of some token here.
            end = made.add("Sub", [self._length, made.int64(1)])
            last = made.add("Max", [made.add("Min", [last, end]), made.int64(0)])
            index = made.add("Unsqueeze", [last, made.int64([1])])  # (B, 1)
            row = made.add("GatherND", [hidden, index], batch_dims=1)  # (B, hidden)
            hidden = made.add("Unsqueeze", [row, made.int64([1])])
        made.replace(marker, [hidden])
