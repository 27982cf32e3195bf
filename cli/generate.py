"""`adx generate`: text out of a bundle, streamed, with every sampling option of the runtime."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from adx.cli.command import AdxCommand, Spelling, Values
from adx.cli.figures import number
from adx.cli.options import (
    TARGET_ALIASES,
    TARGET_NAMES,
    THREADS_ALIASES,
    bundle_argument,
    target_option,
    threads_option,
)
from adx.cli.output import Output, plain, to_json
from adx.export.errors import UsageError

if TYPE_CHECKING:
    from adx.runtime import Completion, Generator

_LATER = "is not offered by this release of adx; leave it out"
_BEAMS = f"{_LATER}: one sequence is generated for each prompt, without beams"
_GRAMMAR = f"{_LATER}: text cannot be constrained by a grammar yet"

SPELLING = Spelling(
    aliases={
        **TARGET_ALIASES,
        **THREADS_ALIASES,
        "--max-tokens": "--max-new-tokens",
        "--min-tokens": "--min-new-tokens",
        "--temp": "--temperature",
        "--repeat-penalty": "--repetition-penalty",
        "--eos-token-id": "--eos-token-ids",
        "--stop-strings": "--stop",
    },
    values={"--target": TARGET_NAMES},
    unavailable={
        **dict.fromkeys(("--n", "--num-return-sequences", "--best-of", "--num-beam-groups"), _BEAMS),
        **dict.fromkeys(("--length-penalty", "--early-stopping", "--diversity-penalty"), _BEAMS),
        **dict.fromkeys(
            ("--json-schema", "--regex", "--grammar", "--choice", "--response-format", "--tools"), _GRAMMAR
        ),
        **dict.fromkeys(("--typical-p", "--epsilon-cutoff", "--eta-cutoff"), _LATER),
        **dict.fromkeys(("--presence-penalty", "--frequency-penalty", "--encoder-repetition-penalty"), _LATER),
        **dict.fromkeys(("--encoder-no-repeat-ngram-size", "--exponential-decay-length-penalty"), _LATER),
        **dict.fromkeys(("--sequence-bias", "--logit-bias", "--remove-invalid-values", "--renormalize-logits"), _LATER),
        **dict.fromkeys(("--logprobs", "--top-logprobs", "--prompt-logprobs", "--stop-token-ids"), _LATER),
        **dict.fromkeys(("--include-stop-str-in-output", "--allowed-token-ids", "--bad-words"), _LATER),
    },
)


def _ids(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Token ids separated by commas; an empty string is an empty list, which turns a model's own setting off."""
    if value is None:
        return None
    try:
        return tuple(int(item) for item in value.split(",")) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of token ids, as 5,17", ctx, param) from None


def _id_lists(ctx: click.Context, param: click.Parameter, value: Sequence[str]) -> tuple[tuple[int, ...], ...] | None:
    return tuple(_ids(ctx, param, item) or () for item in value) or None


def _list(name: str, help: str) -> click.Option:
    return click.Option([name], callback=_ids, metavar="IDS", help=help)


def _flag(name: str, help: str) -> click.Option:
    return click.Option([f"{name}/--no-{name[2:]}"], default=None, help=help)


SAMPLING = [
    click.Option(["-n", "--max-new-tokens"], type=int, metavar="N", help="Tokens to add at most."),
    click.Option(["--max-length"], type=int, metavar="N", help="Tokens of prompt and answer together."),
    click.Option(["--min-new-tokens"], type=int, metavar="N", help="Tokens before the text may end."),
    click.Option(["--min-length"], type=int, metavar="N", help="The same, with the prompt counted."),
    _flag("--do-sample", "Draw tokens; else the likeliest is taken. Implied by the next four."),
    click.Option(["--temperature"], type=float, metavar="X", help="Divides the logits; 0 takes the likeliest token."),
    click.Option(["--top-k"], type=int, metavar="N", help="Keep the N likeliest tokens; 0 or -1: all."),
    click.Option(["--top-p"], type=float, metavar="X", help="Keep the likeliest tokens that hold this probability."),
    click.Option(["--min-p"], type=float, metavar="X", help="Keep tokens this likely, relative to the likeliest."),
    click.Option(["--repetition-penalty"], type=float, metavar="X", help="Penalty of tokens seen; 1: none."),
    click.Option(["--no-repeat-ngram-size"], type=int, metavar="N", help="No N-gram comes twice; 0: off."),
    click.Option(
        ["--bad-words-ids"],
        multiple=True,
        callback=_id_lists,
        metavar="IDS",
        help="Tokens that never come in a row; repeatable.",
    ),
    _list("--suppress-tokens", "Tokens that never come."),
    _list("--begin-suppress-tokens", "Tokens that never come first."),
    click.Option(["--forced-bos-token-id"], type=int, metavar="ID", help="The token after a prompt of one token."),
    _list("--forced-eos-token-id", "Tokens of which one comes last where the length limit is reached."),
    _list("--eos-token-ids", "Tokens that end the text."),
    click.Option(
        ["--num-beams"], type=int, metavar="N", help="1 turns the beams of a model's own settings off; more come later."
    ),
    _flag("--ignore-eos", "Go on after a token that ends the text."),
    click.Option(["--stop"], multiple=True, metavar="TEXT", help="Text that ends the answer; repeatable."),
    _flag("--skip-special-tokens", "Leave special tokens out of the text."),
    click.Option(["-s", "--seed"], type=int, metavar="N", help="Of the random stream: same seed, same text."),
]


