"""Weights in blocks of 4 and 8 bits in the float16 graphs, for ONNX Runtime on CUDA; its CPU provider runs the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import models
import numpy as np
import pytest
from numpy.typing import NDArray
from static_graphs import files_of, reweighted, session_over
from traced import Traced, engine_logits, reference, tokens, traced

from adx.calibration.quantizers import round_to_nearest
from adx.calibration.ranges import LayerRange
from adx.calibration.recipe import Raised, make_channel_recipe, make_recipe
from adx.calibration.weights import BlockScheme, QuantizedWeight, quantize
from adx.ci.build_cpu import CpuBuilder
from adx.ci.build_cuda import CudaBuilder
from adx.ci.build_static import StaticBuilder
from adx.ci.builders import make_builder
from adx.ci.built import Source
from adx.ci.calibrated import Calibration
from adx.ci.export_request import ExportRequest
from adx.ci.pipeline import export_bundle
from adx.ci.proof import Proof
from adx.engines.compiled import CompiledEngine
from adx.engines.half_blocks import block_product, gathered_rows, half_scales
from adx.engines.made_nodes import MadeNodes
from adx.engines.static_graphs import write_graphs
from adx.export.bundle import Bundle
from adx.export.errors import LoweringError, UsageError
from adx.export.manifest import Limits
from adx.export.rewrite import initializer
from adx.runtime import load

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

Floats = NDArray[np.float32]
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory, "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory, "llama", num_hidden_layers=1, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory, "gpt2", n_layer=1, vocab_size=320)


def lowered(source: Traced, folder: Path, precision: Any, *, ranges: Any = None, **how: Any) -> CompiledEngine:
    quantizer = how.pop("quantizer", round_to_nearest)
    return write_graphs(
        source.semantic,
        lambda layers: make_recipe(precision, layers, **how),
        folder,
        ranges=ranges or {},
        quantizer=quantizer,
    )


def unpacked(node: onnx.NodeProto, tensors: Mapping[str, NDArray[Any]], columns: int) -> Floats:
    """The matrix (rows, columns) that a node's integers stand for, byte by byte as the operator's text has it: low
    nibble first, the middle of the range is 0 without zero points."""
    at = {a.name: a.i for a in node.attribute}
    gathers = node.op_type == "GatherBlockQuantized"
    names = [node.input[0], *node.input[2:]] if gathers else list(node.input[1:])
    bits, block = at["bits"], at["block_size"]

    def codes(array: NDArray[np.uint8]) -> NDArray[np.float64]:
        flat = array.reshape(len(array), -1).astype(np.float64)
        return flat if bits == 8 else np.stack([flat % 16, flat // 16], -1).reshape(len(array), -1)

    scales = tensors[names[1]].astype(np.float64)
    zeros = np.full(scales.shape, 1 << (bits - 1))
    if len(names) > 2 and names[2]:
        zeros = codes(tensors[names[2]])[:, : scales.shape[1]]
    values = codes(tensors[names[0]]) - zeros.repeat(block, 1)
    return (values * scales.repeat(block, 1))[:, :columns].astype(np.float32)


def stored(engine: CompiledEngine, folder: Path) -> tuple[list[onnx.NodeProto], dict[str, NDArray[Any]]]:
    """The nodes of the decode graph that hold blocks, and all of its tensors."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(files_of(engine, folder)["decode"])
    tensors = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    return [node for node in model.graph.node if node.domain == "com.microsoft"], tensors


def rewritten(source: Traced, engine: CompiledEngine, folder: Path) -> Any:
    """The model in PyTorch with the weights that the graph's integers stand for."""
    import torch

    model = models.load_model(source.checkpoint)
    nodes, tensors = stored(engine, folder)
    with torch.no_grad():
        for node in nodes:
            gathers = node.op_type == "GatherBlockQuantized"
            module = model.get_input_embeddings() if gathers else model.get_submodule(node.name)
            turned = type(module).__name__ == "Conv1D"
            columns = module.weight.shape[0 if turned else 1]
            weight = torch.from_numpy(unpacked(node, tensors, columns))
            assert weight.shape == (module.weight.T if turned else module.weight).shape
            module.weight.copy_(weight.T if turned else weight)
    return model


def departure(found: Floats, expected: Floats) -> float:
    """Largest difference as a part of the reference's range."""
    return float(np.abs(found - expected).max() / np.ptp(expected))


# The graphs.


