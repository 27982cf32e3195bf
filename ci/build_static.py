"""Build the float16 or 8-bit graphs over a preallocated cache, which TensorRT compiles and ONNX Runtime runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from adx.ci.built import Built, Remembered, Source, counter, linear_count, onnx_packages
from adx.ci.calibration import calibration_samples
from adx.ci.export_request import ORT_CUDA
from adx.export.manifest import EngineRecord

if TYPE_CHECKING:
    from adx.calibration.activations import InputQuantization
    from adx.calibration.ranges import LayerRange, Tokens
    from adx.calibration.samples import CalibrationSamples
    from adx.calibration.smoothing import Choose
    from adx.export.linears import Floats, LinearLayer
    from adx.runtime.session import Session

ALPHA = 0.6  # of SmoothQuant, where activations are quantized with one static scale a layer


def build_static(source: Source) -> Built:
    """Measure ranges, choose scales, lower, quantize, write.

    Every precision is calibrated: float16 too, since what comes near its end is scaled.

    Raises:
        LoweringError: a node or a number that the target cannot hold.
        UsageError: a recipe that cannot be made.
    """
    from adx.calibration.ranges import layer_ranges
    from adx.calibration.recipe import make_channel_recipe
    from adx.engines import static_graphs

    request, report = source.request, source.report
    samples = calibration_samples(source)
    rows = list(samples.windows())
    ranges = layer_ranges(source.model, rows, partial(report, "measuring activations"))
    smoothed = request.algorithm == "smoothquant"
    inputs = _input_scales(source, samples, ranges, smoothed) if request.quantizes_activations else None
    made = Remembered(
        lambda layers: make_channel_recipe(request.precision, layers, inputs=inputs, exclude=request.nodes_to_exclude)
    )
    count = 2 * linear_count(source.semantic)
    engine = static_graphs.write_graphs(
        source.semantic,
        made,
        source.folder,
        ranges=ranges,
        choose=_smoothing(ranges, inputs) if smoothed else None,
        progress=counter(report, f"storing the weights in {request.precision}", count),
    )
    assert made.recipe is not None
    by_phase = {graph.phase: graph.file for graph in engine.graphs}
    # ONNX Runtime's CUDA provider runs the graphs as they are; so does its CPU provider, for checks.
    targets = (*(target for target in request.targets if target == ORT_CUDA), engine.target)
    records = tuple(
        EngineRecord(
            target, engine.files, by_phase["prefill"], by_phase["decode"], onnx_packages(), None, None, source.limits
        )
        for target in targets
    )

    def session() -> Session:
        from adx.runtime.ort_graphs import OrtGraphs
        from adx.runtime.static_session import CHECK_CHUNK, StaticSession

        kv_cache, vocab_size = source.spec.kv_cache, source.spec.vocab_size
        prefill, decode = (source.folder / by_phase[phase] for phase in static_graphs.PHASES)
        executor = OrtGraphs(prefill, decode, kv_cache, vocab_size, threads=request.threads)
        batch = source.limits.max_batch_size
        return StaticSession(executor, kv_cache, vocab_size, max_batch_size=batch, prefill_chunk=CHECK_CHUNK)

    def check(rows: Sequence[Tokens]) -> tuple[str, ...]:
        from adx.ci.half_range import overflows

        return overflows(source.folder / by_phase["prefill"], source.spec.kv_cache, rows, request.threads)

    return Built(engine.graphs, records, made.recipe, 16, request.bound, samples, session, check)


def _input_scales(
    source: Source, samples: CalibrationSamples, ranges: Mapping[str, LayerRange], smoothed: bool
) -> dict[str, InputQuantization]:
    from adx.calibration.activations import quantize_inputs
    from adx.calibration.smoothing import by_activations
    from adx.engines.static_graphs import input_divisors

    choose = by_activations({name: found.inputs for name, found in ranges.items()}, ALPHA)
    divisors = input_divisors(source.semantic, choose) if smoothed else {}
    progress = partial(source.report, "choosing scales for activations")
    rows = list(samples.windows())
    return quantize_inputs(source.model, rows, ranges, divisors, source.request.calib_method, progress)


def _smoothing(ranges: Mapping[str, LayerRange], inputs: Mapping[str, InputQuantization] | None) -> Choose:
    """Where activations are quantized SmoothQuant's divisors, elsewhere those that suit the weights."""
    from adx.calibration.recipe import INPUT_NOISE
    from adx.calibration.smoothing import by_activations, by_weight_error

    outliers = by_activations({name: found.inputs for name, found in ranges.items()}, ALPHA)
    weights = by_weight_error(ranges)
    found = inputs or {}

    def choose(readers: Sequence[LinearLayer]) -> Floats | None:
        quantized = all(
            layer.role != "head" and layer.name in found and found[layer.name].noise <= INPUT_NOISE for layer in readers
        )
        return (outliers if quantized else weights)(readers)

    return choose
