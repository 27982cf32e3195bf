"""How tokens are chosen and when a row ends: one frozen value, checked when made, with transformers' meanings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from adx.export.errors import SamplingError, UsageError
from adx.runtime.param_checks import CHECKS, MOOT, UNSUPPORTED

DEFAULT_MAX_NEW_TOKENS: Final = 256

# Other spellings of a field, as transformers, OpenAI, vLLM and llama.cpp write it.
ALIASES: Final[Mapping[str, str]] = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    "eos_token_id": "eos_token_ids",
    "stop_strings": "stop",
}


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one row. Meanings are transformers' own; the order is its too (see `runtime.sampling`).

    Attributes:
        max_new_tokens: tokens to add at most; None: what `max_length` leaves, or 256. The context bounds it too.
        max_length: tokens of prompt and answer together; `max_new_tokens` goes before it.
        min_new_tokens: tokens before an end-of-text token may come; None: what `min_length` leaves.
        min_length: the same with the prompt counted.
        do_sample: draw from the distribution; otherwise the likeliest token is taken. Temperature 0 turns it off.
        temperature: divides the logits.
        top_k: keep the k likeliest tokens; 0 or -1: all; a k above the vocabulary keeps all.
        top_p: keep the likeliest tokens that hold this much probability, one at least.
        min_p: keep tokens at least this likely, relative to the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen, the prompt's included.
        no_repeat_ngram_size: no n-gram of this size comes twice, the prompt's included; 0: off.
        bad_words_ids: token sequences that never come.
        suppress_tokens: tokens that never come.
        begin_suppress_tokens: tokens that never come first.
        forced_bos_token_id: the token after a prompt of one token.
        forced_eos_token_id: the tokens of which one must be last where the length limit is reached.
        eos_token_ids: tokens that end a row; the one that came is part of the row's tokens.
        pad_token_id: pads the tokens of finished rows; None: the first of `eos_token_ids`, or 0.
        ignore_eos: end-of-text tokens do not end a row.
        stop: strings that end a row's text; not part of it.
        skip_special_tokens: special tokens are left out of the text.
        seed: of the random stream, 0 to 2**64 - 1; None: a fresh one each time.

    Raises:
        SamplingError: a value is not accepted; names the field.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    min_length: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.temperature == 0.0:
            object.__setattr__(self, "do_sample", False)

    @classmethod
    def from_generation_config(
        cls, config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """Settings from a model's generation_config.json and explicit arguments.

        An argument goes before the file, the file before the default. An argument of None counts as not given; an
        empty list turns a list or a forced token off. `temperature` above 0, `top_k`, `top_p` or `min_p` as an
        argument turns sampling on unless `do_sample` is given, `temperature=0` turns it off.

        Args:
            config: the file's content; keys that are not about choosing tokens are left alone.
            overrides: arguments by name, aliases accepted.

        Raises:
            SamplingError: a value that is not accepted, or an option that is not supported.
            UsageError: an unknown name.
        """
        explicit = _explicit(overrides or {})
        settings = _from_file(config, explicit)
        settings.update((key, value) for key, value in explicit.items() if key in CHECKS)
        if "max_length" in explicit and "max_new_tokens" not in explicit:
            settings.pop("max_new_tokens", None)
        if "min_length" in explicit and "min_new_tokens" not in explicit:
            settings.pop("min_new_tokens", None)
        settings.update(_sampling_switch(explicit))
        return cls(**settings)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return not self.do_sample

    def new_token_limit(self, prompt_tokens: int, capacity: int) -> int:
        """Tokens that a row may add to a prompt in a cache of `capacity` tokens.

        The last token needs no room in the cache, so the context allows `capacity - prompt_tokens + 1`.

        Raises:
            SamplingError: the prompt alone has `max_length` tokens, and nothing else sets the limit.
        """
        wanted = self.max_new_tokens
        if wanted is None and self.max_length is not None:
            wanted = self.max_length - prompt_tokens
            if wanted < 1:
                raise SamplingError(
                    "max_length",
                    f"the prompt has {prompt_tokens} tokens and max_length, which counts them, is {self.max_length}: "
                    "give max_new_tokens",
                )
        if wanted is None:
            wanted = DEFAULT_MAX_NEW_TOKENS
        return max(0, min(wanted, capacity - prompt_tokens + 1))

    def new_token_minimum(self, prompt_tokens: int) -> int:
        """Tokens that a row must add before an end-of-text token may come."""
        if self.min_new_tokens is not None:
            return self.min_new_tokens
        return max(0, self.min_length - prompt_tokens)

    @property
    def padding(self) -> int:
        """The id that pads a finished row."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return self.eos_token_ids[0] if self.eos_token_ids else 0

    def effective(self) -> dict[str, Any]:
        """The settings in force, for printing: what is off or does not matter is left out."""
        drawing = {"temperature", "top_k", "top_p", "min_p", "seed"}
        out: dict[str, Any] = {"do_sample": self.do_sample}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name == "do_sample" or (item.name in drawing and self.greedy):
                continue
            if item.name in ("temperature", "top_k", "top_p") and not self.greedy:
                out[item.name] = value
            elif value != item.default:
                out[item.name] = list(value) if isinstance(value, tuple) else value
        if self.max_new_tokens is None and self.max_length is None:
            out["max_new_tokens"] = DEFAULT_MAX_NEW_TOKENS
        if self.max_new_tokens is not None:
            out.pop("max_length", None)
        return out