@pytest.mark.parametrize("family", ["llama", "tied", "gpt2"])
@pytest.mark.parametrize(
    ("precision", "options"),
    [("int8", {}), ("int8", {"symmetric": False}), ("int4", {}), ("int4", {"group_size": 16, "symmetric": True})],
)
def test_the_graphs_compute_with_the_integers_that_they_hold(
    family: str, precision: str, options: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Prefill and decode, several rows: what PyTorch computes with those weights, as closely as float16 allows."""
    source: Traced = request.getfixturevalue(family)
    engine = lowered(source, tmp_path, precision, **options)
    expected = reference(rewritten(source, engine, tmp_path), ids := tokens(1, 2, 24))[:, 9:]
    found = engine_logits(session_over(engine, tmp_path, source), ids, past=9)
    assert departure(found, expected) <= 4e-3
    plain = reference(source.model, ids)[:, 9:]
    assert departure(found, plain) > 2 * departure(found, expected), "the rounding of the weights must be seen"


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_every_layer_is_in_blocks_and_close_to_its_weight(precision: str, llama: Traced, tmp_path: Path) -> None:
    """No element is further from the checkpoint's than half a step of its block, the step's own rounding aside."""
    nodes, tensors = stored(lowered(llama, tmp_path, precision), tmp_path)
    products = {node.name: node for node in nodes if node.op_type == "MatMulNBits"}
    linears = {name: m for name, m in llama.model.named_modules() if type(m).__name__ == "Linear"}
    assert products.keys() == linears.keys()
    for name, node in products.items():
        at = {a.name: a.i for a in node.attribute}
        weight = linears[name].weight.detach().numpy()
        assert at["bits"] == (8 if precision == "int8" or name == "lm_head" else 4)
        assert at["accuracy_level"] == 0, "inputs stay float16 where the check runs as well"
        steps = np.abs(tensors[node.input[2]].astype(np.float32)).repeat(at["block_size"], 1)[:, : weight.shape[1]]
        assert np.all(np.abs(unpacked(node, tensors, weight.shape[1]) - weight) <= steps * (0.5 + 1e-2))
        assert tensors[node.input[2]].dtype == np.float16


def test_a_tied_table_is_in_the_file_once(tied: Traced, llama: Traced, tmp_path: Path) -> None:
    """The head's product and the embedding's rows read the same bytes; nothing holds a float copy of them."""
    sizes = {}
    for name, source in (("tied", tied), ("apart", llama)):
        engine = lowered(source, tmp_path / name, "int8")
        nodes, tensors = stored(engine, tmp_path / name)
        (gather,) = (node for node in nodes if node.op_type == "GatherBlockQuantized")
        head = next(node for node in nodes if node.name == "lm_head")
        assert np.array_equal(tensors[gather.input[0]].ravel(), tensors[head.input[1]].ravel()) is (name == "tied")
        largest = max(t.size for t in tensors.values() if t.dtype in (np.float16, np.float32))
        assert largest <= source.vocab_size * source.model.config.hidden_size / 16
        sizes[name] = (tmp_path / name / "engines/onnx/weights.data").stat().st_size
    table = llama.vocab_size * llama.model.config.hidden_size
    assert sizes["apart"] - sizes["tied"] >= table


def test_a_head_in_float_shares_its_table_in_float(tied: Traced, tmp_path: Path) -> None:
    nodes, tensors = stored(lowered(tied, tmp_path, "int4", exclude=("lm_head",)), tmp_path)
    assert {node.op_type for node in nodes} == {"MatMulNBits"}
    tables = [t for t in tensors.values() if t.size == tied.vocab_size * tied.model.config.hidden_size]
    assert [t.dtype for t in tables] == [np.float16]


def test_a_layer_near_the_end_of_float16_is_scaled_in_its_blocks(llama: Traced, tmp_path: Path) -> None:
    """An output of 40,000 on the samples: the scales are divided by a power of two, the integers stay as they are."""
    width = llama.model.config.intermediate_size
    seen = LayerRange(np.ones(width, np.float32), np.ones(width, np.float32), 4e4)
    found = {}
    for name, ranges in (("plain", {}), ("scaled", {DOWN: seen})):
        engine = lowered(llama, tmp_path / name, "int4", ranges=ranges)
        nodes, tensors = stored(engine, tmp_path / name)
        down = next(node for node in nodes if node.name == DOWN)
        logits = engine_logits(session_over(engine, tmp_path / name, llama), tokens(1, 1, 12), past=4)
        found[name] = [*(tensors[each] for each in down.input[1:]), logits]
    for plain, scaled, times in zip(found["plain"], found["scaled"], (1, 8, 1), strict=False):
        assert np.array_equal(plain, scaled * scaled.dtype.type(times))
    assert departure(found["scaled"][3], found["plain"][3]) <= 4e-3


# The kernels, against sums in float64 over the bytes.


def run(
    make: Callable[[MadeNodes, Any, ir.Value], ir.Value], x: NDArray[Any], columns: int | str, *, optimized: bool = True
) -> NDArray[np.float16]:
    """What the nodes that `make` adds give for an input in ONNX Runtime on the CPU."""
    import onnx_ir as ir
    import onnxruntime

    shape = ir.Shape(["rows", columns][: x.ndim])
    value = ir.Value(name="x", type=ir.TensorType(ir.DataType.from_numpy(x.dtype)), shape=shape)
    graph = ir.Graph([value], [], nodes=[], opset_imports={"": 24, "com.microsoft": 1}, name="g")
    model = ir.Model(graph, ir_version=11)
    made = MadeNodes(model)
    out = make(made, lambda name, array: initializer(graph, name, array), value)
    out.name, out.type = "y", ir.TensorType(ir.DataType.FLOAT16)
    for each in made.nodes:
        graph.append(each)
    graph.outputs.append(out)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    found: NDArray[np.float16] = session.run(None, {"x": x})[0]
    return found


def matrix_of(quantized: QuantizedWeight) -> NDArray[np.float64]:
    """What the bytes stand for."""
    rows, bits, size = quantized.shape[0], quantized.scheme.bits, quantized.scheme.block_size

    def codes(array: NDArray[np.uint8]) -> NDArray[np.float64]:
        flat = array.reshape(rows, -1).astype(np.float64)
        return flat if bits == 8 else np.stack([flat % 16, flat // 16], -1).reshape(rows, -1)

    zeros = np.full(quantized.scales.shape, 1 << (bits - 1), np.float64)
    if quantized.zero_points is not None:
        zeros = codes(quantized.zero_points)[:, : zeros.shape[1]]
    values = (codes(quantized.data) - zeros.repeat(size, 1)) * quantized.scales.astype(np.float64).repeat(size, 1)
    return values[:, : quantized.shape[1]]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("columns", [64, 72, 31])
@pytest.mark.parametrize("scheme", [BlockScheme(b, g, s) for b in (4, 8) for g in (16, 64) for s in (True, False)])
def test_products_with_blocks(scheme: BlockScheme, columns: int, rows: int) -> None:
    """Blocks of zeros, one outlier in each of some blocks, sizes that no block divides; optimizations on and off."""
    rng = np.random.default_rng(columns + rows)
    weight = rng.standard_normal((24, columns)).astype(np.float32)
    weight[3] = 0
    weight[4:8, ::16] *= 100
    x = rng.standard_normal((rows, columns)).astype(np.float16)
    quantized = quantize(weight, scheme)
    matrix = matrix_of(quantized) / 4
    expected = x.astype(np.float64) @ matrix.T

    def product(made: MadeNodes, store: Any, value: ir.Value) -> ir.Value:
        return block_product(made, store, "w", value, quantized, 0.25)

    for optimized in (True, False):
        found = run(product, x, columns, optimized=optimized).astype(np.float64)
        # float16 keeps 11 bits: of the result, and of the terms where they cancel
        assert np.all(np.abs(found - expected) <= 2.0**-10 * (np.abs(x.astype(np.float64)) @ np.abs(matrix.T)) + 1e-6)
        assert np.all(found[:, 3] == 0)


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_of_blocks(symmetric: bool) -> None:
    """Each element is its code less the zero point, times the scale: exact but for the product's rounding."""
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((40, 96)).astype(np.float32) + np.float32(0.5)
    quantized = quantize(weight, BlockScheme(8, 32, symmetric))
    ids = rng.integers(0, 40, 17)

    def rows(made: MadeNodes, store: Any, value: ir.Value) -> ir.Value:
        return gathered_rows(made, store, "w", quantized, value)

    for optimized in (True, False):
        found = run(rows, ids, "", optimized=optimized)
        assert np.array_equal(found, matrix_of(quantized)[ids].astype(np.float16))


# What is refused.


@pytest.mark.parametrize("largest", [2.0**-20, 1e5])
def test_scales_that_float16_cannot_hold_are_refused(largest: float) -> None:
    scales = np.array([[largest, largest / 3]], np.float32)
    with pytest.raises(LoweringError, match=r"layer: the scales of its blocks, .*--nodes-to-exclude"):
        half_scales("layer", scales)


def test_scales_below_the_normal_numbers_are_kept_where_they_are_small_beside_the_largest() -> None:
    scales = np.array([[1e-2, 3e-8, 0.0, 2.0**-14]], np.float32)
    assert np.array_equal(half_scales("layer", scales), scales.astype(np.float16))


def test_groups_without_a_kernel_are_refused() -> None:
    """The CPU's kernel takes them, CUDA's does not."""
    quantized = quantize(np.ones((8, 256), np.float32), BlockScheme(4, 256))

    def product(made: MadeNodes, store: Any, value: ir.Value) -> ir.Value:
        return block_product(made, store, "layer", value, quantized, 1.0)

    with pytest.raises(LoweringError, match=r"layer: 256 weights share a scale, .* 16, 32, 64, 128: .*--group-size"):
        run(product, np.ones((1, 256), np.float16), 256)


def test_a_weight_that_float16_cannot_hold_is_told_by_its_name(llama: Traced, tmp_path: Path) -> None:
    def change(model: Any) -> None:
        model.model.layers[0].mlp.down_proj.weight[2, 3] = 7e4

    loud = reweighted(llama, tmp_path, change)
    with pytest.raises(LoweringError, match=r"down_proj holds a weight of 7e\+04"):
        lowered(loud, tmp_path, "int4")


# The builder.


def source_of(made: Traced, folder: Path, precision: Any, **options: Any) -> Source:
    settings = {"targets": ("ort-cuda",), "threads": 1, "calib_size": 8, "calib_seq_len": 32, **options}
    request = ExportRequest(str(made.checkpoint), folder / "out", precision, **settings)
    folder.joinpath("out").mkdir(parents=True)
    limits = Limits(None, 64, made.spec.kv_cache.capacity)
    return Source(request, made.spec, limits, folder / "out", made.model, made.semantic, lambda stage, done: None)


def test_each_target_and_precision_has_its_builder(llama: Traced, tmp_path: Path) -> None:
    expected = {
        ("ort-cuda", "int8"): CudaBuilder,
        ("ort-cuda", "int4"): CudaBuilder,
        ("ort-cuda", "fp16"): StaticBuilder,
        ("tensorrt-rtx", "int8"): StaticBuilder,
        ("ort-cpu", "int8"): CpuBuilder,
    }
    for index, ((target, precision), kind) in enumerate(expected.items()):
        source = source_of(llama, tmp_path / str(index), precision, targets=(target,), quant_algo="rtn")
        assert type(make_builder(source, Calibration(source))) is kind


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_build_is_for_cuda_and_for_checks_on_the_cpu(precision: str, llama: Traced, tmp_path: Path) -> None:
    source = source_of(llama, tmp_path, precision)
    builder = make_builder(source, Calibration(source))
    built = builder.build({})
    assert [engine.target for engine in built.engines] == ["ort-cuda", "onnx"]
    assert built.recipe.precision == precision
    assert built.float_bits == 16
    figures = Proof(source).parity(built)
    assert figures.kl_mean <= (0.01 if precision == "int8" else 0.3), "a random model: beyond int4's own bound"
    half = write_graphs(llama.semantic, lambda n: make_channel_recipe("fp16", n), tmp_path / "half", ranges={})
    sizes = [(place / "engines/onnx/weights.data").stat().st_size for place in (tmp_path / "out", tmp_path / "half")]
    assert half.files
    assert sizes[0] < (0.60 if precision == "int8" else 0.45) * sizes[1]


@pytest.mark.parametrize("options", [{"quant_algo": "gptq"}, {"quant_algo": "rtn", "clip": True}], ids=["gptq", "clip"])
def test_the_integers_are_those_of_the_cpu(options: dict[str, Any], llama: Traced, tmp_path: Path) -> None:
    """One recipe, two targets: what GPTQ and clipping make of a layer that the CPU's graph does not fuse."""
    import onnx
    from onnx import numpy_helper

    found = {}
    for target in ("ort-cpu", "ort-cuda"):
        source = source_of(llama, tmp_path / target, "int4", targets=(target,), **options)
        built = make_builder(source, Calibration(source)).build({})
        model = onnx.load(source.folder / next(graph.file for graph in built.graphs if graph.phase == "decode"))
        tensors = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
        node = next(node for node in model.graph.node if node.name == DOWN)
        found[target] = [tensors[node.input[index]] for index in (1, 3)]
    for cpu, cuda in zip(found["ort-cpu"], found["ort-cuda"], strict=True):
        assert np.array_equal(cpu, cuda)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_smoothing_changes_the_integers_and_not_the_function(precision: str, llama: Traced, tmp_path: Path) -> None:
    """AWQ's divisors, and SmoothQuant's where a share of the outliers is given: norms take them back."""
    options: list[dict[str, Any]] = [
        {"quant_algo": "rtn"},
        {"quant_algo": "awq"},
        {"quant_algo": "smoothquant", "smooth_quant_alpha": 0.5},
    ]
    found = []
    for index, each in enumerate(options):
        source = source_of(llama, tmp_path / str(index), precision, **each)
        built = make_builder(source, Calibration(source)).build({})
        assert Proof(source).parity(built).kl_mean <= (0.01 if precision == "int8" else 0.3)
        nodes, tensors = stored(CompiledEngine("onnx", (), built.graphs, {}), source.folder)
        up = next(node for node in nodes if node.name == "model.layers.0.mlp.up_proj")
        found.append(tensors[up.input[1]].tobytes())
    assert len(set(found)) == 3


def test_layers_are_raised_by_what_they_cost(llama: Traced, tmp_path: Path) -> None:
    """Kept at 8 bits, or in float16; sizes of a unit are what the file grows by."""
    source = source_of(llama, tmp_path, "int4", quant_algo="rtn", group_size=64)
    builder = make_builder(source, Calibration(source))
    unit = next(unit for unit in builder.units() if unit.layers == (DOWN,))
    assert unit.levels == ("int8", "float")
    rows, columns = llama.model.get_submodule(DOWN).weight.shape
    blocks = columns // 64
    assert unit.sizes == (
        rows * (columns // 2 + 2 * blocks + blocks // 2),
        rows * (columns + 2 * blocks),
        2 * rows * columns,
    )
    plain, eight, real = builder.errors(unit)
    assert plain > 100 * eight > 0 == real
    found = {}
    for level in ("int8", "float"):
        built = builder.build({DOWN: Raised(level, "told to")})
        assert built.recipe.layers[DOWN].reason == "told to"
        nodes, _ = stored(CompiledEngine("onnx", (), built.graphs, {}), source.folder)
        found[level] = {node.name: {a.name: a.i for a in node.attribute}["bits"] for node in nodes}
    assert found["int8"][DOWN] == 8
    assert DOWN not in found["float"]


def test_two_builds_are_the_same_bytes(llama: Traced, tmp_path: Path) -> None:
    files = []
    for name in ("first", "second"):
        source = source_of(llama, tmp_path / name, "int4")
        make_builder(source, Calibration(source)).build({})
        files.append({path.name: path.read_bytes() for path in (source.folder / "engines/onnx").iterdir()})
    assert files[0] == files[1]


# From end to end.


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_an_export_for_cuda(precision: Any, tied: Traced, tmp_path: Path) -> None:
    """The bound is that of weights alone; a random model misses int4's own, and layers are kept more precise for it.
    Both engines are the same files, and the one for checks runs on the CPU."""
    out = tmp_path / "out"
    settings: dict[str, Any] = {"targets": ("ort-cuda",), "threads": 1, "calib_size": 8, "calib_seq_len": 32}
    result = export_bundle(ExportRequest(str(tied.checkpoint), out, precision, **settings))
    assert result.passed
    assert result.parity["bound"]["precision"] == precision
    manifest = Bundle.open(out).manifest
    cuda, checks = manifest.engines
    assert (cuda.target, checks.target) == ("ort-cuda", "onnx")
    assert cuda.files == checks.files
    assert manifest.quantization is not None
    assert manifest.quantization.recipe == precision
    assert {layer.bits for layer in manifest.quantization.layers} <= {4, 8, 16}
    assert all(layer.block_size in (16, 32, 64, 128) for layer in manifest.quantization.layers if layer.bits < 16)
    with load(out, target="onnx", threads=1) as generator:
        assert len(generator.generate([5, 6, 7], max_new_tokens=3, ignore_eos=True).token_ids) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group_size": -1}, "--group-size -1 on ort-cuda: its kernels take 16, 32, 64, 128"),
        ({"group_size": 256}, "--group-size 256 on ort-cuda"),
        ({"targets": ("ort-cuda", "tensorrt-rtx")}, "export two bundles"),
        ({"weights_only": True}, "--weights-only applies to --int8 on TensorRT"),
        ({"calib_method": "percentile"}, "--calib-method"),
        ({"precision": "int8", "quant_algo": "gptq"}, "accepted are rtn, smoothquant, awq"),
        ({"precision": "int4", "targets": ("tensorrt-rtx",), "build": False}, "int4 on tensorrt-rtx: it is built in"),
    ],
)
def test_what_has_no_kernel_or_no_effect_is_refused(
    options: dict[str, Any], words: str, llama: Traced, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"precision": "int8", "targets": ("ort-cuda",), **options}
    with pytest.raises(UsageError, match=words):
        export_bundle(ExportRequest(str(llama.checkpoint), tmp_path / "out", **settings))
    assert not list(tmp_path.iterdir())
