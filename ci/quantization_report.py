"""`reports/quantization.json` and `.html`: what quantization did to a model, layer by layer and in the whole."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from adx.ci.budget import BudgetSearch, Outcome
from adx.ci.built import Builder, Built, Source
from adx.ci.decode_steps import TorchSteps
from adx.ci.figures import finite_or_none
from adx.ci.proof import Proof
from adx.ci.report_html import render
from adx.ci.report_measures import Measures

if TYPE_CHECKING:
    from adx.calibration.recipe import LayerRecipe
    from adx.calibration.samples import CalibrationSamples
    from adx.export.manifest import EngineRecord

JSON_FILE, HTML_FILE = "reports/quantization.json", "reports/quantization.html"
SCHEMA_VERSION = 1


def write_quantization_report(
    source: Source, builder: Builder, proof: Proof, outcome: Outcome, engines: Sequence[EngineRecord]
) -> None:
    """Write both files into the bundle's folder; nothing where no layer is quantized.

    Args:
        builder: made the engines.
        proof: compared them with PyTorch.
        engines: all of the bundle's.
    """
    if source.request.algorithm is None:
        return
    started = time.perf_counter()
    facts = report_of(source, builder, proof, outcome, engines)
    facts["seconds"] = round(time.perf_counter() - started, 1)
    facts = finite(facts)
    (source.folder / JSON_FILE).parent.mkdir(exist_ok=True)
    (source.folder / JSON_FILE).write_text(json.dumps(facts, allow_nan=False) + "\n", encoding="utf-8")
    (source.folder / HTML_FILE).write_text(render(facts), encoding="utf-8")


def report_of(
    source: Source, builder: Builder, proof: Proof, outcome: Outcome, engines: Sequence[EngineRecord]
) -> dict[str, Any]:
    """Everything that the report says; numbers may be infinite where the engine gave NaN."""
    from adx.export.manifest import adx_version, provenance

    request, spec, built = source.request, source.spec, outcome.built
    made = provenance(request.command)
    layers = layer_rows(source, builder, outcome)
    return {
        "schema_version": SCHEMA_VERSION,
        "adx_version": adx_version(),
        "created": made.created,
        "command": list(made.command),
        "packages": dict(made.packages),
        "model": {key: getattr(spec, key) for key in ("source", "revision", "architecture", "dtype", "parameters")},
        "targets": list(request.targets),
        "precision": request.precision,
        "algorithm": request.algorithm,
        "options": _options(source),
        "calibration": None if built.samples is None else _calibration(built.samples),
        "parity": {key: value for key, value in outcome.figures.to_dict().items() if key != "cases"},
        **_measured(source, built, proof),
        "layers": layers,
        "sensitivity_note": _note(source, outcome),
        "search": None if outcome.search is None else outcome.search.to_dict(),
        "size": _sizes(source, built, engines, layers),
    }


def layer_rows(source: Source, builder: Builder, outcome: Outcome) -> list[dict[str, Any]]:
    """Each linear layer, in the model's order: how it is stored, what that costs, and why."""
    costs, levels = _search_by_layer(outcome.search)
    rows = []
    for name, layer in outcome.built.recipe.layers.items():
        shape = _shape(source.model, name)
        rows.append(
            {
                "name": name,
                "shape": list(shape),
                **_stored(layer, shape, outcome.built.float_bits),
                "output_error": builder.error(name, layer.scheme),
                "sensitivity": costs.get(name),
                "raised_to": levels.get(name),
                "reason": layer.reason,
            }
        )
    return rows


