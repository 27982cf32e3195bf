"""What an export writes down: the manifest, and the lines that people read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adx.ci.export_request import ExportRequest
from adx.export.spec import ModelSpec

if TYPE_CHECKING:
    from adx.calibration.recipe import LayerRecipe
    from adx.ci.built import Built
    from adx.ci.figures import ParityFigures
    from adx.export.manifest import EngineRecord, LayerQuantization, Limits, Manifest
    from adx.export.spec import GraphSpec


def manifest_of(
    request: ExportRequest,
    spec: ModelSpec,
    limits: Limits,
    built: Built,
    plans: tuple[EngineRecord, ...],
    portable: tuple[GraphSpec, ...],
    figures: ParityFigures,
) -> Manifest:
    """The manifest of a bundle whose files are written but not hashed; plans come first among its engines."""
    from adx.export.manifest import ExcludedNode, Manifest, QuantizationRecord, adx_version, provenance

    layers = tuple(_layer_record(name, layer, built.float_bits) for name, layer in built.recipe.layers.items())
    excluded = tuple(
        ExcludedNode(name, layer.reason or "")
        for name, layer in built.recipe.layers.items()
        if layer.scheme is None and request.algorithm is not None
    )
    digest = built.samples.sha256 if built.samples else None
    return Manifest(
        adx_version(),
        spec,
        (*portable, *built.graphs),
        QuantizationRecord(built.bound, digest, layers, excluded),
        (*plans, *built.engines),
        limits,
        {key: value for key, value in figures.to_dict().items() if key != "cases"},
        provenance(request.command),
    )


def _layer_record(name: str, layer: LayerRecipe, float_bits: int) -> LayerQuantization:
    from adx.export.manifest import LayerQuantization

    scheme = layer.scheme
    if scheme is None:
        return LayerQuantization(name, float_bits, "float", None, layer.reason)
    kind = "symmetric" if scheme.symmetric else "asymmetric"
    if getattr(scheme, "input_scale", None) is not None:
        kind += ", activations too"
    return LayerQuantization(name, scheme.bits, kind, scheme.block_size, layer.reason)


def summary_of(
    request: ExportRequest,
    built: Built,
    plans: tuple[EngineRecord, ...],
    figures: ParityFigures,
    size: int,
    kept: bool,
    seconds: float,
) -> tuple[str, ...]:
    """What was quantized, the figures of parity, and where the bundle is, for people."""
    recipe = built.recipe
    quantized = sum(layer.scheme is not None for layer in recipe.layers.values())
    bits: dict[str, int] = {}
    for layer in recipe.layers.values():
        name = f"float{built.float_bits}" if layer.scheme is None else layer.scheme.name
        bits[name] = bits.get(name, 0) + 1
    kinds = ", ".join(f"{count} x {name}" for name, count in bits.items())
    parity = figures.to_dict()
    if request.algorithm is None:
        stored = f"{len(recipe.layers)} linear layers in float{built.float_bits}"
    else:
        stored = f"quantized {quantized} of {len(recipe.layers)} linear layers ({kinds})"
    lines = [
        stored,
        f"parity {'passed' if figures.passed else 'FAILED'}: KL {_short(parity['kl_mean'])}, "
        f"top-1 {_short(parity['top1'])}, perplexity ratio {_short(parity['perplexity_ratio'])}, "
        f"largest logit error {_short(parity['max_abs_logit_error'])} of a range of {_short(parity['logit_range'])}",
    ]
    lines += [f"missed: {miss}" for miss in parity.get("misses", ())]
    lines += [f"{plan.target} {plan.compute_capability}: {plan.prefill} and {plan.decode}" for plan in plans]
    if kept and request.plan_targets and not request.build:
        targets = " ".join(f"--target {target}" for target in request.plan_targets)
        lines.append(f"no plans yet; on the host that has the GPU: adx compile {request.out} {targets}")
    if kept:
        lines.append(f"{request.out}: {size / 1e6:,.1f} MB in {seconds:,.0f} s")
    else:
        lines.append(f"{request.out} was not written; --allow-parity-failure keeps a bundle that misses its bounds")
    return tuple(lines)


def _short(figure: float | None) -> str:
    """Four digits; what is not finite is none in a report."""
    return "not finite" if figure is None else f"{figure:.4g}"
