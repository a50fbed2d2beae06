"""One layer of configuration against the schema: types, ranges and names, each mistake one line
that teaches."""

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
from relax_hpc.config.variants import FAMILIES, chosen, fields_of
from relax_hpc.config.yaml_files import Source

COMMAND_LINE = "command line"
"""Source of overrides, in the place of a file's name."""
MAX_DEPTH = 16
"""Nesting allowed inside a free-form value of `flags`."""

REMOVED = {
    "rollout.max_attempts": "rollout.max_failed_share says when failing prompt groups end a run; "
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
"""Keys that configurations of older runs may still have -> what to do about them."""
GROWN = {"algorithm.correction": "algorithm.correction.kind"}
"""Keys that had one value and are sections now -> where the value went."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_NO_BOUNDS: Mapping[str, Any] = MappingProxyType({})


DROPPED: Any = object()
"""Mark in the place of a value that is not allowed."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that is wrong with a layer."""

    key: str
    text: str


class Cleaner:
    """Checks layers against the schema: what is not allowed is left out and kept in `mistakes`."""

    def __init__(self, source: Source, below: Mapping[str, Any] = _NO_BOUNDS) -> None:
        """``below``: what the layers before have come to, by which sections are understood that say
        no name."""
        self.source, self.below = source, below
        self.mistakes: list[Mistake] = []

    def clean(
        self, hint: Any, value: Any, key: str = "", metadata: Mapping[str, Any] = _NO_BOUNDS
    ) -> Any:
        """`value` of the type `hint` within the bounds of `metadata`, without what is wrong in it;
        or `DROPPED`."""
        if dataclasses.is_dataclass(hint):
            return self._section(hint, value, key)
        if type(None) in get_args(hint) and get_origin(hint) is not Literal:
            hint = next(choice for choice in get_args(hint) if choice is not type(None))
            if hint in _KINDS:
                return (
                    None if value is None else self._scalar(hint, value, key, metadata, " or null")
                )
        origin = get_origin(hint)
        if origin is dict:
            return self._map(get_args(hint)[1], value, key)
        if origin is list:
            if not isinstance(value, list):
                return self._wrong(key, value, "a list")
            items = [
                self.clean(get_args(hint)[0], item, f"{key}[{index}]")
                for index, item in enumerate(value)
            ]
            return DROPPED if any(item is DROPPED for item in items) else items
        if origin is Literal:
            if type(value) is not str or value not in get_args(hint):
                allowed = get_args(hint)
                return self._wrong(
                    key, value, ", ".join(map(repr, allowed)), near(str(value), allowed)
                )
            return value
        # Of a user's own class types may be others than the schema has.
        return (
            self._scalar(hint, value, key, metadata) if hint in _KINDS else self._plain(value, key)
        )

    def mistake(self, key: str, text: str) -> Any:
        """Keep what is wrong with the value of ``key``; `DROPPED`."""
        self.mistakes.append(Mistake(key, f"{self.source.at(key)}: {key or 'the file'}: {text}"))
        return DROPPED

    def _wrong(self, key: str, found: Any, allowed: str, hint: str = "") -> Any:
        return self.mistake(key, found_and_allowed(found, allowed, hint))

    def _section(self, hint: Any, value: Any, key: str) -> Any:
        # A section with all its lines commented out reads as null.
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            moved = f"; it is {GROWN[key]} now" if key in GROWN else ""
            return self._wrong(key, value, f"a mapping of {', '.join(get_type_hints(hint))}", moved)
        family, hint = hint, self._chosen(hint, value, key)
        if hint is DROPPED:
            return DROPPED
        fields = {field.name: field for field in dataclasses.fields(hint)}
        hints = get_type_hints(hint)
        found = {}
        for name, item in value.items():
            dotted = f"{key}.{name}".lstrip(".")
            if name in fields:
                found[name] = self.clean(hints[name], item, dotted, fields[name].metadata)
            elif not issubclass(hint, UnavailableAlgorithm):
                self._unknown(dotted, str(name), list(fields), family, item)
        return _kept(found)

    def _chosen(self, hint: Any, value: Mapping[str, Any], key: str) -> Any:
        """The dataclass that a section of a family is to be, by its name or, if it says none, that
        of layers before."""
        if hint not in FAMILIES:
            return hint
        name = value.get("name", "")
        if type(name) is not str:
            # Nothing else of the section can be judged, nor what is found in its place.
            self.mistakes.append(
                Mistake(
                    key,
                    f"{self.source.at(f'{key}.name')}: {key}.name: "
                    f"{found_and_allowed(name, 'text')}",
                )
            )
            return DROPPED
        try:
            return chosen(
                hint, value, self.below.get(key, {}), {"name": next(iter(FAMILIES[hint].known))}
            )
        except ConfigError as error:
            text = str(error).partition(": ")[2]
            self.mistakes.append(
                Mistake(key, f"{self.source.at(f'{key}.name')}: {key}.name: {text}")
            )
            return DROPPED

    def _unknown(
        self, dotted: str, name: str, siblings: list[str], family: Any, value: Any
    ) -> None:
        if dotted in REMOVED:
            self.mistake(dotted, f"there is no such setting any more: {REMOVED[dotted]}")
            return
        others = [member.name for member in fields_of(family).get(name, ())]
        explained = [] if others else list(explain_section(dotted, value))
        for key, text in explained:
            self.mistake(key, f"unknown key; {text}")
        if explained:
            return
        hint = (
            f"; {', '.join(others)} has it"
            if others
            else near(name, siblings) or near(dotted, list(keys()))
        )
        self.mistake(dotted, f"unknown key, allowed: {', '.join(siblings)}{hint}")

    def _map(self, item: Any, value: Any, key: str) -> Any:
        # As of a section: `groups:` with nothing but comments below it.
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            return self._wrong(key, value, "a mapping of names to values")
        found = {}
        for name, entry in value.items():
            if type(name) is not str or not name:
                self._wrong(key, name, "names that are text (quote it)")
            elif dataclasses.is_dataclass(item) and not _NAME.fullmatch(name):
                self._wrong(key, name, "names of letters, digits, _ and - (they name directories)")
            elif entry is None and item is not Any:
                found[name] = None
            else:
                found[name] = self.clean(item, entry, f"{key}.{name}")
        return _kept(found)

    def _scalar(
        self, hint: Any, value: Any, key: str, metadata: Mapping[str, Any], also_allowed: str = ""
    ) -> Any:
        if hint is float and type(value) is int:
            value = float(value) if abs(value) < 2**1023 else math.inf
        if type(value) is not hint:
            quote = (
                f"; quote it: '{value}'"
                if hint is str and isinstance(value, bool | int | float)
                else ""
            )
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
        """A free-form value: scalars, and lists and mappings of them."""
        if depth > MAX_DEPTH:
            return self.mistake(key, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, list):
            items = [
                self._plain(item, f"{key}[{index}]", depth + 1) for index, item in enumerate(value)
            ]
            return DROPPED if any(item is DROPPED for item in items) else items
        if isinstance(value, Mapping):
            if bad := [name for name in value if type(name) is not str]:
                return self._wrong(key, bad[0], "names that are text (quote it)")
            return _kept(
                {
                    name: self._plain(item, f"{key}.{name}", depth + 1)
                    for name, item in value.items()
                }
            )
        if not (value is None or type(value) in _KINDS) or (
            type(value) is float and not math.isfinite(value)
        ):
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
    """`value` checked against the type `hint` and the bounds in `metadata`; ConfigError with every
    mistake."""
    cleaner = Cleaner(Source(source) if isinstance(source, str) else source)
    found = cleaner.clean(hint, value, key, metadata)
    if cleaner.mistakes:
        raise ConfigError(*(mistake.text for mistake in cleaner.mistakes))
    return found


def found_and_allowed(found: Any, allowed: str, hint: str = "") -> str:
    """Message about a value that is not allowed."""
    shown = repr(found) if len(repr(found)) <= 60 else repr(found)[:57] + "..."
    kind = "" if found is None else f" ({type(found).__name__})"
    return f"found {shown}{kind}, allowed: {allowed}{hint}"


def _kept(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value is not DROPPED}


def near(word: str, allowed: Sequence[str]) -> str:
    """A suggestion for `word`, by the last part of dotted keys or, where none has it, by its
    spelling; empty if nothing is close."""
    last = word.rpartition(".")[2]
    matches = [key for key in allowed if key.rpartition(".")[2] == last]
    matches = matches or difflib.get_close_matches(word, allowed, n=1)
    return f"; did you mean {' or '.join(matches[:3])}?" if matches else ""


def keys(hint: Any = Config, prefix: str = "") -> Iterator[str]:
    """Dotted keys of all fields of the dataclass `hint`, sections included."""
    for name, members in fields_of(hint).items():
        yield prefix + name
        item = get_type_hints(members[0])[name]
        if dataclasses.is_dataclass(item):
            yield from keys(item, f"{prefix}{name}.")


def bounds(metadata: Mapping[str, Any]) -> str:
    """Words for the range in a field's `metadata`; empty without one."""
    low, high = metadata.get("low"), metadata.get("high")
    if low is not None and high is not None:
        return f"{low} to {high}"
    return f"at least {low}" if low is not None else f"at most {high}" if high is not None else ""
