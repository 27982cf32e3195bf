"""Build the float16 or quantized graphs over a preallocated cache, which TensorRT compiles and ONNX Runtime runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

from adx.calibration.quantizers import round_to_nearest
from adx.calibration.recipe import Raised, make_channel_recipe
from adx.calibration.sensitivity import Altered, InputRounding
from adx.ci.built import Built, Remembered, Source, counter, linear_count, onnx_packages
from adx.ci.calibrated import Calibration
from adx.ci.export_request import ORT_CUDA
from adx.export.manifest import EngineRecord

if TYPE_CHECKING:
    from adx.calibration.activations import InputQuantization
    from adx.calibration.budget import Unit
    from adx.calibration.quantizers import WeightQuantizer
    from adx.calibration.ranges import Tokens
    from adx.calibration.recipe import QuantRecipe
    from adx.calibration.smoothing import Choose
    from adx.calibration.weights import Floats
    from adx.export.linears import LinearLayer
    from adx.runtime.session import Session


class StaticBuilder:
    """Builds for one export, as often as the search for its budget asks; layers are measured once.

    Every precision is calibrated: float16 too, since what comes near its end is scaled.
    """

    def __init__(self, source: Source, calibration: Calibration) -> None:
        self.source = source
        self.calibration = calibration
        self._errors: dict[str, float] = {}

    def build(self, raised: Mapping[str, Raised]) -> Built:
        """Measure ranges, choose scales, lower, quantize, write; what an earlier build left is replaced.

        Raises:
            LoweringError: a node or a number that the target cannot hold.
            UsageError: a recipe that cannot be made.
        """
        return write_static(self.source, self.calibration, partial(self._recipe, raised=raised), self._choose)

    def units(self) -> tuple[Unit, ...]:
        """Layers that read the same input, with what they can be raised to."""
        from adx.calibration.budget import Unit

        layers, groups = self._planned
        recipe, units = self._base, []
        for group in groups:
            names = tuple(name for name in group if recipe.layers[name].scheme is not None)
            if not names:
                continue
            rounded = any(self._rounding(name) is not None for name in names)
            eight = sum(rows * columns + 2 * rows for rows, columns in (layers[name].shape for name in names))
            full = sum(2 * layers[name].shape[0] * layers[name].shape[1] for name in names)
            if rounded:
                units.append(Unit(names, (eight, eight, full), ("weights", "float")))
            else:
                units.append(Unit(names, (eight, full), ("float",)))
        return tuple(units)

    def altered(self, name: str) -> Altered | None:
        """A layer as it computes in the recipe; None: in float."""
        return Altered(self._stored(name), self._rounding(name))

    def errors(self, unit: Unit) -> tuple[float, ...]:
        """Squared errors of a unit's outputs over the outputs' squares: as the recipe has it, then at each level."""
        weights = sum(self.error(name, self._scheme(name)) or 0.0 for name in unit.layers)
        if unit.levels == ("float",):
            return weights, 0.0
        found = self._inputs or {}
        inputs = sum(found[name].noise for name in unit.layers if self._rounding(name) is not None)
        return weights + inputs, weights, 0.0

    def error(self, name: str, scheme: object) -> float | None:
        """Squared error that rounding the weight adds to a layer's output, over the output's square; None: in float."""
        from adx.calibration.quantizers import output_error

        if scheme is None:
            return None
        if name not in self._errors:
            layer = self._planned[0][name]
            self._errors[name] = output_error(layer, self._stored(name), self.calibration.moments(name))
        return self._errors[name]

    def _stored(self, name: str) -> Floats:
        from adx.calibration.channels import dequantize_channels, quantize_channels
        from adx.calibration.quantizers import unsmoothed

        layer = self._planned[0][name]
        return unsmoothed(layer, dequantize_channels(*quantize_channels(layer.weight())))

    def _rounding(self, name: str) -> InputRounding | None:
        scheme = self._scheme(name)
        scale = getattr(scheme, "input_scale", None)
        return None if scale is None else InputRounding(scale, self._planned[0][name].input_scale)

    def _scheme(self, name: str) -> object:
        return self._base.layers[name].scheme

    @cached_property
    def _base(self) -> QuantRecipe:
        return self._recipe(self._planned[0], {})

    def _recipe(self, layers: Mapping[str, LinearLayer], raised: Mapping[str, Raised]) -> QuantRecipe:
        request = self.source.request
        return make_channel_recipe(
            request.precision,
            layers,
            inputs=self._inputs,
            exclude=request.nodes_to_exclude,
            raised=raised,
            uniform=request.uniform,
        )

    @cached_property
    def _planned(self) -> tuple[dict[str, LinearLayer], list[tuple[str, ...]]]:
        from adx.engines.static_graphs import plan_layers

        return plan_layers(self.source.semantic, self._choose)

    @cached_property
    def _inputs(self) -> Mapping[str, InputQuantization] | None:
        """How each layer's input would be quantized; None: inputs stay float."""
        from adx.calibration.activations import quantize_inputs
        from adx.engines.static_graphs import plan_layers

        source, calibration = self.source, self.calibration
        if not source.request.quantizes_activations:
            return None
        ranges, divisors = calibration.ranges(), {}
        if source.request.algorithm == "smoothquant":
            layers, _ = plan_layers(source.semantic, self._outliers)
            divisors = {n: layer.input_scale for n, layer in layers.items() if layer.input_scale is not None}
        return quantize_inputs(
            source.model,
            calibration.rows(),
            ranges,
            divisors,
            source.request.calib_method,
            partial(source.report, "choosing scales for activations"),
            store=calibration.store,
            digest=calibration.digest,
        )

    @cached_property
    def _outliers(self) -> Choose:
        """SmoothQuant's divisors."""
        from adx.calibration.smoothing import ALPHA, by_activations, by_output_error, static_step

        alpha, found = self.source.request.smooth_quant_alpha, self.calibration.ranges()
        if alpha == "auto":
            return by_output_error(found, rounded=None, step=static_step)
        return by_activations({name: each.inputs for name, each in found.items()}, ALPHA if alpha is None else alpha)

    @cached_property
    def _choose(self) -> Choose | None:
        """Where activations are quantized SmoothQuant's divisors, elsewhere those that suit the weights."""
        from adx.calibration.recipe import INPUT_NOISE
        from adx.calibration.smoothing import by_weight_error

        request = self.source.request
        if request.algorithm not in ("smoothquant", "awq"):
            return None
        outliers, weights = self._outliers, by_weight_error(self.calibration.ranges())
        found = self._inputs or {}

        def choose(readers: Sequence[LinearLayer]) -> Floats | None:
            names = [layer.name for layer in readers if request.uniform or layer.role != "head"]
            noises = [found[name].noise for name in names if name in found]
            quantized = len(noises) == len(readers) and (request.uniform or max(noises) <= INPUT_NOISE)
            return (outliers if quantized else weights)(readers)

        return choose


