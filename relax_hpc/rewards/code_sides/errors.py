"""Errors of one process that are raised again in the other: class names and plain arguments."""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Callable
from typing import Any

from .plain import encode

_NO_ERRORS = (StopIteration, StopAsyncIteration)
"""Errors that silently end a loop: `all(map(f, cases))` would be true if `f` raised one."""


def describe_class(kind: type[BaseException]) -> dict[str, Any]:
    """Names of an error's class and its base classes, up to the first class of the standard
    library."""
    names: list[str] = []
    for ancestor in kind.__mro__:
        if issubclass(ancestor, BaseException):
            if standard(ancestor.__module__, ancestor.__qualname__) is ancestor:
                return {"names": names, "base": [ancestor.__module__, ancestor.__qualname__]}
            names.append(ancestor.__name__)
    return {"names": names, "base": ["builtins", "Exception"]}


def describe_error(error: BaseException, encode_object: Callable[[Any], Any]) -> list[Any]:
    """An error's class, its text, and its arguments if they are plain data."""
    try:
        text = str(error)
    except Exception:
        # The class belongs to the program, whose `__str__` may raise anything.
        text = ""
    try:
        args = encode(list(error.args), encode_object)
    except (TypeError, RecursionError):
        args = [text]
    return [describe_class(type(error)), text, args]


def standard(module: Any, name: Any) -> Any:
    """Attribute ``name`` of a module of the standard library; None if it does not exist."""
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception:
        # Some modules exist only on other systems.
        return None


class ErrorClasses:
    """Classes of errors, made from descriptions by the other process. Equal descriptions give the
    same class."""

    def __init__(self) -> None:
        self._classes: dict[tuple[str, ...], type[Exception]] = {}

    def resolve(self, description: dict[str, Any]) -> type[Exception]:
        """The class for a description by `describe_class`. If its base is not an ordinary error,
        RuntimeError is the base."""
        names, (module, name) = description["names"], description["base"]
        base = standard(module, name)
        is_error = isinstance(base, type) and issubclass(base, Exception)
        if not is_error or issubclass(base, _NO_ERRORS):
            names, module, base = [*names, str(name)], "builtins", RuntimeError
        for index in range(len(names) - 1, -1, -1):
            key = (*map(str, names[index:]), str(module), str(name))
            if key not in self._classes:
                self._classes[key] = type(str(names[index]), (base,), {"__str__": _text})
            base = self._classes[key]
        return base

    def error(self, description: dict[str, Any], text: str, args: list[Any]) -> Exception:
        """An error of a described class."""
        kind = self.resolve(description)
        try:
            error = kind(*args)
        except Exception:
            # Some classes need certain arguments, such as UnicodeDecodeError, which needs five.
            error = kind.__new__(kind)
            error.args = tuple(args)
        if type(error).__str__ is _text:
            setattr(error, "shown_text", str(text))  # noqa: B010 (a new attribute)
        return error


def _text(error: BaseException) -> str:
    return getattr(error, "shown_text", "") or BaseException.__str__(error)


def builtin_type(name: Any) -> type | None:
    """The built-in type called ``name``."""
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    return kind if isinstance(kind, type) else None
