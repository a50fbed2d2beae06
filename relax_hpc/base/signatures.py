"""Checks of the parameters of a user's function, before anything calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def parameters_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Signature of ``function``; None: it is built in and does not say, or it is no function."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def method_of(cls: type, name: str) -> Callable[..., Any] | None:
    """Method ``name`` of ``cls`` with the parameters that it has on an object, without `self`.
    None: the class has no such method.

    >>> class Length:
    ...     def __call__(self, sample, unit="words"): ...
    >>> str(inspect.signature(method_of(Length, "__call__")))
    "(sample, unit='words')"
    """
    # Not getattr: it would find `__call__` of the class's own class.
    attributes = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
    if not attributes:
        return None
    attribute = attributes[0]
    if isinstance(attribute, staticmethod | classmethod):
        return attribute.__get__(None, cls)
    # As on an object, which is not made here: a user's `__init__` may take long.
    return attribute.__get__(object(), cls) if inspect.isfunction(attribute) else attribute


def describe_mismatch(function: Callable[..., Any], *names: str) -> str:
    """Reason why ``function`` cannot be called with positional arguments that stand for ``names``.
    Empty: it can, or it does not say.

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
