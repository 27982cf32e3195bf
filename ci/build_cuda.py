"""Build weights in blocks of integers for ONNX Runtime on CUDA: the CPU's quantization in the float16 graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from adx.ci.build_cpu import CpuBuilder
from adx.ci.build_static import write_static
from adx.ci.built import Built

if TYPE_CHECKING:
    from adx.calibration.recipe import Level, Raised
    from adx.calibration.smoothing import Choose
    from adx.calibration.weights import Floats
    from adx.export.linears import LinearLayer


class CudaBuilder(CpuBuilder):
    """Builds for one export, as often as the search for its budget asks.

    Layers are quantized as for the CPU. The graphs are others: layers are not fused, inputs are float16 and stay so.
    """

    def build(self, raised: Mapping[str, Raised]) -> Built:
        """Lower, quantize, write; what an earlier build left is replaced.

        Raises:
            LoweringError: a node or a number that the target cannot hold.
            UsageError: a recipe that cannot be made.
        """
        recipe = partial(self._recipe, raised=raised)
        return write_static(self.source, self.calibration, recipe, self._choose, self._quantizer)

    def _smoothing(self) -> Choose | None:
        """As inputs stay float, SmoothQuant without a share of the outliers to move takes what suits the weights."""
        from adx.calibration.smoothing import by_weight_error

        request = self.source.request
        if request.algorithm == "smoothquant" and request.smooth_quant_alpha is None:
            return by_weight_error(self.calibration.ranges(), self._rounded)
        return super()._smoothing()

    def _rounded(self, weight: Floats) -> Floats:
        from adx.calibration.recipe import int4_scheme
        from adx.calibration.weights import quantize

        request = self.source.request
        if request.precision == "int4":
            return super()._rounded(weight)
        scheme = int4_scheme(weight.shape[1], request.group_size, request.symmetric)
        return quantize(weight, replace(scheme, bits=8, symmetric=request.symmetric is not False)).dequantize()

    @cached_property
    def _planned(self) -> tuple[dict[str, LinearLayer], list[tuple[str, ...]]]:
        from adx.engines.static_graphs import plan_layers

        return plan_layers(self.source.semantic, self._choose)

    def _bytes(self, name: str, level: Level | None) -> int:
        shape, scheme = self._planned[0][name].shape, self._scheme(name, level)
        return 2 * shape[0] * shape[1] if scheme is None else scheme.stored_bytes(shape)
