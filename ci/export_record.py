"""What an export writes down: the manifest, and the lines that people read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adx.ci.export_request import ExportRequest
from adx.export.spec import ModelSpec

if TYPE_CHECKING:
    from adx.calibration.recipe import QuantRecipe
    from adx.calibration.samples import CalibrationSamples
    from adx.ci.figures import ParityFigures
    from adx.engines.ort_cpu import CompiledEngine
    from adx.export.manifest import Limits, Manifest


def manifest_of(
    request: ExportRequest,
    spec: ModelSpec,
    limits: Limits,
    engine: CompiledEngine,
    recipe: QuantRecipe,
    samples: CalibrationSamples | None,
    portable: tuple[Any, ...],
    figures: ParityFigures,
) -> Manifest:
    """The manifest of a bundle whose files are written but not hashed."""
    from adx.export.manifest import (
        EngineRecord,
        ExcludedNode,
        LayerQuantization,
        Manifest,
        QuantizationRecord,
        adx_version,
        provenance,
    )

    layers = tuple(
        LayerQuantization(
            name,
            32 if layer.scheme is None else layer.scheme.bits,
            "float" if layer.scheme is None else "symmetric" if layer.scheme.symmetric else "asymmetric",
            None if layer.scheme is None else layer.scheme.block_size,
            layer.reason,
        )
        for name, layer in recipe.layers.items()
    )
    excluded = tuple(
        ExcludedNode(name, layer.reason or "")
        for name, layer in recipe.layers.items()
        if layer.scheme is None and request.precision != "fp32"
    )
    made_by = provenance(request.command)
    built_with = {name: version for name, version in made_by.packages.items() if "onnx" in name}
    by_phase = {graph.phase: graph.file for graph in engine.graphs}
    record = EngineRecord(
        engine.target, engine.files, by_phase["prefill"], by_phase["decode"], built_with, None, None, limits
    )
    return Manifest(
        adx_version(),
        spec,
        (*portable, *engine.graphs),
        QuantizationRecord(request.precision, samples.sha256 if samples else None, layers, excluded),
        (record,),
        limits,
        {key: value for key, value in figures.to_dict().items() if key != "cases"},
        made_by,
    )


def summary_of(
    request: ExportRequest, recipe: QuantRecipe, figures: ParityFigures, size: int, kept: bool, seconds: float
) -> tuple[str, ...]:
    """What was quantized, the figures of parity, and where the bundle is, for people."""
    quantized = sum(layer.scheme is not None for layer in recipe.layers.values())
    bits: dict[str, int] = {}
    for layer in recipe.layers.values():
        name = "float32" if layer.scheme is None else layer.scheme.name
        bits[name] = bits.get(name, 0) + 1
    kinds = ", ".join(f"{count} x {name}" for name, count in bits.items())
    parity = figures.to_dict()
    lines = [
        f"quantized {quantized} of {len(recipe.layers)} linear layers ({kinds})",
        f"parity {'passed' if figures.passed else 'FAILED'}: KL {_short(parity['kl_mean'])}, "
        f"top-1 {_short(parity['top1'])}, perplexity ratio {_short(parity['perplexity_ratio'])}, "
        f"largest logit error {_short(parity['max_abs_logit_error'])} of a range of {_short(parity['logit_range'])}",
    ]
    lines += [f"missed: {miss}" for miss in parity.get("misses", ())]
    if kept:
        lines.append(f"{request.out}: {size / 1e6:,.1f} MB in {seconds:,.0f} s")
    else:
        lines.append(f"{request.out} was not written; --allow-parity-failure keeps a bundle that misses its bounds")
    return tuple(lines)


def _short(figure: float | None) -> str:
    """Four digits; what is not finite is none in a report."""
    return "not finite" if figure is None else f"{figure:.4g}"
