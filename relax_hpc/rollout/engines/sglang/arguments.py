"""Server arguments of the installed SGLang, read from its source: names, types and choices.

An import of SGLang would take seconds, and needs packages that only compute nodes have.
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

_GROUPS = "srt/arg_groups"
"""Folder in which SGLang 0.5.21 declares its server arguments: classes in `fields/`, lists of
choices in `choices.py`."""
_TYPES = {"bool": bool, "int": int, "float": int | float, "str": str, "Dict": dict}
_NAMES = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "Dict": "a mapping",
}
_PLURALS = {"int": "integers", "float": "numbers", "str": "texts"}
_DISTANT_CHOICES = {
    "sampling_backend": ("srt/arg_groups/choices.py", "SAMPLING_BACKEND_CHOICES"),
    "tool_call_parser": ("srt/function_call/parser_names.py", "TOOL_CALL_PARSER_NAMES"),
    "reasoning_parser": ("srt/parser/reasoning_parser_names.py", "REASONING_PARSER_NAMES"),
}
"""Arguments whose choices SGLang 0.5.21 adds when it builds its parser -> the file and the list of
choices."""
_AUTO_PARSERS = ("tool_call_parser", "reasoning_parser")
"""Arguments of SGLang that also accept `auto`."""
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
_POSITIVE = (
    *("tp_size", "pp_size", "dp_size", "ep_size", "context_length", "page_size"),
    *("max_running_requests", "max_total_tokens", "stream_interval"),
)
"""Arguments that must be above 0. SGLang 0.5.21 checks this late, or not at all."""
Constants = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class ServerArgument:
    """A server argument as SGLang declares it."""

    type_name: str = ""
    """bool, int, float, str or Dict; empty: another type, which is not checked."""
    choices: tuple[Any, ...] = ()
    """Accepted values; empty: any value of the type."""
    is_list: bool = False
    """Whether it accepts a list of values of the type."""
    aliases: tuple[str, ...] = ()
    """Other names of the argument on SGLang's command line, with underscores."""

    def misfit(self, value: Any) -> str:
        """The allowed values if ``value`` is not allowed; empty: it is allowed, or not checked."""
        if value is None:
            return ""
        if not self.is_list:
            return self._value_misfit(value)
        allowed = f"a list of {_PLURALS.get(self.type_name, 'values')}"
        if not isinstance(value, list):
            return allowed
        misfit = next(filter(None, map(self._value_misfit, value)), "")
        return f"{allowed}, each {misfit}" if misfit else ""

    def _value_misfit(self, value: Any) -> str:
        if self.choices and value not in self.choices:
            near = difflib.get_close_matches(str(value), map(str, self.choices), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            return f"{', '.join(map(str, self.choices))}{hint}"
        if not self.type_name:
            return ""
        # In Python, True is an instance of int.
        is_bool = isinstance(value, bool)
        fits = isinstance(value, _TYPES[self.type_name]) and is_bool == (self.type_name == "bool")
        return "" if fits else _NAMES[self.type_name]


def server_arguments() -> Mapping[str, ServerArgument]:
    """All server arguments by name; empty if SGLang is not installed, or declares them in other
    files."""
    spec = find_spec("sglang")
    folders = spec.submodule_search_locations if spec else None
    return _read(tuple(map(Path, folders or ())))


def range_misfit(name: str, value: Any) -> str:
    """The allowed values of ``name`` if ``value`` is out of range; empty: it is allowed, or the
    range is unknown. ``value`` has the right type."""
    if value is None:
        return ""
    if name in _POSITIVE and isinstance(value, int) and value < 1:
        return "at least 1"
    if name == "mem_fraction_static" and isinstance(value, int | float) and not 0 < value <= 1:
        return "above 0, at most 1"
    if name in ("log_level", "log_level_http") and str(value).lower() not in _LOG_LEVELS:
        return ", ".join(_LOG_LEVELS)
    if name == "json_model_override_args" and not _is_json_object(value):
        return "a JSON object as a text, for example '{\"rope_theta\": 1000000}'"
    return ""


def _is_json_object(value: Any) -> bool:
    try:
        return isinstance(json.loads(value), dict)
    except (TypeError, ValueError):
        return False


@functools.lru_cache(maxsize=2)
def _read(folders: tuple[Path, ...]) -> Mapping[str, ServerArgument]:
    arguments = dict[str, ServerArgument]()
    for folder in folders:
        constants = dict(_constants(folder / _GROUPS / "choices.py"))
        for file in sorted((folder / _GROUPS / "fields").glob("*.py")):
            arguments.update(_declared(ast.parse(file.read_bytes()), constants))
        for name, (file_name, list_name) in _DISTANT_CHOICES.items():
            choices = dict(_constants(folder / file_name)).get(list_name, ())
            if choices and name in arguments:
                auto = ("auto",) if name in _AUTO_PARSERS else ()
                arguments[name] = replace(arguments[name], choices=auto + choices)
    return MappingProxyType(arguments)


def _constants(file: Path) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Lists of constants in ``file`` with their names."""
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
    kind = _inner(elements[0], "Optional")
    is_list = _name(kind) == "List"
    kind = _inner(kind, "List")
    choices = _literals(settings.get("choices"), constants)
    if _name(kind) == "Literal":
        choices = choices or tuple(_literals(ast.List(_elements(kind)), constants))
    type_name = kind.id if isinstance(kind, ast.Name) else _name(kind)
    names = [settings.get("cli_name"), *_nodes(settings.get("aliases"))]
    aliases = tuple(_as_field(str(node.value)) for node in names if isinstance(node, ast.Constant))
    return ServerArgument(type_name if type_name in _TYPES else "", choices, is_list, aliases)


def _inner(kind: ast.expr, generic: str) -> ast.expr:
    """The type in the brackets of ``generic``; ``kind`` itself if it is another type."""
    if isinstance(kind, ast.Subscript) and _name(kind) == generic:
        return kind.slice
    return kind


def _nodes(node: ast.expr | None) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.List) else []


def _as_field(option: str) -> str:
    """`--tensor-parallel-size` -> `tensor_parallel_size`."""
    return option.lstrip("-").replace("-", "_")


def _name(node: ast.expr) -> str:
    """Name before the brackets of ``node``; empty: there are no brackets."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return node.value.id
    return ""


def _elements(node: ast.expr) -> list[ast.expr]:
    """Elements in the brackets of ``node``."""
    inner = node.slice if isinstance(node, ast.Subscript) else node
    return list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]


def _literals(node: ast.expr | None, constants: Constants) -> tuple[Any, ...]:
    """Values of a literal list or of a named one in ``constants``; empty if they are computed."""
    if isinstance(node, ast.Name):
        return constants.get(node.id, ())
    if not isinstance(node, ast.List | ast.Set | ast.Tuple):
        return ()
    if not all(isinstance(element, ast.Constant) for element in node.elts):
        return ()
    return tuple(element.value for element in node.elts if isinstance(element, ast.Constant))
