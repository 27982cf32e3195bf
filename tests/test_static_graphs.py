"""The float16 graphs over a preallocated cache, in ONNX Runtime on CPU, against transformers in float32.

Every comparison has a fault planted beside it that it sees.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from models import FAMILIES
from numpy.typing import NDArray
from static_graphs import Buffers, RawGraph, files_of, lowered, paths, session
from traced import Traced, engine_logits, reference, tokens, traced

from adx.calibration.activations import quantize_inputs
from adx.calibration.ranges import layer_ranges
from adx.calibration.samples import write_samples
from adx.export.spec import Phase

if TYPE_CHECKING:
    import onnx

# Parts of the logits' range: what float16 rounding leaves (0.0036 at most was measured), and what no rounding makes.
ROUNDING, SEEN = 0.006, 0.03
PLACES = 64
WINDOWED = ("mistral", "gemma2")
PRECISIONS = ("fp16", "int8", "int8-activations")

Tiny = Callable[..., Traced]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Makes and traces a tiny model of a family, once for each set of overrides."""
    return lambda family, **overrides: traced(tmp_path_factory, family, **overrides)


def error(got: Any, expected: Any) -> float:
    """Largest difference as a part of the expected logits' range; infinite where one is not finite."""
    difference = np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64))
    return float(difference.max() / np.ptp(expected)) if np.isfinite(difference).all() else float("inf")


def expected_of(source: Traced, row: NDArray[np.int64]) -> NDArray[np.float32]:
    """(T, V): a row alone, without padding, in transformers."""
    logits: NDArray[np.float32] = reference(source.model, row[None])[0]
    return logits


def raw(source: Traced, phase: Phase) -> RawGraph:
    return RawGraph.load(paths(source)[phase])


def dirty_cache(source: Traced, batch: int, places: int = PLACES) -> Buffers:
    """Buffers of finite numbers that would change every logit if a query saw them."""
    spec, rng = source.spec.kv_cache, np.random.default_rng(9)
    shape = (batch, spec.kv_heads, places, spec.head_dim)
    return [(8 * rng.standard_normal(shape)).astype(np.float16) for _ in range(2 * spec.layers)]


# What the graphs compute.


def grid(source: Traced) -> list[tuple[int, int, int]]:
    """(batch, length, past); a call that crosses long rope's length is the token loop's to avoid."""
    limit = source.spec.kv_cache.recompute_at
    shapes = [*itertools.product((1, 3), (1, 2, 7, 33), (0, 1, 7, 40)), (2, 16, 0), (2, 17, 0)]
    return [s for s in shapes if not (limit and s[2] and s[2] < limit <= s[1] + s[2])]


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_equals_transformers_on_any_past(tiny: Tiny, family: str) -> None:
    """Several new tokens at once and one, on pasts shorter and longer than windows, every position's logits. A call of
    more than 16 tokens goes through the graph in pieces, and once whole."""
    source = tiny(family)
    sessions = session(source), session(source, decode_tokens=64)
    for seed, (batch, length, past) in enumerate(grid(source)):
        ids = tokens(seed, batch, past + length)
        got = engine_logits(sessions[seed % 2], ids, past)
        assert error(got, reference(source.model, ids)[:, past:]) <= ROUNDING, (batch, length, past)


