"""Sections whose fields follow from the `name` in them: the algorithm's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from relax_hpc.algorithms import ALGORITHMS, Algorithm, algorithm_class


@dataclass(frozen=True, slots=True)
class Family:
    """Dataclasses that one section may be made of."""

    chosen: Callable[[str], type]
    """Function from a name to its dataclass. ConfigError if there is none."""
    known: Mapping[str, type]


FAMILIES: dict[Any, Family] = {Algorithm: Family(algorithm_class, ALGORITHMS)}
"""Type in the schema, whose fields all have -> those that may stand in its place."""


def chosen(hint: Any, *trees: Mapping[str, Any]) -> Any:
    """The dataclass that the first of ``trees`` with a name asks for; ``hint`` itself if it is of
    no family."""
    if hint not in FAMILIES:
        return hint
    return FAMILIES[hint].chosen(next(tree["name"] for tree in trees if "name" in tree))


def fields_of(hint: Any) -> dict[str, list[type]]:
    """Every field that one of the family ``hint`` has -> those that have it; of any other dataclass
    its own."""
    members = FAMILIES[hint].known.values() if hint in FAMILIES else [hint]
    found: dict[str, list[type]] = {}
    for member in members:
        for field in dataclasses.fields(member):
            found.setdefault(field.name, []).append(member)
    return found


def own_fields(hint: Any, names: Collection[str]) -> Iterator[str]:
    """Names among ``names`` of fields that not all of the family ``hint`` have to have."""
    shared = {field.name for field in dataclasses.fields(hint)}
    return (name for name in names if name not in shared)
