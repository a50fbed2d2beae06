"""Checks of the parameters of a user's function before its first call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def parameters_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Signature of ``function``. None: it is a built-in function without one, or no function."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def method_of(cls: type, name: str) -> Callable[..., Any] | None:
    """Method ``name`` of ``cls``, as bound to an object, so that `self` is no parameter.

    None: the class has no such method.

    >>> class Length:
    ...     def __call__(self, sample, unit="words"): ...
    >>> str(inspect.signature(method_of(Length, "__call__")))
    "(sample, unit='words')"
    """
    # Not getattr: for `__call__` it returns the method of the metaclass.
    attributes = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
    if not attributes:
        return None
    attribute = attributes[0]
    if isinstance(attribute, staticmethod | classmethod):
        return attribute.__get__(None, cls)
    # Bound to a plain object, because a user's `__init__` may take long.
    return attribute.__get__(object(), cls) if inspect.isfunction(attribute) else attribute


def describe_mismatch(function: Callable[..., Any], *names: str) -> str:
    """Reason why ``function`` cannot be called with positional arguments for ``names``.

    Empty: it can be called, or its signature is unknown.

    >>> describe_mismatch(lambda sample, extra: 0, "sample")
    'takes (sample, extra), allowed: (sample)'
    >>> describe_mismatch(lambda sample, extra=None: 0, "sample")
    ''
    """
    signature = parameters_of(function)
    if signature is None:
        return ""
    try:
        signature.bind(*names)
    except TypeError:
        return f"takes {signature}, allowed: ({', '.join(names)})"
    return ""
