"""Validation of one layer of configuration against the schema: types, ranges and names. Each
mistake is one line that names the remedy."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from relax_hpc.algorithms import UnavailableAlgorithm
from relax_hpc.base.errors import ConfigError
from relax_hpc.config.other_trainers import explain_section
from relax_hpc.config.schema import Config
from relax_hpc.config.variants import FAMILIES, fields_of, members_with_field, variant
from relax_hpc.config.yaml_files import Source

COMMAND_LINE = "command line"
"""Source of overrides, used like the name of a file."""
MAX_DEPTH = 16
"""Deepest nesting inside a free-form value of `flags`."""

REMOVED = {
    "rollout.max_attempts": "rollout.max_failed_share limits failures of prompt groups; "
    "delete the line",
    "groups_per_step": "it is prompts_per_step now",
    "samples_per_group": "it is samples_per_prompt now",
    "algorithm.tis_cap": "it is algorithm.correction.high now",
    "algorithm.advantage": "it is algorithm.name now",
    "algorithm.kl_coefficient": "it is algorithm.kl.coefficient now",
    "algorithm.kl_estimator": "it is algorithm.kl.estimator now",
    "algorithm.refresh_reference_every": "it is algorithm.kl.refresh_every now",
    "algorithm.correction_level": "it is algorithm.correction.level now",
    "algorithm.correction_low": "it is algorithm.correction.low now",
    "algorithm.correction_high": "it is algorithm.correction.high now",
}
"""Keys of earlier releases that configurations of existing runs may contain, with the remedy."""
BECAME_SECTIONS = {"algorithm.correction": "algorithm.correction.kind"}
"""Keys that had one value and are sections now, with the present key of the value."""
_ROLE_KEY = re.compile(r"groups\.[^.]+\.roles\[\d+\]")
_NEW_ROLE = "; a new role is an entry of ROLES in relax_hpc/config/roles.py, under a short name"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_NO_BOUNDS: Mapping[str, Any] = MappingProxyType({})


DROPPED: Any = object()
"""Marker for a value that is not allowed and is left out."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a layer."""

    key: str
    text: str


