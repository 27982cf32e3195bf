"""Chat templates: found as transformers finds them, rendered in the sandbox with the names that it gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adx.export.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Template


def load_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The source of a folder's chat template: chat_template.jinja, else tokenizer_config.json's, else None."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates; "default" serves conversations without tools
        template = {item["name"]: item["template"] for item in template}
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else None


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
) -> str:
    """A conversation as text.

    Raises:
        UsageError: the messages have not the form of a conversation, or the template refuses them.
    """
    from jinja2 import TemplateError

    conversation = _plain_messages(messages)
    try:
        return _compiled(template).render(
            messages=conversation,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except TemplateError as error:
        raise UsageError(f"the model's chat template refuses these messages: {error}") from error


# Names under which a message's reasoning is passed; the first is the one that templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of plain JSON values: no absent ones, reasoning under each name that templates use."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise UsageError('messages must be a list with one message at least, as [{"role": "user", "content": "Hi"}]')
    out = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f'a message must be as {{"role": "user", "content": "Hi"}}, not {message!r}')
        try:
            plain = json.loads(json.dumps({key: value for key, value in message.items() if value is not None}))
        except (TypeError, ValueError) as error:
            raise UsageError(f"a message must hold plain JSON values: {error}") from error
        reasoning = next((plain[key] for key in _REASONING if plain.get(key) is not None), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        out.append(plain)
    return out


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    """The template in the environment of transformers' `utils/chat_template_utils.py`."""
    from jinja2 import TemplateError, TemplateSyntaxError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; here it only stands around it."""

        tags = {"generation"}  # noqa: RUF012  jinja2 declares it as an instance attribute of a plain set

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            """The body alone."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class SafeNamespace(Namespace):
        """A namespace that takes no underscored name, through which a template could leave the sandbox."""

        def __init__(*args: Any, **attributes: Any) -> None:
            self, *rest = args
            named = dict(*rest, **attributes)
            for name in named:
                _refuse_underscore(name)
            Namespace.__init__(self, named)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_underscore(name)
            Namespace.__setitem__(self, name, value)

    class SafeDict:
        """`dict` without its attributes."""

        def __call__(self, *args: Any, **keys: Any) -> dict[Any, Any]:
            return dict(*args, **keys)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def _refuse_underscore(name: str) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"chat templates cannot store {name!r} on a namespace")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = SafeDict()
    environment.globals["namespace"] = SafeNamespace
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise UsageError(f"the model's chat template is not valid, line {error.lineno}: {error.message}") from error
