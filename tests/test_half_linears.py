"""Linear layers in float16: what comes near its end is scaled by powers of two, what it cannot hold is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray
from static_graphs import RawGraph, files_of, lowered, reweighted, session_over
from traced import Traced, engine_logits, reference, tokens, traced

from adx.calibration.activations import quantize_inputs
from adx.calibration.channels import ChannelScheme
from adx.calibration.ranges import LayerRange, layer_ranges
from adx.calibration.recipe import LayerRecipe, QuantRecipe
from adx.calibration.samples import write_samples
from adx.calibration.smoothing import by_activations
from adx.ci.bounds import bound_of
from adx.ci.corpus import load_corpus
from adx.ci.figures import ParityFigures
from adx.ci.half_range import overflows
from adx.ci.parity import measure_parity
from adx.ci.reference import Reference
from adx.engines.compiled import CompiledEngine
from adx.engines.half_linears import LARGEST
from adx.engines.static_graphs import plan_layers, write_graphs
from adx.export.errors import LoweringError

if TYPE_CHECKING:
    import onnx
    from transformers import PreTrainedModel

END = 65504.0  # float16's largest number
HUGE = 1e5
FIRST = "model.layers.0.mlp"

Change = Callable[["PreTrainedModel"], None]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory, "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory, "llama", num_hidden_layers=1, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory, "gpt2", n_layer=1, vocab_size=320)


def samples(source: Traced) -> list[NDArray[np.int64]]:
    return list(write_samples(source.model, seed=1, rows=32, length=64).windows())


def measured(source: Traced) -> dict[str, LayerRange]:
    return layer_ranges(source.model, samples(source))


def parity(source: Traced, folder: Path, bound: str = "fp16", **how: Any) -> ParityFigures:
    """Lower into `folder`, then compare with PyTorch float32 as an export does."""
    engine = lowered(source, folder, "fp16" if bound == "fp16" else "int8", **how)
    return measure_parity(
        session_over(engine, folder, source),
        Reference(source.model, threads=1),
        load_corpus(source.vocab_size, None),
        bound_of(bound),
        positions=400,
    )


def protos(source: Traced, folder: Path, **how: Any) -> dict[str, onnx.ModelProto]:
    import onnx

    engine = lowered(source, folder, **how)
    return {phase: onnx.load(path, load_external_data=False) for phase, path in files_of(engine, folder).items()}


def written_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "engines/onnx").iterdir()}


def multiply(factors: dict[str, float]) -> Change:
    """Parameters whose name ends so, multiplied."""

    def change(model: PreTrainedModel) -> None:
        for ending, factor in factors.items():
            found = [p for name, p in model.named_parameters() if name.endswith(ending)]
            assert found
            for parameter in found:
                parameter.mul_(factor)

    return change


# Layers that compute near 1e5, by what is multiplied.
LOUD: dict[str, dict[str, float]] = {
    "the product in the MLP and what the MLP adds": {"up_proj.weight": 5e3},
    "what the MLP adds, its input small": {"down_proj.weight": 1e4},
    "what attention adds": {"o_proj.weight": 3e4},
    "values and what attention adds": {"v_proj.weight": 3e3, "o_proj.weight": 10.0},
    "the gate": {"gate_proj.weight": 1e4},
    "the residual sum from the embedding on": {"embed_tokens.weight": 6e4, "down_proj.weight": 3e4},
    "the logits' input": {"model.norm.weight": 3e4, "lm_head.weight": 1e-4},
}


def loudest(source: Traced) -> float:
    """Largest magnitude of any layer's input or output and of the residual sums, in float32."""
    import torch

    seen = [0.0]

    def hook(_module: object, args: tuple[Any, ...], output: Any) -> None:
        values = [v for v in (*args, output) if isinstance(v, torch.Tensor) and v.is_floating_point()]
        seen.extend(float(v.detach().abs().max()) for v in values)

    hooks = [module.register_forward_hook(hook) for module in source.model.modules()]
    for row in samples(source):
        reference(source.model, row[None])
    for each in hooks:
        each.remove()
    return max(seen)