@pytest.mark.parametrize("lengths", [(3, 7, 11), (17, 40, 25)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_equal_each_row_alone(tiny: Tiny, family: str, lengths: tuple[int, ...]) -> None:
    """Prompts padded on the right with random ids, whole and in chunks of 5 (rows end in different chunks, and the
    prefill graph reads on a past), then single steps and four tokens at once on the ragged pasts."""
    source = tiny(family)
    ids, more = tokens(0, len(lengths), max(lengths)), tokens(1, len(lengths), 4)
    expected = [expected_of(source, np.append(ids[row, :n], more[row]))[n - 1 :] for row, n in enumerate(lengths)]
    for chunk in (64, 5):
        graphs = session(source, prefill_chunk=chunk)
        cache = graphs.new_cache(len(lengths), max(lengths) + 4)
        got = [graphs.prefill(ids, np.array(lengths), cache)[:, None].copy()]
        got += [graphs.decode(part, cache).copy() for part in (more[:, :1], more[:, 1:2], more[:, 2:])]
        assert cache.lengths.tolist() == [n + 4 for n in lengths]
        for row, logits in enumerate(np.concatenate(got, axis=1)):
            assert error(logits, expected[row]) <= ROUNDING, (chunk, row)


def left_padded(
    source: Traced, lengths: tuple[int, ...], steps: tuple[int, ...], phase: Phase = "prefill"
) -> tuple[list[NDArray[np.float32]], Buffers, NDArray[np.int64], NDArray[np.int64]]:
    """Run prompts that end in the same column, padded on the left with ids that no prompt holds.

    Returns:
        Logits of each call, the cache, the ids (B, T), and the padding of each row.
    """
    width = max(lengths)
    pads = np.array([width - n for n in lengths])
    ids = tokens(2, len(lengths), width + sum(steps))
    for row, pad in enumerate(pads):
        ids[row, :pad] = 0
    cache, found = dirty_cache(source, len(lengths)), []
    for start, length in itertools.pairwise((0, *itertools.accumulate((width, *steps)))):
        graph = raw(source, "decode" if start else phase)
        rows = {"write_indices": np.full_like(pads, start), "row_lengths": np.full_like(pads, length)}
        logits, cache = graph.run(ids[:, start:length], cache, pad_lengths=pads, **rows)
        found.append(logits)
    return found, cache, ids, pads


@pytest.mark.parametrize(("lengths", "steps"), [((2, 14), (1,)), ((8, 20), (1, 1, 4))], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_padded_on_the_left_equal_each_row_alone(
    tiny: Tiny, family: str, lengths: tuple[int, ...], steps: tuple[int, ...]
) -> None:
    """A pad's query sees nothing true: a softmax over nothing is NaN, and NaN in a pad's value makes every later layer
    NaN, though its weight is 0. The cache holds garbage where nothing was written."""
    source = tiny(family)
    found, cache, ids, pads = left_padded(source, lengths, steps)
    assert all(np.isfinite(logits).all() for logits in found)
    assert all(np.isfinite(buffer).all() for buffer in cache)
    for row, pad in enumerate(pads):
        expected = expected_of(source, ids[row, pad:])[-1 - sum(steps) :]
        assert error(np.concatenate([logits[row] for logits in found]), expected) <= ROUNDING, row


@pytest.mark.parametrize("family", FAMILIES)
def test_every_position_of_a_left_padded_prompt_is_finite(tiny: Tiny, family: str) -> None:
    """Pads' own logits too, from the decode graph, which gives all; true ones are right."""
    source = tiny(family)
    (logits,), cache, ids, pads = left_padded(source, (2, 14), (), "decode")
    assert np.isfinite(logits).all()
    assert all(np.isfinite(buffer).all() for buffer in cache)
    for row, pad in enumerate(pads):
        assert error(logits[row, pad:], expected_of(source, ids[row, pad:])) <= ROUNDING, row


def test_each_row_has_the_rope_of_its_own_length(tiny: Tiny) -> None:
    """Long rope changes at 17 true tokens: rows on both sides of it in one batch, padded on either side."""
    source = tiny("phi3")
    assert source.spec.kv_cache.recompute_at == 17
    for lengths in ((15, 16, 17, 18), (4, 17, 30)):
        graphs = session(source)
        ids, cache = tokens(3, len(lengths), max(lengths)), graphs.new_cache(len(lengths))
        last = graphs.prefill(ids, np.array(lengths), cache).copy()
        for row, length in enumerate(lengths):
            assert error(last[row], expected_of(source, ids[row, :length])[-1]) <= ROUNDING
        (padded,), _, ids, pads = left_padded(source, lengths, ())
        for row, pad in enumerate(pads):
            assert error(padded[row, 0], expected_of(source, ids[row, pad:])[-1]) <= ROUNDING


def test_a_row_that_ends_in_another_call_gives_no_error(tiny: Tiny) -> None:
    """The place of the logits is clamped to the call's tokens: a chunk before and one after the row's end."""
    source = tiny("llama")
    graph, ids = raw(source, "prefill"), tokens(4, 2, 4)
    for start, end in ((0, 9), (8, 3)):
        write, rows = np.full(2, start), np.full(2, end)
        zero = np.zeros_like(write)
        logits, _ = graph.run(ids, dirty_cache(source, 2), write_indices=write, row_lengths=rows, pad_lengths=zero)
        assert logits.shape == (2, 1, source.vocab_size)
        assert np.isfinite(logits).all()


# That the comparisons see a fault.


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padding_that_is_not_told_would_be_seen(tiny: Tiny, family: str) -> None:
    """The same batch, its padding called text."""
    source = tiny(family)
    _, _, ids, pads = left_padded(source, (2, 14), ())
    zero = np.zeros_like(pads)
    full = np.full_like(pads, 14)
    logits, _ = raw(source, "prefill").run(
        ids, dirty_cache(source, 2), write_indices=zero, row_lengths=full, pad_lengths=zero
    )
    assert error(logits[0, 0], expected_of(source, ids[0, 12:])[-1]) >= SEEN
    assert error(logits[1, 0], expected_of(source, ids[1])[-1]) <= ROUNDING


@pytest.mark.parametrize("change", [{"row_lengths": -1}, {"write_indices": 1, "row_lengths": 1}], ids=str)
def test_rows_that_are_off_by_one_would_be_seen(tiny: Tiny, change: dict[str, int]) -> None:
    """A prompt's last token taken one too early; a token written one place too far, so that garbage is seen."""
    source = tiny("llama")
    ids, lengths = tokens(5, 2, 9), np.array([6, 9])
    cache = dirty_cache(source, 2)
    for faulty in (False, True):
        rows = {"write_indices": np.zeros(2, np.int64), "row_lengths": lengths, "pad_lengths": np.zeros(2, np.int64)}
        if faulty:
            rows = {name: value + change.get(name, 0) for name, value in rows.items()}
        logits, _ = raw(source, "prefill").run(ids, cache, **rows)
        worst = max(error(logits[row, 0], expected_of(source, ids[row, :n])[-1]) for row, n in enumerate(lengths))
        assert worst >= SEEN if faulty else worst <= ROUNDING


def constant_becomes(old: float, new: float) -> Callable[[onnx.ModelProto], int]:
    """A change of every scalar or one-element constant of a value."""

    def change(proto: onnx.ModelProto) -> int:
        from onnx import numpy_helper

        changed = 0
        for tensor in proto.graph.initializer:
            if tensor.data_location or np.prod(tensor.dims) != 1 or numpy_helper.to_array(tensor).item() != old:
                continue
            array = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.full_like(array, new), tensor.name))
            changed += 1
        return changed

    return change


def scaled_attention(proto: onnx.ModelProto) -> int:
    nodes = [node for node in proto.graph.node if node.op_type == "Attention"]
    for node in nodes:
        (scale,) = [attribute for attribute in node.attribute if attribute.name == "scale"]
        scale.f *= 1.25
    return len(nodes)


def own_key_hidden(proto: onnx.ModelProto) -> int:
    """A key at the query's own place is not seen: `key <= query` becomes `query > key`."""
    nodes = [node for node in proto.graph.node if node.op_type == "LessOrEqual"]
    for node in nodes:
        node.op_type = "Greater"
        node.input[:] = [node.input[1], node.input[0]]
    return len(nodes)


def pads_see_nothing(proto: onnx.ModelProto) -> int:
    """Left padding does not even see itself: `true or itself` becomes `true or true`."""
    nodes = [node for node in proto.graph.node if node.op_type == "Or"]
    for node in nodes:
        node.input[1] = node.input[0]
    return len(nodes)


def mutated(source: Traced, phase: Phase, change: Callable[[onnx.ModelProto], int]) -> RawGraph:
    """A graph with a fault in it."""
    import onnx

    path = paths(source)[phase]
    proto = onnx.load(path, load_external_data=False)
    assert change(proto) > 0, "there was nothing to change"
    out = path.with_name("mutated.onnx")
    onnx.save(proto, out)
    return RawGraph.load(out)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mistral", constant_becomes(8, 9)),
        ("mistral", constant_becomes(8, 7)),
        ("gemma2", constant_becomes(8, 9)),
        ("gemma2", constant_becomes(3.0, 4.0)),
        ("phi3", constant_becomes(17, 30)),
        ("llama", scaled_attention),
        ("llama", own_key_hidden),
    ],
    ids=["window 9", "window 7", "mixed window 9", "soft cap", "long rope", "scale", "own key"],
)
def test_a_fault_in_the_graph_would_be_seen(tiny: Tiny, family: str, change: Callable[[onnx.ModelProto], int]) -> None:
    """A window one off, another cap, rope that changes later, another scale, a query that does not see itself."""
    source = tiny(family)
    ids, zero = tokens(6, 1, 24), np.zeros(1, np.int64)
    expected = reference(source.model, ids)
    rows = {"write_indices": zero, "row_lengths": zero + 24, "pad_lengths": zero}
    right, _ = raw(source, "decode").run(ids, dirty_cache(source, 1), **rows)
    assert error(right, expected) <= ROUNDING
    wrong, _ = mutated(source, "decode", change).run(ids, dirty_cache(source, 1), **rows)
    assert error(wrong, expected) >= SEEN