def write_static(
    source: Source,
    calibration: Calibration,
    recipe: Callable[[Mapping[str, LinearLayer]], QuantRecipe],
    choose: Choose | None,
    quantizer: WeightQuantizer = round_to_nearest,
) -> Built:
    """Lower, quantize, write; what an earlier build left is replaced.

    Args:
        calibration: gives the ranges by which layers are kept within float16.
        recipe: from the linear layers to how each is stored.
        choose: how layers are smoothed first, or None.
        quantizer: what makes integers of the weight of a layer in blocks.

    Raises:
        LoweringError: a node or a number that the target cannot hold.
        UsageError: a recipe that cannot be made.
    """
    from adx.engines import static_graphs

    request = source.request
    shutil.rmtree(source.folder / static_graphs.FOLDER, ignore_errors=True)
    made = Remembered(recipe)
    engine = static_graphs.write_graphs(
        source.semantic,
        made,
        source.folder,
        ranges=calibration.ranges(),
        choose=choose,
        quantizer=quantizer,
        progress=counter(
            source.report, f"storing the weights in {request.precision}", 2 * linear_count(source.semantic)
        ),
    )
    assert made.recipe is not None
    by_phase = {graph.phase: graph.file for graph in engine.graphs}
    # ONNX Runtime's CUDA provider runs the graphs as they are; so does its CPU provider, for checks.
    targets = (*(target for target in request.targets if target == ORT_CUDA), engine.target)
    prefill, decode = (by_phase[phase] for phase in static_graphs.PHASES)
    records = tuple(
        EngineRecord(target, engine.files, prefill, decode, onnx_packages(), None, None, source.limits)
        for target in targets
    )

    def check(rows: Sequence[Tokens]) -> tuple[str, ...]:
        from adx.ci.half_range import overflows

        return overflows(source.folder / prefill, source.spec.kv_cache, rows, request.threads)

    opened = partial(_session, source, prefill, decode)
    return Built(engine.graphs, records, made.recipe, 16, request.bound, calibration.drawn, opened, check)


def _session(source: Source, prefill: str, decode: str) -> Session:
    from adx.runtime.ort_graphs import OrtGraphs
    from adx.runtime.static_session import CHECK_CHUNK, StaticSession

    kv_cache, vocab_size = source.spec.kv_cache, source.spec.vocab_size
    files = (source.folder / prefill, source.folder / decode)
    executor = OrtGraphs(*files, kv_cache, vocab_size, threads=source.request.threads)
    batch = source.limits.max_batch_size
    return StaticSession(executor, kv_cache, vocab_size, max_batch_size=batch, prefill_chunk=CHECK_CHUNK)
