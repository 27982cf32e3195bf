"""SmoothQuant: nothing changes in float, ranges are what transformers' layers see, samples repeat from their seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from models import FAMILIES, load_model, tiny
from numpy.typing import NDArray
from static_graphs import RawGraph, files_of, lowered, session_over
from traced import Traced, engine_logits, reference, tokens, traced

from adx.calibration import smoothing
from adx.calibration.ranges import LayerRange, input_ranges, layer_ranges
from adx.calibration.recipe import make_recipe
from adx.calibration.samples import CalibrationSamples, write_samples
from adx.calibration.smoothing import by_activations, by_weight_error, smooth
from adx.engines import ort_cpu
from adx.export.linears import LinearLayer, collect_linears
from adx.export.rotary import fold_rotary
from adx.runtime.ort_session import OrtSession

if TYPE_CHECKING:
    import onnx_ir as ir

Floats = NDArray[np.float32]
Tiny = Callable[..., Traced]
WAYS = ("activations", "everything moves", "weight error")

FLOAT32, ROUNDING, SEEN = 1e-4, 0.006, 0.03  # parts of the logits' range


@pytest.fixture(scope="module")
def tiny_traced(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return lambda family, **overrides: traced(tmp_path_factory, family, **overrides)


def measured(source: Traced) -> dict[str, LayerRange]:
    return layer_ranges(source.model, write_samples(source.model, seed=3, rows=2, length=17).rows)


def way(name: str, ranges: dict[str, LayerRange]) -> smoothing.Choose:
    if name == "weight error":
        return by_weight_error(ranges)
    inputs = {layer: found.inputs for layer, found in ranges.items()}
    return by_activations(inputs, 1.0 if name == "everything moves" else 0.5)


def error(got: Any, expected: Any) -> float:
    """Largest difference as a part of the expected logits' range."""
    return float(np.abs(np.asarray(got, np.float64) - expected).max() / np.ptp(expected))


def graph_and_layers(source: Traced) -> tuple[ir.Model, dict[str, LinearLayer]]:
    graph = source.semantic.model.clone()
    fold_rotary(graph)
    return graph, collect_linears(graph)


@pytest.mark.parametrize("family", FAMILIES)
def test_smoothing_moves_scales_and_keeps_every_product(tiny_traced: Tiny, family: str) -> None:
    """Each smoothed layer's weight is its old one times one scale per column (rows divided where a projection took the
    next layer's division), the scale is the paper's formula, and layers behind a norm are among the smoothed."""
    source = tiny_traced(family)
    ranges = {name: found.inputs for name, found in measured(source).items()}
    graph, layers = graph_and_layers(source)
    before = {name: layer.weight().copy() for name, layer in layers.items()}
    smoothed = smooth(graph, layers, by_activations(ranges))
    assert smoothed >= 2 * source.model.config.num_hidden_layers
    for name, layer in layers.items():
        columns = np.ones(layer.shape[1]) if layer.input_scale is None else layer.input_scale
        rows = np.ones(layer.shape[0]) if layer.output_scale is None else layer.output_scale
        np.testing.assert_allclose(layer.weight(), before[name] * rows[:, None] * columns, rtol=1e-5)
        if layer.input_scale is not None:
            assert np.exp(np.log(layer.input_scale).mean()) == pytest.approx(1, abs=1e-3)


def test_layers_that_share_an_input_share_the_divisor(tiny_traced: Tiny) -> None:
    """Query, key and value together, gate and up together; it is the paper's formula over the largest weight of all."""
    source = tiny_traced("llama")
    ranges = {name: found.inputs for name, found in measured(source).items()}
    graph, layers = graph_and_layers(source)
    before = {name: layer.weight().copy() for name, layer in layers.items()}
    asked: list[tuple[str, ...]] = []
    formula = by_activations(ranges, 0.7)

    def choose(readers: Sequence[LinearLayer]) -> Floats | None:
        asked.append(tuple(layer.name for layer in readers))
        return formula(readers)

    smooth(graph, layers, choose)
    block = "model.layers.0"
    attention = tuple(f"{block}.self_attn.{part}_proj" for part in "qkv")
    gates = tuple(f"{block}.mlp.{part}_proj" for part in ("gate", "up"))
    assert {attention, gates, (f"{block}.mlp.down_proj",)} <= set(asked)
    for group in (attention, gates):
        largest = np.max([np.abs(before[name]).max(0) for name in group], axis=0)
        expected = ranges[group[0]] ** 0.7 / largest**0.3
        expected /= np.exp(np.log(expected).mean())
        for name in group:
            scale = layers[name].input_scale
            assert scale is not None
            np.testing.assert_allclose(scale, expected, rtol=1e-4)


