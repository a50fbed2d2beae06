"""Sections whose fields depend on the `name` in them, such as the section of the algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from relax_hpc.algorithms import ALGORITHMS, Algorithm, algorithm_class


@dataclass(frozen=True, slots=True)
class Family:
    """Dataclasses that a section may consist of."""

    class_of_name: Callable[[str], type]
    """Function from a name to its dataclass. ConfigError: there is no such name."""
    members: Mapping[str, type]
    """Built-in dataclasses by name."""


FAMILIES: dict[Any, Family] = {Algorithm: Family(algorithm_class, ALGORITHMS)}
"""Families by the type in the schema, whose fields all members have."""


def variant(hint: Any, *trees: Mapping[str, Any]) -> Any:
    """Return the dataclass that the first of ``trees`` with a name selects; ``hint`` itself if it
    is not a family."""
    if hint not in FAMILIES:
        return hint
    name = next(tree["name"] for tree in trees if "name" in tree)
    return FAMILIES[hint].class_of_name(name)


def fields_of(hint: Any) -> dict[str, list[type]]:
    """Return, for every field of a member of the family ``hint``, the members that have it. Any
    other dataclass is its only member."""
    members = FAMILIES[hint].members.values() if hint in FAMILIES else [hint]
    owners: dict[str, list[type]] = {}
    for member in members:
        for field in dataclasses.fields(member):
            owners.setdefault(field.name, []).append(member)
    return owners


def members_with_field(hint: Any, field: str) -> list[str]:
    """Return the names of the members of the family ``hint`` that have ``field``; none if ``hint``
    is not a family."""
    if hint not in FAMILIES:
        return []
    owners = fields_of(hint).get(field, ())
    return [name for name, member in FAMILIES[hint].members.items() if member in owners]


def own_fields(hint: Any, names: Collection[str]) -> Iterator[str]:
    """Yield those of ``names`` that are not fields of all members of the family ``hint``."""
    shared = {field.name for field in dataclasses.fields(hint)}
    return (name for name in names if name not in shared)