def test_a_softmax_over_nothing_would_be_seen(tiny: Tiny) -> None:
    """A graph whose pads do not see themselves, its mask minus infinity: a true row becomes NaN."""
    source = tiny("gemma2")

    def change(proto: onnx.ModelProto) -> int:
        return pads_see_nothing(proto) + constant_becomes(-30000.0, -np.inf)(proto)

    pads, zero = np.array([12, 0]), np.zeros(2, np.int64)
    ids = tokens(2, 2, 14)
    rows = {"write_indices": zero, "row_lengths": zero + 14, "pad_lengths": pads}
    logits, _ = mutated(source, "prefill", change).run(ids, dirty_cache(source, 2), **rows)
    assert not np.isfinite(logits[0]).all()


@pytest.mark.parametrize("family", ["llama", *WINDOWED])
def test_the_masks_are_those_of_arithmetic(tiny: Tiny, family: str) -> None:
    """Every element, of every window: what is at or before the query, inside the window, and no left padding, and the
    query itself. A row without any key is NaN in some kernels and the mean of the cache in others."""
    from onnx import helper

    source = tiny(family)
    pads, write, length, places = np.array([12, 0, 3]), np.array([0, 9, 20]), 9, 32
    names: list[str] = []

    def masks_as_outputs(proto: onnx.ModelProto) -> int:
        inner = {name for node in proto.graph.node if node.op_type in {"And", "Or"} for name in node.input}
        names.extend(n.output[0] for n in proto.graph.node if n.op_type == "And" and n.output[0] not in inner)
        proto.graph.output.extend(helper.make_tensor_value_info(name, 9, None) for name in names)
        return len(names)

    graph = mutated(source, "decode", masks_as_outputs)
    rows = {"write_indices": write, "pad_lengths": pads}
    _, outputs = graph.run(tokens(7, 3, length), dirty_cache(source, 3, places), **rows)
    masks = outputs[-len(names) :]
    keys, queries = np.arange(places), (write[:, None] + np.arange(length))[:, None, :, None]
    expected = []
    for window in set(source.spec.kv_cache.windows):
        true = (keys >= pads[:, None, None, None]) & (keys > queries - (window or places))
        expected.append((keys <= queries) & (true | (keys == queries)))
    assert len(masks) == len(expected)
    for mask in masks:
        assert mask.shape == (3, 1, length, places)
        assert any(np.array_equal(mask, other) for other in expected)
        assert mask.any(axis=-1).all()