def float32_engine(source: Traced, folder: Path, ranges: dict[str, Floats]) -> OrtSession:
    choose = by_activations(ranges)
    ort_cpu.compile(source.semantic, lambda layers: make_recipe("fp32", layers), folder, choose=choose)
    return OrtSession(folder / ort_cpu.GRAPH_FILE, source.spec.kv_cache, source.vocab_size, threads=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_stay_what_they_were(tiny_traced: Tiny, family: str, tmp_path: Path) -> None:
    """Ranges drawn at random, far from the measured ones, so that divisors differ a thousandfold."""
    source = tiny_traced(family)
    rng, ids = np.random.default_rng(0), tokens(0, 2, 15)
    wild = {name: rng.lognormal(0, 2, len(found.inputs)).astype(np.float32) for name, found in measured(source).items()}
    assert error(engine_logits(float32_engine(source, tmp_path, wild), ids), reference(source.model, ids)) <= FLOAT32


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_float16_logits_stay_what_they_were(tiny_traced: Tiny, family: str, name: str, tmp_path: Path) -> None:
    """The head smoothed too, where a norm makes its input."""
    source = tiny_traced(family)
    ids, ranges = tokens(0, 2, 15), measured(source)
    engine = lowered(source, tmp_path, ranges=ranges, choose=way(name, ranges))
    logits = engine_logits(session_over(engine, tmp_path, source), ids)
    assert error(logits, reference(source.model, ids)) <= ROUNDING


@pytest.mark.parametrize("part", ["_divide_norm", "_divide_projection"])
def test_a_division_that_is_forgotten_would_be_seen(
    tiny_traced: Tiny, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_traced("llama")
    ids, ranges = tokens(0, 2, 15), measured(source)
    real: Callable[..., bool] = getattr(smoothing, part)
    # The weights are scaled and what makes the input is not: the function says that it did its part.
    monkeypatch.setattr(smoothing, part, lambda *args: real(*args[:-1], np.ones_like(args[-1])))
    engine = lowered(source, tmp_path, ranges=ranges, choose=way("activations", ranges))
    logits = engine_logits(session_over(engine, tmp_path, source), ids)
    assert error(logits, reference(source.model, ids)) >= SEEN


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_an_embedding_tied_to_a_smoothed_head_stays_what_it_was(
    tiny_traced: Tiny, precision: Any, tmp_path: Path
) -> None:
    """The table is stored once, its columns scaled for the head; what the first layer reads is the embedding still."""
    import onnx
    from onnx import helper, numpy_helper

    source = tiny_traced("llama", num_hidden_layers=1, tie_word_embeddings=True)
    ranges = measured(source)
    engine = lowered(source, tmp_path, precision, ranges=ranges, choose=way("activations", ranges))
    path = files_of(engine, tmp_path)["decode"]
    proto = onnx.load(path)
    norm = next(node for node in proto.graph.node if node.op_type == "RMSNormalization")
    proto.graph.output.append(helper.make_tensor_value_info(norm.input[0], 1, None))
    onnx.save(proto, tmp_path / "watched.onnx")
    ids, zero = tokens(0, 1, 12), np.zeros(1, np.int64)
    cache = [np.zeros((1, 2, 16, 16), np.float16) for _ in range(2)]
    graph = RawGraph.load(tmp_path / "watched.onnx")
    logits, values = graph.run(ids, cache, write_indices=zero, row_lengths=zero + 12, pad_lengths=zero)
    table = source.model.state_dict()["model.embed_tokens.weight"].numpy()
    (stored,) = [t for t in proto.graph.initializer if list(t.dims) == list(table.shape)]
    if precision == "fp16":
        assert np.abs(numpy_helper.to_array(stored).astype(np.float32) - table).max() > 0.1, "it was not smoothed"
    np.testing.assert_allclose(
        values[-1], table[ids], atol=np.abs(table).max() * (1e-3 if precision == "fp16" else 2e-2)
    )
    assert error(logits, reference(source.model, ids)) <= (ROUNDING if precision == "fp16" else 0.1)


def test_layers_whose_divisor_is_none_are_left(tiny_traced: Tiny) -> None:
    source = tiny_traced("llama")
    graph, layers = graph_and_layers(source)
    assert smooth(graph, layers, lambda readers: None, head=True) == 0
    assert all(layer.input_scale is None and layer.output_scale is None for layer in layers.values())


def test_the_head_is_left_unless_asked_for(tiny_traced: Tiny) -> None:
    """Without `head` no embedding needs to undo anything."""
    source = tiny_traced("llama")
    choose = by_activations({name: found.inputs for name, found in measured(source).items()})
    for head in (False, True):
        graph, layers = graph_and_layers(source)
        smooth(graph, layers, choose, head=head)
        assert (layers["lm_head"].input_scale is not None) == head


def test_ranges_are_the_largest_magnitudes_of_each_channel(tmp_path: Path) -> None:
    """Against transformers' own hidden states: the head's input is the last hidden state."""
    model = load_model(tiny("llama", tmp_path / "ll"))
    rows = np.random.default_rng(0).integers(3, 256, (3, 9))
    ranges = input_ranges(model, CalibrationSamples("test", 0, tuple(rows)))
    with torch.no_grad():
        hidden = model(torch.from_numpy(rows), output_hidden_states=True).hidden_states[-1]
    np.testing.assert_allclose(ranges["lm_head"], hidden.abs().amax((0, 1)).numpy(), rtol=1e-4)
