"""The quantization report: its figures against references, its page as a browser reads it, and what shows it."""

from __future__ import annotations

import copy
import json
import re
import shutil
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from models import TorchSession, byte_tokenizer, load_model, reference_logits, reference_tokens, tiny_llama

from adx.ci import report_measures
from adx.ci.corpus import load_corpus
from adx.ci.decode_steps import TorchSteps
from adx.ci.export_request import ExportRequest
from adx.ci.pipeline import export_bundle
from adx.ci.quantization_report import HTML_FILE, JSON_FILE, finite, write_quantization_report
from adx.ci.report_charts import histogram, kinds, layer_chart
from adx.ci.report_html import render
from adx.ci.report_measures import Measures, quantiles
from adx.cli.main import main
from adx.export.bundle import Bundle, refresh_files
from adx.runtime.text import TextCodec

KEYS = {
    *("schema_version", "adx_version", "created", "command", "packages", "model", "targets", "precision", "algorithm"),
    *("options", "calibration", "parity", "positions", "speed", "samples", "layers", "sensitivity_note", "search"),
    *("size", "seconds"),
}
LAYER_KEYS = {
    *("name", "shape", "bits", "scheme", "group_size", "activations", "bytes", "output_error", "sensitivity"),
    *("raised_to", "reason"),
}
HOSTILE = '</td><script>alert("x")</script><img src=x onerror=alert(1)>'


# --- what it measures


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with a tokenizer, and another one that is a little different."""
    folder = tmp_path_factory.mktemp("models")
    first = byte_tokenizer(tiny_llama(folder / "first"), add_bos=True)
    model = load_model(first)
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float() * 1.002
    model.save_pretrained(folder / "second")
    return first, folder / "second"


def measures(reference: Path, engine: Path, *, codec: bool = True, capacity: int = 128) -> Measures:
    corpus = load_corpus(256, reference / "tokenizer.json" if codec else None)
    return Measures(
        TorchSession(load_model(engine), capacity=capacity),
        TorchSteps(load_model(reference), threads=1),
        corpus,
        max_input_len=capacity,
        codec=TextCodec.open(reference) if codec else None,
        report=lambda stage, fraction: None,
    )


def kl_by_numpy(expected: np.ndarray, got: np.ndarray) -> np.ndarray:
    """KL(expected || got) of (N, V) logits, from its definition."""
    p, q = (np.exp(one - one.max(axis=1, keepdims=True)) for one in (expected.astype(float), got.astype(float)))
    p, q = p / p.sum(axis=1, keepdims=True), q / q.sum(axis=1, keepdims=True)
    return (p * (np.log(p) - np.log(q))).sum(axis=1)


def test_divergence_stands_at_the_token_that_it_follows(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows begin with the tokenizer's prefix, whose own logits are no position of the text."""
    monkeypatch.setattr(report_measures, "POSITIONS", 150)
    found = measures(*folders).positions()
    tokens = load_corpus(256, folders[0] / "tokenizer.json").tokens[:150]
    expected = []
    for start in (0, 127):
        row = [1, *tokens[start : min(start + 127, 150)].tolist()]
        expected.append(kl_by_numpy(*(reference_logits(load_model(f), row)[1:] for f in folders)))
    wanted = np.concatenate(expected)
    assert (found["tokens"], found["window"], found["text"]) == (150, 127, "text")
    np.testing.assert_allclose(found["kl"], wanted, rtol=2e-3, atol=2e-6)
    assert found["worst"][0]["index"] == int(wanted.argmax())
    assert found["mean"] == pytest.approx(wanted.mean(), rel=1e-3)
    values = [one["kl"] for one in found["worst"]]
    assert values == sorted(values, reverse=True)


def test_an_example_says_what_stood_there_and_what_each_chose(folders: tuple[Path, Path]) -> None:
    found = measures(*folders).positions()
    text = TextCodec.open(folders[0])
    tokens = load_corpus(256, folders[0] / "tokenizer.json").tokens
    for example in found["worst"]:
        at = example["index"]
        row = [1, *tokens[at - at % 127 : at + 1].tolist()]
        for key, folder in (("expected", folders[0]), ("got", folders[1])):
            logits = reference_logits(load_model(folder), row)[-1].astype(float)
            chances = np.exp(logits - logits.max())
            assert example[key]["token"] == logits.argmax()
            assert example[key]["probability"] == pytest.approx(1 / chances.sum(), rel=1e-3)
        assert example["next"]["token"] == tokens[at + 1]
        assert example["context"] == text.decode(row[1:][-24:])