class Cleaner:
    """Validates layers against the schema. Values that are not allowed are left out and recorded in
    `mistakes`."""

    def __init__(self, source: Source, below: Mapping[str, Any] = _NO_BOUNDS) -> None:
        """``below``: the values of all layers below this one. They name the variant of a section
        that has no name in this layer."""
        self.source = source
        self.below = below
        self.mistakes: list[Mistake] = []

    def clean(
        self, hint: Any, value: Any, key: str = "", metadata: Mapping[str, Any] = _NO_BOUNDS
    ) -> Any:
        """Return `value` as the type `hint` within the bounds of `metadata`, without its parts that
        are not allowed; or `DROPPED`."""
        if dataclasses.is_dataclass(hint):
            return self._section(hint, value, key)
        if type(None) in get_args(hint) and get_origin(hint) is not Literal:
            hint = next(choice for choice in get_args(hint) if choice is not type(None))
            if hint in _KINDS:
                if value is None:
                    return None
                return self._scalar(hint, value, key, metadata, " or null")
        origin = get_origin(hint)
        if origin is dict:
            return self._map(get_args(hint)[1], value, key)
        if origin is list:
            return self._list(get_args(hint)[0], value, key)
        if origin is Literal:
            allowed = get_args(hint)
            if type(value) is str and value in allowed:
                return value
            listed = ", ".join(map(repr, allowed))
            hint = near(str(value), allowed)
            if not hint and _ROLE_KEY.fullmatch(key):
                hint = _NEW_ROLE
            return self._wrong(key, value, listed, hint)
        # A user's class may have types that the schema does not use.
        if hint not in _KINDS:
            return self._plain(value, key)
        return self._scalar(hint, value, key, metadata)

    def mistake(self, key: str, text: str) -> Any:
        """Record a mistake in the value of ``key``. Return `DROPPED`."""
        self.mistakes.append(Mistake(key, f"{self.source.at(key)}: {key or 'the file'}: {text}"))
        return DROPPED

    def _wrong(self, key: str, value: Any, allowed: str, hint: str = "") -> Any:
        return self.mistake(key, found_and_allowed(value, allowed, hint))

    def _list(self, hint: Any, value: Any, key: str) -> Any:
        if not isinstance(value, list):
            return self._wrong(key, value, "a list")
        items = [self.clean(hint, item, f"{key}[{index}]") for index, item in enumerate(value)]
        return DROPPED if any(item is DROPPED for item in items) else items

    def _section(self, hint: Any, value: Any, key: str) -> Any:
        # A section whose lines are all commented out is null in YAML.
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            moved = f"; it is {BECAME_SECTIONS[key]} now" if key in BECAME_SECTIONS else ""
            return self._wrong(key, value, f"a mapping of {', '.join(get_type_hints(hint))}", moved)
        family, hint = hint, self._variant(hint, value, key)
        if hint is DROPPED:
            return DROPPED
        fields = {field.name: field for field in dataclasses.fields(hint)}
        hints = get_type_hints(hint)
        section = {}
        for name, item in value.items():
            dotted = f"{key}.{name}".lstrip(".")
            if name in fields:
                section[name] = self.clean(hints[name], item, dotted, fields[name].metadata)
            elif not issubclass(hint, UnavailableAlgorithm):
                self._unknown(dotted, str(name), list(fields), family, item)
        return _without_dropped(section)

    def _variant(self, hint: Any, value: Mapping[str, Any], key: str) -> Any:
        """Return the dataclass of a section of a family: that of its name or, if it has no name, of
        the name in lower layers."""
        if hint not in FAMILIES:
            return hint
        name = value.get("name", "")
        if type(name) is not str:
            # The rest of the section cannot be validated, and findings about it would mislead.
            return self._wrong_name(key, found_and_allowed(name, "text"))
        first_name = {"name": next(iter(FAMILIES[hint].members))}
        try:
            return variant(hint, value, self.below.get(key, {}), first_name)
        except ConfigError as error:
            return self._wrong_name(key, str(error).partition(": ")[2])

    def _wrong_name(self, key: str, text: str) -> Any:
        location = self.source.at(f"{key}.name")
        self.mistakes.append(Mistake(key, f"{location}: {key}.name: {text}"))
        return DROPPED

    def _unknown(
        self, dotted: str, name: str, siblings: list[str], family: Any, value: Any
    ) -> None:
        if dotted in REMOVED:
            self.mistake(dotted, f"there is no such setting any more: {REMOVED[dotted]}")
            return
        owners = members_with_field(family, name)
        explained = [] if owners else list(explain_section(dotted, value))
        for key, text in explained:
            self.mistake(key, f"unknown key; {text}")
        if explained:
            return
        if owners:
            hint = f"; {', '.join(owners)} has it"
        else:
            hint = near(name, siblings) or near(dotted, list(keys()))
        self.mistake(dotted, f"unknown key, allowed: {', '.join(siblings)}{hint}")

    def _map(self, item: Any, value: Any, key: str) -> Any:
        # A map whose lines are all commented out is null in YAML, as for a section.
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            return self._wrong(key, value, "a mapping of names to values")
        entries: dict[str, Any] = {}
        for name, entry in value.items():
            if type(name) is not str or not name:
                self._wrong(key, name, "names that are text (quote it)")
            elif dataclasses.is_dataclass(item) and not _NAME.fullmatch(name):
                self._wrong(key, name, "names of letters, digits, _ and - (they name directories)")
            elif entry is None and item is not Any:
                entries[name] = None
            else:
                entries[name] = self.clean(item, entry, f"{key}.{name}")
        return _without_dropped(entries)

    def _scalar(
        self, hint: Any, value: Any, key: str, metadata: Mapping[str, Any], also_allowed: str = ""
    ) -> Any:
        if hint is float and type(value) is int:
            value = float(value) if abs(value) < 2**1023 else math.inf
        if type(value) is not hint:
            is_unquoted = hint is str and isinstance(value, bool | int | float)
            quote = f"; quote it: '{value}'" if is_unquoted else ""
            allowed = " ".join([_KINDS[hint], bounds(metadata)]).strip()
            return self._wrong(key, value, allowed + also_allowed, quote)
        low, high = metadata.get("low"), metadata.get("high")
        if isinstance(value, float) and not math.isfinite(value):
            return self._wrong(key, value, "a finite number " + bounds(metadata))
        if (low is not None and value < low) or (high is not None and value > high):
            return self._wrong(key, value, bounds(metadata))
        if hint is str and "\0" in value:
            return self._wrong(key, value, "text without NUL")
        return value

    def _plain(self, value: Any, key: str, depth: int = 0) -> Any:
        """Return a free-form value: scalars, and lists and mappings of them."""
        if depth > MAX_DEPTH:
            return self.mistake(key, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, list):
            items = [
                self._plain(item, f"{key}[{index}]", depth + 1) for index, item in enumerate(value)
            ]
            return DROPPED if any(item is DROPPED for item in items) else items
        if isinstance(value, Mapping):
            for name in value:
                if type(name) is not str:
                    return self._wrong(key, name, "names that are text (quote it)")
            return _without_dropped(
                {
                    name: self._plain(item, f"{key}.{name}", depth + 1)
                    for name, item in value.items()
                }
            )
        is_plain = value is None or type(value) in _KINDS
        if not is_plain or (type(value) is float and not math.isfinite(value)):
            return self._wrong(
                key, value, "text, finite numbers, true, false, null, lists and mappings"
            )
        return value


