"""Pass: casts move down through nodes that only move data, and a cast back to where a value came from is dropped.

Requires casts between float16 and float32 around the parts that compute in float16. Ensures that data movement
between two such parts (heads split off a projection on their way to the cache) stays in float16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adx.export.rewrite import node, producer

if TYPE_CHECKING:
    import onnx_ir as ir

_MOVES = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split"}


def move_casts(model: ir.Model) -> None:
    """Run the pass in place."""
    import onnx_ir as ir

    graph = model.graph
    graph.sort()
    for mover in [n for n in graph if n.op_type in _MOVES and n.domain == ""]:
        widened = _widening(mover.inputs[0])
        if widened is not None and not any(out.is_graph_output() for out in mover.outputs):
            _move_below(mover, widened)
    for cast in [n for n in graph if n.op_type == "Cast" and n.attributes["to"].value == ir.DataType.FLOAT16]:
        widened = _widening(cast.inputs[0])
        if widened is not None and not cast.outputs[0].is_graph_output():
            ir.convenience.replace_all_uses_with(cast.outputs[0], widened)


def _widening(value: ir.Value | None) -> ir.Value | None:
    """The float16 value that a cast to float32 made this one from, or None."""
    import onnx_ir as ir

    cast = producer(value, "Cast")
    if cast is None or cast.attributes["to"].value != ir.DataType.FLOAT:
        return None
    source = cast.inputs[0]
    return source if source is not None and (_is_half(source)) else None


def _is_half(value: ir.Value) -> bool:
    import onnx_ir as ir

    return value.type == ir.TensorType(ir.DataType.FLOAT16)


def _move_below(mover: ir.Node, source: ir.Value) -> None:
    """Let a node move the float16 value, and cast what comes out of it."""
    import onnx_ir as ir

    graph = mover.graph
    assert graph is not None
    mover.replace_input_with(0, source)
    for out in mover.outputs:
        cast = node("Cast", [out], {"to": int(ir.DataType.FLOAT)}, like=out)
        readers = [(use.node, use.idx) for use in out.uses() if use.node is not cast]
        out.type = ir.TensorType(ir.DataType.FLOAT16)
        graph.insert_after(mover, cast)
        for reader, index in readers:
            reader.replace_input_with(index, cast.outputs[0])
