"""Frozen dataclasses to JSON and back, strictly: every key there, no other key, every value of its type."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from adx.export.errors import BundleError

T = TypeVar("T")


def encode(value: object) -> Any:
    """A value made of dataclasses, tuples, mappings and plain scalars, as JSON holds it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    return value


def decode(kind: type[T], value: object, where: str) -> T:
    """The JSON value `value` as a `kind`; `where` names it in messages.

    Raises:
        BundleError: a key is missing or unknown, or a value has another type.
    """
    result: T = _decode(kind, value, where)
    return result


def parse_object(text: str, where: str) -> dict[str, Any]:
    """JSON text that must be an object: no key twice, no NaN or Infinity.

    Raises:
        BundleError: it is something else.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{where} is not valid JSON: {str(error) or 'nested too deeply'}") from error
    if not isinstance(value, dict):
        raise BundleError(f"{where} holds a JSON {type(value).__name__}, but must hold an object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in names if names.count(key) > 1)!r} is there twice")
    return result


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    if origin is Union or origin is types.UnionType:
        return _decode_union(args, value, where)
    if origin is Literal:
        if value not in args or isinstance(value, bool) is not any(value is arg for arg in (True, False)):
            raise _wrong(where, " or ".join(map(repr, args)), value)
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, "a list", value)
        return tuple(_decode(args[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise _wrong(where, "an object", value)
        return {key: _decode(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind in (Any, object):
        return value
    return _decode_scalar(kind, value, where)


def _decode_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(where, "an object", value)
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    if unknown := sorted(set(value) - set(names)):
        raise BundleError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(names)}")
    if missing := [name for name in names if name not in value]:
        raise BundleError(f"{where}: the key {missing[0]!r} is missing")
    return kind(**{name: _decode(hints[name], value[name], f"{where}.{name}") for name in names})


def _decode_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    others = [option for option in options if option is not type(None)]
    if len(others) == 1:
        return _decode(others[0], value, where)
    for option in others:
        if type(value) is option:
            return value
    raise _wrong(where, " or ".join(option.__name__ for option in others), value)


def _decode_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise _wrong(where, f"a {kind.__name__}", value)
    return value


def _wrong(where: str, wanted: str, value: object) -> BundleError:
    return BundleError(f"{where}: must be {wanted}, found {type(value).__name__} {str(value)[:60]!r}")
