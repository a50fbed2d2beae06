"""The process of the tests. It runs them, with stand-ins for the names that the program defines.

The program can reach this process only through the pipe. The verdict, one line of JSON, is written
to standard error, to which the program has no access.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import re
import symtable
import sys
from collections import deque
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NoReturn

from .errors import ErrorClasses, builtin_type, describe_error, standard
from .plain import Channel, Malformed, NotPlainError, decode, encode

PASSED, FAILED, BROKEN = "passed", "failed", "broken"
"""Verdicts. The last one means that the tests cannot run; a program cannot cause it."""
_READABLE = frozenset({"__name__", "__qualname__", "__annotations__", "__wrapped__", "__dict__"})
"""Attributes between double underscores that a stand-in reads from the program. Libraries read
others from any object, and trust them: with an `__array_interface__` numpy would read any
memory."""
_INPUT = re.compile(r"(?:builtins|__builtins__)\.(?:input|print|open)|sys\.stdin")
"""Names to which tests assign in order to give a program its input, or to catch its output. This
only works in one process."""
_PATCH = re.compile(r"(?:^|\.)patch(?:\.(?:object|dict|multiple))?$")
"""Functions of unittest.mock that replace an object."""
_MALFORMED = (Malformed, TypeError, ValueError, LookupError, AttributeError, ImportError)
"""Errors when a message of another form is read."""


def main(path: str) -> NoReturn:
    """Run the tests in the file ``path``. The program is connected to standard input and output."""
    verdict_fd, channel = os.dup(2), Channel(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    judge = _Judge(channel, verdict_fd)
    try:
        tests = PythonTests(Path(path).read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        judge.end(BROKEN, f"no Python: {error}")
    if not tests.names:
        judge.end(BROKEN, "they use no name that a program could define, only built-in names")
    problem = tests.problem()
    if problem:
        judge.end(BROKEN, problem)
    judge.run(tests)


class PythonTests:
    """Tests in Python, and the names that they use but do not define."""

    def __init__(self, text: str) -> None:
        """SyntaxError, ValueError, MemoryError, RecursionError: ``text`` is not valid Python."""
        self.code = compile(text, "tests", "exec")
        self._tree = ast.parse(text)
        top = symtable.symtable(text, "tests", "exec")
        bound = {symbol.get_name() for symbol in top.get_symbols() if _is_bound(symbol)}
        used = _used_names(top)
        self.names = used - bound - set(dir(builtins))
        """Global names that a program has to define. It cannot redefine built-in names."""
        self.top_names = _used_names(top, depth=0) & self.names
        """Names among them that are read outside of functions, so that they are certainly used."""
        self.modules = self.names & _modules_in(self._tree)
        """Names of modules of the standard library. The judge imports them itself: otherwise a
        program could redefine `math.isclose`."""

    def problem(self) -> str:
        """Reason why the tests cannot run with any program; empty if they can."""
        # The tests are not a file, and the name does not come from the program.
        if "__file__" in self.names:
            return "they use __file__"
        patched = next(filter(None, map(_patched_name, ast.walk(self._tree))), "")
        if patched:
            return f"they replace {patched}, which the program's process does not see"
        if any(isinstance(node, ast.Await) or _is_loop(node) for node in ast.walk(self._tree)):
            return "they await the program, whose functions run in another process"
        for node in self._tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                try:
                    exec(compile(ast.Module([node], []), "tests", "exec"), {})
                except Exception as error:
                    # A module may raise anything when it is imported.
                    return f"line {node.lineno}: {_text(error)}"
        return ""


def _is_loop(node: ast.AST) -> bool:
    """Whether ``node`` is a function of asyncio that runs a coroutine."""
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.run"


def _patched_name(node: ast.AST) -> str:
    """Name of an object that ``node`` replaces in the process of the tests; empty if it does not
    replace one.

    Standard output may be replaced, because the output of the program is written to it here.
    """
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        name = ast.unparse(node)
        return name if _INPUT.fullmatch(name) else ""
    if not isinstance(node, ast.Call) or not _PATCH.search(ast.unparse(node.func)):
        return ""
    name = ast.unparse(node.args[0]).strip("'\"") if node.args else "a name"
    return "" if name == "sys.stdout" else name


def _is_bound(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()


def _used_names(table: symtable.SymbolTable, depth: int = 1000) -> set[str]:
    """Global names that are read in ``table``, and in functions and classes down to ``depth``."""
    read = [symbol for symbol in table.get_symbols() if symbol.is_referenced()]
    names = {symbol.get_name() for symbol in read if symbol.is_global()}
    for child in table.get_children() if depth else ():
        names |= _used_names(child, depth - 1)
    return names


def _modules_in(tree: ast.AST) -> set[str]:
    """Names of modules of the standard library that are only used before a dot."""
    nodes = list(ast.walk(tree))
    before_dot = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    used = [node for node in nodes if isinstance(node, ast.Name)]
    other_uses = {node.id for node in used if id(node) not in before_dot}
    return {node.id for node in used} & sys.stdlib_module_names - other_uses


class ProgramObject:
    """Stand-in for an object of the program: function, class, instance or iterator.

    Its operations return plain data and other stand-ins. Comparisons and arithmetic are not
    supported, because the program could then decide whether its object equals the expected value.
    """

    __slots__ = ("__judge", "__number")

    def __init__(self, judge: _Judge, number: int) -> None:
        object.__setattr__(self, "_ProgramObject__judge", judge)
        object.__setattr__(self, "_ProgramObject__number", number)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__judge.ask("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in _READABLE:
            raise AttributeError(name)
        return self.__judge.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__judge.ask("setattr", self, name, value)

    def __eq__(self, other: object) -> bool:
        if self is not other:
            self.__judge.has_compared_objects = True
        return self is other

    def __hash__(self) -> int:
        return hash(self.__number)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an object of the program cannot be copied by its tests")

    def __contains__(self, item: object) -> bool:
        # By iteration: in its own `__contains__` the program could claim to contain anything.
        try:
            members = iter(self.__judge.ask("iter", self))
        except Exception:
            self.__judge.has_compared_objects = True
            raise
        return any(member is item or member == item for member in members)

    def __refuse(self, other: object) -> Any:
        self.__judge.has_compared_objects = True
        return NotImplemented

    __lt__ = __le__ = __gt__ = __ge__ = __refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __refuse
    __matmul__ = __rmatmul__ = __refuse

    def __iter__(self) -> Any:
        return self.__judge.ask("iter", self)

    def __next__(self) -> Any:
        return self.__judge.ask("next", self)

    def __len__(self) -> Any:
        return self.__judge.ask("len", self)

    def __getitem__(self, key: Any) -> Any:
        return self.__judge.ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__judge.ask("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self.__judge.ask("delitem", self, key)

    def __str__(self) -> Any:
        return self.__judge.ask("str", self)

    def __repr__(self) -> Any:
        return self.__judge.ask("repr", self)

    def __bool__(self) -> Any:
        return self.__judge.ask("bool", self)

    def __int__(self) -> Any:
        return self.__judge.ask("int", self)

    def __float__(self) -> Any:
        return self.__judge.ask("float", self)

    def __enter__(self) -> Any:
        return self.__judge.ask("enter", self)

    def __exit__(self, *error: Any) -> None:
        # The result is discarded: a context manager of the program must not suppress a failed
        # assertion.
        self.__judge.ask("exit", self)

    def __instancecheck__(self, instance: Any) -> Any:
        is_program_object = isinstance(instance, ProgramObject)
        return is_program_object and self.__judge.ask("isinstance", instance, self)


def number_of(stand_in: ProgramObject) -> int:
    """Number of the stand-in's object in the process of the program."""
    return object.__getattribute__(stand_in, "_ProgramObject__number")


