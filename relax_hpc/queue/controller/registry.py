"""Registries of functions by operation. Each function is registered at its definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)


class Registry(dict[str, Callable]):
    """Functions by the name of their operation.

    >>> greetings = Registry()
    >>> @greetings.add("hello")
    ... def greet(name): return f"hello {name}"
    >>> greetings["hello"]("you")
    'hello you'
    """

    def add(self, op: str) -> Callable[[F], F]:
        """Decorator that registers a function for ``op``. Each operation has one function."""

        def register(function: F) -> F:
            if op in self:
                raise ValueError(
                    f"{op!r} is registered twice: {self[op].__module__} and {function.__module__}"
                )
            self[op] = function
            return function

        return register


APPLIERS = Registry()
"""Functions that apply a journal record, by its `op`: (state, **other keys of the record). They
change only the state."""
applies = APPLIERS.add
HANDLERS = Registry()
"""Functions that answer a request, by its `op`: (service, request, **arguments). Annotations are
the types of the arguments."""
handles = HANDLERS.add