def largest_half(source: Traced, engine: CompiledEngine, folder: Path) -> float:
    """Largest magnitude of any float16 value in the decode graph on the samples, infinite where one is not finite.

    Every such value becomes an output. ONNX Runtime computes a product of float16 in float32, and where a cast to
    float32 follows it never rounds to float16 at all: an overflow that TensorRT has would not show in the logits.
    """
    import onnx

    path = files_of(engine, folder)["decode"]
    proto = onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False))
    held = {value.name for value in proto.graph.output}
    halves = [v for v in proto.graph.value_info if v.type.tensor_type.elem_type == 10 and v.name not in held]
    products = {node.output[0] for node in proto.graph.node if node.op_type == "MatMul"}
    assert products <= {value.name for value in halves}
    proto.graph.output.extend(halves)
    out = path.with_name("watched.onnx")
    onnx.save(proto, out)
    graph, spec, worst = RawGraph.load(out), source.spec.kv_cache, 0.0
    for row in samples(source):
        zero = np.zeros(1, np.int64)
        cache = [np.zeros((1, spec.kv_heads, len(row), spec.head_dim), np.float16) for _ in range(2 * spec.layers)]
        _, values = graph.run(row[None], cache, write_indices=zero, row_lengths=zero + len(row), pad_lengths=zero)
        worst = max(worst, *(float(np.abs(value.astype(np.float64)).max()) for value in values))
    return worst if np.isfinite(worst) else float("inf")


@pytest.mark.parametrize("smoothed", [False, True], ids=["", "smoothed"])
@pytest.mark.parametrize("name", LOUD)
def test_magnitudes_of_1e5_keep_the_bound_of_float16(llama: Traced, tmp_path: Path, name: str, smoothed: bool) -> None:
    """Logits no farther from float32 than those of a model whose activations are small, and no float16 value on the
    way that is infinite, as one is without the ranges."""
    source = reweighted(llama, tmp_path, multiply(LOUD[name]))
    ranges = measured(source)
    assert loudest(source) >= HUGE
    choose = by_activations({layer: found.inputs for layer, found in ranges.items()}) if smoothed else None
    figures = parity(source, tmp_path / "guarded", ranges=ranges, choose=choose)
    assert figures.passed, figures.misses
    assert figures.kl_mean <= 1e-4
    for bare in (False, True):
        folder = tmp_path / f"watched-{bare}"
        engine = lowered(source, folder, ranges={} if bare else ranges, choose=None if bare else choose)
        assert np.isfinite(largest_half(source, engine, folder)) != bare


def test_the_export_looks_at_every_float16_value(llama: Traced, tmp_path: Path) -> None:
    """Its check names the layers whose product is infinite in float16, though logits on the CPU are right; of a graph
    that was guarded, and of one whose activations are small, it says nothing."""
    loud = reweighted(llama, tmp_path / "loud", multiply({"down_proj.weight": 1e4}))
    cache = llama.spec.kv_cache

    def found(source: Traced, name: str, ranges: dict[str, LayerRange]) -> tuple[str, ...]:
        engine = lowered(source, tmp_path / name, ranges=ranges)
        return overflows(files_of(engine, tmp_path / name)["prefill"], cache, samples(source), 1)

    assert found(llama, "calm", {}) == ()
    assert found(loud, "guarded", measured(loud)) == ()
    (line,) = found(loud, "bare", {})
    assert "float16 overflows at" in line
    assert f"{FIRST}.down_proj" in line
    assert "q_proj" not in line
    values = reweighted(llama, tmp_path / "values", multiply({"v_proj.weight": 1e5, "o_proj.weight": 1e-5}))
    (line,) = found(values, "cache", measured(values))
    assert "layers.0" in line


@pytest.mark.parametrize("bound", ["int8", "int8-activations"])
@pytest.mark.parametrize("name", LOUD)
def test_magnitudes_of_1e5_at_8_bits(llama: Traced, tmp_path: Path, name: str, bound: str) -> None:
    """The same models quantized: the scale of an input that is divided is divided with it."""
    source = reweighted(llama, tmp_path, multiply(LOUD[name]))
    rows, ranges = samples(source), measured(source)
    choose = by_activations({layer: found.inputs for layer, found in ranges.items()})
    inputs = None
    if bound == "int8-activations":
        layers, _ = plan_layers(source.semantic, choose)
        divisors = {n: layer.input_scale for n, layer in layers.items() if layer.input_scale is not None}
        inputs = quantize_inputs(source.model, rows, ranges, divisors)
    figures = parity(source, tmp_path / "guarded", bound, ranges=ranges, inputs=inputs, choose=choose)
    assert not any("NaN" in miss for miss in figures.misses)
    assert figures.kl_mean <= (0.01 if inputs is None else 0.04)
    assert figures.top1 >= 0.88, "of 400 positions, so a standard error of 0.015"
    engine = lowered(source, tmp_path / "watched", "int8", ranges=ranges, inputs=inputs, choose=choose)
    assert np.isfinite(largest_half(source, engine, tmp_path / "watched"))