def clean(
    hint: Any,
    value: Any,
    source: Source | str,
    key: str = "",
    metadata: Mapping[str, Any] = _NO_BOUNDS,
) -> Any:
    """Return `value` checked against the type `hint` and the bounds in `metadata`. ConfigError,
    with every mistake: it is not allowed."""
    cleaner = Cleaner(Source(source) if isinstance(source, str) else source)
    cleaned = cleaner.clean(hint, value, key, metadata)
    if cleaner.mistakes:
        raise ConfigError(*(mistake.text for mistake in cleaner.mistakes))
    return cleaned


def found_and_allowed(value: Any, allowed: str, hint: str = "") -> str:
    """Return the message about a value that is not allowed."""
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    kind = "" if value is None else f" ({type(value).__name__})"
    return f"found {shown}{kind}, allowed: {allowed}{hint}"


def _without_dropped(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not DROPPED}


def near(key: str, allowed: Sequence[str]) -> str:
    """Return a suggestion for `key`: keys with the same last part, otherwise a key
    with a similar spelling; empty if nothing is close."""
    last = key.rpartition(".")[2]
    matches = [name for name in allowed if name.rpartition(".")[2] == last]
    matches = matches or difflib.get_close_matches(key, allowed, n=1)
    return f"; did you mean {' or '.join(matches[:3])}?" if matches else ""


def keys(hint: Any = Config, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all fields of the dataclass `hint`, sections included."""
    for name, members in fields_of(hint).items():
        yield prefix + name
        item = get_type_hints(members[0])[name]
        if dataclasses.is_dataclass(item):
            yield from keys(item, f"{prefix}{name}.")


def bounds(metadata: Mapping[str, Any]) -> str:
    """Return the range in a field's `metadata` as text; empty without a range."""
    low, high = metadata.get("low"), metadata.get("high")
    if low is not None and high is not None:
        return f"{low} to {high}"
    if low is not None:
        return f"at least {low}"
    return f"at most {high}" if high is not None else ""
