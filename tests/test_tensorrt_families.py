"""Every family's own graphs as plans of TensorRT for RTX, built without a GPU: the cache in place, attention whole."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from models import FAMILIES
from static_graphs import lowered
from traced import Traced, traced

from adx.calibration.activations import quantize_inputs
from adx.calibration.ranges import layer_ranges
from adx.calibration.samples import write_samples
from adx.calibration.smoothing import by_activations
from adx.engines import tensorrt
from adx.engines.compiled import CompiledEngine
from adx.engines.plan_record import PlanRecord, from_json, record_path
from adx.engines.static_graphs import plan_layers
from adx.engines.tensorrt import GraphSource, PlanRequest
from adx.export.manifest import Limits

RTX = ("tensorrt_rtx_bindings", "onnxruntime_ep_nv_tensorrt_rtx")
SM = "sm89"

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in RTX),
    reason="TensorRT for RTX is not installed: pip install 'adx-toolchain[tensorrt-rtx]'",
)


def graphs(source: Traced, folder: Path, precision: str) -> CompiledEngine:
    """As an export writes them: ranges measured, and at 8 bits smoothed, with scales for activations."""
    rows = list(write_samples(source.model, seed=0, rows=2, length=16).windows())
    ranges = layer_ranges(source.model, rows)
    if precision == "fp16":
        return lowered(source, folder, ranges=ranges)
    choose = by_activations({name: found.inputs for name, found in ranges.items()}, 0.6)
    layers, _ = plan_layers(source.semantic, choose)
    divisors = {name: layer.input_scale for name, layer in layers.items() if layer.input_scale is not None}
    inputs = quantize_inputs(source.model, rows, ranges, divisors)
    return lowered(source, folder, "int8", ranges=ranges, inputs=inputs, choose=choose)


@pytest.mark.parametrize("precision", ["fp16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_builds(family: str, precision: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each layer's keys and values are written into the cache in place, each attention is one kernel (Gemma 2's soft
    cap is spelled out), and nothing needs a plugin. At 8 bits the layers compute in integers."""
    source = traced(tmp_path_factory, family)
    cache = source.spec.kv_cache
    engine = graphs(source, tmp_path, precision)
    limits = Limits(2, 64, cache.capacity)
    bundle = GraphSource(tmp_path, engine.graphs, cache, limits, tmp_path / "build.log")
    request = PlanRequest(sms=(SM,))
    (record,) = tensorrt.compile(bundle, "tensorrt-rtx", request, lambda stage, fraction: None)
    assert record.compute_capability == SM
    for plan in (tmp_path / record.prefill, tmp_path / record.decode):
        facts = read(plan).facts
        assert plan.stat().st_size == facts.bytes
        assert facts.kv_cache_updates == 2 * cache.layers
        assert facts.attentions == (0 if family == "gemma2" else cache.layers)
        assert facts.attentions_decomposed == 0
        assert facts.plugins == 0
        assert facts.warnings == ()
        assert (facts.layers.get("QUANTIZE", 0) > 0) == (precision == "int8")
        assert (facts.layers.get("DEQUANTIZE", 0) >= facts.layers.get("QUANTIZE", 0) + 1) == (precision == "int8")


def read(plan: Path) -> PlanRecord:
    return from_json(record_path(plan).read_text(encoding="utf-8"), plan.name)


def test_an_8_bit_plan_is_smaller(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Weights of a model that has some: what the plan holds beside them is the same."""
    source = traced(tmp_path_factory, "llama", num_hidden_layers=1, hidden_size=256, intermediate_size=1024)
    weights = {}
    for precision in ("fp16", "int8"):
        folder = tmp_path / precision
        engine = graphs(source, folder, precision)
        bundle = GraphSource(folder, engine.graphs, source.spec.kv_cache, Limits(1, 64, 128), tmp_path / "build.log")
        (record,) = tensorrt.compile(bundle, "tensorrt-rtx", PlanRequest(sms=(SM,)), lambda stage, fraction: None)
        found = read(folder / record.decode).facts.weights_bytes
        assert found is not None
        weights[precision] = found
    assert weights["int8"] < 0.6 * weights["fp16"]
