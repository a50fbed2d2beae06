"""The single settings of a configuration, and the settings in which two configurations differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

_MAX_CHARS = 200
_MISSING = object()


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each setting in ``tree``, a nested mapping. An empty mapping is
    a value.

    >>> list(leaves({"steps": 1, "model": {"path": "/m"}, "groups": {}}))
    [('steps', 1), ('model.path', '/m'), ('groups', {})]
    """
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def differences(value: Any, other: Any, key: str) -> Iterator[tuple[str, str, str]]:
    """Yield (key, setting, other setting), as text, for each setting below ``key`` that differs.

    >>> list(differences({"a": 1, "b": {"c": "x"}}, {"a": 1, "b": {}}, "flags"))
    [('flags.b.c', "'x'", 'nothing')]
    """
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        for name in dict.fromkeys([*value, *other]):
            inner = value.get(name, _MISSING), other.get(name, _MISSING)
            yield from differences(*inner, f"{key}.{name}")
    elif dataclasses.is_dataclass(value) and type(value) is type(other):
        for field in dataclasses.fields(value):
            inner = getattr(value, field.name), getattr(other, field.name)
            yield from differences(*inner, f"{key}.{field.name}")
    elif value != other:
        yield key, _shown(value), _shown(other)


def _shown(value: Any) -> str:
    """Return ``value`` as text for a message."""
    if value is _MISSING or value == "" or value is None:
        return "nothing"
    if dataclasses.is_dataclass(value):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}.."
