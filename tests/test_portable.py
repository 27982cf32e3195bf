"""The portable graphs: what other tools rely on, and that plain ONNX Runtime computes PyTorch's logits with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import models
import numpy as np
import pytest
from models import FAMILIES
from numpy.typing import NDArray
from traced import Traced, reference, tokens, traced

from adx.export.portable import write_portable
from adx.export.spec import GraphSpec

if TYPE_CHECKING:
    import onnx
    import onnxruntime

TOLERANCE = 1e-4
LENGTHS = (3, 7, 12)
PHASES = ("prefill", "decode")

Array = NDArray[Any]


@dataclass(frozen=True)
class Portable:
    """A family's two graphs on disk, and sessions of them."""

    source: Traced
    folder: Path
    specs: tuple[GraphSpec, ...]
    prefill: onnxruntime.InferenceSession
    decode: onnxruntime.InferenceSession

    def run_prefill(self, ids: Array, mask: Array) -> list[Array]:
        """Logits and the present."""
        return self.prefill.run(
            None, {"input_ids": ids, "attention_mask": mask, "position_ids": _positions(mask)[:, -ids.shape[1] :]}
        )

    def run_decode(self, ids: Array, mask: Array, past: list[Array]) -> list[Array]:
        """Logits and the present; `mask` covers past and new."""
        names = [i.name for i in self.decode.get_inputs()[3:]]
        feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": _positions(mask)[:, -ids.shape[1] :]}
        return self.decode.run(None, {**feeds, **dict(zip(names, past, strict=True))})


def _positions(mask: Array) -> Array:
    """As transformers and optimum count them: true tokens before this one; 1 for padding."""
    return np.where(mask > 0, np.cumsum(mask, 1) - 1, 1)


def _open(path: Path) -> onnxruntime.InferenceSession:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _write(source: Traced, name: str, *, full_logits: bool) -> Portable:
    folder = source.scratch / name
    folder.mkdir()
    specs = write_portable(source.semantic, folder, full_logits=full_logits)
    sessions = (_open(folder / "onnx" / f"{phase}.onnx") for phase in PHASES)
    return Portable(source, folder / "onnx", specs, *sessions)


