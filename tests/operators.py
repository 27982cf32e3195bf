"""Single operators and linear layers in ONNX Runtime, and packed weights read with numpy alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.calibration.channels import ChannelScheme
from adx.calibration.quantizers import round_to_nearest
from adx.calibration.recipe import LayerRecipe, QuantRecipe
from adx.calibration.weights import BlockScheme, QuantizedWeight
from adx.engines import ort_cpu, static_graphs
from adx.engines.half_linears import HalfLinears
from adx.engines.ort_linears import LinearLowering
from adx.export.linears import LinearLayer
from adx.export.rewrite import node, prune, seal
from adx.export.trace import DOMAIN
from adx.export.weights_file import WeightsFile

if TYPE_CHECKING:
    import onnx_ir as ir
    import onnxruntime

Floats = NDArray[np.float32]


def unpacked(packed: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """(rows, n) codes of packed bytes, the first of a pair in the low half."""
    if bits == 8:
        return packed.astype(np.int64)
    codes = np.zeros((packed.shape[0], 2 * packed.shape[1]), np.int64)
    codes[:, 0::2], codes[:, 1::2] = packed % 16, packed // 16
    return codes


def parts_of(made: QuantizedWeight) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Codes (rows, blocks, block_size) and zero points (rows, blocks) from the packed bytes."""
    (rows, blocks), bits = made.scales.shape, made.scheme.bits
    codes = unpacked(made.data.reshape(rows, -1), bits).reshape(rows, blocks, made.scheme.block_size)
    if made.zero_points is None:
        return codes, np.full((rows, blocks), 1 << (bits - 1))
    return codes, unpacked(made.zero_points, bits)[:, :blocks]


def run_node(
    op: str,
    feeds: dict[str, Any],
    constants: dict[str, Any],
    order: list[str],
    *,
    level: str = "ORT_ENABLE_ALL",
    **attributes: int,
) -> Floats:
    """One com.microsoft node in ONNX Runtime on CPU; `order` names its inputs, '' for one that is left out."""
    import onnx
    import onnxruntime

    inputs = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    made = onnx.helper.make_node(op, order, ["y"], domain="com.microsoft", **attributes)
    initializers = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = onnx.helper.make_graph([made], "one", inputs, [output], initializers)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, feeds)
    return np.asarray(result, np.float32)


def multiply(x: Floats, made: QuantizedWeight, accuracy_level: int, *, level: str = "ORT_ENABLE_ALL") -> Floats:
    """`MatMulNBits` with scales in float32."""
    constants: dict[str, Any] = {"data": made.data, "scales": made.scales}
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
        level=level,
        K=columns,
        N=rows,
        bits=scheme.bits,
        block_size=scheme.block_size,
        accuracy_level=accuracy_level,
    )


def layer(name: str, weight: Floats, bias: Floats | None = None, **more: Any) -> LinearLayer:
    """A linear layer of a matrix (out, in)."""
    import onnx_ir as ir

    return LinearLayer(name, ir.tensor(weight), False, None if bias is None else ir.tensor(bias), **more)


def block_engine(layers: Sequence[LinearLayer], scheme: BlockScheme | None, folder: Path) -> Path:
    """The graph of fused layers on one input `x` (rows, in), as engines for ONNX Runtime on CPU have it."""

    def lower(model: ir.Model, named: dict[str, LinearLayer], weights: WeightsFile) -> None:
        recipe = QuantRecipe("int8", dict.fromkeys(named, LayerRecipe(scheme)))
        LinearLowering(model, named, recipe, round_to_nearest, weights, lambda name: None).run()

    return _written(layers, folder, lower, ort_cpu.IR_VERSION, ort_cpu.OPSETS)


def channel_graph(layer: LinearLayer, scheme: ChannelScheme | None, folder: Path) -> Path:
    """The graph of one layer on an input `x` (rows, in), as the graphs over a preallocated cache have it."""

    def lower(model: ir.Model, named: dict[str, LinearLayer], weights: WeightsFile) -> None:
        recipe = QuantRecipe("int8", dict.fromkeys(named, LayerRecipe(scheme)))
        HalfLinears(model, named, recipe, round_to_nearest, {}, weights, lambda name: None).run()

    return _written([layer], folder, lower, static_graphs.IR_VERSION, {"": static_graphs.OPSET})


def _written(
    layers: Sequence[LinearLayer],
    folder: Path,
    lower: Callable[[ir.Model, dict[str, LinearLayer], WeightsFile], None],
    ir_version: int,
    opsets: Mapping[str, int],
) -> Path:
    import onnx_ir as ir

    columns, rows = layers[0].shape[1], sum(each.shape[0] for each in layers)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["tokens", columns]))
    linear = node("Linear", [x], {"names": [each.name for each in layers]}, domain=DOMAIN)
    y = linear.outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["tokens", rows])
    graph = ir.Graph([x], [y], nodes=[linear], opset_imports={"": 21}, name="linear")
    model = ir.Model(graph, ir_version=ir_version)
    folder.mkdir(parents=True, exist_ok=True)
    with WeightsFile(folder / "weights.data") as weights:
        lower(model, {each.name: each for each in layers}, weights)
    prune(model)
    seal(model, ir_version, opsets)
    ir.save(model, folder / "linear.onnx")
    return folder / "linear.onnx"


def opened(path: Path, level: str = "ORT_ENABLE_ALL") -> onnxruntime.InferenceSession:
    """A graph in ONNX Runtime on CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
