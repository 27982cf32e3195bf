"""`adx generate`: prompts in, streamed text out, every sampling option reaches the runtime."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import byte_ids, byte_tokenizer
from numpy.typing import NDArray

from adx.cli.generate import SAMPLING
from adx.cli.main import main
from adx.cli.output import Output
from adx.runtime import Generator, SamplingParams
from adx.runtime.fake import FakeSession
from adx.runtime.text import TextCodec

ANSWER = "é🙂B"
END = 2
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"

Adx = Callable[..., int]


class Recorder:
    """A session that answers every prompt with `ANSWER`, and what it was asked."""

    def __init__(self) -> None:
        self.session = FakeSession(self.logits_of, 256, capacity=48)
        self.prompts: list[list[int]] = []
        self.options: dict[str, Any] = {}
        self.loaded: tuple[Any, ...] = ()

    def logits_of(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        script = [*byte_ids(ANSWER), END]
        text = list(tokens)
        done = next((n for n in range(len(script) - 1, 0, -1) if text[-n:] == script[:n]), 0)
        if done == 0:
            self.prompts.append(text)
        logits = np.zeros(256, np.float32)
        logits[script[done]] = 9.0
        return logits


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Takes the place of loading a bundle."""
    found = Recorder()
    folder = byte_tokenizer(tmp_path / "tokenizer", chat_template=TEMPLATE)
    codec = TextCodec.open(folder)
    settings = SamplingParams.from_generation_config

    def load(bundle: Path, *, target: str | None, threads: int | None) -> Generator:
        found.loaded = (bundle, target, threads)
        return Generator(found.session, codec, {"eos_token_id": END})

    def recorded(config: Any, options: Any = None) -> SamplingParams:
        found.options = dict(options or {})
        return settings(config, options)

    monkeypatch.setattr("adx.runtime.load", load, raising=False)
    monkeypatch.setattr(SamplingParams, "from_generation_config", recorded)
    return found


def test_text_is_streamed_in_whole_characters(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces: list[str] = []
    write = Output.write
    monkeypatch.setattr(Output, "write", lambda self, text: (pieces.append(text), write(self, text))[1])
    assert main(["generate", "b", "--prompt", "hi"]) == 0
    assert pieces == ["é", "🙂", "B", "\n"]
    assert capsys.readouterr().out == f"{ANSWER}\n"
    assert recorder.prompts == [byte_ids("hi")]


def test_text_without_streaming_is_the_same(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "b", "--prompt", "hi", "--no-stream"]) == 0
    assert capsys.readouterr().out == f"{ANSWER}\n"