def test_scales_are_powers_of_two(llama: Traced, tmp_path: Path) -> None:
    """So that they cost no precision; what the layer was divided by comes back after it."""
    source = reweighted(llama, tmp_path, multiply({"gate_proj.weight": 1e4, "up_proj.weight": 1e3}))
    from onnx import numpy_helper

    ranges = measured(source)
    bare, guarded = protos(source, tmp_path / "bare"), protos(source, tmp_path / "guarded", ranges=ranges)
    for phase, proto in guarded.items():
        before = {tensor.name for tensor in bare[phase].graph.initializer}
        new = {t.name: float(numpy_helper.to_array(t)) for t in proto.graph.initializer if t.name not in before}
        assert new
        assert {np.frexp(value)[0] for value in new.values()} == {0.5}
        made = {out: node for node in proto.graph.node for out in node.output}
        down = next(node for node in proto.graph.node if node.name == f"{FIRST}.down_proj")
        cast = made[down.input[0]]
        assert made[cast.input[0]].op_type == "Mul", "its input is divided before it is cast"
        divisor = 1 / new[made[cast.input[0]].input[1]]
        assert float(ranges[f"{FIRST}.down_proj"].inputs.max()) / divisor <= LARGEST
        users = {name: node for node in proto.graph.node for name in node.input}
        back = users[users[down.output[0]].output[0]]
        assert back.op_type == "Mul"
        assert ranges[f"{FIRST}.down_proj"].output / new[back.input[1]] <= LARGEST


def test_nothing_changes_where_nothing_is_large(llama: Traced, tmp_path: Path) -> None:
    """Byte for byte the graphs and weights that no ranges would give."""
    ranges = measured(llama)
    assert max(max(float(found.inputs.max()), found.output) for found in ranges.values()) < LARGEST / 10
    lowered(llama, tmp_path / "bare")
    lowered(llama, tmp_path / "guarded", ranges=ranges)
    assert written_bytes(tmp_path / "bare") == written_bytes(tmp_path / "guarded")


@pytest.mark.parametrize(
    ("inputs", "output", "scales"),
    [
        (1.0, LARGEST, []),
        (LARGEST, 1.0, []),
        (1.0, LARGEST * 1.01, [2.0]),
        (1.0, LARGEST * 4, [4.0]),
        (LARGEST * 2.01, 1.0, [0.25, 4.0]),
        (LARGEST * 2, LARGEST * 8, [0.5, 8.0]),
        (0.0, 0.0, []),
    ],
)
def test_the_threshold(llama: Traced, tmp_path: Path, inputs: float, output: float, scales: list[float]) -> None:
    """Of a layer whose range is given: divided as often as needed, first its input, then what is left by its weight,
    and multiplied back once."""
    from onnx import numpy_helper

    channel = np.zeros(64, np.float32)
    channel[3] = inputs
    given = {f"{FIRST}.up_proj": LayerRange(channel, np.square(channel), output)}
    proto = protos(llama, tmp_path, ranges=given)["decode"]
    values = {tensor.name: tensor for tensor in proto.graph.initializer if not list(tensor.dims)}
    used = [name for node in proto.graph.node if node.op_type == "Mul" for name in node.input if name in values]
    assert [float(numpy_helper.to_array(values[name])) for name in used] == scales


