"""Prompts in, completions and chunks out: on scripted models whose answers are known by hand."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import (
    BOS,
    TorchSession,
    byte_ids,
    byte_tokenizer,
    fixed_gpt2,
    load_model,
    metaspace_tokenizer,
    reference_tokens,
    scripted_gpt2,
    set_generation_config,
    tiny_llama,
)

from adx.export.bundle import BundleWriter
from adx.export.errors import BackendError, BundleError, ContextLengthError, SamplingError, UsageError
from adx.export.manifest import EngineRecord, Limits, Manifest, QuantizationRecord, provenance
from adx.export.spec import KVCacheSpec, ModelSpec
from adx.runtime import Completion, Generator, load, loading
from adx.runtime.fake import FakeSession
from adx.runtime.text import TextCodec

CHAT = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def scripted(
    folder: Path, script: Sequence[int], prompt_tokens: int = 1, config: dict[str, Any] | None = None, **keys: Any
) -> Generator:
    """A model that answers prompts of `prompt_tokens` with the script."""
    scripted_gpt2(folder, script, prompt_tokens=prompt_tokens)
    if not (folder / "tokenizer.json").exists():
        byte_tokenizer(folder, **keys)
    return Generator(TorchSession(load_model(folder)), TextCodec.open(folder, bos=BOS), config or {})


def answering(text: str, **config: Any) -> Generator:
    """A fake model that answers any prompt with `text`, then with `</s>` for ever; positions count from the prompt."""
    script = byte_ids(text)

    def logits_of(history: Sequence[int]) -> np.ndarray:
        done = len(history) - 1 - (history.index(3 + ord(">")) if 3 + ord(">") in history else 0)
        out = np.zeros(300, np.float32)
        out[script[done] if done < len(script) else 2] = 5.0
        return out

    return Generator(FakeSession(logits_of, 300), None, config)


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    return TextCodec.open(byte_tokenizer(tmp_path / "tokenizer", add_bos=True, chat_template=CHAT))


def fake(text: str, codec: TextCodec | None, **config: Any) -> Generator:
    return Generator(answering(text).session, codec, config)


# End of text


def test_end_of_text_list_of_the_generation_config_is_honoured_whole(tmp_path: Path) -> None:
    """config.json names one end-of-text token, generation_config.json two others; the second of them comes third."""
    script = [70, 71, 2, 73, 74]
    folder = scripted_gpt2(tmp_path, script, eos_token_id=90)
    set_generation_config(folder, eos_token_id=[91, 2], max_new_tokens=10, pad_token_id=0)
    byte_tokenizer(folder)
    model = load_model(folder)
    expected = reference_tokens(model, [5], max_new_tokens=10)
    config = loading._generation_config(folder)
    answer = Generator(TorchSession(model), TextCodec.open(folder), config).generate([5])
    assert list(answer.token_ids) == expected == [70, 71, 2]
    assert answer.finish_reason == "stop"
    assert answer.text == bytes([67, 68]).decode(), "the special end-of-text token is not in the text"
    assert answer.completion_tokens == 3


def test_config_json_serves_where_there_is_no_generation_config(tmp_path: Path) -> None:
    folder = scripted_gpt2(tmp_path, [70, 71, 90, 73], eos_token_id=90)
    (folder / "generation_config.json").unlink()
    assert loading._generation_config(folder) == {"bos_token_id": 1, "eos_token_id": 90, "pad_token_id": 0}
    (folder / "generation_config.json").write_text("[1]")
    with pytest.raises(BundleError, match="holds list"):
        loading._generation_config(folder)


def test_settings_of_the_model_file_apply_and_are_shown(tmp_path: Path) -> None:
    model = load_model(tiny_llama(tmp_path, eos_token_id=None))
    generator = Generator(TorchSession(model), None, {"repetition_penalty": 1.5, "max_new_tokens": 7})
    ids = [5, 9, 200, 31]
    assert list(generator.generate(ids).token_ids) == reference_tokens(
        model, ids, repetition_penalty=1.5, max_new_tokens=7
    )
    assert generator.sampling_params().effective() == {
        "do_sample": False,
        "max_new_tokens": 7,
        "repetition_penalty": 1.5,
    }
    assert "repetition_penalty" not in generator.sampling_params(repetition_penalty=1.0).effective()


# Streaming


@pytest.mark.parametrize(("limit", "cut"), [(50, False), (7, True)])
def test_streamed_text_equals_the_whole_and_breaks_no_character(tmp_path: Path, limit: int, cut: bool) -> None:
    text = "ab é🙂 日本"
    model = scripted(tmp_path, [*byte_ids(text), 2], config={"eos_token_id": 2})
    whole = model.generate([9], max_new_tokens=limit)
    chunks = list(model.stream([9], max_new_tokens=limit))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]
    broken = [n for n, chunk in enumerate(chunks) if "\ufffd" in chunk.text]
    assert broken == ([len(chunks) - 1] if cut else [])
    assert whole.text == (text if not cut else "ab é\ufffd")


def test_sentencepiece_words_keep_their_spaces_when_streamed(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(metaspace_tokenizer(tmp_path) / "tokenizer.json"))
    script = tokenizer.encode("hello big world").ids
    scripted_gpt2(tmp_path, script, vocab_size=400)
    model = Generator(TorchSession(load_model(tmp_path)), TextCodec.open(tmp_path), {})
    assert [chunk.text for chunk in model.stream([9], max_new_tokens=3)] == ["hello", " big", " world"]


@pytest.mark.parametrize(
    ("stop", "limit", "expected", "reason"),
    [
        ("BCD", 20, "A", "stop"),
        ("BCX", 5, "ABCDE", "length"),
        ("BCX", 3, "ABC", "length"),
        ("BCX", 20, "ABCDE", "stop"),
        (["E"], 20, "ABCD", "stop"),
    ],
)
@pytest.mark.parametrize("merges", [(), (("D", "E"),)])
def test_stop_strings(
    tmp_path: Path, stop: Any, limit: int, expected: str, reason: str, merges: Sequence[tuple[str, str]]
) -> None:
    """In the second run D and E are one token, so a stop string can begin inside a token."""
    script = [*byte_ids("ABC"), 259] if merges else byte_ids("ABCDE")
    limit = limit - 1 if merges and limit == 5 else limit
    model = scripted(tmp_path, [*script, 2], config={"eos_token_id": 2}, merges=merges)
    answer = model.generate([9], stop=stop, max_new_tokens=limit)
    chunks = list(model.stream([9], stop=stop, max_new_tokens=limit))
    assert (answer.text, answer.finish_reason) == (expected, reason)
    assert "".join(chunk.text for chunk in chunks) == expected
    assert chunks[-1].finish_reason == reason


def test_stop_strings_in_a_batch_end_their_row_alone(tmp_path: Path) -> None:
    model = scripted(tmp_path, byte_ids("ABCDEF"))
    first, second = model.generate([[9], [9, 9]], stop=["CD"], max_new_tokens=4)
    assert (first.text, first.finish_reason, len(first.token_ids)) == ("AB", "stop", 4)
    assert (second.text, second.finish_reason) == ("B", "stop")


# Prompts


def test_kinds_of_prompts(codec: TextCodec) -> None:
    model = fake("hi", codec, eos_token_id=2)
    one = model.generate("x>")
    assert isinstance(one, Completion)
    assert (one.text, one.finish_reason, one.prompt_tokens) == ("hi", "stop", 3)
    ids = codec.encode("x>")
    assert model.generate(ids).text == "hi"
    assert model.generate(np.array(ids)).text == "hi"
    assert [answer.text for answer in model.generate(["x>", "longer >"])] == ["hi", "hi"]
    assert [answer.text for answer in model.generate([ids, [1, *ids]])] == ["hi", "hi"]
    assert model.generate([]) == []


@pytest.mark.parametrize("prompt", [None, 3, [[]], [3.5], {"a": 1}, [[1, 2], 5], [True]])
def test_what_is_no_prompt_is_refused(codec: TextCodec, prompt: Any) -> None:
    with pytest.raises(UsageError):
        fake("hi", codec).generate(prompt)


def test_conversation_has_one_beginning_of_text_token_and_the_template(codec: TextCodec) -> None:
    model = fake("hi", codec, eos_token_id=2)
    messages = [{"role": "user", "content": "Hello"}]
    expected = [BOS, *byte_ids("Hello>")]
    assert codec.encode_chat(messages) == expected
    for answer in (model.generate(messages=messages), model.generate("Hello", chat=True)):
        assert (answer.text, answer.prompt_tokens) == ("hi", len(expected))
    assert model.generate("Hello>").prompt_tokens == len(expected), "a plain prompt has exactly one too"
    assert "".join(chunk.text for chunk in model.stream(messages=messages)) == "hi"
    assert model.generate("", chat=True).prompt_tokens == 2
    with pytest.raises(UsageError, match="a prompt or messages"):
        model.generate("x", messages=messages)
    with pytest.raises(UsageError, match="token ids cannot"):
        model.generate([1, 2], chat=True)


def test_empty_prompt_starts_from_the_beginning_of_text_token(tmp_path: Path) -> None:
    folder = byte_tokenizer(tiny_llama(tmp_path, eos_token_id=None))
    model = load_model(folder)
    generator = Generator(TorchSession(model), TextCodec.open(folder), {})
    assert list(generator.generate("", max_new_tokens=6).token_ids) == reference_tokens(model, [BOS], max_new_tokens=6)
    assert generator.generate(" ", max_new_tokens=1).prompt_tokens == 1


def test_token_counts_at_the_edges(codec: TextCodec) -> None:
    model = fake("hello", codec, eos_token_id=2)
    none = model.generate("x>", max_new_tokens=0)
    assert (none.text, none.token_ids, none.finish_reason) == ("", (), "length")
    assert (none.ttft_ms, none.tpot_ms) == (None, None)
    [chunk] = model.stream("x>", max_new_tokens=0)
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("", (), "length")
    one = model.generate("x>", max_new_tokens=1)
    assert (one.text, one.completion_tokens, one.tpot_ms) == ("h", 1, None)
    assert one.ttft_ms is not None
    assert one.ttft_ms > 0
    many = model.generate("x>", max_new_tokens=10**9)
    assert (many.text, many.finish_reason) == ("hello", "stop")
    assert many.tpot_ms is not None
    assert math.isfinite(many.tpot_ms)
    assert model.generate("x>", max_new_tokens=None).text == "hello"
    for wrong in (-1, 1.5, "3"):
        with pytest.raises(SamplingError, match="max_new_tokens"):
            model.generate("x>", max_new_tokens=wrong)
    assert model.generate("x>").text == "hello", "an ordinary request after refused ones"


def test_errors_come_at_the_call_of_stream(codec: TextCodec) -> None:
    model = fake("hi", codec)
    with pytest.raises(SamplingError, match="temperature"):
        model.stream("x", temperature=-1)
    with pytest.raises(ContextLengthError, match=r"65.*64"):
        model.stream("x" * 64)
    with pytest.raises(UsageError, match="one prompt at a time"):
        model.stream(["x"])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="top_k"):
        model.generate("x", topk=3)


def test_long_prompt_in_a_batch_is_refused_before_any_run(codec: TextCodec) -> None:
    model = fake("hi", codec)
    session = model.session
    assert isinstance(session, FakeSession)
    session.max_batch_size = 1
    with pytest.raises(ContextLengthError, match=r"65.*64"):
        model.generate(["x", "x" * 64])
    assert session.calls == []


def test_more_prompts_than_the_engine_takes_at_once_run_in_parts(tmp_path: Path) -> None:
    folder = fixed_gpt2(tmp_path, [0.1, 0.2, 0.3, 0.1, 0.0])
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_new_tokens": 8}
    whole = Generator(TorchSession(load_model(folder))).generate([[0]] * 5, **settings)
    parts = Generator(TorchSession(load_model(folder), max_batch_size=2)).generate([[0]] * 5, **settings)
    assert [answer.token_ids for answer in parts] == [answer.token_ids for answer in whole]
    assert len({answer.token_ids for answer in whole}) == 5


def test_without_a_tokenizer_token_ids_work_and_text_is_refused() -> None:
    model = answering("hi", eos_token_id=2)
    answer = model.generate([5])
    assert (answer.text, answer.token_ids) == ("", (*byte_ids("hi"), 2))
    assert [chunk.token_ids for chunk in model.stream([5])] == [(token,) for token in answer.token_ids]
    for refused in ({"prompt": "text"}, {"messages": [{"role": "user", "content": "x"}]}, {"prompt": [5], "stop": "x"}):
        with pytest.raises(UsageError, match="no tokenizer"):
            model.generate(**refused)


def test_special_tokens_are_shown_when_asked_for(codec: TextCodec) -> None:
    assert fake("hi", codec, eos_token_id=2).generate("x>", skip_special_tokens=False).text == "hi</s>"


def test_tokens_of_the_model_that_the_tokenizer_does_not_know_give_no_text(tmp_path: Path) -> None:
    model = scripted(tmp_path, [*byte_ids("a"), 310, *byte_ids("b")])
    assert model.generate([9], max_new_tokens=3).text == "ab"
    assert [chunk.text for chunk in model.stream([9], max_new_tokens=3)] == ["a", "", "b"]


def test_cancelling(codec: TextCodec) -> None:
    model = fake("hello", codec)
    asked: list[int] = []
    answer = model.generate("x>", cancelled=lambda: len(asked) == 3 or bool(asked.append(1)))
    assert (answer.text, answer.finish_reason) == ("hel"[: len(answer.text)], "cancelled")
    assert model.generate("x>", max_new_tokens=5).text == "hello"


def test_closed_generator_says_so(codec: TextCodec) -> None:
    with fake("hi", codec, eos_token_id=2) as model:
        assert model.generate("x>").text == "hi"
    model.close()
    with pytest.raises(UsageError, match="closed"):
        model.generate("x>")


# Loading


def manifest(targets: Sequence[str]) -> Manifest:
    limits = Limits(None, 64, 64)
    cache = KVCacheSpec(1, 1, 8, 64, (None,))
    model = ModelSpec("tiny", None, "GPT2LMHeadModel", "gpt2", "float32", 1, 300, 8, 1, 64, cache, "0" * 64)
    files = {target: f"engines/{target}/model.onnx" for target in targets}
    engines = tuple(EngineRecord(name, (file,), file, file, {}, None, None, limits) for name, file in files.items())
    quantization = QuantizationRecord("fp32", None, ())
    parity = {"passed": None, "skipped": "made by a test"}
    return Manifest("0", model, (), quantization, engines, limits, parity, provenance(["adx"]))


def bundle(folder: Path, targets: Sequence[str], *, tokenizer: bool = True) -> Path:
    with BundleWriter(folder) as writer:
        for target in targets:
            path = writer.folder / "engines" / target / "model.onnx"
            path.parent.mkdir(parents=True)
            path.write_text("not a graph")
        (writer.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
        if tokenizer:
            byte_tokenizer(writer.folder, chat_template=CHAT)
        writer.commit(manifest(targets))
    return folder


def test_target_that_the_bundle_lacks_names_what_it_has(tmp_path: Path) -> None:
    path = bundle(tmp_path / "one", ["ort-cpu"])
    with pytest.raises(BackendError, match=r"no engine for 'tensorrt', it has ort-cpu: export with --target tensorrt"):
        load(path, target="tensorrt")
    other = bundle(tmp_path / "two", ["coreml"])
    for target, message in ((None, "runs engines for ort-cpu.* has coreml"), ("coreml", "cannot run 'coreml'")):
        with pytest.raises(BackendError, match=message):
            load(other, target=target)
    graphs = bundle(tmp_path / "three", ["onnx"])
    with pytest.raises(BackendError, match=r"no plans yet.*adx compile .*three --target tensorrt.*--target onnx"):
        load(graphs)
    with pytest.raises(BundleError, match="does not exist"):
        load(tmp_path / "none")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Bundles open with a scripted session; gives the threads asked for."""
    threads: list[int | None] = []

    def opener(_bundle: object, count: int | None) -> Any:
        threads.append(count)
        return answering("hi").session

    monkeypatch.setattr(loading, "_OPENERS", {"ort-cpu": opener})
    return threads


def test_load_joins_engine_tokenizer_and_settings(tmp_path: Path, opened: list[int | None]) -> None:
    with load(bundle(tmp_path / "whole", ["tensorrt", "ort-cpu"]), threads=1) as model:
        assert model.generate("x>").text == "hi"
        assert model.generate("x", chat=True).finish_reason == "stop"
    assert opened == [1]
    with pytest.raises(UsageError, match="no tokenizer"):
        load(bundle(tmp_path / "bare", ["ort-cpu"], tokenizer=False)).generate("x")


def test_example_of_the_documentation_runs(
    tmp_path: Path, opened: list[int | None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle(tmp_path / "smollm2-int8", ["ort-cpu"])
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(Generator) or ""
    example = text[text.index("Example:\n") + len("Example:\n") : text.index("Every option")]
    exec(textwrap.dedent(example), {})
    assert "stop" in capsys.readouterr().out


def test_importing_the_runtime_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "onnx", "onnxruntime", "onnx_ir", "tokenizers", "jinja2")
    code = f"import sys; from adx.runtime import load; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
