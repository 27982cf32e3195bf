"""The linear layers of a semantic graph as data: their weights by name, apart from the nodes that use them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from adx.export.rewrite import producer
from adx.export.trace import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir

Floats = NDArray[np.float32]
Role = Literal["head", "other"]


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer, y = x @ weight.T + bias.

    Attributes:
        name: the layer's path in the model, as `model.layers.0.mlp.up_proj`.
        tensor: the checkpoint's tensor.
        transposed: the tensor is (in, out) and not (out, in).
        bias_tensor: the checkpoint's bias (out,), or None.
        input_scale: factor of each input feature's column, or None.
        output_scale: factor of each output feature, in the tensor's own order, or None.
        rows: order in which the output features are wanted, or None for the tensor's own.
        role: `head` if it makes the logits, else `other`.
        tied_to: name of the initializer that is the same tensor (an embedding), or None.
    """

    name: str
    tensor: ir.TensorProtocol
    transposed: bool
    bias_tensor: ir.TensorProtocol | None
    role: Role = "other"
    input_scale: Floats | None = None
    output_scale: Floats | None = None
    rows: NDArray[np.int64] | None = None
    tied_to: str | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) features."""
        first, second = (int(size) for size in self.tensor.shape.numpy())
        return (second, first) if self.transposed else (first, second)

    def weight(self) -> Floats:
        """The weight, (out, in) float32; read from the checkpoint anew each time."""
        array: Floats = np.asarray(self.tensor.numpy(), np.float32)
        array = array.T if self.transposed else array
        if self.input_scale is not None:
            array = array * self.input_scale
        if self.output_scale is not None:
            array = array * self.output_scale[:, None]
        return array if self.rows is None else array[self.rows]

    def bias(self) -> Floats | None:
        """The bias (out,) float32, or None."""
        if self.bias_tensor is None:
            return None
        array: Floats = np.asarray(self.bias_tensor.numpy(), np.float32)
        if self.output_scale is not None:
            array = array * self.output_scale
        return array if self.rows is None else array[self.rows]

    def with_input_scale(self, scale: Floats) -> LinearLayer:
        """The layer with the columns of its weight multiplied, on top of what scales them already."""
        return replace(self, input_scale=scale if self.input_scale is None else self.input_scale * scale)

    def reordered(self, rows: NDArray[np.int64]) -> LinearLayer:
        """The layer with its output features in another order."""
        return replace(self, rows=rows if self.rows is None else self.rows[rows])


def collect_linears(model: ir.Model) -> dict[str, LinearLayer]:
    """Take the weights out of a semantic graph: its `Linear` nodes keep their input and `names`, a list of one.

    Returns:
        The layers by name, in the graph's order.
    """
    import onnx_ir as ir

    layers: dict[str, LinearLayer] = {}
    for node in [n for n in model.graph if n.domain == DOMAIN and n.op_type == "Linear"]:
        name = str(node.attributes["name"].value)
        weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
        assert weight is not None, f"{name} has no weight"
        assert weight.const_value is not None, f"{name}: its weight is computed"
        shared = [use.node for use in weight.uses() if use.node is not node]
        layers[name] = LinearLayer(
            name,
            weight.const_value,
            bool(node.attributes["transposed"].value),
            bias.const_value if bias is not None else None,
            _role(node),
            tied_to=weight.name if shared else None,
        )
        for index in range(1, len(node.inputs)):
            node.replace_input_with(index, None)
        node.attributes["names"] = ir.AttrStrings("names", [name])
    return layers


def groups_by_input(model: ir.Model) -> list[tuple[str, ...]]:
    """Names of the layers that read the same value, in the graph's order; the layers have been collected."""
    groups: dict[ir.Value, list[str]] = {}
    for node in model.graph:
        if node.domain == DOMAIN and node.op_type == "Linear" and node.inputs[0] is not None:
            groups.setdefault(node.inputs[0], []).extend(names_of(node))
    return [tuple(names) for names in groups.values()]


def _role(linear: ir.Node) -> Role:
    """Where a linear layer stands, by what makes its input."""
    return "other" if producer(linear.inputs[0], "LogitsRows", DOMAIN) is None else "head"


def names_of(node: ir.Node) -> list[str]:
    """The layers that a `Linear` node computes, side by side."""
    return [str(name) for name in node.attributes["names"].value]