def finite(value: Any) -> Any:
    """The value as JSON can hold it: numbers that are not finite are null."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return finite_or_none(value.item() if isinstance(value, np.generic) else value)


def _options(source: Source) -> dict[str, Any]:
    """What was asked of the quantization; null: left to adx."""
    request = source.request
    return {
        "group_size": request.group_size,
        "symmetric": request.symmetric,
        "clip": request.clips,
        "smooth_quant_alpha": request.smooth_quant_alpha,
        "activations": request.quantizes_activations,
        "calib_method": request.calib_method if request.quantizes_activations else None,
        "nodes_to_exclude": list(request.nodes_to_exclude),
        "uniform": request.uniform,
        "max_ppl_increase": request.max_ppl_increase,
        "max_kl": request.max_kl,
        "seed": request.seed,
    }


def _calibration(samples: CalibrationSamples) -> dict[str, Any]:
    return {
        "summary": samples.summary(),
        "source": samples.source,
        "samples": len(samples.rows),
        "tokens": samples.token_count,
        "skipped": dict(samples.skipped),
        "seed": samples.seed,
        "sha256": samples.sha256,
    }


def _measured(source: Source, built: Built, proof: Proof) -> dict[str, Any]:
    """Figures that take the engine beside PyTorch."""
    from adx.runtime.text import TextCodec

    source.report("loading the engine", None)
    session = built.open()
    try:
        measures = Measures(
            session,
            TorchSteps(source.model, threads=session.threads),
            proof.corpus,
            max_input_len=source.limits.max_input_len,
            codec=TextCodec.open(source.folder) if proof.corpus.source == "text" else None,
            report=source.report,
        )
        unfit = {"skipped": "this engine is for a GPU, and was checked on the CPU: `adx bench` times it there"}
        return {
            "positions": measures.positions(),
            "speed": unfit if source.request.static else measures.speed(),
            "samples": measures.samples(_ends(source)),
        }
    finally:
        session.close()


def _ends(source: Source) -> list[int]:
    """Tokens that end a text."""
    ends = getattr(source.model.generation_config, "eos_token_id", None)
    return [] if ends is None else [int(ends)] if isinstance(ends, int) else [int(end) for end in ends]


def _search_by_layer(search: BudgetSearch | None) -> tuple[Mapping[str, float], Mapping[str, str]]:
    """By layer what its unit costs as the recipe has it, and the last level that it was raised to."""
    if search is None:
        return {}, {}
    costs = {name: cost for names, cost in search.sensitivities.items() for name in names}
    levels = {name: step.level for step in search.steps[: search.kept] for name in step.unit.layers}
    return costs, levels


def _note(source: Source, outcome: Outcome) -> str:
    """What the sensitivities are, or why there are none."""
    if outcome.search is not None:
        return (
            "mean KL divergence in nats when this layer, with those that are computed as one with it, is the only "
            "quantized part"
        )
    if outcome.figures.passed:
        return "not measured: the first build kept the bound"
    option = "--uniform" if source.request.uniform else "--allow-parity-failure"
    return f"not measured: {option} leaves every layer as it is"


def _shape(model: Any, name: str) -> tuple[int, int]:
    """(out, in) of a linear layer."""
    from transformers.pytorch_utils import Conv1D

    module = model.get_submodule(name)
    first, second = (int(size) for size in module.weight.shape)
    return (second, first) if isinstance(module, Conv1D) else (first, second)


def _stored(layer: LayerRecipe, shape: tuple[int, int], float_bits: int) -> dict[str, Any]:
    """How a layer is stored, and the bytes that it takes in an engine's file."""
    from adx.calibration.weights import BlockScheme

    scheme, (rows, columns) = layer.scheme, shape
    if scheme is None:
        stored = float_bits // 8 * rows * columns
        return {"bits": float_bits, "scheme": "float", "group_size": None, "activations": False, "bytes": stored}
    if isinstance(scheme, BlockScheme):
        stored, activations = scheme.stored_bytes(shape), False
    else:
        stored, activations = rows * columns + 2 * rows, scheme.input_scale is not None
    return {
        "bits": scheme.bits,
        "scheme": "symmetric" if scheme.symmetric else "asymmetric",
        "group_size": scheme.block_size,
        "activations": activations,
        "bytes": stored,
    }


def _sizes(
    source: Source, built: Built, engines: Sequence[EngineRecord], layers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Bytes of the engines' files, and of the same parameters in float."""
    width = built.float_bits // 8
    whole = width * source.spec.parameters
    weights = sum(row["shape"][0] * row["shape"][1] for row in layers)
    stored = sum(row["bytes"] for row in layers)
    found = []
    for engine in engines:
        size = sum((source.folder / file).stat().st_size for file in engine.files)
        made_for = {"target": engine.target, "compute_capability": engine.compute_capability}
        found.append({**made_for, "bytes": size, "ratio": whole / size})
    return {
        "float_dtype": f"float{built.float_bits}",
        "float_bytes": whole,
        "engines": found,
        "linear_float_bytes": width * weights,
        "linear_bytes": stored,
        "bits_per_weight": 8 * stored / weights,
    }