def test_json_holds_the_answer(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "b", "--prompt", "hi", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.pop("ttft_ms") > 0
    assert answer.pop("tpot_ms") > 0
    tokens = [*byte_ids(ANSWER), END]
    expected = {"text": ANSWER, "token_ids": tokens, "finish_reason": "stop", "prompt_tokens": 2}
    assert answer == {**expected, "completion_tokens": len(tokens)}


def test_json_of_one_token_has_no_time_per_token(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "b", "--prompt", "hi", "--json", "-n", "1"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["completion_tokens"], answer["finish_reason"], answer["tpot_ms"]) == (1, "length", None)


def test_several_prompts_are_a_batch(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["generate", "b", "--prompt", "hi", "--prompt", "longer"]
    assert main([*args, "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    assert [(choice["index"], choice["text"], choice["prompt_tokens"]) for choice in choices] == [
        (0, ANSWER, 2),
        (1, ANSWER, 6),
    ]
    assert recorder.session.calls[0] == ("prefill", [0, 0])
    assert main(args) == 0
    assert capsys.readouterr().out == f"[0] {ANSWER}\n[1] {ANSWER}\n"


@pytest.mark.parametrize(("given", "text"), [("plain", "plain"), ("@@x", "@x"), ("--stop", "--stop"), ("- ", "- ")])
def test_prompts_are_text(given: str, text: str, recorder: Recorder) -> None:
    assert main(["generate", "b", "--prompt", given]) == 0
    assert recorder.prompts == [byte_ids(text)]


def test_a_prompt_comes_from_a_file(recorder: Recorder, tmp_path: Path) -> None:
    """One newline at the end is dropped, no more."""
    path = tmp_path / "prompt.txt"
    path.write_bytes("ü\n\n".encode())
    assert main(["generate", "b", "--prompt", f"@{path}"]) == 0
    assert recorder.prompts == [byte_ids("ü\n")]


def test_a_prompt_comes_from_standard_input(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe\n")))
    assert main(["generate", "b", "--prompt", "-"]) == 0
    assert recorder.prompts == [byte_ids("from a pipe")]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--prompt", "-", "--prompt", "-"], "can be read once only"),
        (["--prompt", "@/does/not/exist"], "cannot read /does/not/exist as UTF-8 text"),
        (["--prompt", "x", "--system", "y"], "add --chat"),
        ([], "Missing option '-p' / '--prompt'"),
    ],
)
def test_prompts_that_cannot_be_read(
    args: list[str], error: str, recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "b", *args]) == 2
    assert error in capsys.readouterr().err
    assert recorder.prompts == []


def test_chat_uses_the_models_template(recorder: Recorder) -> None:
    assert main(["generate", "b", "--chat", "--prompt", "hi"]) == 0
    assert main(["generate", "b", "--chat", "--system", "be", "--prompt", "hi"]) == 0
    assert recorder.prompts == [byte_ids("[user]hi:"), byte_ids("[system]be[user]hi:")]


OPTIONS: dict[str, tuple[list[str], object]] = {
    "max_new_tokens": (["--max-new-tokens", "5"], 5),
    "max_length": (["--max-length", "40"], 40),
    "min_new_tokens": (["--min-new-tokens", "1"], 1),
    "min_length": (["--min-length", "3"], 3),
    "do_sample": (["--do-sample"], True),
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_k": (["--top-k", "3"], 3),
    "top_p": (["--top-p", "0.5"], 0.5),
    "min_p": (["--min-p", "0.25"], 0.25),
    "repetition_penalty": (["--repetition-penalty", "1.5"], 1.5),
    "no_repeat_ngram_size": (["--no-repeat-ngram-size", "3"], 3),
    "bad_words_ids": (["--bad-words-ids", "5,6", "--bad-words-ids", "7"], ((5, 6), (7,))),
    "suppress_tokens": (["--suppress-tokens", "5,6"], (5, 6)),
    "begin_suppress_tokens": (["--begin-suppress-tokens", "5"], (5,)),
    "forced_bos_token_id": (["--forced-bos-token-id", "9"], 9),
    "forced_eos_token_id": (["--forced-eos-token-id", "2"], (2,)),
    "eos_token_ids": (["--eos-token-ids", "2,3"], (2, 3)),
    "ignore_eos": (["--ignore-eos"], True),
    "stop": (["--stop", "a", "--stop", "b"], ("a", "b")),
    "skip_special_tokens": (["--no-skip-special-tokens"], False),
    "seed": (["--seed", "7"], 7),
}


def test_every_setting_of_the_runtime_has_its_option() -> None:
    """All but padding, which no text shows; and one beam can be asked for, where a model's own settings want more."""
    fields = {item.name for item in dataclasses.fields(SamplingParams) if item.init} - {"pad_token_id"}
    assert fields == set(OPTIONS) == {option.name for option in SAMPLING} - {"num_beams"}


def test_one_beam_reaches_the_runtime(recorder: Recorder) -> None:
    """A model whose generation_config.json asks for beams can be run without them."""
    assert main(["generate", "b", "--prompt", "hi", "--no-stream", "--num-beams", "1"]) == 0
    assert recorder.options == {"num_beams": 1}


@pytest.mark.parametrize("name", OPTIONS)
def test_settings_reach_the_runtime(name: str, recorder: Recorder) -> None:
    """The value arrives under its name, and nothing that was not given arrives at all."""
    args, value = OPTIONS[name]
    assert main(["generate", "b", "--prompt", "hi", "--no-stream", "--max-new-tokens", "1", *args]) == 0
    assert recorder.options.pop("max_new_tokens", 1) == (5 if name == "max_new_tokens" else 1)
    assert recorder.options == ({} if name == "max_new_tokens" else {name: value})


def test_an_empty_list_turns_a_setting_off(recorder: Recorder) -> None:
    assert main(["generate", "b", "--prompt", "hi", "--suppress-tokens", ""]) == 0
    assert recorder.options == {"suppress_tokens": ()}


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-p", "1.1"], "top_p"),
        (["--top-k", "-2"], "top_k"),
        (["--min-p", "2"], "min_p"),
        (["--repetition-penalty", "0"], "repetition_penalty"),
        (["--max-new-tokens", "-1"], "max_new_tokens"),
        (["--seed", "-1"], "seed"),
        (["--stop", ""], "stop"),
        (["--suppress-tokens", "5;6"], "--suppress-tokens"),
        (["--top-k", "many"], "--top-k"),
    ],
    ids=" ".join,
)
def test_values_out_of_range_name_the_option(
    args: list[str], field: str, recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "b", "--prompt", "hi", *args]) == 2
    found = capsys.readouterr()
    assert field in found.err
    assert found.out == ""
    assert recorder.prompts == []