# What the graphs are.


@pytest.fixture(scope="module")
def stored(tiny: Tiny) -> Callable[..., tuple[Traced, dict[str, onnx.ModelProto], Path]]:
    """Both graphs of a family in a precision, written once, without their weights, and the weights file."""
    import onnx

    done: dict[str, Any] = {}

    def graphs(family: str, precision: str, **overrides: Any) -> tuple[Traced, dict[str, onnx.ModelProto], Path]:
        source = tiny(family, **overrides)
        folder = source.scratch / precision
        if str(folder) not in done:
            rows = list(write_samples(source.model, seed=1, rows=2, length=12).windows())
            ranges = layer_ranges(source.model, rows)
            inputs = quantize_inputs(source.model, rows, ranges, {}) if precision == "int8-activations" else None
            engine = lowered(source, folder, "fp16" if precision == "fp16" else "int8", ranges=ranges, inputs=inputs)
            files = files_of(engine, folder)
            protos = {phase: onnx.load(path, load_external_data=False) for phase, path in files.items()}
            done[str(folder)] = protos, folder / "engines/onnx/weights.data"
        return source, *done[str(folder)]

    return graphs


Stored = Callable[..., "tuple[Traced, dict[str, onnx.ModelProto], Path]"]


def external(tensor: onnx.TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def array_of(tensor: onnx.TensorProto, weights: Path) -> NDArray[Any]:
    """A constant's values, from the graph's own file or from the weights file."""
    from onnx import helper, numpy_helper

    where = external(tensor)
    if not where:
        return numpy_helper.to_array(tensor)
    assert where["location"] == weights.name
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    count = int(np.prod(tensor.dims))
    assert int(where["length"]) == count * dtype.itemsize
    return np.fromfile(weights, dtype, count, offset=int(where["offset"])).reshape(tensor.dims)


def constants(proto: onnx.ModelProto, weights: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every number in a graph: initializers, constant nodes, and other attributes."""
    for tensor in proto.graph.initializer:
        yield tensor.name, array_of(tensor, weights)
    for node in proto.graph.node:
        for attribute in node.attribute:
            where = f"{node.name}.{attribute.name}"
            assert not attribute.HasField("g"), f"{where}: a graph inside the graph"
            if attribute.HasField("t"):
                yield where, array_of(attribute.t, weights)
            yield where, np.array([attribute.f, *attribute.floats])


def origin(proto: onnx.ModelProto, name: str) -> str:
    """The constant that a dequantized or transposed value comes from, or the value itself."""
    made = {output: node for node in proto.graph.node for output in node.output}
    while name in made and made[name].op_type in {"DequantizeLinear", "Transpose"}:
        name = made[name].input[0]
    return name


def dims_of(value: onnx.ValueInfoProto) -> list[str | int]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_are_of_standard_operators_and_finite_constants(stored: Stored, family: str, precision: str) -> None:
    """Opset 24 alone, no `If`, and no infinity or NaN in any constant: a mask's must add to a score within float16."""
    _, graphs, weights = stored(family, precision)
    assert set(graphs) == {"prefill", "decode"}
    for proto in graphs.values():
        assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", 24)]
        assert not proto.functions
        assert {node.domain for node in proto.graph.node} == {""}
        assert not {"If", "Loop", "Scan"} & {node.op_type for node in proto.graph.node}
        names = set()
        for name, array in constants(proto, weights):
            names.add(name)
            if array.dtype.kind == "f":
                assert np.isfinite(array).all(), name
                assert np.abs(array).max(initial=0) < 65504, f"{name}: nothing may be added to it in float16"
        assert len(names) > 20
        quantized = sum(node.op_type == "QuantizeLinear" for node in proto.graph.node)
        assert (quantized > 0) == (precision == "int8-activations")
        assert ("DequantizeLinear" in {node.op_type for node in proto.graph.node}) == (precision != "fp16")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_and_outputs(stored: Stored, family: str, precision: str) -> None:
    """Names, order, types and named dimensions; a past and its present have one shape, so that one buffer is both."""
    source, graphs, _ = stored(family, precision)
    spec = source.spec.kv_cache
    cache = ["batch_size", spec.kv_heads, "cache_length", spec.head_dim]
    for phase, proto in graphs.items():
        rows = ["write_indices", "row_lengths", "pad_lengths"]
        if phase == "decode" and spec.recompute_at is None:
            rows.remove("row_lengths")
        layers = [(layer, part) for layer in range(spec.layers) for part in ("key", "value")]
        assert [(v.name, v.type.tensor_type.elem_type, dims_of(v)) for v in proto.graph.input] == [
            ("input_ids", 7, ["batch_size", "sequence_length"]),
            *((name, 7, ["batch_size"]) for name in rows),
            *((f"past_key_values.{layer}.{part}", 10, cache) for layer, part in layers),
        ]
        length = 1 if phase == "prefill" else "sequence_length"
        assert [(v.name, v.type.tensor_type.elem_type, dims_of(v)) for v in proto.graph.output] == [
            ("logits", 1, ["batch_size", length, source.vocab_size]),
            *((f"present.{layer}.{part}", 10, cache) for layer, part in layers),
        ]
        scattered = [node for node in proto.graph.node if node.op_type == "TensorScatter"]
        pairs = {(node.input[0], node.output[0]) for node in scattered}
        assert pairs == {(f"past_key_values.{layer}.{part}", f"present.{layer}.{part}") for layer, part in layers}
        assert {node.input[2] for node in scattered} == {"write_indices"}
        whole = sum(node.op_type == "Attention" for node in proto.graph.node)
        assert whole == (0 if family == "gemma2" else spec.layers)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_graphs_share_one_weights_file(stored: Stored, family: str, precision: str) -> None:
    """The same tensors at the same places, no two of them overlapping, nothing in the file that no graph reads, and no
    tensor of more than a kilobyte outside it."""
    _, graphs, weights = stored(family, precision)
    places: dict[str, dict[str, tuple[int, int]]] = {}
    for phase, proto in graphs.items():
        assert all(external(tensor) or len(tensor.raw_data) <= 1024 for tensor in proto.graph.initializer)
        found = {tensor.name: external(tensor) for tensor in proto.graph.initializer if external(tensor)}
        assert {each["location"] for each in found.values()} == {weights.name}
        places[phase] = {name: (int(each["offset"]), int(each["length"])) for name, each in found.items()}
    assert places["prefill"] == places["decode"]
    spans = sorted(places["decode"].values())
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spans))
    assert sum(spans[-1]) == weights.stat().st_size
    assert weights.stat().st_size <= sum(size for _, size in spans) + 4096 * len(spans)
    assert {path.name for path in weights.parent.iterdir()} == {"prefill.onnx", "decode.onnx", weights.name}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("gpt2", {"vocab_size": 320, "n_layer": 1}),
        ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 1}),
    ],
)
def test_a_tied_table_is_stored_once(stored: Stored, family: str, overrides: dict[str, Any], precision: str) -> None:
    """Embedding and head read one tensor of (vocabulary, width); at 8 bits one byte an element."""
    source, graphs, _ = stored(family, precision, **overrides)
    for proto in graphs.values():
        size = source.vocab_size * source.spec.hidden_size
        tables = [t for t in proto.graph.initializer if list(t.dims) == [source.vocab_size, source.spec.hidden_size]]
        assert len(tables) == 1
        assert int(external(tables[0])["length"]) == size * (2 if precision == "fp16" else 1)
        (head,) = [node for node in proto.graph.node if node.op_type == "MatMul" and "lm_head" in node.name]
        gathered = [origin(proto, node.input[0]) for node in proto.graph.node if node.op_type == "Gather"]
        assert origin(proto, head.input[1]) == tables[0].name
        assert gathered.count(tables[0].name) == 1
