"""What each option of choosing tokens accepts, and the options known elsewhere that are not supported here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from adx.export.errors import SamplingError

# Options that transformers, OpenAI or vLLM know and that this runtime cannot honour yet: the values that change
# nothing, which are accepted. `None` always changes nothing.
UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "n": (1,),
    "best_of": (1,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "sequence_bias": (),
    "logit_bias": (),
    "constraints": (),
    "force_words_ids": (),
    "dola_layers": (),
    "token_healing": (False,),
    "max_time": (),
    "stop_token_ids": ((), []),
    "allowed_token_ids": (),
    "bad_words": ((), []),
    "include_stop_str_in_output": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "response_format": (),
    "tools": (),
    "json_schema": (),
    "regex": (),
    "grammar": (),
    "choice": (),
    "logits_processor": ((), []),
}

# Options without effect unless another, unsupported one is on: refused as an argument, left alone in a model's file.
MOOT: Final[Mapping[str, tuple[object, ...]]] = {
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "renormalize_logits": (False, True),
    "remove_invalid_values": (False,),
}


def _integer(name: str, value: Any, low: int, accepted: str, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise SamplingError(name, f"{value!r} is not an integer: give {accepted}")
    if value < low or (high is not None and value > high):
        raise SamplingError(name, f"{value} is out of range: give {accepted}")
    return int(value)


def _count(name: str, value: Any) -> int:
    return _integer(name, value, 0, "0 or more")


def _count_or_none(name: str, value: Any) -> int | None:
    return None if value is None else _count(name, value)


def _number(name: str, value: Any, accepted: str, low: float, high: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise SamplingError(name, f"{value!r} is not a number: give {accepted}")
    if not math.isfinite(value) or value < low or value > high:
        raise SamplingError(name, f"{value} is out of range: give {accepted}")
    return float(value)


def _temperature(name: str, value: Any) -> float:
    return _number(name, value, "a finite number, 0 (the likeliest token each time) or more", 0.0)


def _top_k(name: str, value: Any) -> int:
    return max(0, _integer(name, value, -1, "1 or more, or 0 or -1 for no limit"))


def _probability(name: str, value: Any) -> float:
    return _number(name, value, "a number from 0 to 1", 0.0, 1.0)


def _penalty(name: str, value: Any) -> float:
    number = _number(name, value, "a number above 0 (1 changes nothing)", 0.0)
    if number == 0.0:
        raise SamplingError(name, "0 is out of range: give a number above 0 (1 changes nothing)")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise SamplingError(name, f"{value!r} is not a yes or no: give True or False")
    return bool(value)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        value = (value,)
    if isinstance(value, str) or not isinstance(value, (Sequence, np.ndarray, set, frozenset)):
        raise SamplingError(name, f"{value!r} is not a list of token ids")
    return tuple(_integer(name, item, 0, "token ids of 0 or more") for item in value)


def _id_or_none(name: str, value: Any) -> int | None:
    ids = _ids(name, value)
    if len(ids) > 1:
        raise SamplingError(name, f"{value!r} holds more than one token id: give one")
    return ids[0] if ids else None


def _id_lists(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if value is None:
        return ()
    if isinstance(value, (str, int)) or not isinstance(value, Sequence):
        raise SamplingError(name, f"{value!r} is not a list of lists of token ids")
    out = tuple(_ids(name, item) if not isinstance(item, int) else _not_nested(name, value) for item in value)
    if not all(out):
        raise SamplingError(name, "an empty sequence of token ids bans nothing: leave it out")
    return out


def _not_nested(name: str, value: Any) -> tuple[int, ...]:
    raise SamplingError(name, f"{value!r} is not a list of lists of token ids")


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise SamplingError(name, f"{value!r} is not a string or a list of strings")
    if "" in items:
        raise SamplingError(name, "an empty string would stop at once: leave it out")
    return tuple(items)


def _seed(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value, 0, "an integer from 0 to 2**64 - 1", 2**64 - 1)


# Per field: checks a value and gives its canonical form.
CHECKS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "max_new_tokens": _count_or_none,
    "max_length": _count_or_none,
    "min_new_tokens": _count_or_none,
    "min_length": _count,
    "do_sample": _flag,
    "temperature": _temperature,
    "top_k": _top_k,
    "top_p": _probability,
    "min_p": _probability,
    "repetition_penalty": _penalty,
    "no_repeat_ngram_size": _count,
    "bad_words_ids": _id_lists,
    "suppress_tokens": _ids,
    "begin_suppress_tokens": _ids,
    "forced_bos_token_id": _id_or_none,
    "forced_eos_token_id": _ids,
    "eos_token_ids": _ids,
    "pad_token_id": _id_or_none,
    "ignore_eos": _flag,
    "stop": _strings,
    "skip_special_tokens": _flag,
    "seed": _seed,
}