def sampling_settings(values: Values) -> dict[str, Any]:
    """The sampling options that were given, under the runtime's own names."""
    given = {option.name: values[option.name] for option in SAMPLING if option.name is not None}
    return {name: value for name, value in given.items() if value is not None and (name != "stop" or value)}


def prompt_text(given: str) -> str:
    """A prompt as it was given: text, `@FILE`, or `-` for standard input; `@@` begins a text with `@`.

    Of a file and of standard input one newline at the end is dropped, which editors and shells add.

    Raises:
        UsageError: the file cannot be read as UTF-8 text.
    """
    if given.startswith("@@"):
        return given[1:]
    if given != "-" and not given.startswith("@"):
        return given
    try:
        text = sys.stdin.buffer.read().decode() if given == "-" else Path(given[1:]).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        source = "standard input" if given == "-" else given[1:]
        raise UsageError(f"--prompt {given}: cannot read {source} as UTF-8 text: {error}") from error
    return text.removesuffix("\n").removesuffix("\r")


def run(values: Values, output: Output) -> int:
    """Load the bundle and answer the prompts."""
    from adx.runtime import load

    texts = prompt_texts(values)
    settings = sampling_settings(values)
    output.report("loading the engine", None)
    with load(values["bundle"], target=values["target"], threads=values["threads"]) as model:
        params = model.sampling_params(**settings)
        output.detail(f"engine: {model.session.provider}, {model.session.threads} threads")
        output.detail(f"settings: {to_json(params.effective())}")
        prompts = [token_ids(model, text, values) for text in texts]
        if len(prompts) == 1 and not (values["json"] or values["no_stream"]):
            stream(model, prompts[0], settings, output)
            return 0
        output.report("generating", None)
        answers = model.generate(prompts, **settings)
    report_answers(answers, output)
    return 0


def prompt_texts(values: Values) -> list[str]:
    """Every prompt's text.

    Raises:
        UsageError: a file cannot be read, standard input is asked for twice, or --system stands without --chat.
    """
    if values["prompt"].count("-") > 1:
        raise UsageError("--prompt - reads standard input, which can be read once only")
    if values["system"] is not None and not values["chat"]:
        raise UsageError("--system is a message of a conversation: add --chat to use the model's chat template")
    return [prompt_text(given) for given in values["prompt"]]


def token_ids(model: Generator, text: str, values: Values) -> list[int]:
    """A prompt's tokens, put in the chat template if asked for.

    Raises:
        UsageError: the bundle has no tokenizer, or no chat template where one is needed.
    """
    if model.codec is None:
        raise UsageError(
            "this bundle has no tokenizer, so it cannot read text: export a checkpoint with tokenizer.json"
        )
    if not values["chat"]:
        return model.codec.encode(text)
    system = [] if values["system"] is None else [{"role": "system", "content": values["system"]}]
    return model.codec.encode_chat([*system, {"role": "user", "content": text}])


def stream(model: Generator, prompt: Sequence[int], settings: Mapping[str, Any], output: Output) -> None:
    """Print an answer as it comes."""
    began, times, count, reason = time.perf_counter(), [], 0, None
    try:
        for chunk in model.stream(prompt, **settings):
            times.append(time.perf_counter() - began)
            count += len(chunk.token_ids)
            reason = chunk.finish_reason or reason
            if chunk.text:
                output.write(chunk.text)
    finally:
        output.write("\n")
    first = times[0] * 1e3 if count else None
    each = (times[-1] - times[0]) * 1e3 / (count - 1) if count > 1 else None
    output.detail(_summary(len(prompt), count, reason, first, each))


def report_answers(answers: Sequence[Completion], output: Output) -> None:
    """Print answers that are complete: one by itself, several as numbered choices."""
    for answer in answers:
        output.detail(
            _summary(
                answer.prompt_tokens, answer.completion_tokens, answer.finish_reason, answer.ttft_ms, answer.tpot_ms
            )
        )
    if len(answers) == 1:
        output.result(answers[0], [answers[0].text])
        return
    choices = [{"index": index, **plain(answer)} for index, answer in enumerate(answers)]
    output.result({"choices": choices}, [f"[{index}] {answer.text}" for index, answer in enumerate(answers)])


def _summary(prompt: int, count: int, reason: str | None, first: float | None, each: float | None) -> str:
    times = f"first token {number(first)} ms, then {number(each)} ms a token"
    return f"prompt of {prompt} tokens, {count} new ({reason}); {times}"


command = AdxCommand(
    "generate",
    run,
    help="""Answer a prompt, streamed as the text comes.

    Options that are not given are taken from the bundle's generation_config.json; -v shows the settings in force.""",
    arguments=[bundle_argument()],
    sections={
        "Prompt": [
            click.Option(
                ["-p", "--prompt"],
                multiple=True,
                required=True,
                metavar="TEXT",
                help="Text, @FILE, or - for standard input (@@ begins a text with @); repeatable: a batch.",
            ),
            click.Option(["--chat"], is_flag=True, help="Put the prompt in the model's chat template."),
            click.Option(["--system"], metavar="TEXT", help="System message before the prompt, with --chat."),
            click.Option(["--no-stream"], is_flag=True, help="Print the text when it is complete."),
        ],
        "Sampling": SAMPLING,
        "Engine": [target_option(), threads_option()],
    },
    spelling=SPELLING,
)
