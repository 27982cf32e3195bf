"""Nodes in the making: what a pass writes down in order before it puts them into the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from adx.export.rewrite import Attribute, initializer, node, replace

if TYPE_CHECKING:
    import onnx_ir as ir


class MadeNodes:
    """New nodes of one graph, in order."""

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self.nodes: list[ir.Node] = []

    def add(self, op: str, inputs: Sequence[ir.Value | None], **attributes: Attribute) -> ir.Value:
        """One more node; its first output."""
        self.nodes.append(node(op, inputs, attributes))
        return self.nodes[-1].outputs[0]

    def cast(self, value: ir.Value | None, to: Literal["FLOAT", "FLOAT16"]) -> ir.Value:
        """A value in another type."""
        import onnx_ir as ir

        assert value is not None
        made = self.add("Cast", [value], to=int(ir.DataType[to]))
        made.type, made.shape = ir.TensorType(ir.DataType[to]), value.shape
        return made

    def int64(self, numbers: int | list[int]) -> ir.Value:
        """The graph's constant of these numbers."""
        kind = "list." if isinstance(numbers, list) else ""
        name = f"int64.{kind}" + "x".join(map(str, numbers if isinstance(numbers, list) else [numbers]))
        return initializer(self.graph, name, np.array(numbers, np.int64))

    def float32(self, number: float) -> ir.Value:
        """The graph's scalar constant of this number."""
        return initializer(self.graph, f"float32.{number!r}", np.array(number, np.float32))

    def replace(self, old: ir.Node, values: Sequence[ir.Value]) -> None:
        """Put the nodes where `old` stands, and `values` in place of its outputs."""
        for before, after in zip(old.outputs, values, strict=True):
            if not before.is_graph_output():
                after.type, after.shape = before.type, before.shape
            replace(before, after)
        self.graph.insert_before(old, self.nodes)
        self.graph.remove(old, safe=True)

    def insert_first(self) -> None:
        """Put the nodes before all others of the graph."""
        self.graph.insert_before(self.graph[0], self.nodes)