def _explicit(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments under their canonical names, without those not given; refuses unknown and unsupported ones."""
    out: dict[str, Any] = {}
    for given, value in overrides.items():
        name = ALIASES.get(given, given)
        if value is None and (name in CHECKS or name in UNSUPPORTED or name in MOOT):
            continue
        if name in UNSUPPORTED or name in MOOT:
            _refuse_unless_neutral(name, value, ({**UNSUPPORTED, **MOOT})[name], "leave it out")
        elif name not in CHECKS:
            raise UsageError(f"unknown option {given!r}{_closest(given)}")
        if name in out and out[name] != value:
            raise SamplingError(name, f"given twice, as {out[name]!r} and as {value!r} (alias {given!r})")
        out[name] = value
    return out


def _from_file(config: Mapping[str, Any], explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that generation_config.json sets; refuses what would change the text and is not supported."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        name = ALIASES.get(key, key)
        if value is None or name in explicit:
            continue
        if name in UNSUPPORTED:
            neutral = UNSUPPORTED[name]
            cure = f"override it with {name}={neutral[0]!r}" if neutral else "remove it from generation_config.json"
            _refuse_unless_neutral(name, value, neutral, f"the model's generation_config.json asks for it; {cure}")
        elif name in CHECKS:
            out[name] = value
    return out


def _refuse_unless_neutral(name: str, value: Any, neutral: tuple[object, ...], cure: str) -> None:
    if not any(value == accepted for accepted in neutral):
        raise SamplingError(name, f"{value!r} is not supported by this runtime: {cure}")


def _sampling_switch(explicit: Mapping[str, Any]) -> dict[str, bool]:
    """What the arguments say of `do_sample` without naming it."""
    drawing = [name for name in ("temperature", "top_k", "top_p", "min_p") if name in explicit]
    if explicit.get("do_sample") is False:
        moot = [name for name in drawing if explicit[name] not in _OFF[name]]
        if moot:
            raise SamplingError(
                moot[0], f"{explicit[moot[0]]!r} has no effect with do_sample=False: drop one of the two"
            )
    if "do_sample" in explicit or not drawing:
        return {}
    return {"do_sample": explicit.get("temperature") != 0}


_OFF: Final[Mapping[str, tuple[object, ...]]] = {
    "temperature": (0, 1),
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
}


def _closest(name: str) -> str:
    import difflib

    known = [*CHECKS, *ALIASES]
    found = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return f": did you mean {found[0]!r}?" if found else f": accepted are {', '.join(sorted(CHECKS))}"
