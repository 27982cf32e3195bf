"""Products with quantized weights in ONNX Runtime against integer arithmetic in numpy, and the engines' files."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray
from operators import block_engine, channel_graph, layer, multiply, opened, parts_of, run_node
from traced import Traced, engine_logits, tokens, traced

from adx.calibration.channels import ChannelScheme
from adx.calibration.recipe import make_channel_recipe, make_recipe
from adx.calibration.weights import BlockScheme, QuantizedWeight, quantize
from adx.engines import ort_cpu
from adx.export.errors import UsageError
from adx.runtime import ort_session
from adx.runtime.ort_graphs import load_graph
from adx.runtime.ort_session import OrtSession

if TYPE_CHECKING:
    import onnx
    import onnxruntime

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

SCHEMES = [
    BlockScheme(bits, block, symmetric)
    for bits in (4, 8)
    for block in (16, 32, 64, 128, 256, 512)
    for symmetric in (True, False)
]
WIDEST = 256  # columns of an input that share a scale, however wide the weights' blocks are
CLOSE = 1e-5  # of the largest element

BIG = {"vocab_size": 32000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", BIG),
    "llama, tied": ("llama", {**BIG, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"vocab_size": 32000, "n_embd": 128, "n_layer": 1}),
}


def weights(rows: int, columns: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def inputs(tokens: int, columns: int, seed: int = 1) -> Floats:
    """Rows of different sizes, one element a hundred times larger, and the first 64 columns of the last row zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, columns)) * rng.lognormal(0, 1, (tokens, 1))
    x[0, 7] *= 100
    x[-1, :64] = 0
    return x.astype(np.float32)


