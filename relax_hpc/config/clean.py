"""One layer of configuration against the schema: types, ranges and names, each error one line that teaches."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from relax_hpc.config.schema import Config
from relax_hpc.errors import ConfigError

COMMAND_LINE = "command line"
"""Source of overrides, in the place of a file's name."""
MAX_DEPTH = 16
"""Nesting allowed inside a free-form value of `flags`."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_NO_BOUNDS: Mapping[str, Any] = MappingProxyType({})


def clean(hint: Any, value: Any, source: str, key: str = "", metadata: Mapping[str, Any] = _NO_BOUNDS) -> Any:
    """`value` checked against the type `hint` and the bounds in `metadata`; ConfigError names `source` and `key`."""
    if dataclasses.is_dataclass(hint):
        return _clean_section(hint, value, source, key)
    origin = get_origin(hint)
    if origin is dict:
        return _clean_map(get_args(hint)[1], value, source, key)
    if origin is list:
        if not isinstance(value, list):
            raise wrong(source, key, value, "a list")
        return [clean(get_args(hint)[0], item, source, f"{key}[{index}]") for index, item in enumerate(value)]
    if origin is Literal:
        if type(value) is not str or value not in get_args(hint):
            raise wrong(source, key, value, ", ".join(map(repr, get_args(hint))), near(str(value), get_args(hint)))
        return value
    return _plain(value, source, key) if hint is Any else _clean_scalar(hint, value, source, key, metadata)


def wrong(source: str, key: str, found: Any, allowed: str, hint: str = "") -> ConfigError:
    """The error for a value that is not allowed."""
    shown = repr(found) if len(repr(found)) <= 60 else repr(found)[:57] + "..."
    kind = "" if found is None else f" ({type(found).__name__})"
    return ConfigError(f"{source}: {key or 'the file'}: found {shown}{kind}, allowed: {allowed}{hint}")


def near(word: str, allowed: Sequence[str]) -> str:
    """A suggestion for `word`, by its spelling or, for dotted keys, by its last part; empty if nothing is close."""
    matches = difflib.get_close_matches(word, allowed, n=1) or [
        key for key in allowed if key.rpartition(".")[2] == word.rpartition(".")[2]
    ]
    return f"; did you mean {' or '.join(matches[:3])}?" if matches else ""


def keys(hint: Any = Config, prefix: str = "") -> Iterator[str]:
    """Dotted keys of all fields of the dataclass `hint`, sections included."""
    for name, item in get_type_hints(hint).items():
        yield prefix + name
        if dataclasses.is_dataclass(item):
            yield from keys(item, f"{prefix}{name}.")


def bounds(metadata: Mapping[str, Any]) -> str:
    """Words for the range in a field's `metadata`; empty without one."""
    low, high = metadata.get("low"), metadata.get("high")
    if low is not None and high is not None:
        return f"{low} to {high}"
    return f"at least {low}" if low is not None else f"at most {high}" if high is not None else ""


def _clean_section(hint: Any, value: Any, source: str, key: str) -> dict[str, Any]:
    # A section with all its lines commented out reads as null.
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise wrong(source, key, value, f"a mapping of {', '.join(get_type_hints(hint))}")
    fields = {field.name: field for field in dataclasses.fields(hint)}
    hints = get_type_hints(hint)
    result = {}
    for name, item in value.items():
        dotted = f"{key}.{name}".lstrip(".")
        if name not in fields:
            raise _unknown(source, dotted, str(name), list(fields))
        result[name] = clean(hints[name], item, source, dotted, fields[name].metadata)
    return result


def _unknown(source: str, dotted: str, name: str, siblings: list[str]) -> ConfigError:
    hint = near(name, siblings) or near(dotted, list(keys()))
    return ConfigError(f"{source}: {dotted}: unknown key, allowed: {', '.join(siblings)}{hint}")


def _clean_map(item: Any, value: Any, source: str, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong(source, key, value, "a mapping of names to values")
    for name in value:
        if type(name) is not str or not name:
            raise wrong(source, key, name, "names that are text (quote it)")
        if dataclasses.is_dataclass(item) and not _NAME.fullmatch(name):
            raise wrong(source, key, name, "names of letters, digits, _ and - (they name directories)")
    return {
        name: None if entry is None and item is not Any else clean(item, entry, source, f"{key}.{name}")
        for name, entry in value.items()
    }


def _clean_scalar(hint: Any, value: Any, source: str, key: str, metadata: Mapping[str, Any]) -> Any:
    if hint is float and type(value) is int:
        value = float(value) if abs(value) < 2**1023 else math.inf
    if type(value) is not hint:
        quote = f"; quote it: '{value}'" if hint is str and isinstance(value, bool | int | float) else ""
        raise wrong(source, key, value, " ".join([_KINDS[hint], bounds(metadata)]).strip(), quote)
    low, high = metadata.get("low"), metadata.get("high")
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong(source, key, value, "a finite number " + bounds(metadata))
    if (low is not None and value < low) or (high is not None and value > high):
        raise wrong(source, key, value, bounds(metadata))
    if hint is str and "\0" in value:
        raise wrong(source, key, value, "text without NUL")
    return value


def _plain(value: Any, source: str, key: str, depth: int = 0) -> Any:
    """A free-form value: scalars, and lists and mappings of them."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{source}: {key}: nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, list):
        return [_plain(item, source, f"{key}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        if bad := [name for name in value if type(name) is not str]:
            raise wrong(source, key, bad[0], "names that are text (quote it)")
        return {name: _plain(item, source, f"{key}.{name}", depth + 1) for name, item in value.items()}
    if not (value is None or type(value) in _KINDS) or (type(value) is float and not math.isfinite(value)):
        raise wrong(source, key, value, "text, finite numbers, true, false, null, lists and mappings")
    return value
