"""One decoder from JSON to dataclasses, for configurations, records, manifests and settings.

A wrong value raises a ValueError that says which value it is, what it must be, and what it was.
For an unknown key the error suggests the nearest known one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mosar.core.checks import is_real
from mosar.files import parse_json

T = TypeVar("T")
_NAMES = {
    **{int: "an integer", float: "a number", bool: "true or false", str: "a word"},
    **{NoneType: "none", Path: "a path"},
}


def decode(kind: type[T], values: Any, path: str, *, loose: bool = False) -> T:
    """A dataclass from a JSON object with all its fields; `path` names it in errors.

    loose: takes numbers and words without checking types, for readers with checks of their own.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a JSON object, got {values!r:.60}")
    hints = field_types(kind)
    unknown, missing = sorted(set(values) - set(hints)), sorted(set(hints) - set(values))
    if unknown or missing:
        faults = [f"lacks the keys {missing}"] if missing else []
        if unknown:
            faults.append(f"has unknown keys {unknown}{nearest(str(unknown[0]), hints)}")
        raise ValueError(f"{path} {' and '.join(faults)}")
    return kind(
        **{n: decode_value(hints[n], v, f"{path}.{n}", loose=loose) for n, v in values.items()}
    )


@lru_cache(maxsize=64)
def field_types(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields by name."""
    hints = get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}


def decode_value(kind: Any, value: Any, path: str, *, loose: bool = False) -> Any:
    """Converts a JSON value to the type `kind`."""
    for option in _options(kind):
        origin, arguments = get_origin(option), get_args(option)
        if is_dataclass(option) and (isinstance(value, dict) or loose):
            return decode(option, value, path, loose=loose)  # pyright: ignore[reportArgumentType]
        if origin is dict and isinstance(value, dict):
            part = arguments[1]
            return {k: decode_value(part, v, f"{path}.{k}", loose=loose) for k, v in value.items()}
        if origin is list and isinstance(value, list):
            return [decode_value(arguments[0], v, path, loose=loose) for v in value]
        if origin is tuple and isinstance(value, (list, tuple)):
            kinds = [arguments[0]] * len(value) if arguments[-1] is ... else list(arguments)
            if len(kinds) == len(value):
                parts = zip(kinds, value, strict=True)
                return tuple(decode_value(k, v, path, loose=loose) for k, v in parts)
        nested = origin is tuple or (origin is dict and arguments[1] is not Any)
        if option is Any or (loose and not nested):
            return value
        if origin is Literal and value in arguments:
            return value
        if option is float and is_real(value):
            return float(value)
        if option in (int, bool, str, NoneType) and type(value) is option:
            return value
        if option is Path and isinstance(value, str):
            return Path(value)
    raise ValueError(f"{path} must be {_name(kind)}, got {value!r:.60}")


def parse_value(kind: Any, text: str, path: str) -> Any:
    """Parses text: plain numbers and words, or JSON for anything larger."""
    options = _options(kind)
    if NoneType in options and text.lower() in ("none", "null"):
        return None
    if bool in options and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        if number in options:
            try:
                return number(text)
            except ValueError:
                continue
    if str in options or Path in options:
        return text
    if any(get_origin(option) is Literal for option in options):
        return decode_value(kind, text, path)
    if any(get_origin(option) is tuple or is_dataclass(option) for option in options):
        try:
            value = parse_json(text)
        except ValueError:
            pass
        else:
            return decode_value(kind, value, path)
    raise ValueError(f"{path} must be {_name(kind)}, got {text!r}")


def parse_changes(changes: Iterable[str], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """ "train.steps=60" -> {"train.steps": 60}; `kinds` has the type of each key."""
    parsed = {}
    for change in changes:
        key, equals, text = change.partition("=")
        key = key.strip()
        if not equals:
            raise ValueError(f"a change is written key=value, got {change!r}")
        if key not in kinds:
            raise ValueError(f"there is no key {key!r}{nearest(key, kinds)}")
        parsed[key] = parse_value(kinds[key], text.strip(), key)
    return parsed


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    known = list(known)
    if name not in known:
        raise ValueError(
            f"{what} must be one of {', '.join(known)}, got {name!r}{nearest(name, known)}"
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean …?" with similar known names, compared by their last part first."""
    known = list(known)
    last = name.rpartition(".")[2]
    same_ending = [key for key in known if key.rpartition(".")[2] == last]
    found = same_ending or get_close_matches(name, known, n=1, cutoff=0.5)
    if not found:
        by_ending = {key.rpartition(".")[2]: key for key in known}
        found = [by_ending[key] for key in get_close_matches(last, by_ending, n=1, cutoff=0.5)]
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _name(kind: Any) -> str:
    """The name of a type in error messages."""

    def say(option: Any) -> str:
        if get_origin(option) is Literal:
            return f"one of {', '.join(get_args(option))}"
        if get_origin(option) in (tuple, list):
            return "a list in JSON"
        return _NAMES.get(option, "an object in JSON")

    return " or ".join(say(option) for option in _options(kind))
