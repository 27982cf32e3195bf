"""Pass for the float16 graphs: linear layers and embeddings in float16, or in integers.

What goes into a layer and what comes out of it is float16; what lies between layers (residual sums, norms,
activations) stays float32. A layer whose input or output came near float16's end on the calibration samples computes
on values scaled down by a power of two, which costs no precision. Layers with one scale per output channel are 8 bits
behind `DequantizeLinear`, as TensorRT takes them; where the recipe gives an input scale, `QuantizeLinear` and
`DequantizeLinear` stand before the product as well. Layers in blocks are ONNX Runtime's `MatMulNBits`.

Requires collected linear layers. Ensures that no `Linear` is left and that weights lie in the weights file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from adx.calibration.channels import ChannelScheme, quantize_channels
from adx.calibration.quantizers import WeightQuantizer
from adx.calibration.ranges import LayerRange
from adx.calibration.recipe import QuantRecipe
from adx.calibration.weights import BlockScheme, quantize
from adx.engines.half_blocks import block_product, can_gather, gathered_rows
from adx.engines.made_nodes import MadeNodes
from adx.engines.ort_linears import is_token_table
from adx.export.errors import LoweringError
from adx.export.linears import Floats, LinearLayer, names_of
from adx.export.rewrite import dims, initializer
from adx.export.trace import DOMAIN
from adx.export.weights_file import WeightsFile

if TYPE_CHECKING:
    import onnx_ir as ir

HALF_MAX = float(np.finfo(np.float16).max)
# Largest magnitude of a float16 tensor that is let be: an eighth of float16's end, since other text than the
# calibration samples goes further.
LARGEST = HALF_MAX / 8


@dataclass
class HalfLinears:
    """The pass, over one graph and into one weights file.

    Attributes:
        model: the graph.
        layers: its linear layers by name.
        recipe: how each is stored.
        quantizer: what makes integers of the weight of a layer in blocks.
        ranges: largest magnitudes at each layer, before smoothing.
        weights: the file that takes the tensors as they are made.
        progress: called with the name of each layer.
    """

    model: ir.Model
    layers: dict[str, LinearLayer]
    recipe: QuantRecipe
    quantizer: WeightQuantizer
    ranges: Mapping[str, LayerRange]
    weights: WeightsFile
    progress: Callable[[str], None]

    def run(self) -> None:
        """Run the pass in place."""
        graph = self.model.graph
        for linear in [n for n in graph if n.domain == DOMAIN and n.op_type == "Linear"]:
            (name,) = names_of(linear)
            self.progress(name)
            self._lower(linear, self.layers[name])
        for gather in [n for n in graph if n.op_type == "Gather" and n.domain == ""]:
            if is_token_table(self.model, gather.inputs[1]):
                self._lower_embedding(gather)

    def _lower(self, linear: ir.Node, layer: LinearLayer) -> None:
        made = MadeNodes(self.model)
        scheme = self.recipe.layers[layer.name].scheme
        shrink_input, shrink_weight = self._shrinking(layer)
        x = linear.inputs[0]
        if shrink_input:
            x = made.add("Mul", [x, made.float32(2.0**-shrink_input)])
        x = made.cast(x, "FLOAT16")
        if isinstance(scheme, ChannelScheme) and scheme.input_scale is not None:
            x = self._through_int8(made, x, layer.name, scheme.input_scale * 2.0**-shrink_input)
        y = self._product(made, x, layer, 2.0**-shrink_weight)
        made.nodes[-1].name = layer.name
        shrunk = shrink_input + shrink_weight
        bias = layer.bias()
        if bias is not None:
            y = made.add("Add", [y, self._store(f"{layer.name}.bias", self._half(layer.name, bias * 2.0**-shrunk))])
        y = made.cast(y, "FLOAT")
        if shrunk:
            y = made.add("Mul", [y, made.float32(2.0**shrunk)])
        made.replace(linear, [y])

    def _shrinking(self, layer: LinearLayer) -> tuple[int, int]:
        """Powers of two by which the layer's input, and on top of that its weight, are divided."""
        found = self.ranges.get(layer.name)
        if found is None:
            return 0, 0
        inputs = found.inputs if layer.input_scale is None else found.inputs / layer.input_scale
        output = found.output
        if layer.output_scale is not None:
            output *= float(layer.output_scale.max())
        by_input = _halvings(float(inputs.max()))
        return by_input, _halvings(output * 2.0**-by_input)

    def _through_int8(self, made: MadeNodes, x: ir.Value, name: str, scale: float) -> ir.Value:
        half = self._half(name, np.array(scale, np.float32))
        if half == 0:
            raise LoweringError(f"{name}: the scale of its input, {scale:.3g}, is 0 in float16: exclude the layer")
        step = initializer(self.model.graph, f"{name}.input_scale", half)
        zero = initializer(self.model.graph, "int8.zero", np.array(0, np.int8))
        return made.add("DequantizeLinear", [made.add("QuantizeLinear", [x, step, zero]), step, zero])

    def _product(self, made: MadeNodes, x: ir.Value, layer: LinearLayer, factor: float) -> ir.Value:
        scheme = self.recipe.layers[layer.name].scheme
        if not isinstance(scheme, BlockScheme):
            return made.add("MatMul", [x, self._weight(made, layer, factor)])
        _check_range(layer.name, layer.weight() * factor)
        shared = layer.tied_to is not None and self._shares_table(layer)
        name = str(layer.tied_to) if shared else layer.name
        return block_product(made, self._store, name, x, self.quantizer(layer, scheme), factor)

    def _weight(self, made: MadeNodes, layer: LinearLayer, factor: float) -> ir.Value:
        """(in, out) float16: the stored weight times `factor`, dequantized and turned where it is stored otherwise."""
        weight, scheme, name = layer.weight(), self.recipe.layers[layer.name].scheme, layer.name
        if layer.tied_to is not None and self._shares_table(layer):
            return made.add("Transpose", [self._table(made, layer.tied_to, weight, scheme)], perm=[1, 0])
        if scheme is None:
            return self._store(f"{name}.weight", np.ascontiguousarray(self._half(name, weight * factor).T))
        _check_range(name, weight * factor)
        codes, scales = quantize_channels(weight * factor)
        stored = self._store(f"{name}.weight", np.ascontiguousarray(codes.T))
        return made.add("DequantizeLinear", [stored, self._store(f"{name}.scales", scales)], axis=1)

    def _shares_table(self, layer: LinearLayer) -> bool:
        """Does a layer tied to an embedding read that table as it is stored?"""
        return self._shrinking(layer)[1] == 0

    def _table(self, made: MadeNodes, name: str, table: Floats, scheme: object) -> ir.Value:
        """(rows, width) float16, an embedding: stored once, whoever reads it."""
        if scheme is None:
            return self._store(f"{name}.half", self._half(name, table))
        _check_range(name, table)
        codes, scales = quantize_channels(table)
        stored = [self._store(f"{name}.codes", codes), self._store(f"{name}.scales", scales)]
        return made.add("DequantizeLinear", stored, axis=0)

    def _lower_embedding(self, gather: ir.Node) -> None:
        table, indices = gather.inputs
        if table is None or indices is None or table.const_value is None or len(dims(table)) != 2:
            return
        tied = next((layer for layer in self.layers.values() if layer.tied_to == table.name), None)
        if tied is not None and not self._shares_table(tied):
            tied = None
        made = MadeNodes(self.model)
        rows = made.cast(self._rows(made, table, indices, tied), "FLOAT")
        if tied is not None and tied.input_scale is not None:
            # The head reads columns that smoothing has scaled.
            back = self._store(f"{table.name}.unscale", (1 / tied.input_scale).astype(np.float32))
            rows = made.add("Mul", [rows, back])
        made.replace(gather, [rows])

    def _rows(self, made: MadeNodes, table: ir.Value, indices: ir.Value, tied: LinearLayer | None) -> ir.Value:
        """Rows of an embedding in float16, as the head has them that is tied to it."""
        assert table.const_value is not None
        name = str(table.name)
        array: Floats = tied.weight() if tied else np.asarray(table.const_value.numpy(), np.float32)
        scheme = self.recipe.layers[tied.name].scheme if tied else self.recipe.embedding
        if not isinstance(scheme, BlockScheme):
            return made.add("Gather", [self._table(made, name, array, scheme), indices], axis=0)
        if not can_gather(scheme, array.shape[1]):
            return made.add("Gather", [self._table(made, name, array, None), indices], axis=0)
        _check_range(name, array)
        quantized = self.quantizer(tied, scheme) if tied else quantize(array, scheme)
        return gathered_rows(made, self._store, name, quantized, indices)

    def _half(self, name: str, array: Floats) -> NDArray[np.float16]:
        """As float16, never infinite."""
        _check_range(name, array)
        return np.asarray(array, np.float32).astype(np.float16)

    def _store(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        import onnx_ir as ir

        value = initializer(self.model.graph, name, np.zeros(0, array.dtype))
        value.const_value = self.weights.add(name, array)
        value.shape = ir.Shape(array.shape)
        return value


def _check_range(name: str, array: Floats) -> None:
    largest = float(np.abs(array).max(initial=0))
    if not largest <= HALF_MAX:
        raise LoweringError(
            f"{name} holds a weight of {largest:.3g}, and float16 ends at 65504: this checkpoint cannot be built for a "
            "target that computes in float16; ort-cpu takes it"
        )


def _halvings(magnitude: float) -> int:
    """How often a magnitude must be halved to be within `LARGEST`."""
    return max(0, math.ceil(math.log2(magnitude / LARGEST))) if magnitude > 0 else 0
