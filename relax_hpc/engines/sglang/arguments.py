"""Server arguments that the installed SGLang knows, read from its source: names, types and choices.

Importing SGLang takes seconds, and needs packages that only nodes have.
"""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

_GROUPS = "srt/arg_groups"
"""Folder in which SGLang 0.5.21 declares its server arguments: classes in `fields/`, lists of
choices in `choices.py`."""
_TYPES = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
_NAMES = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "a text"}
_PARSES = ("type_parser", "action", "nargs")
"""Settings of an argument by which its values are not of its type."""
Constants = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class ServerArgument:
    """A server argument as SGLang declares it."""

    type_name: str = ""
    """bool, int, float or str; empty: another, which is not checked."""
    choices: tuple[Any, ...] = ()
    """Values that it takes; empty: any of its type."""

    def misfit(self, value: Any) -> str:
        """The values that are allowed instead of ``value``; empty: nothing is known against it."""
        if value is None or isinstance(value, list | dict):
            return ""
        if self.choices and value not in self.choices:
            near = difflib.get_close_matches(str(value), map(str, self.choices), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            return f"{', '.join(map(str, self.choices))}{hint}"
        if not self.type_name:
            return ""
        # In Python True is an integer.
        is_bool = isinstance(value, bool)
        fits = isinstance(value, _TYPES[self.type_name]) and is_bool == (self.type_name == "bool")
        return "" if fits else _NAMES[self.type_name]


def server_arguments() -> Mapping[str, ServerArgument]:
    """All of them by name; none if there is no SGLang here, or if it declares them elsewhere."""
    spec = find_spec("sglang")
    folders = (
        [Path(folder) / _GROUPS for folder in spec.submodule_search_locations or ()] if spec else []
    )
    return _read(tuple(folders))


@functools.lru_cache(maxsize=2)
def _read(folders: tuple[Path, ...]) -> Mapping[str, ServerArgument]:
    arguments = dict[str, ServerArgument]()
    for folder in folders:
        constants = dict(_constants(folder / "choices.py"))
        for file in sorted((folder / "fields").glob("*.py")):
            arguments.update(_declared(ast.parse(file.read_bytes()), constants))
    return MappingProxyType(arguments)


def _constants(file: Path) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Lists of constants in ``file``, by their names."""
    body = ast.parse(file.read_bytes()).body if file.is_file() else []
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values = _literals(node.value, {})
            if values:
                yield node.targets[0].id, values


def _declared(module: ast.Module, constants: Constants) -> Iterator[tuple[str, ServerArgument]]:
    """Fields of the classes in ``module``: `name: A[type, Arg(...)] = default`."""
    for node in module.body:
        for line in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                yield line.target.id, _argument(line.annotation, constants)


def _argument(annotation: ast.expr, constants: Constants) -> ServerArgument:
    elements = _elements(annotation) if _name(annotation) == "A" else [annotation]
    settings = dict[str | None, ast.expr]()
    for element in elements[1:]:
        if isinstance(element, ast.Call):
            settings |= {keyword.arg: keyword.value for keyword in element.keywords}
    if not settings.keys().isdisjoint(_PARSES):
        return ServerArgument()
    kind = elements[0]
    if _name(kind) == "Optional":
        kind = kind.slice if isinstance(kind, ast.Subscript) else kind
    choices = _literals(settings.get("choices"), constants)
    if _name(kind) == "Literal":
        choices = choices or tuple(_literals(ast.List(_elements(kind)), constants))
    type_name = kind.id if isinstance(kind, ast.Name) and kind.id in _TYPES else ""
    return ServerArgument(type_name, choices)


def _name(node: ast.expr) -> str:
    """Name before the brackets of ``node``."""
    is_named = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
    return node.value.id if is_named else ""


def _elements(node: ast.expr) -> list[ast.expr]:
    """Elements in the brackets of ``node``."""
    inner = node.slice if isinstance(node, ast.Subscript) else node
    return list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]


def _literals(node: ast.expr | None, constants: Constants) -> tuple[Any, ...]:
    """Values of a list that is written out, or named; empty if they are computed."""
    if isinstance(node, ast.Name):
        return constants.get(node.id, ())
    if not isinstance(node, ast.List | ast.Set | ast.Tuple):
        return ()
    if not all(isinstance(element, ast.Constant) for element in node.elts):
        return ()
    return tuple(element.value for element in node.elts if isinstance(element, ast.Constant))
