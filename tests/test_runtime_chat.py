"""Chat templates against transformers' `apply_chat_template`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models import BOS, byte_tokenizer, metaspace_tokenizer

from adx.export.errors import UsageError
from adx.runtime.text import TextCodec

WITH_BOS = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] | trim }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
BUSY = """{%- set ns = namespace(first=true) -%}
{%- for message in messages -%}
    {%- if loop.index0 == 5 %}{% break %}{% endif %}
    {%- if message.role == "system" and not ns.first %}{{ raise_exception("system must be first") }}{% endif %}
    {%- set ns.first = false -%}
    {{ message | tojson }}{{ message.get("name", "-") }}{{ strftime_now("%Y") }}
    {%- if message.thinking %}[{{ message.reasoning_content }}]{% endif %}
    {% generation %}{{ dict(a=1) }}{% endgeneration %}
{% endfor %}{{ tools is none }}{{ documents is none }}{{ eos_token }}{{ "<&" }}"""

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " Hi é🙂 "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo"},
    ],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "a</s>b", "name": None}],
    [{"role": "assistant", "content": "x", "reasoning": "because"}],
]


def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("template", [WITH_BOS, BUSY])
@pytest.mark.parametrize("build", [byte_tokenizer, metaspace_tokenizer])
@pytest.mark.parametrize("prompted", [True, False])
def test_conversation_equals_transformers(tmp_path: Path, build: Any, template: str, prompted: bool) -> None:
    """The tokenizer adds a beginning-of-text token and so does the template: one comes out, as with transformers."""
    folder = build(tmp_path, add_bos=True, chat_template=template)
    codec, tokenizer = TextCodec.open(folder), reference(folder)
    for chat in CHATS:
        expected = tokenizer.apply_chat_template(chat, add_generation_prompt=prompted, tokenize=False)
        assert codec.render_chat(chat, add_generation_prompt=prompted) == expected
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=prompted, tokenize=True, return_dict=False)
        assert codec.encode_chat(chat, add_generation_prompt=prompted) == ids
    if template == WITH_BOS:
        assert codec.encode_chat(CHATS[0]).count(BOS) == 1
        assert codec.encode("Hi").count(BOS) == 1


@pytest.mark.parametrize(
    "setting", [WITH_BOS, [{"name": "default", "template": WITH_BOS}, {"name": "tool_use", "template": "no"}]]
)
def test_template_in_the_tokenizer_configuration(tmp_path: Path, setting: Any) -> None:
    folder = byte_tokenizer(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": setting}))
    expected = reference(folder).apply_chat_template(CHATS[1], tokenize=False)
    assert TextCodec.open(folder).render_chat(CHATS[1], add_generation_prompt=False) == expected
    (folder / "chat_template.jinja").write_text("the file goes first")
    assert TextCodec.open(folder).render_chat(CHATS[0]) == "the file goes first"


def test_no_template_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no chat template.*chat_template\.jinja"):
        TextCodec.open(byte_tokenizer(tmp_path)).encode_chat(CHATS[0])


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", CHATS[0], "roles must alternate"),
        ("{% if %}", CHATS[0], "not valid, line 1"),
        ("{{ ''.__class__.__mro__ }}", CHATS[0], "refuses"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", CHATS[0], "_x"),
        (WITH_BOS, [], "one message at least"),
        (WITH_BOS, "hello", "one message at least"),
        (WITH_BOS, [{"content": "no role"}], "must be as"),
        (WITH_BOS, [{"role": "user", "content": object()}], "plain JSON"),
    ],
)
def test_what_a_template_refuses_is_a_usage_error(tmp_path: Path, template: str, messages: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TextCodec.open(byte_tokenizer(tmp_path, chat_template=template)).render_chat(messages)
