"""Text at the edge of the token loop: a tokenizer that encodes and decodes as transformers' does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adx.export.errors import BundleError, UsageError
from adx.runtime.chat import load_chat_template, render_chat_template

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = Mapping[str, Any]

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextCodec:
    """A tokenizer with its chat template; encodes and decodes as transformers' tokenizer of the same folder does.

    Attributes:
        special_tokens: the named special tokens that the tokenizer has, as `{"bos_token": "<s>"}`.
        chat_template: the source of the chat template, or None.
        cleans: whether decoding removes spaces before punctuation, as WordPiece tokenizers may ask for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: Mapping[str, Any],
        *,
        chat_template: str | None = None,
        bos: int | None = None,
    ) -> None:
        """Args:
        tokenizer: from tokenizer.json.
        config: tokenizer_config.json.
        chat_template: its source.
        bos: the token that stands for an empty prompt where the tokenizer names none.
        """
        self.special_tokens = {name: _content(config[name]) for name in _NAMED if config.get(name) is not None}
        self.chat_template = chat_template
        self._tokenizer = tokenizer
        self._bos = self._named_id("bos_token") if "bos_token" in self.special_tokens else bos
        layout = json.loads(tokenizer.to_str())
        self._special = {token["id"] for token in layout["added_tokens"] if token["special"]}
        self._bytes = _byte_fallback_ids(tokenizer, layout)
        self.cleans = _cleans_up(layout, config)

    @classmethod
    def open(cls, folder: Path, *, bos: int | None = None) -> TextCodec:
        """The codec of a folder with tokenizer.json, tokenizer_config.json and perhaps chat_template.jinja.

        Args:
            folder: a bundle or a Hugging Face folder.
            bos: the model's beginning-of-text token, for an empty prompt where the tokenizer names none.

        Raises:
            BundleError: tokenizer.json is missing or cannot be read.
        """
        from tokenizers import Tokenizer

        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise BundleError(f"{folder} has no tokenizer.json: pass token ids, or export from a folder that has one")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception for whatever is wrong with the file
            raise BundleError(f"{path} cannot be read as a tokenizer: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        config = _read_json(Path(folder) / "tokenizer_config.json")
        named = [_content(config[name]) for name in _NAMED if config.get(name) is not None]
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        tokenizer.add_special_tokens([token for token in named if token not in known])
        return cls(tokenizer, config, chat_template=load_chat_template(Path(folder), config), bos=bos)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer adds to one.

        An empty text is the beginning-of-text token alone.

        Raises:
            UsageError: the text is no Unicode, or gives no token, and there is no beginning-of-text token.
        """
        ids: list[int] = self._tokenizer.encode(_unicode(text)).ids
        if ids:
            return ids
        if self._bos is None:
            raise UsageError(
                f"the prompt {text!r} gives no token, and this model has no beginning-of-text token: give some text"
            )
        return [self._bos]

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation in the model's chat template; the template writes all special tokens itself.

        Raises:
            UsageError: there is no template, or it refuses these messages.
        """
        rendered = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        ids: list[int] = self._tokenizer.encode(_unicode(rendered), add_special_tokens=False).ids
        return ids

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """A conversation in the model's chat template, as text.

        Args:
            messages: `{"role": ..., "content": ...}` each.
            add_generation_prompt: end with what opens the assistant's answer.

        Raises:
            UsageError: there is no template, or it refuses these messages.
        """
        if self.chat_template is None:
            raise UsageError(
                "this bundle has no chat template: give a plain prompt, or put chat_template.jinja beside the "
                "checkpoint's tokenizer and export again"
            )
        return render_chat_template(self.chat_template, messages, self.special_tokens, add_generation_prompt)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids that the tokenizer does not know give no text."""
        text = self.decode_raw(ids, skip_special_tokens)
        return clean_up_spaces(text) if self.cleans else text

    def decode_raw(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """`decode` without the cleaning of spaces that some tokenizers ask for."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def has_text(self, token: int, skip_special_tokens: bool) -> bool:
        """Whether `decode` looks at a token at all."""
        if skip_special_tokens and token in self._special:
            return False
        return self._tokenizer.id_to_token(token) is not None

    def is_byte(self, token: int) -> bool:
        """Whether a token is one byte of a run that is decoded as a whole (byte fallback)."""
        return token in self._bytes

    def _named_id(self, name: str) -> int | None:
        token: int | None = self._tokenizer.token_to_id(self.special_tokens[name])
        return token


def _content(token: Any) -> str:
    """A special token's text; the configuration has it as a string or as an object."""
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BundleError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise BundleError(f"{path} holds {type(content).__name__}, not an object")
    return content


def _byte_fallback_ids(tokenizer: Tokenizer, layout: Mapping[str, Any]) -> frozenset[int]:
    """Ids of `<0x00>` to `<0xFF>` where the decoder turns runs of them into characters."""
    if "ByteFallback" not in json.dumps(layout["decoder"]):
        return frozenset()
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token for token in ids if token is not None)


def _cleans_up(layout: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether transformers cleans up spaces: asked for, and not byte-pair encoding, which that would damage."""
    if not config.get("clean_up_tokenization_spaces", False):
        return False
    forced = config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return bool(forced) or layout["model"]["type"] != "BPE"


def clean_up_spaces(text: str) -> str:
    """transformers' `clean_up_tokenization`."""
    for spaced, joined in _CLEANED:
        text = text.replace(spaced, joined)
    return text


_CLEANED = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _unicode(text: str) -> str:
    """The text, unless it holds half of a surrogate pair, as bytes that are not UTF-8 give on a command line.

    Raises:
        UsageError: it does.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the prompt is not valid UTF-8 at character {error.start}: give it as Unicode text"
        ) from error
    return text
