"""Functions by the operation that they carry out, each registered where it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)


class Registry(dict[str, Callable]):
    """
    >>> greetings = Registry()
    >>> @greetings.add("hello")
    ... def greet(name): return f"hello {name}"
    >>> greetings["hello"]("you")
    'hello you'
    """

    def add(self, op: str) -> Callable[[F], F]:
        """Register the function behind it for ``op``, which no other has."""

        def register(function: F) -> F:
            if op in self:
                raise ValueError(
                    f"{op!r} is registered twice: {self[op].__module__} and {function.__module__}"
                )
            self[op] = function
            return function

        return register


APPLIERS = Registry()
"""Functions that carry out a journal record, by its `op`: (state, **the rest of it), which change
the state alone."""
applies = APPLIERS.add
HANDLERS = Registry()
"""Functions that answer a request, by its `op`: (service, request, **its arguments); annotations
are their types."""
handles = HANDLERS.add