def rounded_inputs(x: Floats, block: int) -> Doubles:
    """What an input stands for in 8 bits: symmetric, each row's blocks by themselves, their largest magnitude at 127.

    As ONNX Runtime's `MatMulNBits` of accuracy level 4 has it on x86: found by comparing block sizes, kernels and
    roundings, and it is what its source says (`QuantizeARow_CompInt8`). Weights in blocks wider than 256 have inputs
    in blocks of 256. Quotients are float32, so the codes are the kernel's own, ties included.
    """
    (rows, columns), block = x.shape, min(block, WIDEST)
    padded = np.zeros((rows, -(-columns // block) * block), np.float32)
    padded[:, :columns] = x
    padded = padded.reshape(rows, -1, block)
    largest = np.abs(padded).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(padded * inverse).astype(np.int64)
    assert np.abs(codes).max() <= 127
    values: Doubles = codes * (largest / np.float32(127)).astype(np.float64)
    return values.reshape(rows, -1)[:, :columns]


def stored(made: QuantizedWeight) -> Doubles:
    """The matrix (rows, columns) of the packed bytes, in float64."""
    codes, zeros = parts_of(made)
    values: Doubles = (codes - zeros[..., None]) * made.scales[..., None].astype(np.float64)
    return values.reshape(len(codes), -1)[:, : made.shape[1]]


def cpu() -> str:
    """The processor's instruction sets, which decide on the kernel."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    return " ".join(f for f in flags if f.startswith(("avx", "amx", "fma"))) or platform.processor()


def assert_product(got: Floats, x: Floats, matrix: Doubles, block: int, bias: Doubles | float = 0.0) -> None:
    """The integer product, or the float one of a kernel that does not quantize its input; nothing between them."""
    integers, floats = rounded_inputs(x, block) @ matrix.T + bias, x.astype(np.float64) @ matrix.T + bias
    size = np.abs(floats).max()
    errors = [float(np.abs(got - each).max() / size) for each in (integers, floats)]
    assert min(errors) <= CLOSE, f"of integers {errors[0]:.1e}, of floats {errors[1]:.1e}; {cpu()}"


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("columns", [80, 256, 300, 1100])
def test_an_engines_product_is_integer_arithmetic(scheme: BlockScheme, columns: int, tmp_path: Path) -> None:
    """Two fused layers, one of them with a bias, in the graph that engines have: one token (decode), a few, and more
    than a kernel takes at once (prefill); columns that fill no whole block."""
    first, second, bias = weights(24, columns), weights(9, columns, 5), weights(1, 24, 6)[0]
    path = block_engine([layer("a", first, bias), layer("b", second)], scheme, tmp_path)
    session = opened(path)
    matrix = np.concatenate([stored(quantize(each, scheme)) for each in (first, second)])
    for rows in (1, 5, 130):
        x = inputs(rows, columns)
        (y,) = session.run(None, {"x": x})
        assert_product(y, x, matrix, scheme.block_size, np.concatenate([bias, np.zeros(9)]).astype(np.float64))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_sums_of_the_largest_codes_do_not_saturate(scheme: BlockScheme) -> None:
    """Weights and inputs at the ends of their ranges, of one sign and of both: sums of two products overflow 16 bits
    in kernels that are made carelessly (255 * 127 * 2)."""
    sign = np.sign(weights(16, 300))
    for matrix in (sign, np.ones_like(sign), -np.ones_like(sign)):
        matrix = matrix * np.float32(127)
        if not scheme.symmetric:
            matrix[:, ::16] *= -1  # the range needs both ends for codes to be at one of them
        made = quantize(matrix, scheme)
        for x in (sign[:5] * 127, np.full((5, 300), 127, np.float32), matrix[:1]):
            for rows in (x, x[:1]):
                assert_product(multiply(rows, made, 4), rows, stored(made), scheme.block_size)


def test_the_reference_sees_a_product_that_saturates() -> None:
    """What `assert_product` is good for: a block of pairs clipped to 16 bits is far from it."""
    made, x = quantize(np.full((1, 32), 127, np.float32), BlockScheme(8, 32)), np.full((1, 32), 127, np.float32)
    pairs = np.minimum((255 * 127 + 255 * 127), 32767) * 16.0 - 128 * 127 * 32  # codes 255 less their middle
    with pytest.raises(AssertionError, match="of integers"):
        assert_product(np.array([[pairs]], np.float32), x, stored(made), 32)


def test_inputs_of_one_block_do_not_change_anothers() -> None:
    """An element a thousand times larger costs the elements of its own block alone their precision."""
    made, x = quantize(weights(16, 256), BlockScheme(8, 32)), weights(1, 256, 1)
    loud = x.copy()
    loud[0, 3] = 1000
    matrix = stored(made)
    (rest,) = multiply(loud, made, 4) - rounded_inputs(loud, 32)[:, :32] @ matrix.T[:32]
    np.testing.assert_allclose(rest, (rounded_inputs(x, 32)[:, 32:] @ matrix.T[32:])[0], atol=2e-3)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("columns", [256, 300, 80])
def test_the_runtime_reads_the_packing(scheme: BlockScheme, columns: int) -> None:
    """ONNX Runtime's product in float32 arithmetic: order, nibbles, zero points, padding."""
    made, x = quantize(weights(24, columns), scheme), weights(3, columns, seed=1)
    expected = x.astype(np.float64) @ stored(made).T
    for level in (0, 1):
        np.testing.assert_allclose(multiply(x, made, level), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_the_runtime_reads_an_embedding_in_8_bits(block: int) -> None:
    """`GatherBlockQuantized` on the layout that the linear layer's matrix has, so that a tied table is stored once."""
    made = quantize(weights(40, 128), BlockScheme(8, block))
    ids = np.array([[0, 39, 7], [7, 7, 1]], np.int64)
    constants = {"data": made.data.reshape(40, 128), "scales": made.scales}
    order = ["data", "ids", "scales"]
    found = run_node(
        "GatherBlockQuantized",
        {"ids": ids},
        constants,
        order,
        bits=8,
        block_size=block,
        gather_axis=0,
        quantize_axis=1,
    )
    np.testing.assert_allclose(found, stored(made)[ids], rtol=1e-6, atol=1e-7)


# Graphs over a preallocated cache: a scale for each output channel, and one for the input.


def channels_by_hand(weight: Floats) -> Doubles:
    """The smallest float16 scale that reaches the row's largest element, codes to nearest, the product in float16."""
    exact = np.maximum(np.abs(weight).max(1) / np.float32(127), np.float32(2.0**-24))
    scales = exact.astype(np.float16)
    low = scales.astype(np.float32) < exact
    scales[low] = np.nextafter(scales[low], np.float16(np.inf))
    codes = np.rint(weight / scales.astype(np.float32)[:, None])
    values: Doubles = (codes * scales.astype(np.float64)[:, None]).astype(np.float16).astype(np.float64)
    return values


def assert_close(got: Floats, expected: Doubles) -> None:
    error = float(np.abs(got - expected).max() / np.abs(expected).max())
    assert error <= CLOSE, f"{error:.1e}; {cpu()}"


@pytest.mark.parametrize("columns", [64, 300])
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("scale", [0.03, 0.004, 1e-5])
def test_the_static_graphs_product_is_that_of_rounded_inputs(
    columns: int, rows: int, scale: float, tmp_path: Path
) -> None:
    """Inputs up to a fifth beyond the ends of their codes, -128 and 127, where they saturate; none is near a tie. The
    scale is a float16. ONNX Runtime's CPU provider computes such a graph in float32, its weights made float16."""
    rng, step = np.random.default_rng(0), float(np.float16(scale))
    codes = rng.integers(-150, 151, (rows, columns))
    x = ((codes + rng.uniform(-0.3, 0.3, codes.shape)) * step).astype(np.float32)
    weight = weights(40, columns)
    weight[3] = np.sign(weight[3]) * np.abs(weight[3]).max()  # every weight at the ends of its codes
    weight[4] = 0
    path = channel_graph(layer("a", weight), ChannelScheme(scale), tmp_path)
    (y,) = load_graph(path, 1).run(None, {"x": x})
    assert_close(y, (np.clip(codes, -128, 127) * step) @ channels_by_hand(weight).T)


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_the_static_graphs_weights_alone(rows: int, tmp_path: Path) -> None:
    """The input stays float; with a bias, in float16."""
    weight, x, bias = weights(40, 300), inputs(rows, 300), weights(1, 40, 7)[0]
    path = channel_graph(layer("a", weight, bias), ChannelScheme(), tmp_path)
    (y,) = load_graph(path, 1).run(None, {"x": x})
    assert_close(y, x.astype(np.float64) @ channels_by_hand(weight).T + bias.astype(np.float16))


# Optimizations.


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_a_product_does_not_depend_on_optimizations(scheme: BlockScheme) -> None:
    """With scales that are float32 constants, as they are once ONNX Runtime has folded their cast."""
    made = quantize(weights(24, 300), scheme)
    for rows in (1, 5):
        x = inputs(rows, 300)
        results = [multiply(x, made, 4, level=f"ORT_{level}") for level in ("DISABLE_ALL", "ENABLE_ALL")]
        np.testing.assert_array_equal(*results)


def test_scales_beyond_float16_need_no_cast(tmp_path: Path) -> None:
    """They are float32 in the file, and the product is the same at every level."""
    weight, x = weights(24, 96) * np.float32(2e7), inputs(3, 96)
    path = block_engine([layer("a", weight)], BlockScheme(4, 32, False), tmp_path)
    results = [opened(path, f"ORT_{level}").run(None, {"x": x})[0] for level in ("DISABLE_ALL", "ENABLE_ALL")]
    np.testing.assert_array_equal(*results)
    assert_product(results[0], x, stored(quantize(weight, BlockScheme(4, 32, False))), 32)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Traced]:
    """The model of a name in `MODELS`, traced when it is first asked for."""

    def source(name: str) -> Traced:
        family, overrides = MODELS[name]
        return traced(tmp_path_factory, family, **overrides)

    return source


@functools.cache
def written(source: Traced, precision: Any) -> Path:
    """The engine's graph."""
    folder = source.scratch / f"engine-{precision}"
    ort_cpu.compile(source.semantic, lambda layers: make_recipe(precision, layers), folder)
    return folder / ort_cpu.GRAPH_FILE


def session(source: Traced, precision: Any) -> OrtSession:
    return OrtSession(written(source, precision), source.spec.kv_cache, source.vocab_size, threads=1)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_an_engines_logits_do_not_depend_on_optimizations(
    sources: Callable[[str], Traced], name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Basic ones fold the scales' cast; what more of them do to a graph changes nothing but rounding.

    With none at all ONNX Runtime 1.32 leaves the cast in the graph, and its `MatMulNBits`, which packs constant scales
    with its weights, gives zeros for scales that are computed; see the test below for what adx opens.
    """
    source, ids = sources(name), tokens(0, 2, 12)
    every = engine_logits(session(source, precision), ids, 5)
    monkeypatch.setattr(ort_session, "_load", lambda path, threads: opened(path, "ORT_ENABLE_BASIC"))
    basic = engine_logits(session(source, precision), ids, 5)
    assert np.abs(every - basic).max() <= 1e-5 * np.ptp(every)


def test_adx_opens_engines_with_every_optimization(
    sources: Callable[[str], Traced], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then every quantized product's scales are a float32 constant, no longer a cast's result."""
    import onnx
    import onnxruntime

    source, real = sources("llama"), onnxruntime.InferenceSession
    levels: list[Any] = []

    def noted(path: str, options: onnxruntime.SessionOptions, **more: Any) -> onnxruntime.InferenceSession:
        levels.append(options.graph_optimization_level)
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        return real(path, options, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", noted)
    session(source, "int4").close()
    assert levels == [onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL]
    graph = onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph
    constants = {each.name: each.data_type for each in graph.initializer}
    products = [each for each in graph.node if each.op_type == "MatMulNBits"]
    assert len(products) >= 4
    assert {constants.get(each.input[2]) for each in products} == {onnx.TensorProto.FLOAT}


# Sizes.


def graph_of(path: Path) -> onnx.GraphProto:
    import onnx

    return onnx.load(path, load_external_data=False).graph


def tensor_bytes(path: Path) -> dict[str, int]:
    """Every initializer's bytes."""
    import onnx

    found = {}
    for each in graph_of(path).initializer:
        itemsize = onnx.helper.tensor_dtype_to_np_dtype(each.data_type).itemsize
        found[each.name] = int(np.prod(each.dims)) * itemsize
    return found


def of_layers(sizes: dict[str, int]) -> int:
    """Bytes of all but the embeddings and the head, which has 8 bits at int4."""
    return sum(
        size for name, size in sizes.items() if not any(part in name for part in ("lm_head", "embed", "wte", "wpe"))
    )


@pytest.mark.parametrize("name", MODELS)
def test_integers_take_a_part_of_the_floats_bytes(sources: Callable[[str], Traced], name: str) -> None:
    """A vocabulary of 32000, so that the embedding and the head count: on disk, and layer by layer."""
    source = sources(name)
    folders = {precision: written(source, precision).parent for precision in ("fp32", "int8", "int4")}
    disk = {key: sum(path.stat().st_size for path in folder.iterdir()) for key, folder in folders.items()}
    assert disk["int8"] <= 0.35 * disk["fp32"]
    assert disk["int4"] <= disk["int8"]
    layers = {key: of_layers(tensor_bytes(folder / "model.onnx")) for key, folder in folders.items()}
    assert layers["int8"] <= 0.35 * layers["fp32"]
    assert layers["int4"] <= 0.20 * layers["fp32"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_no_large_float_is_left(sources: Callable[[str], Traced], name: str, precision: str) -> None:
    """But scales, in float16."""
    import onnx

    path = written(sources(name), precision)
    sizes, kinds = tensor_bytes(path), {each.name: each.data_type for each in graph_of(path).initializer}
    floats = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
    large = {name for name, size in sizes.items() if size > 65536 and kinds[name] in floats}
    scales = {name for name in large if name.endswith(".scales")}
    assert {kinds[name] for name in scales} <= {onnx.TensorProto.FLOAT16}
    assert not large - scales
    for quantized in (name for name in sizes if name.endswith(".quantized")):
        assert sizes[quantized.replace(".quantized", ".scales")] <= sizes[quantized] / 16


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_an_engine_without_a_quantized_layer_is_refused(
    sources: Callable[[str], Traced], precision: Any, tmp_path: Path
) -> None:
    """And not written in float under the name of the precision."""
    source = sources("llama")
    with pytest.raises(UsageError, match=f"no layer would be quantized to {precision}"):
        ort_cpu.compile(source.semantic, lambda layers: make_recipe(precision, layers, exclude=["."]), tmp_path)
    with pytest.raises(UsageError, match="no layer would be quantized to int8"):
        make_channel_recipe("int8", {}, inputs={})
