"""Pass for ONNX Runtime: linear layers and embeddings take their stored form, float or in blocks of integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from adx.calibration.quantizers import WeightQuantizer
from adx.calibration.recipe import QuantRecipe
from adx.calibration.weights import BlockScheme, QuantizedWeight, concatenate, quantize
from adx.engines.ort_attention import MICROSOFT
from adx.export.linears import LinearLayer, names_of
from adx.export.rewrite import dims, initializer, node, replace
from adx.export.trace import DOMAIN
from adx.export.weights_file import WeightsFile

if TYPE_CHECKING:
    import onnx_ir as ir

ACCURACY_INT8 = 4  # MatMulNBits quantizes its input to 8 bits, a scale for each block of each row


@dataclass
class LinearLowering:
    """The pass, over one graph and into one weights file.

    Attributes:
        model: the graph.
        layers: its linear layers by name.
        recipe: how each is stored.
        quantizer: what makes integers of a layer's weight.
        weights: the file that takes the tensors as they are made.
        progress: called with the name of each layer.
    """

    model: ir.Model
    layers: dict[str, LinearLayer]
    recipe: QuantRecipe
    quantizer: WeightQuantizer
    weights: WeightsFile
    progress: Callable[[str], None]

    def run(self) -> None:
        """Run the pass in place."""
        graph = self.model.graph
        for linear in [n for n in graph if n.domain == DOMAIN and n.op_type == "Linear"]:
            for name in names_of(linear):
                self.progress(name)
            self._lower(linear)
        if self.recipe.embedding is not None:
            for gather in [n for n in graph if n.op_type == "Gather" and n.domain == ""]:
                self._lower_embedding(gather)

    def _lower(self, linear: ir.Node) -> None:
        graph = self.model.graph
        layers = [self.layers[name] for name in names_of(linear)]
        schemes = {self.recipe.layers[layer.name].scheme for layer in layers}
        if len(schemes) > 1:
            self._lower_apart(linear, layers)
            return
        x = linear.inputs[0]
        biases = [layer.bias() for layer in layers]
        bias = None
        if any(b is not None for b in biases):
            parts = [
                np.zeros(layer.shape[0], np.float32) if b is None else b
                for layer, b in zip(layers, biases, strict=True)
            ]
            bias = self._store(f"{layers[0].name}.bias", np.concatenate(parts))
        name = "+".join(layer.name for layer in layers)
        made = self._float(x, layers, bias) if schemes == {None} else [self._integers(x, layers, bias)]
        made[-1].outputs[0].type, made[-1].outputs[0].shape = linear.outputs[0].type, linear.outputs[0].shape
        made[0].name = name
        graph.insert_before(linear, made)
        replace(linear.outputs[0], made[-1].outputs[0])
        graph.remove(linear, safe=True)

    def _lower_apart(self, linear: ir.Node, layers: list[LinearLayer]) -> None:
        """Layers that were fused but are stored differently: one node each, side by side again."""
        import onnx_ir as ir

        graph = self.model.graph
        parts = [node("Linear", [linear.inputs[0]], {"names": [layer.name]}, domain=DOMAIN) for layer in layers]
        for part, layer in zip(parts, layers, strict=True):
            part.outputs[0].type = linear.outputs[0].type
            part.outputs[0].shape = ir.Shape([*dims(linear.outputs[0])[:-1], layer.shape[0]])
        joined = node("Concat", [part.outputs[0] for part in parts], {"axis": -1}, like=linear.outputs[0])
        graph.insert_before(linear, [*parts, joined])
        replace(linear.outputs[0], joined.outputs[0])
        graph.remove(linear, safe=True)
        for part in parts:
            self._lower(part)

    def _integers(self, x: ir.Value | None, layers: list[LinearLayer], bias: ir.Value | None) -> ir.Node:
        quantized = concatenate([self._quantized(layer) for layer in layers])
        name, scheme = layers[0].name, quantized.scheme
        data = self._store(f"{name}.quantized", quantized.data)
        scales = self._scales(name, quantized)
        zeros = None if quantized.zero_points is None else self._store(f"{name}.zero_points", quantized.zero_points)
        attributes = {
            "K": quantized.shape[1],
            "N": quantized.shape[0],
            "bits": scheme.bits,
            "block_size": scheme.block_size,
            "accuracy_level": ACCURACY_INT8,
        }
        inputs = [x, data, scales, zeros, None, bias]
        while inputs[-1] is None:
            inputs.pop()
        return node("MatMulNBits", inputs, attributes, domain=MICROSOFT)

    def _quantized(self, layer: LinearLayer) -> QuantizedWeight:
        scheme = self.recipe.layers[layer.name].scheme
        assert isinstance(scheme, BlockScheme), "ONNX Runtime's kernels take blocks"
        return self.quantizer(layer, scheme)

    def _float(self, x: ir.Value | None, layers: list[LinearLayer], bias: ir.Value | None) -> list[ir.Node]:
        (first, *others) = layers
        if x is not None and len(dims(x)) == 2 and not others and first.tied_to is not None:
            # The embedding's own (out, in) tensor serves, so the table is stored once.
            table = self._store(f"{first.name}.weight", first.weight())
            return [node("Gemm", [x, table] if bias is None else [x, table, bias], {"transB": 1})]
        weight = np.concatenate([layer.weight() for layer in layers]).T
        product = node("MatMul", [x, self._store(f"{first.name}.weight", np.ascontiguousarray(weight))])
        return [product] if bias is None else [product, node("Add", [product.outputs[0], bias])]

    def _lower_embedding(self, gather: ir.Node) -> None:
        """A token embedding in 8 bits; tied to the head, both read the same bytes."""
        graph = self.model.graph
        table, indices = gather.inputs
        assert table is not None
        tied = next((layer for layer in self.layers.values() if layer.tied_to == table.name), None)
        scheme = self.recipe.embedding if tied is None else self.recipe.layers[tied.name].scheme
        if (
            table.const_value is None
            or len(dims(table)) != 2
            or not isinstance(scheme, BlockScheme)
            or scheme.bits != 8
        ):
            return
        rows, columns = (int(d) for d in dims(table) if isinstance(d, int))
        if columns % scheme.block_size or not is_token_table(self.model, indices):
            return
        name = str(table.name)
        if tied is None:
            quantized = quantize(np.asarray(table.const_value.numpy(), np.float32), scheme)
        else:
            quantized = self.quantizer(tied, scheme)
        inputs = [
            self._store(f"{name}.quantized", quantized.data.reshape(rows, columns)),
            indices,
            self._scales(name, quantized),
        ]
        if quantized.zero_points is not None:
            inputs.append(self._store(f"{name}.zero_points", quantized.zero_points))
        attributes = {"bits": 8, "block_size": scheme.block_size, "gather_axis": 0, "quantize_axis": 1}
        lowered = node("GatherBlockQuantized", inputs, attributes, domain=MICROSOFT, like=gather.outputs[0])
        graph.insert_before(gather, lowered)
        replace(gather.outputs[0], lowered.outputs[0])
        graph.remove(gather, safe=True)

    def _scales(self, name: str, quantized: QuantizedWeight) -> ir.Value:
        """Scales as the kernels take them, float32; in float16 in the file where that loses nothing.

        ONNX Runtime folds the cast when it loads the graph. With every optimization off it does not, and its
        `MatMulNBits` gives zeros for scales that are computed: adx opens its engines with optimizations on.
        """
        half = quantized.half_scales
        if half is None:
            return self._store(f"{name}.scales", quantized.scales)
        stored = self._store(f"{name}.scales", half)
        made = next((use.node.outputs[0] for use in stored.uses() if use.node.op_type == "Cast"), None)
        if made is not None:
            return made
        cast = node("Cast", [stored], {"to": 1}, name=f"{name}.scales.float32")
        self.model.graph.insert_before(self.model.graph[0], cast)
        return cast.outputs[0]

    def _store(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        import onnx_ir as ir

        value = initializer(self.model.graph, name, np.zeros(0, array.dtype))
        value.const_value = self.weights.add(name, array)
        value.shape = ir.Shape(array.shape)
        return value


def is_token_table(model: ir.Model, indices: ir.Value | None) -> bool:
    """Do the indices come from the token ids, at most reshaped (as GPT-2 does)?"""
    while indices is not None and (made_by := indices.producer()) is not None and made_by.op_type == "Reshape":
        indices = made_by.inputs[0]
    return indices is not None and indices is model.graph.inputs[0]
