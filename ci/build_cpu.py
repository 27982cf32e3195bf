"""Build for ONNX Runtime on CPU: one graph for both phases."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING

from adx.calibration.recipe import INT8_GROUPS, Raised, block_scheme, int4_scheme, make_recipe
from adx.calibration.sensitivity import Altered
from adx.ci.built import Built, Remembered, Source, counter, linear_count, onnx_packages
from adx.ci.calibrated import Calibration, HessianPasses
from adx.export.manifest import EngineRecord

if TYPE_CHECKING:
    from adx.calibration.budget import Unit
    from adx.calibration.quantizers import WeightQuantizer
    from adx.calibration.recipe import Level, QuantRecipe
    from adx.calibration.smoothing import Choose
    from adx.calibration.weights import BlockScheme, Floats
    from adx.export.linears import LinearLayer
    from adx.runtime.session import Session


class CpuBuilder:
    """Builds for one export, as often as the search for its budget asks: layers are measured and quantized once."""

    def __init__(self, source: Source, calibration: Calibration) -> None:
        from adx.calibration.quantizers import Remembering

        self.source = source
        self.calibration = calibration
        self._hessians: HessianPasses | None = None
        self._choose = self._smoothing()
        self._quantizer = Remembering(self._rounding(), self._moments)

    def build(self, raised: Mapping[str, Raised]) -> Built:
        """Lower, quantize, write; what an earlier build left is replaced.

        Raises:
            LoweringError: a node has no counterpart in ONNX Runtime.
            UsageError: a recipe that cannot be made.
        """
        from adx.engines import ort_cpu

        source = self.source
        request, report = source.request, source.report
        shutil.rmtree((source.folder / ort_cpu.GRAPH_FILE).parent, ignore_errors=True)
        made = Remembered(partial(self._recipe, raised=raised))
        engine = ort_cpu.compile(
            source.semantic,
            made,
            source.folder,
            choose=self._choose,
            quantizer=self._quantizer,
            progress=counter(report, f"storing the weights in {request.precision}", linear_count(source.semantic)),
        )
        assert made.recipe is not None
        by_phase = {graph.phase: graph.file for graph in engine.graphs}
        prefill, decode = by_phase["prefill"], by_phase["decode"]
        record = EngineRecord(engine.target, engine.files, prefill, decode, onnx_packages(), None, None, source.limits)

        def session() -> Session:
            from adx.runtime.ort_session import OrtSession

            path, spec = source.folder / decode, source.spec
            opened = OrtSession(path, spec.kv_cache, spec.vocab_size, threads=request.threads)
            opened.max_batch_size = source.limits.max_batch_size
            return opened

        samples = self.calibration.drawn
        return Built(engine.graphs, (record,), made.recipe, 32, request.bound, samples, session)

    def units(self) -> tuple[Unit, ...]:
        """Layers that are fused into one product, with what they can be raised to."""
        from adx.calibration.budget import Unit

        units = []
        finer: tuple[Level, ...] = () if self.source.request.group_size is not None else ("finer",)
        for names in self._planned[1]:
            names = tuple(name for name in names if self._base.layers[name].scheme is not None)
            if not names:
                continue
            eight = all(self._bits(name) == 8 for name in names)
            levels: tuple[Level, ...] = ("float",) if eight else (*finer, "int8", "float")
            sizes = tuple(sum(self._bytes(name, level) for name in names) for level in (None, *levels))
            units.append(Unit(names, sizes, levels))
        return tuple(units)

    def altered(self, name: str) -> Altered | None:
        """A layer as it computes in the recipe; None: in float."""
        from adx.calibration.quantizers import stored_weight

        layer, scheme = self._planned[0][name], self._scheme(name, None)
        return None if scheme is None else Altered(stored_weight(layer, self._quantizer(layer, scheme)))

    def errors(self, unit: Unit) -> tuple[float, ...]:
        """Squared errors of a unit's outputs over the outputs' squares: as the recipe has it, then at each level."""
        return tuple(sum(self._error(name, level) for name in unit.layers) for level in (None, *unit.levels))

    def error(self, name: str, scheme: object) -> float | None:
        """Squared error that rounding the weight adds to a layer's output, over the output's square; None: in float."""
        return None if scheme is None else self._quantizer.errors.get((name, scheme))  # type: ignore[arg-type]

    def _recipe(self, layers: Mapping[str, LinearLayer], raised: Mapping[str, Raised]) -> QuantRecipe:
        request = self.source.request
        return make_recipe(
            request.precision,
            layers,
            group_size=request.group_size,
            symmetric=request.symmetric,
            exclude=request.nodes_to_exclude,
            raised=raised,
        )

    def _smoothing(self) -> Choose | None:
        from adx.calibration.smoothing import ALPHA, block_step, by_activations, by_output_error, by_weight_error

        algorithm = self.source.request.algorithm
        if algorithm == "smoothquant":
            alpha, found = self.source.request.smooth_quant_alpha, self.calibration.ranges()
            if alpha == "auto":
                return by_output_error(found, self._rounded, block_step(INT8_GROUPS["other"]))
            return by_activations(
                {name: each.inputs for name, each in found.items()}, ALPHA if alpha is None else alpha
            )
        if algorithm in ("awq", "gptq"):  # GPTQ leaves a tenth less error behind AWQ's divisors than without
            return by_weight_error(self.calibration.ranges(), self._rounded)
        return None

    def _rounded(self, weight: Floats) -> Floats:
        from adx.calibration.weights import BlockScheme, quantize

        request = self.source.request
        scheme = int4_scheme(weight.shape[1], request.group_size, request.symmetric)
        if request.precision == "int8":
            scheme = BlockScheme(8, INT8_GROUPS["other"])
        return quantize(weight, scheme).dequantize()

    def _rounding(self) -> WeightQuantizer:
        from adx.calibration.quantizers import Clipped, Gptq, round_to_nearest

        request = self.source.request
        if request.algorithm == "gptq":
            layers = self._planned[0]
            self._hessians = self.calibration.hessians([name for name in layers if layers[name].role != "head"])
            return Gptq(self._hessians)
        if request.clips:
            return Clipped({name: found.power for name, found in self.calibration.ranges().items()})
        return round_to_nearest

    def _moments(self, name: str) -> Floats | None:
        """What was measured of a layer's input, as far as it is still in memory."""
        full = None if self._hessians is None else self._hessians.held(name)
        return self.calibration.moments(name) if full is None else full

    @cached_property
    def _planned(self) -> tuple[dict[str, LinearLayer], list[tuple[str, ...]]]:
        from adx.engines.ort_cpu import plan_layers

        return plan_layers(self.source.semantic, self._choose)

    @cached_property
    def _base(self) -> QuantRecipe:
        return self._recipe(self._planned[0], {})

    def _scheme(self, name: str, level: Level | None) -> BlockScheme | None:
        """A layer's scheme at a level; None: as the recipe has it."""
        request = self.source.request
        return block_scheme(request.precision, self._planned[0][name], request.group_size, request.symmetric, level)

    def _bits(self, name: str) -> int | None:
        scheme = self._base.layers[name].scheme
        return None if scheme is None else scheme.bits

    def _bytes(self, name: str, level: Level | None) -> int:
        shape, scheme = self._planned[0][name].shape, self._scheme(name, level)
        return 4 * shape[0] * shape[1] if scheme is None else scheme.stored_bytes(shape)

    def _error(self, name: str, level: Level | None) -> float:
        scheme = self._scheme(name, level)
        if scheme is None:
            return 0.0
        self._quantizer(self._planned[0][name], scheme)
        return self._quantizer.errors[name, scheme]
