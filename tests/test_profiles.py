"""Shape profiles: what must hold for any limits, model and graph, the check of a call, and trtexec's shape grammar."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traced import Traced, traced

from adx.engines.profiles import (
    DECODE_TOKENS,
    PREFILL_CHUNK,
    SHORT_TOTAL,
    Shape,
    ShapeProfile,
    check_request,
    plan_profiles,
)
from adx.engines.shape_grammar import format_shapes, override, parse_shapes
from adx.engines.static_cache import StaticCacheLowering
from adx.export.errors import LoweringError, UsageError
from adx.export.manifest import Limits
from adx.export.portable import graph_spec, write_portable
from adx.export.rotary import fold_rotary
from adx.export.spec import GraphSpec, KVCacheSpec, Phase, TensorSpec

PHASES: tuple[Phase, ...] = ("prefill", "decode")
KINDS = ("static", "fixed", "portable")
quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Case:
    """A graph of one kind, its limits and its cache."""

    kind: str
    graph: GraphSpec
    limits: Limits
    kv_cache: KVCacheSpec

    def plan(self) -> tuple[ShapeProfile, ...]:
        return plan_profiles(self.graph, self.limits, self.kv_cache)


def graph_of(kind: str, phase: Phase, kv_cache: KVCacheSpec, max_seq_len: int) -> GraphSpec:
    """A graph's inputs, spelled as the exporters spell them.

    Args:
        kind: "static" has a cache of named length, "fixed" the same with its length in the graph, "portable" joins past
            and new tokens.
    """
    inputs = [TensorSpec("input_ids", "int64", ("batch_size", "sequence_length"))]
    if kind == "portable":
        inputs.append(TensorSpec("attention_mask", "int64", ("batch_size", "total_sequence_length")))
        inputs.append(TensorSpec("position_ids", "int64", ("batch_size", "sequence_length")))
    else:
        rows = ("write_indices", "row_lengths", "pad_lengths") if phase == "prefill" else ("write_indices",)
        inputs += [TensorSpec(name, "int64", ("batch_size",)) for name in rows]
    length = {"static": "cache_length", "fixed": max_seq_len, "portable": "past_sequence_length"}[kind]
    if kind != "portable" or phase == "decode":
        dims = ("batch_size", kv_cache.kv_heads, length, kv_cache.head_dim)
        inputs += [
            TensorSpec(f"past_key_values.{layer}.{part}", "float16", dims)
            for layer in range(kv_cache.layers)
            for part in ("key", "value")
        ]
    return GraphSpec(phase, f"onnx/{phase}.onnx", tuple(inputs), ())


def case(kind: str, phase: Phase, batch: int, max_input_len: int, max_seq_len: int, layers: int = 2) -> Case:
    """Two layers of 3 KV heads of 64 elements."""
    kv_cache = KVCacheSpec(layers, 3, 64, max(max_seq_len, 1), (None,) * layers)
    graph = graph_of(kind, phase, kv_cache, max_seq_len)
    return Case(kind, graph, Limits(batch, max_input_len, max_seq_len), kv_cache)


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS) -> Case:
    """Any limits from 1 to huge, any cache, any graph."""
    near = st.integers(SHORT_TOTAL - 2, SHORT_TOTAL + DECODE_TOKENS + 2)
    max_seq_len = draw(st.integers(1, 3) | st.integers(4, 40) | near | st.integers(1, 2**24))
    max_input_len = draw(st.just(max_seq_len) | st.integers(1, max_seq_len))
    batch = draw(st.just(1) | st.integers(1, 2**16))
    layers = draw(st.integers(1, 4))
    kv_cache = KVCacheSpec(
        layers,
        draw(st.integers(1, 128)),
        draw(st.integers(1, 512)),
        max_seq_len + draw(st.integers(0, 9)),
        (None,) * layers,
    )
    kind, phase = draw(st.sampled_from(kinds)), draw(st.sampled_from(PHASES))
    graph = graph_of(kind, phase, kv_cache, max_seq_len)
    return Case(kind, graph, Limits(batch, max_input_len, max_seq_len), kv_cache)


def corner(profile: ShapeProfile, index: int) -> dict[str, Shape]:
    """The shapes of min (0), opt (1) or max (2)."""
    return {name: shapes[index] for name, shapes in profile.shapes.items()}


def sizes_of(graph: GraphSpec, shapes: dict[str, Shape]) -> dict[str, set[int]]:
    """All sizes that a named dimension has anywhere."""
    sizes: dict[str, set[int]] = {}
    for tensor in graph.inputs:
        for dim, size in zip(tensor.dims, shapes[tensor.name], strict=True):
            sizes.setdefault(str(dim), set()).add(size)
    return sizes


def call(case: Case, batch: int, new: int, past: int = 0, cache: int | None = None) -> dict[str, Shape]:
    """The input shapes of a call."""
    capacity = case.limits.max_seq_len if cache is None else cache
    named = {
        "batch_size": batch,
        "sequence_length": new,
        "past_sequence_length": past,
        "total_sequence_length": past + new,
        "cache_length": capacity,
    }
    return {
        tensor.name: tuple(named[dim] if isinstance(dim, str) else dim for dim in tensor.dims)
        for tensor in case.graph.inputs
    }


def check_plan(case: Case) -> None:
    """All that must hold for every corner of every profile."""
    limits, kv_cache = case.limits, case.kv_cache
    profiles = case.plan()
    assert len({profile.name for profile in profiles}) == len(profiles) >= 1
    for profile in profiles:
        assert list(profile.shapes) == [tensor.name for tensor in case.graph.inputs]
        for index in range(3):
            shapes = corner(profile, index)
            sizes = sizes_of(case.graph, shapes)
            assert all(len(values) == 1 for values in sizes.values()), sizes
            one = {name: next(iter(values)) for name, values in sizes.items()}
            assert one["batch_size"] == (1 if index == 0 else limits.max_batch_size)
            assert one["sequence_length"] >= 1
            past = one.get("past_sequence_length", 0)
            assert past >= 0
            assert past + one["sequence_length"] <= limits.max_seq_len
            if case.kind == "portable":
                assert one["total_sequence_length"] == past + one["sequence_length"]
            for name in (name for name in shapes if name.startswith("past_key_values.")):
                places = past if case.kind == "portable" else limits.max_seq_len
                assert shapes[name] == (one["batch_size"], kv_cache.kv_heads, places, kv_cache.head_dim)
        for least, usual, most in profile.shapes.values():
            assert all(low <= middle <= high for low, middle, high in zip(least, usual, most, strict=True))


@quick
@given(cases())
def test_every_corner_is_a_possible_call(case: Case) -> None:
    """Batch tied, total = past + new, KV dimensions from the spec, min <= opt <= max, nothing beyond the limits."""
    check_plan(case)


@pytest.mark.parametrize("max_seq_len", [1, 2, 3, SHORT_TOTAL, SHORT_TOTAL + 1])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
def test_edges_of_the_limits(kind: str, phase: Phase, max_seq_len: int) -> None:
    """A context of one token, and both sides of the point where a past is long."""
    check_plan(case(kind, phase, 1, max_seq_len, max_seq_len))


@pytest.mark.parametrize(
    ("max_input_len", "span"),
    [(4096, (1, 128, PREFILL_CHUNK)), (300, (1, 128, 300)), (64, (1, 64, 64)), (1, (1, 1, 1))],
)
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_reads_a_chunk_at_most(kind: str, max_input_len: int, span: tuple[int, int, int]) -> None:
    """Longer prompts are read in several calls."""
    (profile,) = case(kind, "prefill", 4, max_input_len, 8192).plan()
    assert profile.shapes["input_ids"] == ((1, span[0]), (4, span[1]), (4, span[2]))


@pytest.mark.parametrize("kind", ["static", "fixed"])
def test_decode_on_a_preallocated_cache_has_a_step_and_a_chunk(kind: str) -> None:
    """By hand for a batch of 4 and 2048 places."""
    step, chunk = case(kind, "decode", 4, 512, 2048).plan()
    assert (step.name, chunk.name) == ("step", "chunk")
    assert step.shapes["input_ids"] == ((1, 1), (4, 1), (4, 1))
    assert chunk.shapes["input_ids"] == ((1, 1), (4, 8), (4, 16))
    assert chunk.shapes["past_key_values.1.value"] == ((1, 3, 2048, 64), (4, 3, 2048, 64), (4, 3, 2048, 64))


@pytest.mark.parametrize(("max_seq_len", "most"), [(1, [1]), (2, [1]), (3, [1, 2]), (16, [1, 15]), (17, [1, 16])])
@pytest.mark.parametrize("kind", KINDS)
def test_decode_leaves_room_for_a_past(kind: str, max_seq_len: int, most: list[int]) -> None:
    """A chunk is one token shorter than the context; where that is one token, the step alone is left."""
    planned = case(kind, "decode", 1, 1, max_seq_len).plan()
    assert [profile.shapes["input_ids"][2][1] for profile in planned] == most


def test_portable_decode_has_a_short_and_a_long_past() -> None:
    """By hand for a batch of 2 and 4096 tokens; one profile each where the context is no longer than a short past."""
    planned = {profile.name: profile for profile in case("portable", "decode", 2, 512, 4096).plan()}
    assert list(planned) == ["step, short past", "step, long past", "chunk, short past", "chunk, long past"]
    masks = {name: [shape[1] for shape in profile.shapes["attention_mask"]] for name, profile in planned.items()}
    assert masks["step, short past"] == [1, 512, 1024]
    assert masks["step, long past"] == [1025, 2560, 4096]
    assert masks["chunk, long past"] == [1010, (1009 + 4080) // 2 + 8, 4096]
    assert [profile.name for profile in case("portable", "decode", 2, 512, 1024).plan()] == ["step", "chunk"]


@quick
@given(cases(), st.data())
def test_every_call_within_the_limits_is_held(case: Case, data: st.DataObject) -> None:
    """No gap between the profiles: one new token on any past, and a chunk on any that leaves room for the longest."""
    limits, graph = case.limits, case.graph
    batch = data.draw(st.integers(1, limits.max_batch_size or 1))
    if graph.phase == "prefill":
        new, past = data.draw(st.integers(1, min(limits.max_input_len, PREFILL_CHUNK))), 0
    else:
        longest = min(DECODE_TOKENS, max(1, limits.max_seq_len - 1))
        new = data.draw(st.just(1) | st.integers(1, longest))
        room = limits.max_seq_len - (1 if new == 1 else longest)
        past = data.draw(st.integers(0, room))
    profiles = case.plan()
    shapes = call(case, batch, new, past)
    index = check_request(profiles, shapes, graph)
    for name, shape in shapes.items():
        least, _, most = profiles[index].shapes[name]
        assert all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))


@quick
@given(cases())
def test_a_profile_holds_its_corners_and_nothing_more(case: Case) -> None:
    """Its own min, opt and max are accepted; one more in any dynamic dimension is refused."""
    for profile in case.plan():
        for index in range(3):
            assert check_request((profile,), corner(profile, index), case.graph) == 0
        largest = sizes_of(case.graph, corner(profile, 2))
        batch, new, past = (
            next(iter(largest.get(name, {0}))) for name in ("batch_size", "sequence_length", "past_sequence_length")
        )
        beyond = [call(case, batch + 1, new, past), call(case, batch, new + 1, past)]
        if "past_sequence_length" in largest:
            beyond.append(call(case, batch, new, past + 1))
        if case.kind == "static":
            beyond.append(call(case, batch, new, cache=case.limits.max_seq_len + 1))
        for shapes in beyond:
            with pytest.raises(UsageError, match="this engine takes"):
                check_request((profile,), shapes, case.graph)


@quick
@given(cases(), st.data())
def test_inputs_at_odds_are_found(case: Case, data: st.DataObject) -> None:
    """One input of another batch size, though the profile would take that size."""
    case = dataclasses.replace(case, limits=dataclasses.replace(case.limits, max_batch_size=8))
    shapes = call(case, 4, 1)
    name = data.draw(st.sampled_from(sorted(shapes)))
    shapes[name] = (data.draw(st.sampled_from([1, 3, 5, 8])), *shapes[name][1:])
    with pytest.raises(UsageError, match=r"dimension 0 \(batch_size\): found \d, but \S+ has \d"):
        check_request(case.plan(), shapes, case.graph)


@pytest.mark.parametrize(
    ("kind", "phase", "wrong", "message"),
    [
        ("portable", "prefill", {"attention_mask": (2, 6)}, "must be 5, 0 past and 5 new tokens"),
        ("portable", "decode", {"attention_mask": (2, 5)}, "must be 12, 7 past and 5 new tokens"),
        ("portable", "decode", {"past_key_values.1.key": (2, 3, 6, 64)}, r"dimension 2 \(past_sequence_length\)"),
        ("portable", "decode", {"past_key_values.1.key": (2, 4, 7, 64)}, "dimension 1: found 4; .* fixed at 3"),
        ("static", "decode", {"past_key_values.1.key": (2, 3, 64)}, "3 dimensions; it has 4: batch_sizex3xcache"),
        ("static", "decode", {"attention_mask": (2, 5)}, "has no input 'attention_mask'; it takes input_ids, write_in"),
        ("fixed", "decode", {"past_key_values.0.value": (2, 3, 99, 64)}, "dimension 2: found 99; .* fixed at 100"),
    ],
)
def test_a_call_with_a_wrong_input_is_refused(kind: str, phase: Phase, wrong: dict[str, Shape], message: str) -> None:
    """Each is told apart by its input and dimension."""
    one = case(kind, phase, 4, 100, 100)
    shapes = call(one, 2, 5, 0 if phase == "prefill" else 7)
    assert check_request(one.plan(), shapes, one.graph) >= 0
    with pytest.raises(UsageError, match=message):
        check_request(one.plan(), {**shapes, **wrong}, one.graph)


def test_a_call_without_an_input_is_refused() -> None:
    """The message lists the inputs, those of the layers once."""
    one = case("static", "decode", 4, 100, 100)
    shapes = call(one, 1, 1)
    del shapes["write_indices"]
    with pytest.raises(
        UsageError, match=r"no shape for write_indices; .*input_ids, write_indices, past_key_values\.N\.key"
    ):
        check_request(one.plan(), shapes, one.graph)


def test_a_refusal_says_what_the_engine_takes() -> None:
    """One clear sentence: the dimension, what was asked and what is accepted."""

    def refusal(one: Case, shapes: dict[str, Shape]) -> str:
        with pytest.raises(UsageError) as caught:
            check_request(one.plan(), shapes, one.graph)
        return str(caught.value)

    static = case("static", "decode", 4, 100, 2048)
    assert refusal(static, call(static, 5, 1)) == (
        "batch 5: this engine takes 1 to 4 in decode; split the batch, or export with a larger --max-batch-size"
    )
    assert refusal(static, call(static, 1, 17)).startswith("length 17: this engine takes 1 to 16 in decode; split")
    assert refusal(static, call(static, 1, 1, cache=64)).startswith("cache length 64: this engine takes 2048 in decode")
    assert refusal(static, call(static, 0, 1)) == "batch 0: this engine takes 1 to 4 in decode"
    portable = case("portable", "decode", 4, 100, 2048)
    assert refusal(portable, call(portable, 1, 1, 2048)).startswith("past 2048: this engine takes 0 to 2047 in decode")
    assert refusal(portable, call(portable, 5, 17)).count("this engine takes") == 2
    together = refusal(portable, call(portable, 1, 5, 2040))
    assert together.startswith("length 5 with past 2040: no profile of this engine takes them together in decode: ")
    assert "'step, long past' takes length 1, past 1024 to 2047" in together
    assert "'chunk, long past' takes length 1 to 16, past 1009 to 2032" in together


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(None, 10, 10), "pass --max-batch-size"),
        (Limits(0, 10, 10), "--max-batch-size must be 1 or more, found 0"),
        (Limits(1, 0, 10), "--max-input-len must be 1 or more, found 0"),
        (Limits(1, 1, -1), "--max-seq-len must be 1 or more, found -1"),
        (Limits(1, 11, 10), "--max-input-len 11 is more than --max-seq-len 10"),
        (Limits(1, 10, 11), "--max-seq-len 11 is more than the 10 tokens"),
    ],
)
def test_impossible_limits_are_refused(limits: Limits, message: str) -> None:
    """A cache of 10 tokens."""
    one = case("static", "decode", 1, 10, 10)
    with pytest.raises(UsageError, match=message):
        plan_profiles(one.graph, limits, one.kv_cache)


@pytest.mark.parametrize(
    ("phase", "name", "dims", "message"),
    [
        ("decode", "extra", ("batch_size", "images"), "extra, dimension 1 is named 'images'"),
        ("prefill", "extra", ("past_sequence_length",), "named 'past_sequence_length'"),
        ("decode", "past_key_values.9.key", ("batch_size", 4, "cache_length", 64), "3 KV heads of 64"),
        ("decode", "past_key_values.9.key", ("batch_size", 3, "cache_length", 32), "3 KV heads of 64"),
        ("decode", "past_key_values.9.key", ("batch_size", 3, "cache_length"), "3 KV heads of 64"),
        ("decode", "past_key_values.9.key", ("batch_size", 3, 99, 64), "--max-seq-len is 100"),
    ],
)
def test_graphs_that_cannot_be_planned_are_refused(
    phase: Phase, name: str, dims: tuple[str | int, ...], message: str
) -> None:
    """An unknown dimension by its name; a cache of another shape with both shapes."""
    one = case("static", phase, 1, 100, 100)
    inputs = (*one.graph.inputs, TensorSpec(name, "float16", dims))
    with pytest.raises(LoweringError, match=message):
        plan_profiles(dataclasses.replace(one.graph, inputs=inputs), one.limits, one.kv_cache)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory, "llama")


def check_real(source: Traced, kind: str, graph: GraphSpec) -> None:
    kv_cache = source.spec.kv_cache
    for length in (1, 2, 3, kv_cache.capacity):
        check_plan(Case(kind, graph, Limits(3, length, length), kv_cache))


def test_portable_graphs_as_exported(llama: Traced, tmp_path: Path) -> None:
    """The planner's names are the exporter's."""
    for graph in write_portable(llama.semantic, tmp_path, full_logits=False):
        check_real(llama, "portable", graph)


@pytest.mark.parametrize("phase", PHASES)
def test_preallocated_cache_graphs_as_lowered(llama: Traced, phase: Phase) -> None:
    """The planner's names are the pass's."""
    model = llama.semantic.model.clone()
    fold_rotary(model)
    StaticCacheLowering(model, llama.semantic.rotary, llama.spec.kv_cache, phase).run()
    check_real(llama, "static", graph_spec(model, phase, f"engines/onnx/{phase}.onnx"))


NAMES = st.text(st.characters(blacklist_characters="'", blacklist_categories=["Cs"]), min_size=1, max_size=12)
SHAPES = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)


@quick
@given(st.dictionaries(NAMES, SHAPES, min_size=1, max_size=4))
def test_grammar_round_trip(given_shapes: dict[str, Shape]) -> None:
    """Whatever the names hold."""
    assert parse_shapes(format_shapes(given_shapes), "--min-shapes") == given_shapes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "input_ids:1x1,past_key_values.0.key:1x3x2048x64",
            {"input_ids": (1, 1), "past_key_values.0.key": (1, 3, 2048, 64)},
        ),
        (" input_ids : 1 x 16 , decode/mask:0x2 ", {"input_ids": (1, 16), "decode/mask": (0, 2)}),
        ("'name with:colon':1x2,'a,b':3", {"name with:colon": (1, 2), "a,b": (3,)}),
        ("scale:,step:scalar,ids:7", {"scale": (), "step": (), "ids": (7,)}),
    ],
)
def test_grammar(text: str, expected: dict[str, Shape]) -> None:
    """As trtexec reads it."""
    assert parse_shapes(text, "--min-shapes") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        ("input_ids", "cannot read 'input_ids'"),
        (":1x2", "cannot read ':1x2'"),
        ("'':1x2", "cannot read"),
        ("a:1,", "a shape is missing at the end"),
        ("a:1,,b:2", "cannot read ',b:2'"),
        ("a:1x", "a, dimension 1: '' is no size"),
        ("a:x", "a, dimension 0: '' is no size"),
        ("a:1X2", "'1X2' is no size"),
        ("a:-1x2", "'-1' is no size"),
        ("a:1.5", "'1.5' is no size"),
        ("a:\u0661", "is no size"),
        ("a:2147483648", "is no size from 0 to 2147483647"),
        ("a:1 2", "'1 2' is no size"),
        ("a:b:1", "cannot read 'a:b:1'"),
        ("'a:1", "cannot read"),
        ("'a'b:1", "cannot read"),
        ("a:1,a:2", "a is given twice"),
        ("a:1;b:2", "'1;b' is no size|cannot read"),
        ("a:1,b:2,'a':1", "a is given twice"),
    ],
)
def test_grammar_refuses(text: str, message: str) -> None:
    """Always a usage error that names the option."""
    with pytest.raises(UsageError, match=message) as caught:
        parse_shapes(text, "--opt-shapes")
    assert str(caught.value).startswith("--opt-shapes: ")


@quick
@given(st.text("ab1x:,' \t\n0-", max_size=20))
def test_grammar_never_fails_otherwise(text: str) -> None:
    """Any text is read, or refused by a usage error; what is read can be written again."""
    try:
        read = parse_shapes(text, "--min-shapes")
    except UsageError:
        return
    assert parse_shapes(format_shapes(read), "--min-shapes") == read


def overridden(one: Case, least: str = "", usual: str = "", most: str = "") -> tuple[ShapeProfile, ...]:
    """`override` with texts."""
    low, middle, high = (parse_shapes(text, "--shapes") if text else {} for text in (least, usual, most))
    return override(one.plan(), min_shapes=low, opt_shapes=middle, max_shapes=high, graph=one.graph)


@quick
@given(cases())
def test_override_with_the_plan_changes_nothing(case: Case) -> None:
    """Nothing given, and the first profile given as it is."""
    plan = case.plan()
    assert override(plan, min_shapes={}, opt_shapes={}, max_shapes={}, graph=case.graph) == plan
    low, middle, high = (corner(plan[0], index) for index in range(3))
    # Every profile becomes the first, and one of them is kept.
    assert override(plan, min_shapes=low, opt_shapes=middle, max_shapes=high, graph=case.graph) == plan[:1]


def test_override_takes_a_phase_or_both() -> None:
    """A key of one phase is left alone by the other graph, and goes before a plain one."""
    prefill, decode = (case("portable", phase, 4, 64, 64, layers=1) for phase in PHASES)
    text = "input_ids:2x8,position_ids:2x8,prefill/attention_mask:2x9,prefill/input_ids:2x9,prefill/position_ids:2x9"
    text += (
        ",decode/attention_mask:2x30,decode/past_key_values.0.key:2x3x22x64,decode/past_key_values.0.value:2x3x22x64"
    )
    (prompt,) = overridden(prefill, usual=text)
    assert corner(prompt, 1) == {"input_ids": (2, 9), "attention_mask": (2, 9), "position_ids": (2, 9)}
    assert corner(prompt, 2) == corner(prefill.plan()[0], 2)
    chunk = override(
        decode.plan()[1:], min_shapes={}, opt_shapes=parse_shapes(text, ""), max_shapes={}, graph=decode.graph
    )
    assert corner(chunk[0], 1) == call(decode, 2, 8, 22)


@quick
@given(cases(), st.data())
def test_override_that_breaks_one_input_is_found(case: Case, data: st.DataObject) -> None:
    """Another batch size for one input alone: named with its dimension, not the inputs that were left as planned."""
    name = data.draw(st.sampled_from([tensor.name for tensor in case.graph.inputs]))
    index = data.draw(st.integers(0, 2))
    shape = case.plan()[0].shapes[name][index]
    given_shapes: list[dict[str, Shape]] = [{}, {}, {}]
    given_shapes[index] = {name: (shape[0] + 1, *shape[1:])}
    low, middle, high = given_shapes
    with pytest.raises(UsageError) as caught:
        override(case.plan(), min_shapes=low, opt_shapes=middle, max_shapes=high, graph=case.graph)
    assert f"--{('min', 'opt', 'max')[index]}-shapes in the profile" in str(caught.value)
    assert f": {name}, dimension 0 (batch_size): found {shape[0] + 1}, but " in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "phase", "shapes", "message"),
    [
        ("static", "decode", ("", "", "row_lengths:4"), "no input 'row_lengths'; .*write prefill/row_lengths"),
        ("static", "decode", ("", "", "decode/row_lengths:4"), "the decode graph has no input 'row_lengths'; it takes"),
        ("static", "prefill", ("", "", "prefil/input_ids:1x1"), "has no input 'prefil/input_ids'"),
        ("static", "prefill", ("", "", "input_ids:4x8x1"), "input_ids: found 4x8x1 with 3 dimensions; it has 2"),
        ("static", "prefill", ("", "", "past_key_values.0.key:4x2x64x64"), "dimension 1: found 2; .* fixed at 3"),
        ("static", "prefill", ("", "input_ids:4x64", "input_ids:4x32"), "min 1, opt 64, max 32"),
        ("static", "prefill", ("", "", "input_ids:4x32"), "opt 64, max 32; .*give --min-shapes and --opt-shapes"),
        ("static", "prefill", ("", "", "input_ids:4x65"), "found 65; it takes 1 to 64 .--max-seq-len is 64."),
        ("fixed", "prefill", ("", "", "input_ids:4x65"), "found 65; it takes 1 to 64 .--max-seq-len is 64."),
        (
            "portable",
            "prefill",
            ("input_ids:1x0,position_ids:1x0,attention_mask:1x0", "", ""),
            "found 0; it takes 1 or",
        ),
        ("portable", "decode", ("", "", "attention_mask:4x65"), "attention_mask, dimension 1 .total.*must be 64"),
        ("portable", "decode", ("", "", "past_key_values.0.key:4x3x40x64"), "past_key_values.0.key, dimension 2"),
    ],
)
def test_override_refuses(kind: str, phase: Phase, shapes: tuple[str, str, str], message: str) -> None:
    """Unknown input, rank, fixed dimension, order, room in the cache, total = past + new."""
    one = case(kind, phase, 4, 64, 64, layers=1)
    with pytest.raises(UsageError, match=message):
        overridden(one, *shapes)


def test_override_keeps_the_length_of_the_cache() -> None:
    """TensorRT wants one length at every corner, and it is that of --max-seq-len."""
    one = case("static", "decode", 4, 64, 64, layers=1)
    text = "past_key_values.0.key:4x3x32x64,past_key_values.0.value:4x3x32x64"
    with pytest.raises(
        UsageError, match=r"dimension 2 \(cache_length\): found 32; it takes 64 \(--max-seq-len is 64\)"
    ):
        overridden(one, most=text)


def test_override_keeps_a_row() -> None:
    """A batch of none, given for all inputs alike."""
    one = case("portable", "prefill", 4, 64, 64)
    with pytest.raises(UsageError, match=r"input_ids, dimension 0 \(batch_size\): found 0; it takes 1 or more"):
        overridden(one, least="input_ids:0x1,attention_mask:0x1,position_ids:0x1")


def test_override_of_every_input_moves_a_limit() -> None:
    """A larger batch, given for all inputs as trtexec wants it."""
    one = case("static", "decode", 4, 64, 64, layers=1)
    cache = "past_key_values.0.key:8x3x64x64,past_key_values.0.value:8x3x64x64"
    step, chunk = overridden(one, most=f"input_ids:8x16,write_indices:8,{cache}")
    assert step.shapes["input_ids"] == ((1, 1), (4, 1), (8, 16))
    assert check_request((step, chunk), call(one, 8, 2), one.graph) == 0
