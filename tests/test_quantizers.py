"""Weight quantizers against numpy arithmetic and ONNX Runtime's own kernels, and the recipe that chooses a scheme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from adx.calibration.recipe import INT4_GROUP, INT8_GROUPS, make_recipe
from adx.calibration.weights import BlockScheme, QuantizedWeight, concatenate, quantize
from adx.export.errors import UsageError

Floats = NDArray[np.float32]

SHAPES = [(6, 256), (5, 300), (3, 40), (1, 7), (4, 257)]
SCHEMES = [
    BlockScheme(bits, block, symmetric)
    for bits in (4, 8)
    for block in (16, 32, 64, 128, 256, 512)
    for symmetric in (True, False)
]


def weights(rows: int, columns: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def rounded(block: NDArray[np.float64], bits: int, symmetric: bool) -> tuple[NDArray[np.float64], float, float]:
    """One block by the textbook, in float64: exact (not rounded) codes, scale and zero point.

    Symmetric 4 bits: the element of largest magnitude becomes -8 times the scale. Symmetric 8 bits: +-127 times it.
    Asymmetric: the codes 0..2**bits-1 span the block's range, widened to hold 0.
    """
    if symmetric:
        extreme = block[np.abs(block).argmax()]
        scale = abs(extreme) / 127 if bits == 8 else extreme / -8
        zero = float(1 << (bits - 1))
    else:
        low, high = min(block.min(), 0.0), max(block.max(), 0.0)
        scale = (high - low) / (2**bits - 1)
        zero = float(np.rint(-low / scale)) if scale else 0.0
    return (block / scale if scale else np.zeros_like(block)), scale, zero


def unpacked(packed: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """(rows, n) codes of packed bytes, the first of a pair in the low half."""
    if bits == 8:
        return packed.astype(np.int64)
    codes = np.zeros((packed.shape[0], 2 * packed.shape[1]), np.int64)
    codes[:, 0::2], codes[:, 1::2] = packed % 16, packed // 16
    return codes


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_scales_are_those_of_the_textbook(scheme: BlockScheme, shape: tuple[int, int]) -> None:
    """Every block, also the last one that columns do not fill (padded with zeros, which widen no range)."""
    matrix = weights(*shape)
    made = quantize(matrix, scheme)
    size, bits = scheme.block_size, scheme.bits
    blocks = -(-shape[1] // size)
    assert made.shape == shape
    assert made.data.shape == (shape[0], blocks, size * bits // 8)
    assert made.scales.shape == (shape[0], blocks)
    assert (made.zero_points is None) == scheme.symmetric
    codes = unpacked(made.data.reshape(shape[0], -1), bits).reshape(shape[0], blocks, size)
    zeros = None if made.zero_points is None else unpacked(made.zero_points, bits)
    assert zeros is None or made.zero_points is None or made.zero_points.shape == (shape[0], -(-blocks * bits // 8))
    for row in range(shape[0]):
        for block in range(blocks):
            values = np.zeros(size)
            part = matrix[row, block * size : (block + 1) * size]
            values[: len(part)] = part
            steps, scale, zero = rounded(values, bits, scheme.symmetric)
            assert made.scales[row, block] == pytest.approx(scale, rel=1e-6)
            if zeros is not None:
                assert zeros[row, block] == zero
            wanted = np.clip(np.rint(steps) + zero, 0, 2**bits - 1)
            clear = np.abs(np.abs(steps - np.trunc(steps)) - 0.5) > 1e-4  # float32 may round a tie the other way
            assert clear.sum() >= size - 2
            np.testing.assert_array_equal(codes[row, block][clear], wanted[clear])


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_the_error_is_half_a_step(scheme: BlockScheme) -> None:
    """But where 4 symmetric bits meet the end of their range on the side that has one code less: a whole step."""
    matrix = weights(6, 300)
    made = quantize(matrix, scheme)
    error = np.abs(made.dequantize() - matrix)
    step = np.repeat(np.abs(made.scales), scheme.block_size, axis=1)[:, :300]
    clipped = scheme.symmetric and scheme.bits == 4
    assert (error <= step * ((1.0 if clipped else 0.5) * (1 + 1e-5))).all()
    assert error.max() > step.min() * 0.4  # the bound is not met by being elsewhere


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_blocks_of_zeros_stay_zero(scheme: BlockScheme) -> None:
    """No division by a scale of 0, and the neighbours are not touched."""
    matrix = weights(2, 1024)
    matrix[0, :512] = 0
    made = quantize(matrix, scheme)
    assert not made.dequantize()[0, :512].any()
    assert np.isfinite(made.scales).all()
    assert (made.scales[0, : 512 // scheme.block_size] == 0).all()
    alone = quantize(matrix[:, 512:], scheme).dequantize()
    np.testing.assert_array_equal(made.dequantize()[:, 512:], alone)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("outlier", [100.0, -100.0])
def test_an_outlier_costs_its_own_block_only(bits: int, symmetric: bool, outlier: float) -> None:
    """The outlier is kept, the other blocks are as without it."""
    matrix = weights(1, 96)
    matrix[0, 40] = outlier
    scheme = BlockScheme(bits, 32, symmetric)
    restored = quantize(matrix, scheme).dequantize()
    assert restored[0, 40] == pytest.approx(outlier, rel=0.04 if not symmetric and bits == 4 else 0.005)
    without = matrix.copy()
    without[0, 40] = 0
    expected = quantize(without, scheme).dequantize()
    np.testing.assert_array_equal(restored[0, :32], expected[0, :32])
    np.testing.assert_array_equal(restored[0, 64:], expected[0, 64:])


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 3e-38, 1e-36])
def test_weights_near_the_smallest_float_do_no_harm(scheme: BlockScheme, size: float) -> None:
    """What is too small to be divided by becomes 0 or itself, never infinity or NaN; warnings would fail the test."""
    matrix = (np.sign(weights(2, 64)) * size).astype(np.float32)
    restored = quantize(matrix, scheme).dequantize()
    assert np.isfinite(restored).all()
    assert np.abs(restored).max() <= 1.1 * size


def test_the_ends_of_the_range_are_reached() -> None:
    """Codes by hand: 4 bits symmetric keep -8..7 (8 becomes 7), asymmetric 0..15, 8 bits -127..127."""
    row = np.zeros((1, 16), np.float32)
    row[0, :4] = [-8, 8, 1, -1]
    four = quantize(row, BlockScheme(4, 16))
    assert four.scales[0, 0] == 1
    assert four.data[0, 0, :2].tolist() == [0 | 15 << 4, 9 | 7 << 4]
    assert four.dequantize()[0, :4].tolist() == [-8, 7, 1, -1]
    flipped = quantize(-row, BlockScheme(4, 16))
    assert flipped.scales[0, 0] == -1  # the largest element's side has the extra code
    assert flipped.dequantize()[0, :4].tolist() == [8, -7, -1, 1]
    row[0, :4] = [-5, 10, 0, 1]
    range4 = quantize(row, BlockScheme(4, 16, symmetric=False))
    assert range4.scales[0, 0] == 1
    assert range4.zero_points is not None
    assert range4.zero_points.tolist() == [[5]]
    assert range4.data[0, 0, :2].tolist() == [0 | 15 << 4, 5 | 6 << 4]
    row[0, :4] = [-127, 127, 1, 0]
    eight = quantize(row, BlockScheme(8, 16))
    assert eight.scales[0, 0] == 1
    assert eight.data[0, 0, :4].tolist() == [1, 255, 129, 128]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_refused(bad: float) -> None:
    matrix = weights(2, 32)
    matrix[1, 5] = bad
    with pytest.raises(UsageError, match="NaN or infinity"):
        quantize(matrix, BlockScheme(8, 32))


@pytest.mark.parametrize(
    ("bits", "block", "message"),
    [(3, 32, "4 or 8 bits"), (16, 32, "4 or 8 bits"), (4, 8, "at least 16"), (4, 48, "power of two"), (8, 0, "16")],
)
def test_schemes_that_no_kernel_has_are_refused(bits: int, block: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BlockScheme(bits, block)


@pytest.mark.parametrize("scheme", [BlockScheme(4, 32, False), BlockScheme(4, 32), BlockScheme(8, 16)], ids=str)
def test_stacked_matrices_are_the_matrices_stacked(scheme: BlockScheme) -> None:
    parts = [weights(rows, 80, seed) for seed, rows in enumerate((3, 5, 2))]
    made = concatenate([quantize(part, scheme) for part in parts])
    whole = quantize(np.concatenate(parts), scheme)
    assert made.shape == (10, 80)
    np.testing.assert_array_equal(made.data, whole.data)
    np.testing.assert_array_equal(made.scales, whole.scales)
    np.testing.assert_array_equal(made.dequantize(), whole.dequantize())


def test_matrices_that_differ_cannot_be_stacked() -> None:
    first = quantize(weights(2, 64), BlockScheme(8, 32))
    for other in (quantize(weights(2, 64), BlockScheme(8, 16)), quantize(weights(2, 48), BlockScheme(8, 32))):
        with pytest.raises(ValueError, match="one scheme and one input"):
            concatenate([first, other])


def run_node(op: str, feeds: dict[str, Any], constants: dict[str, Any], order: list[str], **attributes: int) -> Floats:
    """One com.microsoft node in ONNX Runtime on CPU; `order` names its inputs, '' for one that is left out."""
    import onnx
    import onnxruntime

    inputs = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    node = onnx.helper.make_node(op, order, ["y"], domain="com.microsoft", **attributes)
    initializers = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = onnx.helper.make_graph([node], "one", inputs, [output], initializers)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, feeds)
    return np.asarray(result, np.float32)


def multiply(x: Floats, made: QuantizedWeight, accuracy_level: int) -> Floats:
    constants = {"data": made.data, "scales": made.scales}
    order = ["x", "data", "scales"]
    if made.zero_points is not None:
        constants["zeros"] = made.zero_points
        order.append("zeros")
    (rows, columns), scheme = made.shape, made.scheme
    return run_node(
        "MatMulNBits",
        {"x": x},
        constants,
        order,
        K=columns,
        N=rows,
        bits=scheme.bits,
        block_size=scheme.block_size,
        accuracy_level=accuracy_level,
    )


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("columns", [256, 300, 80])
def test_the_runtime_reads_the_packing(scheme: BlockScheme, columns: int) -> None:
    """ONNX Runtime's product in float32 arithmetic is x @ dequantize().T: order, nibbles, zero points, padding."""
    made = quantize(weights(24, columns), scheme)
    x = weights(3, columns, seed=1)
    expected = x.astype(np.float64) @ made.dequantize().T.astype(np.float64)
    for level in (0, 1):
        np.testing.assert_allclose(multiply(x, made, level), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_the_kernel_with_integer_activations_does_not_saturate(bits: int, symmetric: bool) -> None:
    """Weights and inputs at the ends of their ranges: sums of pairs overflow 16 bits in kernels made carelessly."""
    sign = np.sign(weights(16, 256))
    matrix = (sign * 127).astype(np.float32)
    x = np.broadcast_to(sign[0] * 127, (2, 256)).astype(np.float32)
    made = quantize(matrix, BlockScheme(bits, 32, symmetric))
    expected = x @ made.dequantize().T
    np.testing.assert_allclose(multiply(x, made, 4), expected, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_the_runtime_reads_an_embedding_in_8_bits(block: int) -> None:
    """`GatherBlockQuantized` on the layout that the linear layer's matrix has, so that a tied table is stored once."""
    made = quantize(weights(40, 128), BlockScheme(8, block))
    ids = np.array([[0, 39, 7], [7, 7, 1]], np.int64)
    constants = {"data": made.data.reshape(40, 128), "scales": made.scales}
    result = run_node(
        "GatherBlockQuantized",
        {"ids": ids},
        constants,
        ["data", "ids", "scales"],
        bits=8,
        block_size=block,
        gather_axis=0,
        quantize_axis=1,
    )
    np.testing.assert_allclose(result, made.dequantize()[ids], rtol=1e-6, atol=1e-7)


@dataclass(frozen=True)
class Linear:
    shape: tuple[int, int]
    role: str = "other"


LAYERS = {
    "model.layers.0.self_attn.q_proj": Linear((64, 576), "other"),
    "model.layers.0.mlp.down_proj": Linear((64, 1536)),
    "model.layers.0.mlp.up_proj": Linear((64, 40)),
    "lm_head": Linear((1000, 576), "head"),
}


def test_8_bits_are_as_fine_as_a_layers_role_asks_for() -> None:
    """The head, whose input cannot be smoothed, has the finer blocks; an untied embedding is stored as the head."""
    recipe = make_recipe("int8", LAYERS)
    assert list(recipe.layers) == list(LAYERS)
    assert INT8_GROUPS["head"] < INT8_GROUPS["other"]
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"):
        assert recipe.layers[name].scheme == BlockScheme(8, INT8_GROUPS[LAYERS[name].role])
    assert recipe.embedding == BlockScheme(8, INT8_GROUPS["head"])
    assert all(layer.reason is None for layer in recipe.layers.values())


def test_a_block_is_not_mostly_padding() -> None:
    """40 columns: a block of 64 stores 68 bytes a row, three of 16 store 60."""
    scheme = make_recipe("int8", LAYERS).layers["model.layers.0.mlp.up_proj"].scheme
    assert scheme == BlockScheme(8, 16)


def test_4_bits_leave_the_head_at_8() -> None:
    layers = make_recipe("int4", LAYERS).layers
    for name, layer in layers.items():
        if name == "lm_head":
            assert layer.scheme is not None
            assert layer.scheme.bits == 8
            assert layer.reason == "the head keeps 8 bits"
        else:
            assert layer.scheme == BlockScheme(4, INT4_GROUP, symmetric=False)
            assert layer.reason is None


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_group_size_is_that_of_every_layer(precision: Any) -> None:
    """-1 is one block for a row: the next power of two of its columns; no block is larger than that."""
    layers = make_recipe(precision, LAYERS, group_size=128).layers
    sizes = {layer.scheme.block_size for name, layer in layers.items() if layer.scheme and name != "lm_head"}
    assert sizes == {128, 64}
    rows = make_recipe(precision, LAYERS, group_size=-1).layers
    found = {name: layer.scheme.block_size for name, layer in rows.items() if layer.scheme and name != "lm_head"}
    assert list(found.values()) == [1024, 2048, 64]


@pytest.mark.parametrize("size", [0, 8, 48, -2])
def test_group_sizes_that_no_kernel_has_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match=f"group size {size}"):
        make_recipe("int4", LAYERS, group_size=size)


def test_excluded_layers_stay_in_float() -> None:
    """By regular expressions that are searched for in the name; the reason names the one that matched."""
    layers = make_recipe("int4", LAYERS, exclude=[r"down_proj$", "^lm"]).layers
    floats = {name: layer.reason for name, layer in layers.items() if layer.scheme is None}
    assert floats == {"model.layers.0.mlp.down_proj": "excluded by 'down_proj$'", "lm_head": "excluded by '^lm'"}


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        (["down_proj", "("], r"'\(' is not a regular expression"),
        (["down_prj"], r"'down_prj' matches no layer; layers are named as 'model\.layers\.0\.self_attn\.q_proj'"),
        (["."], "no layer would be quantized to int8"),
    ],
)
def test_exclusions_that_say_nothing_are_refused(exclude: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_recipe("int8", LAYERS, exclude=exclude)


def test_a_model_without_linear_layers_is_not_quantized() -> None:
    with pytest.raises(UsageError, match="no layer would be quantized"):
        make_recipe("int8", {})


def test_float_takes_no_quantizing_options() -> None:
    recipe = make_recipe("fp32", LAYERS)
    assert all(layer.scheme is None for layer in recipe.layers.values())
    assert recipe.embedding is None
    for options in ({"exclude": ["lm_head"]}, {"group_size": 32}):
        with pytest.raises(UsageError, match="no effect at fp32"):
            make_recipe("fp32", LAYERS, **options)  # type: ignore[arg-type]  # one of the two at a time