class _Judge:
    """Runs tests, sends operations to the program, and ends with a verdict."""

    def __init__(self, channel: Channel, verdict_fd: int) -> None:
        self._channel, self._verdict_fd = channel, verdict_fd
        self._functions: list[Any] = []
        self._objects: dict[int, ProgramObject] = {}
        self._errors = ErrorClasses()
        self._has_asked = False
        self.has_compared_objects = False

    def end(self, verdict: str, detail: str = "") -> NoReturn:
        """Write the verdict, and end the process without an exception, which tests could catch."""
        line = {"verdict": verdict, "detail": detail, "objects": self.has_compared_objects}
        # On a new line, because the start of a container may have written other text there.
        os.write(self._verdict_fd, b"\n" + json.dumps(line).encode())
        os._exit(0)

    def run(self, tests: PythonTests) -> NoReturn:
        """Run ``tests`` with the names of the program that they use."""
        main_module = ModuleType("__main__")
        sys.modules["__main__"], sys.argv = main_module, ["tests"]
        for name in tests.modules:
            try:
                setattr(main_module, name, importlib.import_module(name))
            except ImportError as error:
                self.end(BROKEN, _text(error))
        names = tests.names - tests.modules
        self._send(["names", sorted(names)])
        values = self._names(self._receive())
        for name in names & values.keys():
            setattr(main_module, name, values[name])
        objects = {name for name, value in values.items() if isinstance(value, ProgramObject)}
        has_constant = not tests.top_names.isdisjoint(values.keys() - objects)
        try:
            exec(tests.code, main_module.__dict__)
        except SystemExit as end:
            # For example by unittest.main().
            if end.code:
                self.end(FAILED, f"exit code {end.code}")
            has_constant = False
        except BaseException as error:
            self.end(FAILED, _text(error))
        if not self._has_asked and not has_constant:
            self.end(BROKEN, "they end without using the program; do they call their functions?")
        self.end(PASSED)

    def ask(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        """Result of an operation on an object of the program, the first of ``args``."""
        self._has_asked = True
        arguments = self._encode_arguments([list(args), kwargs])
        self._send(["do", operation, *arguments])
        message = self._receive()
        while message[0] == "call":
            self._answer(message)
            message = self._receive()
        try:
            _, reply, printed, changed = message
            sys.stdout.write(printed)
            if changed is not None:
                _copy_into([list(args), kwargs], self._decode(changed))
            if reply[0] == "result":
                return self._decode(reply[1])
            # After another operation, StopIteration would silently end a loop of the tests.
            if reply[0] == "stop" and operation == "next":
                error: Exception = StopIteration()
            else:
                error = self._errors.error(reply[1], reply[2], self._decode(reply[3]))
        except _MALFORMED as problem:
            self.end(FAILED, f"a message of the program: {problem}")
        raise error

    def _names(self, message: Any) -> dict[str, Any]:
        """Values of the program's names, from the program's descriptions of them."""
        try:
            return {name: self._value(name, *kind.popitem()) for name, kind in message.items()}
        except _MALFORMED as problem:
            self.end(FAILED, f"a message of the program: {problem}")

    def _value(self, name: str, kind: str, content: Any) -> Any:
        if kind == "value":
            return self._decode(content)
        # The names below need no call of the program. The tests may use only such names, so that
        # they count as a use of the program.
        self._has_asked = True
        if kind == "module":
            return importlib.import_module(content)
        if kind == "error":
            return self._errors.resolve(content)
        value = standard(content, name)
        # Other objects of a module are refused: unittest.mock.ANY is equal to anything.
        is_definition = isinstance(value, (type, FunctionType, BuiltinFunctionType))
        if not is_definition and content != "typing":
            raise Malformed(f"{content}.{name}")
        return value

    def _answer(self, message: Any) -> None:
        """Answer a call of a function that the tests passed to the program as an argument."""
        try:
            function = self._functions[message[1]]
            args, kwargs = self._decode(message[2]), self._decode(message[3])
        except _MALFORMED as problem:
            self.end(FAILED, f"a message of the program: {problem}")
        is_iterator = isinstance(function, Iterator)
        try:
            result = next(function) if is_iterator else function(*args, **kwargs)
            reply = ["result", encode(result, self._encode_object)]
        except Exception as error:
            reply = ["error", *describe_error(error, self._encode_object)]
            if is_iterator and isinstance(error, StopIteration):
                reply = ["stop"]
        self._send(reply)

    def _encode_arguments(self, values: Any) -> Any:
        try:
            return encode(values, self._encode_object)
        except NotPlainError as error:
            hint = "set reward.code.same_process: true, with which programs can forge results"
            self.end(BROKEN, f"{error}; {hint}")

    def _encode_object(self, value: Any) -> Any:
        if isinstance(value, ProgramObject):
            return {"object": number_of(value)}
        if isinstance(value, type) and builtin_type(value.__name__) is value:
            return {"type": value.__name__}
        if isinstance(value, (KeysView, ValuesView, ItemsView)):
            return encode(list(value), self._encode_object)
        if isinstance(value, (ModuleType, BaseException)):
            # The value may come from the program.
            self.end(FAILED, f"an argument of type {type(value).__name__}")
        is_iterator = isinstance(value, Iterator)
        if not is_iterator and not callable(value):
            raise NotPlainError(f"they give the program an object of {type(value).__name__}")
        self._functions.append(value)
        return {"iterator" if is_iterator else "function": len(self._functions) - 1}

    def _decode(self, data: Any) -> Any:
        return decode(data, self._decode_object)

    def _decode_object(self, name: str, content: Any) -> Any:
        if name in ("function", "iterator"):
            return self._functions[content]
        if name == "type":
            return builtin_type(content) or object
        if name != "object" or type(content) is not int:
            raise Malformed(f"{name} {content!r}"[:100])
        return self._objects.setdefault(content, ProgramObject(self, content))

    def _send(self, message: Any) -> None:
        try:
            self._channel.send(message)
        except (ValueError, OSError) as error:
            self.end(FAILED, _text(error))

    def _receive(self) -> Any:
        try:
            return self._channel.receive()
        except EOFError:
            self.end(FAILED, "the program ended")
        except (Malformed, OSError) as error:
            self.end(FAILED, _text(error))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _copy_into(old: Any, new: Any) -> Any:
    """Copy ``new`` into the mutable containers of ``old``, because the tests may have references to
    them. Returns the result."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = [*map(_copy_into, old, new), *new[len(old) :]]
        return old
    if isinstance(old, tuple) and isinstance(new, tuple):
        return (*map(_copy_into, old, new), *new[len(old) :])
    if isinstance(old, dict) and isinstance(new, dict):
        merged = {key: _copy_into(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(merged)
        return old
    if isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)
        return old
    if isinstance(old, (bytearray, deque)) and type(old) is type(new):
        old.clear()
        old.extend(new)
        return old
    return new
