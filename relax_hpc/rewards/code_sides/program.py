"""The process of a program. It runs the program, then the operations that the tests request, until
the tests end.

The program controls this process. The process of the tests therefore trusts nothing that it
receives; it only checks that it is plain data.
"""

from __future__ import annotations

import contextlib
import io
import operator
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import ErrorClasses, builtin_type, describe_class, describe_error, standard
from .plain import Channel, decode, encode

_MAX_PRINTED = 1 << 20
"""Maximum number of characters of a call's output that are sent to the tests."""
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "iter": iter,
    "next": next,
    "len": len,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "str": str,
    "repr": repr,
    "bool": bool,
    "int": int,
    "float": float,
    "isinstance": isinstance,
    "enter": lambda context: type(context).__enter__(context),
    "exit": lambda context: type(context).__exit__(context, None, None, None),
}
"""Operations of the tests on objects of the program, by name."""


def main(path: str) -> None:
    """Run the program in the file ``path``, then serve the process of the tests, which is connected
    to standard input and output."""
    channel = Channel(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    module = ModuleType("program")
    module.__file__ = path
    sys.modules["program"] = module
    exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), module.__dict__)
    with contextlib.suppress(EOFError):
        _Server(channel, module.__dict__).serve()


class _Server:
    """Answers requests: for names of the program, and for operations on its objects."""

    def __init__(self, channel: Channel, names: dict[str, Any]) -> None:
        self._channel, self._names = channel, names
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._errors = ErrorClasses()

    def serve(self) -> None:
        """Answer requests. EOFError: the process of the tests has ended."""
        while True:
            self._answer(self._channel.receive())

    def call_tests(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function of the tests with this ``number``, which may call the program again."""
        self._channel.send(["call", number, self._encode(list(args)), self._encode(kwargs)])
        while True:
            message = self._channel.receive()
            if message[0] == "result":
                return self._decode(message[1])
            if message[0] == "stop":
                raise StopIteration
            if message[0] == "error":
                raise self._errors.error(message[1], message[2], self._decode(message[3]))
            self._answer(message)

    def _answer(self, request: list[Any]) -> None:
        if request[0] == "names":
            names = [name for name in request[1] if name in self._names]
            self._channel.send({name: self._describe(name, self._names[name]) for name in names})
            return
        _, operation, args, kwargs = request
        values, named = self._decode(args), self._decode(kwargs)
        stdout, sys.stdout = sys.stdout, io.StringIO()
        try:
            reply = ["result", self._encode(_OPERATIONS[operation](*values, **named))]
        except BaseException as error:
            # Also SystemExit, so that a call of the program does not end this process.
            reply = self._error(error)
            if operation == "next" and isinstance(error, StopIteration):
                reply = ["stop"]
        finally:
            printed, sys.stdout = sys.stdout, stdout
        changed = self._changed([args, kwargs], [values, named])
        try:
            self._channel.send(["reply", reply, _text_of(printed), changed])
        except ValueError as error:  # too long
            self._channel.send(["reply", self._error(error), "", None])

    def _error(self, error: BaseException) -> list[Any]:
        return ["error", *describe_error(error, self._encode_object)]

    def _changed(self, sent: Any, values: Any) -> Any:
        """``values`` as JSON if they differ from the JSON that was ``sent``; else None."""
        try:
            encoded = self._encode(values)
        except (TypeError, RecursionError):
            return None
        return encoded if encoded != sent else None

    def _describe(self, name: str, value: Any) -> dict[str, Any]:
        """Value of a global name, or its name in the standard library."""
        if isinstance(value, ModuleType):
            return {"module": value.__name__}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error": describe_class(value)}
        module = getattr(value, "__module__", None)
        if callable(value) and module != "builtins" and standard(module, name) is value:
            return {"standard": module}
        try:
            return {"value": self._encode(value)}
        except (TypeError, RecursionError):
            return {"value": self._as_object(value)}

    def _encode(self, value: Any) -> Any:
        return encode(value, self._encode_object)

    def _encode_object(self, value: Any) -> Any:
        if isinstance(value, _TestFunction):
            return {"function": value.number}
        if isinstance(value, _TestIterator):
            return {"iterator": value.number}
        if isinstance(value, type) and builtin_type(value.__name__) is value:
            return {"type": value.__name__}
        return self._as_object(value)

    def _as_object(self, value: Any) -> Any:
        """Reference to an object by its number, always the same for the same object."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            # The object is kept alive, so that no other object gets its id.
            self._objects.append(value)
        return {"object": self._numbers[id(value)]}

    def _decode(self, data: Any) -> Any:
        return decode(data, self._decode_object)

    def _decode_object(self, name: str, content: Any) -> Any:
        if name == "function":
            return _TestFunction(self, content)
        if name == "iterator":
            return _TestIterator(self, content)
        if name == "type":
            return builtin_type(content)
        return self._objects[content]


class _TestFunction:
    """Function that the tests have passed to the program as an argument."""

    def __init__(self, server: _Server, number: int) -> None:
        self._server, self.number = server, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._server.call_tests(self.number, args, kwargs)


class _TestIterator:
    """Iterator that the tests have passed to the program as an argument."""

    def __init__(self, server: _Server, number: int) -> None:
        self._server, self.number = server, number

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._server.call_tests(self.number, (), {})


def _text_of(stdout: Any) -> str:
    # The program may have replaced sys.stdout by another object.
    return stdout.getvalue()[:_MAX_PRINTED] if type(stdout) is io.StringIO else ""
