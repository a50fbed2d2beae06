"""Strict YAML files: plain data, no duplicate keys, no aliases, numbers of YAML 1.2 (1e-3 is a
number)."""

from __future__ import annotations

import difflib
import re
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import yaml

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import open_regular
from relax_hpc.base.path_errors import explain_path_error

MAX_BYTES = 1 << 20
"""Largest size of a configuration. A larger file was probably named by mistake."""

_OWN_DESCRIPTORS = "/dev/fd/", "/proc/self/fd/", "/dev/stdin"
_TAG = "tag:yaml.org,2002:"
_RESOLVERS = [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
]
_TYPES = ("null", "bool", "int", "float", "str", "seq", "map")


class Source:
    """Source of a layer, for messages: a file, whose keys have line numbers, or the command
    line."""

    def __init__(self, name: str, text: str | bytes = b"") -> None:
        self.name = name
        self._text = text

    def __str__(self) -> str:
        return self.name

    def at(self, key: str) -> str:
        """Return the location of ``key``, or of the section that contains it: `run.yaml:12`."""
        while key and key not in self._lines:
            key = key.rpartition("[" if key.endswith("]") else ".")[0]
        return f"{self.name}:{self._lines[key] + 1}" if key else self.name

    @cached_property
    def _lines(self) -> dict[str, int]:
        return key_lines(self._text) if self._text else {}


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2: `yes`, `1:30` and `2024-01-01` are text, `010` is
    10."""

    # PyYAML's stubs declare instance variables of other key types; at run time both are class
    # attributes.
    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}  # type: ignore[misc]
    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: function
        for tag, function in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in _TYPES
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases. A few nested aliases can expand without limit, and files compose without
        them."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(
                None, None, "aliases (*name) are refused; write the value instead", mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the dict of a mapping. ConstructorError: a key appears twice."""
        lines: dict[tuple[str, str], int] = {}
        for key_node, _ in node.value:
            key, line = (key_node.tag, str(key_node.value)), key_node.start_mark.line + 1
            if key in lines:
                problem = (
                    f"key {key_node.value!r} appears twice (first on line {lines[key]}); keep one"
                )
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            lines[key] = line
        return super().construct_mapping(node, deep)

    def _integer(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))


for _name, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)
_Loader.add_constructor(_TAG + "int", _Loader._integer)


class Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes text that only `_Loader` reads as a number, and never folds
    lines."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def _text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')


for _name, _pattern, _first in _RESOLVERS:
    Dumper.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)
Dumper.add_representer(str, Dumper._text)


def dump_yaml(tree: Any) -> str:
    """Return `tree` as YAML in its own order, one line per leaf. `parse_yaml` reads it back."""
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))


def parse_yaml(text: str | bytes, source: str) -> Any:
    """Return the document in `text`. ConfigError, with the line of `source`: it is not plain,
    unambiguous YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            f"{source}:{mark.line + 1 if mark else 1}: not valid YAML: {error.problem}"
        ) from error
    except (yaml.YAMLError, ValueError, KeyError) as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply for a configuration") from error


def key_lines(text: str | bytes) -> dict[str, int]:
    """Return the line (from 0) of each dotted key, for the mappings of the document `text`."""
    lines: dict[str, int] = {}

    def visit(node: yaml.Node, prefix: str) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            lines[prefix + key.value] = key.start_mark.line
            visit(value, f"{prefix}{key.value}.")

    document = yaml.compose(text, Loader=_Loader)
    if document is not None:
        visit(document, "")
    return lines


def read_yaml(path: Path) -> tuple[Any, Source]:
    """Return the document in the file `path`. ConfigError: it cannot be read, is too large, or is
    not plain YAML."""
    try:
        # A pipe of this process, as of `--config <(program)`, belongs to its user. Reading any
        # other pipe could block forever.
        with (
            path.open("rb")
            if str(path).startswith(_OWN_DESCRIPTORS)
            else open_regular(path) as file
        ):
            data = file.read(MAX_BYTES + 1)
    except PermissionError as error:
        raise ConfigError(explain_path_error(error)) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}{_near_file(path)}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{path}: larger than {MAX_BYTES} bytes, which is the limit; is it a configuration?"
        )
    return parse_yaml(data, str(path)), Source(str(path), data)


def _near_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    near = [name for name in difflib.get_close_matches(path.name, names, n=1) if name != path.name]
    return f"; did you mean {path.with_name(near[0])}?" if near else ""