def test_without_a_tokenizer_there_are_ids_and_no_texts(folders: tuple[Path, Path]) -> None:
    measured = measures(*folders, codec=False)
    found = measured.positions()
    assert found["text"] == "random ids"
    assert {example["context"] for example in found["worst"]} == {None}
    assert "tokenizer" in measured.samples([])["skipped"]


def test_quantiles_are_values_that_occur() -> None:
    values = np.random.default_rng(0).lognormal(size=1000)
    found = quantiles(values)
    for name, part in (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
        assert found[name] == np.quantile(values, part, method="inverted_cdf")
    assert quantiles(np.array([0.1, np.inf]))["mean"] == np.inf


def test_texts_are_greedy_and_marked_where_they_part(folders: tuple[Path, Path]) -> None:
    text = TextCodec.open(folders[0])
    prompts = [text.encode(prompt) for prompt in report_measures.PROMPTS]
    length = min(map(len, prompts))
    found = measures(*folders).samples([])["texts"]
    for prompt, sample in zip(prompts, found, strict=True):
        for key, folder in (("float", folders[0]), ("engine", folders[1])):
            ids = reference_tokens(load_model(folder), prompt[:length], max_new_tokens=32, eos_token_id=None)
            assert sample[key]["tokens"] == ids
            whole = sample[key]["same"] + sample[key]["differs"] + sample[key]["rest"]
            assert whole == text.decode(ids, skip_special_tokens=False)
        first = sample["first_difference"]
        ours, theirs = sample["engine"]["tokens"], sample["float"]["tokens"]
        if first is None:
            assert ours == theirs
            assert not sample["engine"]["differs"]
        else:
            assert ours[:first] == theirs[:first]
            assert ours[first] != theirs[first]


def test_a_text_ends_with_the_token_that_ends_it(folders: tuple[Path, Path]) -> None:
    measured = measures(*folders)
    tokens = measured.samples([])["texts"][0]["float"]["tokens"]
    end = tokens[5]
    assert measured.samples([end])["texts"][0]["float"]["tokens"] == tokens[: tokens.index(end) + 1]


def test_speed_counts_its_steps_and_rows_too_short_say_so(folders: tuple[Path, Path]) -> None:
    found = measures(*folders).speed()
    assert (found["past"], found["steps"]) == (64, 12)
    assert found["ratio"] == pytest.approx(found["float_ms"] / found["engine_ms"])
    short = measures(*folders, capacity=16)
    assert "16" in short.speed()["skipped"]
    assert "16" in short.samples([])["skipped"]


def test_numbers_that_are_not_finite_become_null() -> None:
    found = finite({"a": [float("nan"), np.float32("inf"), 1.5], "b": {"c": (np.int64(3), -float("inf"))}})
    assert found == {"a": [None, None, 1.5], "b": {"c": [3, None]}}
    assert json.dumps(found, allow_nan=False)


def test_nothing_is_written_where_no_layer_is_quantized(tmp_path: Path) -> None:
    request = ExportRequest("m", tmp_path / "out", "fp32")
    nothing: Any = None
    source: Any = SimpleNamespace(request=request, folder=tmp_path)
    write_quantization_report(source, nothing, nothing, nothing, ())
    assert list(tmp_path.iterdir()) == []


# --- its page


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def table(page: str, name: str) -> str:
    found = re.search(rf'<table class="[^"]*\b{name}\b[^"]*">(.*?)</table>', page, re.DOTALL)
    assert found
    return found[1]


def svgs(page: str) -> list[ET.Element]:
    """Every drawing, as XML: what is not well-formed there does not parse."""
    return [ET.fromstring(one) for one in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An int4 export of a tiny model that a budget makes search."""
    folder = tmp_path_factory.mktemp("export")
    model = byte_tokenizer(tiny_llama(folder / "model"))
    request = ExportRequest(str(model), folder / "out", "int4", calib_size=2, calib_seq_len=32, threads=1, max_kl=0.5)
    result = export_bundle(request)
    assert result.passed
    return folder / "out"


@pytest.fixture(scope="module")
def facts(bundle: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((bundle / JSON_FILE).read_text())
    return found


def test_an_export_lists_both_files_and_all_keys(bundle: Path, facts: dict[str, Any]) -> None:
    files = {record.path for record in Bundle.open(bundle).manifest.files}
    assert {JSON_FILE, HTML_FILE} <= files
    assert set(facts) == KEYS
    assert [set(layer) for layer in facts["layers"]] == [LAYER_KEYS] * 15
    assert (facts["schema_version"], facts["precision"], facts["algorithm"]) == (1, "int4", "gptq")
    assert facts["options"]["max_kl"] == 0.5
    described = (Path(__file__).parents[1] / "docs/bundle.md").read_text()
    assert all(f"`{key}`" in described for key in KEYS | LAYER_KEYS)


def test_layers_and_sizes_are_those_of_the_model(bundle: Path, facts: dict[str, Any]) -> None:
    """Llama of hidden size 64, 2 KV heads of 16, 128 units of the MLP, 256 tokens, 2 layers."""
    each = [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128)]
    assert [tuple(layer["shape"]) for layer in facts["layers"]] == [*each, *each, (256, 64)]
    for layer in facts["layers"]:
        out, columns = layer["shape"]
        blocks = out * columns // layer["group_size"]
        zeros = 0 if layer["scheme"] == "symmetric" else -(-columns // layer["group_size"] // 2) * out
        assert layer["bytes"] == out * columns * layer["bits"] // 8 + 2 * blocks + zeros
        assert 0 < layer["output_error"] < 0.05
    weights = sum(out * columns for out, columns in [*each, *each, (256, 64)])
    assert facts["size"]["linear_float_bytes"] == 4 * weights
    # the head, an embedding as large, and five norms of 64
    assert facts["size"]["float_bytes"] == 4 * (weights + 256 * 64 + 5 * 64)
    stored = sum(path.stat().st_size for path in (bundle / "engines").rglob("*") if path.is_file())
    assert facts["size"]["engines"][0]["bytes"] == stored


def test_what_the_search_did_stands_with_the_layers(facts: dict[str, Any]) -> None:
    search = facts["search"]
    assert search is not None
    taken = {name: step["raised_to"] for step in search["steps"] if step["kept"] for name in step["layers"]}
    assert taken
    assert {layer["name"]: layer["raised_to"] for layer in facts["layers"] if layer["raised_to"]} == taken
    costs = {name: step["sensitivity"] for step in search["steps"] for name in step["layers"]}
    assert all(layer["sensitivity"] == costs.get(layer["name"], layer["sensitivity"]) for layer in facts["layers"])
    assert all(layer["reason"] for layer in facts["layers"] if layer["raised_to"])


def test_the_page_needs_nothing_from_elsewhere(bundle: Path) -> None:
    text = (bundle / HTML_FILE).read_text()
    assert "http" not in text.lower().replace("http-equiv", "")
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert not [attrs for _, attrs in page.tags if {"src", "href", "onclick", "onload"} & set(attrs)]
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_the_page_shows_every_layer_and_evaluation(bundle: Path, facts: dict[str, Any]) -> None:
    text = (bundle / HTML_FILE).read_text()
    assert table(text, "layers").count("<tr") == 1 + 15
    assert table(text, "evaluations").count("<tr") == 1 + len(facts["search"]["evaluations"])
    assert table(text, "worst").count("<tr") == 1 + len(facts["positions"]["worst"])
    drawings = {one.get("aria-label"): one for one in svgs(text) if one.get("aria-label")}
    for title in ("Output error by layer", "Sensitivity by layer"):
        assert len(drawings[title].findall("rect")) == 15
    assert len(drawings["Evaluations of the search"].findall("rect")) == len(facts["search"]["evaluations"])
    (dots,) = (path.get("d", "") for path in drawings["KL divergence by position"] if path.get("class") == "dots")
    assert dots.count("M") == len(facts["positions"]["kl"])
    legend = re.search(r"<figcaption>(.*?)</figcaption>", text[text.index("Output error by layer") :], re.DOTALL)
    assert legend
    assert re.findall(r"</svg>([^<]+)<", legend[1]) == [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
    ]


def hostile(value: Any) -> Any:
    """Every text of a report replaced by markup, but for words that the page chooses by."""
    if isinstance(value, dict):
        kept = ("text", "scheme", "float_dtype")
        return {
            key: item if key in kept and item in ("text", "float") else hostile(item) for key, item in value.items()
        }
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def test_text_of_a_model_or_its_data_is_never_markup(facts: dict[str, Any]) -> None:
    """A layer's name or a decoded text with a tag in it would run as part of the page."""
    plain, attacked = Page(render(facts)), render(hostile(facts))
    page = Page(attacked)
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in plain.tags}
    assert not [attrs for _, attrs in page.tags if "onerror" in attrs or "src" in attrs]
    assert "<script" not in attacked
    assert any(HOSTILE in part for part in page.text)
    assert len([one for one in svgs(attacked) if one.get("aria-label")]) == 5


def test_the_page_of_a_report_with_gaps(facts: dict[str, Any]) -> None:
    """An engine that gave NaN, no search, no calibration, no tokenizer, layers in float, nothing timed."""
    bare = copy.deepcopy(facts)
    bare.update(search=None, calibration=None, samples={"skipped": "because"}, speed={"skipped": "for a reason"})
    bare["positions"].update(kl=[None] * 8, mean=None, median=None, p90=None, p99=None, max=None, text="random ids")
    for example in bare["positions"]["worst"]:
        example.update(kl=None, context=None, next=None)
        example["expected"]["text"] = example["got"]["text"] = None
    for layer in bare["layers"]:
        layer.update(output_error=None, sensitivity=None, group_size=None, reason=None, raised_to=None)
    bare["parity"].update(kl_mean=None, perplexity_ratio=None, passed=False, misses=["kl_mean is inf"])
    bare["parity"]["bound"] = {"precision": "int4"}
    text = render(bare)
    assert all(words in text for words in ("because", "for a reason", "missed: kl_mean is inf", "random ids"))
    assert "None" not in text
    assert "Evaluations of the search" not in text
    assert svgs(text)


# --- its charts


def test_kinds_are_the_shortest_ends_of_names_that_differ() -> None:
    names = [f"transformer.h.{n}.{part}" for n in range(2) for part in ("attn.c_attn", "attn.c_proj", "mlp.c_proj")]
    found = kinds([*names, "lm_head"])
    assert [found[name] for name in names[:3]] == ["c_attn", "attn.c_proj", "mlp.c_proj"]
    assert found["transformer.h.1.mlp.c_proj"] == "mlp.c_proj"
    assert found["lm_head"] == "lm_head"


def test_bars_grow_with_the_logarithm() -> None:
    layers = [{"name": f"m.{n}.p", "bits": 4, "scheme": "s", "e": e} for n, e in enumerate((1e-3, 1e-2, 1e-1, None))]
    bars = layer_chart(layers, "e", "t", "y").bars
    assert bars[1].height - bars[0].height == pytest.approx(bars[2].height - bars[1].height)
    assert bars[0].height > 0
    assert bars[3].height == 0
    assert [bar.x for bar in bars] == sorted(bar.x for bar in bars)


def test_a_histogram_counts_every_position() -> None:
    values = np.random.default_rng(1).lognormal(-3, 2, 500)
    chart = histogram([*values.tolist(), None, 0.0], {"median": float(np.median(values)), "p99": None})
    counts = [int(re.findall(r"(\d+) positions", bar.label)[0]) for bar in chart.bars]
    assert sum(counts) == 501
    assert [mark.label for mark in chart.marks] == ["median"]


# --- adx inspect --layers


def test_inspect_shows_what_each_layer_costs(
    bundle: Path, facts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(bundle), "--layers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (head,) = (at for at, line in enumerate(lines) if line.startswith("layer ") and "sensitivity" in line)
    rows = lines[head + 1 :]
    assert [row.split()[0] for row in rows] == [layer["name"] for layer in facts["layers"]]
    for row, layer in zip(rows, facts["layers"], strict=True):
        assert f"{layer['shape'][0]} x {layer['shape'][1]}" in row
        assert f"{layer['output_error']:.2g}" in row.split()
        assert row.endswith(layer["reason"] or f"{layer['sensitivity']:.2g}")


def test_inspect_sorts_by_what_is_worst(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for order, key in (("error", "output_error"), ("sensitivity", "sensitivity")):
        assert main(["inspect", str(bundle), "--layers", "--sort", order, "--json"]) == 0
        values = [layer[key] for layer in json.loads(capsys.readouterr().out)["layers"]]
        known = [value for value in values if value is not None]
        assert known == sorted(known, reverse=True)
        assert values[: len(known)] == known
    assert main(["inspect", str(bundle), "--sort", "error"]) == 2
    assert "--layers" in capsys.readouterr().err


def test_inspect_of_a_bundle_without_a_report(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = tmp_path / "older"
    shutil.copytree(bundle, older)
    (older / JSON_FILE).unlink()
    refresh_files(older)
    assert main(["inspect", str(older), "--layers", "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert len(layers) == 15
    assert {layer["output_error"] for layer in layers} == {None}
    assert layers[-1]["bits"] == 8
    assert main(["inspect", str(older), "--layers"]) == 0
    assert "lm_head" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"layers": [{"name": "a"}]}', '{"layers": [{"name": "a", "shape": 1}]}']
)
def test_inspect_of_a_report_that_is_damaged(
    bundle: Path, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle, damaged)
    (damaged / JSON_FILE).write_text(content)
    refresh_files(damaged)
    assert main(["inspect", str(damaged), "--layers"]) == 1
    assert JSON_FILE in capsys.readouterr().err