def test_no_new_tokens_are_no_text(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "b", "--prompt", "hi", "-n", "0"]) == 0
    assert capsys.readouterr().out == "\n"


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "b", "--prompt", "x" * 49]) == 2
    error = capsys.readouterr().err
    assert "49 tokens" in error
    assert "48" in error
    assert recorder.session.calls == []


def test_an_empty_prompt_begins_with_the_models_own_token(recorder: Recorder) -> None:
    assert main(["generate", "b", "--prompt", ""]) == 0
    assert recorder.prompts == [[1]]


def test_stop_strings_end_the_text(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "b", "--prompt", "hi", "--stop", "🙂B"]) == 0
    assert capsys.readouterr().out == "é\n"


def test_verbose_shows_the_settings_in_force(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "b", "--prompt", "hi", "-v", "--temperature", "0.5", "--seed", "3"]) == 0
    found = capsys.readouterr()
    assert found.out.endswith("\n")
    (line,) = (line for line in found.err.splitlines() if line.startswith("settings: "))
    shown = json.loads(line.removeprefix("settings: "))
    assert (shown["do_sample"], shown["temperature"], shown["seed"], shown["eos_token_ids"]) == (True, 0.5, 3, [END])
    assert "engine: fake, 1 threads" in found.err


def test_target_and_threads_reach_the_runtime(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["generate", "b", "--prompt", "hi", "-e", "cpu", "--threads", "1"]) == 0
    assert recorder.loaded == (Path("b"), "ort-cpu", 1)
    monkeypatch.setenv("ADX_THREADS", "3")
    assert main(["generate", "b", "--prompt", "hi"]) == 0
    assert recorder.loaded == (Path("b"), None, 3)


@pytest.mark.parametrize(
    ("given", "target"),
    [("ort-cuda", "ort-cuda"), ("cuda", "ort-cuda"), ("tensorrt", "tensorrt"), ("NvTensorRtRtx", "tensorrt-rtx")],
)
def test_a_device_is_passed_on_as_it_was_named(given: str, target: str, recorder: Recorder) -> None:
    """The one that was asked for is opened, or nothing is: what is missing then, the runtime says."""
    assert main(["generate", "b", "--prompt", "hi", "--device", given]) == 0
    assert recorder.loaded == (Path("b"), target, None)


def test_a_bundle_without_a_tokenizer_cannot_read_text(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("adx.runtime.load", lambda bundle, target, threads: Generator(recorder.session))
    assert main(["generate", "b", "--prompt", "hi", "--chat"]) == 2
    assert "this bundle has no tokenizer" in capsys.readouterr().err