@pytest.fixture(scope="module", params=FAMILIES)
def portable(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Portable:
    """The graphs of each family, prefill with the last logits only."""
    return _write(traced(tmp_path_factory, request.param), "portable", full_logits=False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory, "llama")


def _rows(mask: Array, rows: list[Array]) -> Array:
    """Tokens where the mask is 1, in order; arbitrary ids where it is 0."""
    ids = tokens(99, *mask.shape)
    for row, content in enumerate(rows):
        ids[row, mask[row] > 0] = content
    return ids


def _mask(padding: str) -> Array:
    mask = np.zeros((len(LENGTHS), max(LENGTHS)), np.int64)
    for row, length in enumerate(LENGTHS):
        if padding == "left":
            mask[row, -length:] = 1
        else:
            mask[row, :length] = 1
    return mask


def _graph(portable: Portable, phase: str) -> onnx.ModelProto:
    import onnx

    return onnx.load(portable.folder / f"{phase}.onnx", load_external_data=False)


def test_names_order_and_dimensions_are_those_of_optimum(portable: Portable) -> None:
    """Of the files as ONNX Runtime reads them, and of the specs that go into the manifest."""
    kv = portable.source.spec.kv_cache
    vocab = portable.source.vocab_size
    ids = ["batch_size", "sequence_length"]
    for phase, session, spec in zip(PHASES, (portable.prefill, portable.decode), portable.specs, strict=True):
        past = ["batch_size", kv.kv_heads, "past_sequence_length", kv.head_dim]
        length = "sequence_length" if phase == "prefill" else "total_sequence_length"
        present = ["batch_size", kv.kv_heads, length, kv.head_dim]
        slots = [f"{layer}.{part}" for layer in range(kv.layers) for part in ("key", "value")]
        inputs = [
            ("input_ids", ids),
            ("attention_mask", ["batch_size", "total_sequence_length"]),
            ("position_ids", ids),
        ]
        inputs += [(f"past_key_values.{slot}", past) for slot in slots] if phase == "decode" else []
        logits = ["batch_size", 1 if phase == "prefill" else "sequence_length", vocab]
        outputs = [("logits", logits), *((f"present.{slot}", present) for slot in slots)]
        assert [(i.name, i.shape) for i in session.get_inputs()] == inputs
        assert [(o.name, o.shape) for o in session.get_outputs()] == outputs
        assert (spec.phase, spec.file) == (phase, f"onnx/{phase}.onnx")
        assert [(t.name, list(t.dims)) for t in (*spec.inputs, *spec.outputs)] == inputs + outputs
        assert {t.dtype for t in spec.inputs} <= {"int64", "float32"}
        assert {t.dtype for t in spec.outputs} == {"float32"}


def test_only_standard_operators_and_no_branches(portable: Portable) -> None:
    """onnx's own checker is content, shapes inferred; no other domain, no subgraph, no path that leaves the folder."""
    import onnx

    for phase in PHASES:
        onnx.checker.check_model(str(portable.folder / f"{phase}.onnx"), full_check=True)
        model = _graph(portable, phase)
        assert [(o.domain, o.version) for o in model.opset_import] == [("", 23)]
        assert {node.domain for node in model.graph.node} == {""}
        assert not {node.op_type for node in model.graph.node} & {"If", "Loop", "Scan"}
        assert not model.functions
        files = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
        assert files == {"weights.data"}


def test_the_graphs_share_one_weights_file_and_hold_nothing_twice(portable: Portable) -> None:
    """A tied embedding counts once; what lies in the file is referred to, all of it; 15 % is for graphs and tables."""
    assert sorted(p.name for p in portable.folder.iterdir()) == ["decode.onnx", "prefill.onnx", "weights.data"]
    unique = {p.data_ptr(): 4 * p.numel() for p in portable.source.model.parameters()}
    assert sum(p.stat().st_size for p in portable.folder.iterdir()) <= 1.15 * sum(unique.values())
    places: dict[str, dict[int, int]] = {}
    for phase in PHASES:
        for tensor in _graph(portable, phase).graph.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if place:
                places.setdefault(phase, {})[int(place["offset"])] = int(place["length"])
    assert places["prefill"] == places["decode"]
    referred = sum(places["prefill"].values())
    assert referred >= 0.99 * (portable.folder / "weights.data").stat().st_size


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padded_batches_equal_each_row_alone(portable: Portable, padding: str) -> None:
    """Prefill of 3, 7 and 12 tokens, then on its present one new token, then three at once, as a draft is checked."""
    model = portable.source.model
    mask, more = _mask(padding), tokens(1, 3, 4)
    rows = [tokens(row, length) for row, length in enumerate(LENGTHS)]
    last, *past = portable.run_prefill(_rows(mask, rows), mask)
    assert last.shape == (3, 1, portable.source.vocab_size)
    grown = np.concatenate([mask, np.ones((3, 1), np.int64)], 1)
    one, *past = portable.run_decode(more[:, :1], grown, past)
    grown = np.concatenate([grown, np.ones((3, 3), np.int64)], 1)
    three, *past = portable.run_decode(more[:, 1:], grown, past)
    assert all(p.shape[2] == max(LENGTHS) + 4 for p in past)
    for row, length in enumerate(LENGTHS):
        expected = reference(model, np.concatenate([rows[row], more[row]])[None])[0, length - 1 :]
        got = np.concatenate([last[row], one[row], three[row]])
        assert np.abs(got - expected).max() <= TOLERANCE, (row, length)


def test_any_number_of_tokens_goes_on_any_past(portable: Portable) -> None:
    """Also past windows and long rope's length; a past may be empty, so the decode graph alone serves too."""
    kv = portable.source.spec.kv_cache
    shapes = ((1, 1, 0), (2, 7, 0), (1, 16, 0), (1, 17, 0), (1, 1, 1), (2, 2, 7), (3, 33, 40), (1, 5, 40), (2, 1, 17))
    for batch, length, past in shapes:
        ids = tokens(past + length, batch, past + length)
        held = [np.zeros((batch, kv.kv_heads, 0, kv.head_dim), np.float32)] * (2 * kv.layers)
        expected = reference(portable.source.model, ids)
        if past:
            last, *held = portable.run_prefill(ids[:, :past], np.ones((batch, past), np.int64))
            assert np.abs(last - reference(portable.source.model, ids[:, :past])[:, -1:]).max() <= TOLERANCE
        got, *_ = portable.run_decode(ids[:, past:], np.ones_like(ids), held)
        assert np.abs(got - expected[:, past:]).max() <= TOLERANCE, (batch, length, past)


def test_a_mask_left_out_would_be_seen(portable: Portable) -> None:
    """With all ones in its place the padded rows' logits are others."""
    mask = _mask("left")
    ids = _rows(mask, [tokens(row, length) for row, length in enumerate(LENGTHS)])
    right, wrong = (portable.run_prefill(ids, m)[0] for m in (mask, np.ones_like(mask)))
    assert np.abs(right - wrong).max(axis=(1, 2))[:2].min() > 1e-2
    assert np.abs(right - wrong)[2].max() <= TOLERANCE


def test_full_logits_on_request(llama: Traced) -> None:
    """All positions, of both kinds of padding; the decode graph is the same one."""
    full = _write(llama, "full-logits", full_logits=True)
    assert full.prefill.get_outputs()[0].shape == ["batch_size", "sequence_length", 256]
    for padding in ("left", "right"):
        mask = _mask(padding)
        rows = [tokens(row, length) for row, length in enumerate(LENGTHS)]
        logits = full.run_prefill(_rows(mask, rows), mask)[0]
        for row, content in enumerate(rows):
            expected = reference(llama.model, content[None])[0]
            assert np.abs(logits[row, mask[row] > 0] - expected).max() <= TOLERANCE


def test_two_writes_give_the_same_bytes(llama: Traced, tmp_path: Path) -> None:
    """The semantic graph is left as it was, and nothing depends on addresses or time."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_portable(llama.semantic, tmp_path / name, full_logits=False)
    for file in ("prefill.onnx", "decode.onnx", "weights.data"):
        first, second = ((tmp_path / name / "onnx" / file).read_bytes() for name in ("first", "second"))
        assert first == second, file


def test_a_tied_table_is_stored_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A large vocabulary, where a second copy would show: bytes are those of the unique parameters."""
    source = traced(tmp_path_factory, "llama", num_hidden_layers=1, tie_word_embeddings=True, vocab_size=4000)
    written = _write(source, "tied", full_logits=False)
    size = sum(p.stat().st_size for p in written.folder.iterdir())
    assert source.spec.parameters < 4000 * 64 * 1.3
    assert size <= 1.15 * 4 * source.spec.parameters
    ids = tokens(0, 1, 9, vocab_size=4000)
    assert np.abs(written.run_prefill(ids, np.ones_like(ids))[0] - reference(source.model, ids)[:, -1:]).max() <= 1e-4


def test_greedy_text_through_the_graphs_alone_equals_generate(portable: Portable) -> None:
    """The loop that any user of the files would write: prefill's present feeds decode, each present the next step."""
    model = portable.source.model
    prompt = models.find_gap_prompt(model, 18, new_tokens=8, accept=lambda new: models.EOS not in new)
    ids = np.array([prompt])
    logits, *past = portable.run_prefill(ids, np.ones_like(ids))
    new = [int(logits[0, -1].argmax())]
    while len(new) < 8:
        mask = np.ones((1, len(prompt) + len(new)), np.int64)
        logits, *past = portable.run_decode(np.array([new[-1:]]), mask, past)
        new.append(int(logits[0, -1].argmax()))
    assert new == models.reference_tokens(model, prompt, max_new_tokens=8)
