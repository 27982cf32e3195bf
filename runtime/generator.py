"""Text in, text out: a loaded model that answers prompts, at once or as a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast, overload

import numpy as np

from adx.export.errors import UsageError
from adx.runtime.answer import AnswerRow, Chunk, Completion
from adx.runtime.loop import check_prompt, generate_tokens
from adx.runtime.params import SamplingParams
from adx.runtime.session import Session
from adx.runtime.text import Message, TextCodec

Prompt = str | Sequence[int]


class Generator:
    """A loaded model. Not thread-safe; a context manager.

    Example:
        from adx.runtime import load

        with load("smollm2-int8") as model:
            answer = model.generate("The capital of France is", max_new_tokens=8, temperature=0)
            print(answer.text, answer.finish_reason, answer.tpot_ms)

            hello = [{"role": "user", "content": "Hello!"}]
            for chunk in model.stream(messages=hello, top_p=0.9, seed=1):
                print(chunk.text, end="", flush=True)

            both = model.generate(["One prompt", "and another, in the same batch"], stop=["\\n"])
            print(both[1].text)

    Every option of `SamplingParams` is a keyword argument, under transformers', OpenAI's and vLLM's names; what is not
    given comes from the model's generation_config.json, then from the defaults.

    Attributes:
        codec: the tokenizer, or None where the bundle has none: prompts must be token ids then.
        generation_config: what the model's own file says.
    """

    def __init__(
        self,
        session: Session,
        codec: TextCodec | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.codec = codec
        self.generation_config = dict(generation_config or {})
        self._session: Session | None = session

    @property
    def session(self) -> Session:
        """The compiled model.

        Raises:
            UsageError: the generator is closed.
        """
        if self._session is None:
            raise UsageError("this model is closed: load it again")
        return self._session

    def __enter__(self) -> Generator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model's memory; a second call does nothing."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def sampling_params(self, **options: Any) -> SamplingParams:
        """The settings that `generate(..., **options)` uses.

        Raises:
            SamplingError: a value is not accepted, or the model's own file asks for what is not supported.
            UsageError: an unknown option.
        """
        return SamplingParams.from_generation_config(self.generation_config, options)

    @overload
    def generate(self, prompt: Prompt, *, chat: bool = ..., **options: Any) -> Completion: ...

    @overload
    def generate(self, prompt: Sequence[Prompt], *, chat: bool = ..., **options: Any) -> list[Completion]: ...

    @overload
    def generate(self, *, messages: Sequence[Message], **options: Any) -> Completion: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        chat: bool = False,
        cancelled: Callable[[], bool] | None = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """Answer a prompt, or a batch of prompts in one run.

        Args:
            prompt: a text or token ids, or a list of either for a list of answers (an empty list gives one).
            messages: a conversation, in place of a prompt.
            chat: put each prompt in the model's chat template, as a user's message.
            cancelled: asked at every step; True ends all rows.
            options: see `SamplingParams`.

        Raises:
            UsageError: an option, a prompt or its length is not accepted; nothing has run.
        """
        params = self.sampling_params(**options)
        prompts, single = self._prompts(prompt, messages, chat)
        for ids in prompts:
            check_prompt(ids, self.session)
        size = self.session.max_batch_size or max(len(prompts), 1)
        out: list[Completion] = []
        for start in range(0, len(prompts), size):
            out += self._answer(prompts[start : start + size], params, start, cancelled)
        return out[0] if single else out

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        chat: bool = False,
        cancelled: Callable[[], bool] | None = None,
        **options: Any,
    ) -> Iterator[Chunk]:
        """Answer one prompt piece by piece; the pieces' texts together are `generate`'s text.

        The last chunk alone has a finish reason. Arguments and errors are those of `generate`; they are checked at
        the call, not at the first piece.
        """
        params = self.sampling_params(**options)
        prompts, single = self._prompts(prompt, messages, chat)
        if not single:
            raise UsageError("stream answers one prompt at a time: use generate for a list")
        return self._stream(prompts[0], params, cancelled)

    def _stream(
        self, ids: Sequence[int], params: SamplingParams, cancelled: Callable[[], bool] | None
    ) -> Iterator[Chunk]:
        row = AnswerRow(self.codec, params, incremental=True)
        steps = generate_tokens(self.session, [ids], params, stop_row=row.stops, cancelled=cancelled)

        def chunks() -> Iterator[Chunk]:
            for step in steps:
                token, reason = step.tokens[0], step.finished[0]
                text = row.taken() + (row.rest() if reason is not None else "")
                yield Chunk(text, () if token is None else (token,), reason)

        return chunks()

    def _answer(
        self, prompts: list[list[int]], params: SamplingParams, first: int, cancelled: Callable[[], bool] | None
    ) -> list[Completion]:
        """One batch; `first` is the place of its first row among all prompts."""
        rows = [AnswerRow(self.codec, params, incremental=bool(params.stop)) for _ in prompts]
        start = time.perf_counter()
        steps = generate_tokens(
            self.session,
            prompts,
            params,
            stop_row=lambda row, token: rows[row].stops(0, token),
            cancelled=cancelled,
            first_stream=first,
        )
        for step in steps:
            now = time.perf_counter()
            for row, token, reason in zip(rows, step.tokens, step.finished, strict=True):
                row.record(token, reason, now)
        return [row.completion(len(ids), start) for row, ids in zip(rows, prompts, strict=True)]

    def _prompts(
        self, prompt: Prompt | Sequence[Prompt] | None, messages: Sequence[Message] | None, chat: bool
    ) -> tuple[list[list[int]], bool]:
        """Token ids per prompt, and whether there is one prompt rather than a list."""
        if (prompt is None) == (messages is None):
            raise UsageError("give a prompt or messages, one of the two")
        if messages is not None:
            return [self._text_codec().encode_chat(messages)], True
        if isinstance(prompt, str) or _is_ids(prompt):
            return [self._ids(cast(Prompt, prompt), chat)], True
        if not isinstance(prompt, Sequence) and not hasattr(prompt, "tolist"):
            raise UsageError(f"a prompt is a text, token ids, or a list of either, not {type(prompt).__name__}")
        return [self._ids(item, chat) for item in cast("Sequence[Prompt]", prompt)], False

    def _ids(self, prompt: Prompt, chat: bool) -> list[int]:
        if not isinstance(prompt, str):
            if not _is_ids(prompt) and not (isinstance(prompt, Sequence) and not prompt):
                raise UsageError(f"a prompt is a text or token ids, not {prompt!r}")
            if chat:
                raise UsageError("token ids cannot be put in a chat template: give text, or leave chat out")
            return [int(token) for token in prompt]
        codec = self._text_codec()
        return codec.encode_chat([{"role": "user", "content": prompt}]) if chat else codec.encode(prompt)

    def _text_codec(self) -> TextCodec:
        if self.codec is None:
            raise UsageError(
                "this bundle has no tokenizer: give token ids, or export from a folder that has tokenizer.json"
            )
        return self.codec


def _is_ids(prompt: object) -> bool:
    """Whether a prompt is token ids: a list or an array of integers, not empty."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and prompt.dtype.kind in "iu"
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return False
    return all(isinstance(token, (int, np.integer)) and not isinstance(token, bool) for token in prompt)
