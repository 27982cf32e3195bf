"""Build for ONNX Runtime on CPU: one graph for both phases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adx.ci.built import Built, Remembered, Source, counter, linear_count, onnx_packages
from adx.ci.calibration import calibration_samples
from adx.export.manifest import EngineRecord

if TYPE_CHECKING:
    from adx.runtime.session import Session


def build_cpu(source: Source) -> Built:
    """Calibrate where the recipe needs it, lower, quantize, write.

    Raises:
        LoweringError: a node has no counterpart in ONNX Runtime.
        UsageError: a recipe that cannot be made.
    """
    from adx.calibration.ranges import input_ranges
    from adx.calibration.recipe import make_recipe
    from adx.engines import ort_cpu

    request, report = source.request, source.report
    samples = ranges = None
    if request.algorithm == "smoothquant":
        samples = calibration_samples(source)
        report("measuring activations", None)
        ranges = input_ranges(source.model, samples)
    made = Remembered(
        lambda layers: make_recipe(
            request.precision, layers, group_size=request.group_size, exclude=request.nodes_to_exclude
        )
    )
    engine = ort_cpu.compile(
        source.semantic,
        made,
        source.folder,
        ranges=ranges,
        progress=counter(report, f"storing the weights in {request.precision}", linear_count(source.semantic)),
    )
    assert made.recipe is not None
    by_phase = {graph.phase: graph.file for graph in engine.graphs}
    record = EngineRecord(
        engine.target, engine.files, by_phase["prefill"], by_phase["decode"], onnx_packages(), None, None, source.limits
    )

    def session() -> Session:
        from adx.runtime.ort_session import OrtSession

        path = source.folder / by_phase["decode"]
        opened = OrtSession(path, source.spec.kv_cache, source.spec.vocab_size, threads=request.threads)
        opened.max_batch_size = source.limits.max_batch_size
        return opened

    return Built(engine.graphs, (record,), made.recipe, 32, request.precision, samples, session)
