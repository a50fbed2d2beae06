"""docs/configuration.md: every setting, by the schema."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from relax_hpc.config.options import Option, options
from relax_hpc.config.schema import GroupConfig

_HEAD = """# Configuration

Every setting, made from [the schema](../relax_hpc/config/schema/) by `python tools/docs`. A run is composed of
YAML files, from left to right, and of options on the command line, `--rollout.replicas 2`, which come last.
`relax-hpc check --config run.yaml` tells every mistake at once, `relax-hpc run --config run.yaml --print_config` where
each value came from.
"""
_GROUPS = "One group a role, advantages in the hub; what a group may say is [below](#groupsname)"


def page() -> str:
    """The whole page."""
    groups = options(GroupConfig, "groups.NAME.", "groups.NAME")
    return "\n".join([_HEAD, *_sections(options()), *_sections(groups)]).rstrip() + "\n"


def _sections(found: Iterable[Option]) -> Iterator[str]:
    by_section: dict[str, list[Option]] = {}
    for option in found:
        by_section.setdefault(option.section, []).append(option)
    for section, entries in by_section.items():
        name, _, summary = section.partition(": ")
        yield f"## {name}\n{summary}.\n"
        yield from map(_entry, entries)
        yield ""


def _entry(option: Option) -> str:
    if option.key == "groups":
        return f"- **`groups`**. {_GROUPS}."
    text = option.help and f" {' '.join(option.help.split())}"
    return f"- **`{option.key}`** ({_kind(option.hint)}, `{_shown(option.default)}`).{text}"


def _kind(hint: Any) -> str:
    """In words, as YAML takes it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(
            f"`{json.dumps(value)}`".replace('"', "") if value else '`""`' for value in inner
        )
    if origin is list:
        return f"list of {_kind(inner[0])}"
    if origin is dict:
        return f"mapping to {_kind(inner[1])}"
    if origin in (Union, UnionType):
        return " or ".join(map(_kind, inner))
    if dataclasses.is_dataclass(hint):
        return "section"
    return {
        "str": "text",
        "int": "integer",
        "float": "number",
        "bool": "true or false",
        "Any": "anything",
        "NoneType": "null",
    }.get(hint.__name__, hint.__name__)


def _shown(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) or not value else value