@pytest.mark.parametrize(
    ("factor", "shared"), [(1.0, True), (3e3, True), (3e4, False)], ids=["calm", "loud input", "loud logits"]
)
def test_a_tied_head_near_the_end_of_float16(tied: Traced, tmp_path: Path, factor: float, shared: bool) -> None:
    """Where the head's weight must be divided it can no longer be the embedding's table; embeddings stay what they
    were. Logits this far apart have no distribution to compare, so they are compared themselves."""
    source = reweighted(tied, tmp_path, multiply({"model.norm.weight": factor}))
    engine = lowered(source, tmp_path, ranges=measured(source))
    ids = tokens(1, 2, 12)
    expected = reference(source.model, ids)
    got = engine_logits(session_over(engine, tmp_path, source), ids)
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() <= 0.006 * np.ptp(expected)
    tables = sum(path.stat().st_size for path in (tmp_path / "engines/onnx").glob("weights.data"))
    once = 2 * sum(p.numel() for p in source.model.parameters())
    assert (tables < once + 16 * 4096) == shared or not shared


# What cannot be rescued.


@pytest.mark.parametrize("ending", ["v_proj.weight", "k_proj.weight", "q_proj.weight"])
def test_what_attention_cannot_hold_fails_parity(llama: Traced, tmp_path: Path, ending: str) -> None:
    """Keys and values lie in a float16 cache: above 65504 they are infinite, and no scale is undone after it."""
    source = reweighted(llama, tmp_path, multiply({ending: 1e5, "o_proj.weight": 1e-5}))
    ranges = measured(source)
    assert ranges[f"model.layers.0.self_attn.{ending.split('.')[0]}"].output > 2 * END
    figures = parity(source, tmp_path / "out", ranges=ranges)
    assert figures.passed is False
    assert "NaN or infinite" in figures.misses[0]
    assert "top1" in " ".join(figures.misses)


def set_one(ending: str, value: float) -> Change:
    def change(model: PreTrainedModel) -> None:
        (parameter,) = [p for name, p in model.named_parameters() if name.endswith(ending)]
        parameter.view(-1)[7] = value

    return change


@pytest.mark.parametrize("value", [7e4, -7e4])
@pytest.mark.parametrize("layer", ["self_attn.v_proj", "mlp.up_proj"])
def test_a_weight_above_65504_is_refused_by_name(llama: Traced, tmp_path: Path, layer: str, value: float) -> None:
    source = reweighted(llama, tmp_path, set_one(f"{layer}.weight", value))
    with pytest.raises(LoweringError, match=rf"model\.layers\.0\.{layer} holds a weight of 7e\+04.*float16"):
        lowered(source, tmp_path / "out")


def test_an_embedding_above_65504_is_refused_by_name(llama: Traced, tmp_path: Path) -> None:
    source = reweighted(llama, tmp_path, set_one("embed_tokens.weight", 7e4))
    with pytest.raises(LoweringError, match="embed_tokens"):
        lowered(source, tmp_path / "out", ranges=measured(source))


@pytest.mark.parametrize("layer", ["mlp.c_fc", "mlp.c_proj"])
def test_a_bias_above_65504(gpt2: Traced, tmp_path: Path, layer: str) -> None:
    """Refused where nothing is known of the layer, divided with the layer where its output was measured."""
    source = reweighted(gpt2, tmp_path, set_one(f"{layer}.bias", 7e4))
    with pytest.raises(LoweringError, match=rf"transformer\.h\.0\.{layer}.* holds a weight of 7e\+04"):
        lowered(source, tmp_path / "bare")
    figures = parity(source, tmp_path / "out", ranges=measured(source))
    assert figures.passed, figures.misses


def test_a_weight_above_65504_at_8_bits_is_refused_by_name(llama: Traced, tmp_path: Path) -> None:
    """A scale of 551 fits float16, but 127 times it does not."""
    source = reweighted(llama, tmp_path, set_one("mlp.up_proj.weight", 7e4))
    with pytest.raises(LoweringError, match=rf"{FIRST}\.up_proj holds a weight of 7e\+04"):
        lowered(source, tmp_path / "bare", "int8")


def test_an_input_scale_that_float16_takes_for_0_is_refused(llama: Traced, tmp_path: Path) -> None:
    def recipe(layers: Any) -> QuantRecipe:
        schemes = {name: LayerRecipe(ChannelScheme(1e-9 if "up_proj" in name else 1e-2)) for name in layers}
        return QuantRecipe("int8", schemes, ChannelScheme())

    with pytest.raises(LoweringError, match=rf"{FIRST}\.up_proj: the scale of its input, 1e-09, is 0 in float16"):
        write_graphs(llama.semantic, recipe, tmp_path, ranges={})
