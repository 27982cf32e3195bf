"""Pass: the arithmetic of a rotary embedding becomes one node, `adx::Rotary(x, position_ids)`.

Requires the semantic graph. Ensures that no `RotaryTable` is left: every x*cos + rotate_half(x)*sin, on the whole head
or on its first `dim` elements, is one node with attributes `name` (of the table) and `dim`.
Formula: Su et al. 2021, "RoFormer", in the halves' layout of GPT-NeoX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adx.export.errors import LoweringError
from adx.export.rewrite import consumers, last_dim, node, part_of, producer, replace
from adx.export.trace import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir


def fold_rotary(model: ir.Model) -> None:
    """Run the pass in place.

    Raises:
        LoweringError: a table is read by arithmetic that is not a rotary embedding.
    """
    graph = model.graph
    tables = [n for n in graph if n.domain == DOMAIN and n.op_type == "RotaryTable"]
    for table in tables:
        cos, sin = table.outputs
        cosines = [cos, *(n.outputs[0] for n in consumers(cos, "Unsqueeze"))]
        sines = {sin, *(n.outputs[0] for n in consumers(sin, "Unsqueeze"))}
        found = 0
        for value in cosines:
            for product in consumers(value, "Mul"):
                found += _fold(graph, table, product, value, sines)
        if not found:
            raise LoweringError(f"the rotary table {table.attributes['name'].value} is not used as a rotary embedding")


def _fold(graph: ir.Graph, table: ir.Node, product: ir.Node, cosine: ir.Value, sines: set[ir.Value]) -> int:
    source = _other(product, cosine)
    sums = consumers(product.outputs[0], "Add")
    if source is None or len(sums) != 1:
        raise LoweringError(
            f"node {product.name}: a cosine of {table.attributes['name'].value} is multiplied out of place"
        )
    turned = producer(_other(sums[0], product.outputs[0]), "Mul")
    if turned is None or not any(
        _is_half_turn(_other(turned, sine), source) for sine in sines if sine in turned.inputs
    ):
        raise LoweringError(f"node {sums[0].name}: not the sum x*cos + rotate_half(x)*sin")
    dim = last_dim(source)
    old = sums[0].outputs[0]
    whole = _whole_head(old, source, dim)
    if whole is not None:
        source, old = whole
    attributes: dict[str, int | str] = {"name": str(table.attributes["name"].value), "dim": dim}
    rotary = node("Rotary", [source, table.inputs[0]], attributes, domain=DOMAIN, like=old)
    old_producer = old.producer()
    assert old_producer is not None
    graph.insert_after(old_producer, rotary)
    replace(old, rotary.outputs[0])
    return 1


def _other(binary: ir.Node, one: ir.Value) -> ir.Value | None:
    """The operand that is not `one`."""
    first, second = binary.inputs
    return second if first is one else first


def _is_half_turn(value: ir.Value | None, source: ir.Value) -> bool:
    """Is it concat(-x[half:], x[:half])?"""
    concat = producer(value, "Concat")
    if concat is None or len(concat.inputs) != 2:
        return False
    negated = producer(concat.inputs[0], "Neg")
    half = last_dim(source) // 2
    return (
        negated is not None
        and part_of(negated.inputs[0], source) == (half, 2 * half)
        and part_of(concat.inputs[1], source) == (0, half)
    )


def _whole_head(rotated: ir.Value, source: ir.Value, dim: int) -> tuple[ir.Value, ir.Value] | None:
    """(head, result) where only the head's first `dim` elements are rotated and the rest is concatenated."""
    made_by = source.producer()
    if made_by is None or made_by.op_type not in {"Slice", "Split"}:
        return None
    head = made_by.inputs[0]
    for concat in consumers(rotated, "Concat"):
        if len(concat.inputs) == 2 and concat.inputs[0] is rotated and head is not None:
            rest = part_of(concat.inputs[1], head)
            if part_of(source, head) == (0, dim) and rest == (dim, last_dim(head)):
                return head, concat.outputs[0]
    return None
