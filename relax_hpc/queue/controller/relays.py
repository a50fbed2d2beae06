"""Relays of a version of the weights: of many nodes a few read it from its maker, the others from
them.

In the hub's memory alone: whoever asks a hub that has begun anew is among its first, and reads from
the maker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from relax_hpc.base.versions import Version
from relax_hpc.queue.records import Owner

FAN_OUT = 2
"""Nodes that read from the same one: one link carries so many copies, and there are few nodes one
after the other."""
Where = Mapping[str, Any]


def ancestors(place: int) -> list[int]:
    """Numbers of the nodes from which number ``position`` takes a version, the best first; behind
    them all is its maker.

    >>> [ancestors(place) for place in range(7)]
    [[], [], [0], [0], [1], [1], [2, 0]]
    """
    found = []
    while place >= FAN_OUT:
        place = place // FAN_OUT - 1
        found.append(place)
    return found


class Relays:
    """Readers of each version on other nodes, in the order in which they came, and where each
    passes on what it has."""

    def __init__(self) -> None:
        self._lines: dict[Version, dict[str, tuple[Owner, Where]]] = {}

    def join(
        self,
        version: Version,
        reader: str,
        owner: Owner,
        where: Where,
        is_over: Callable[[Owner], object],
    ) -> list[Where]:
        """Places from which ``reader`` takes ``version``, the best first, without those whose time
        ``is_over``.

        It keeps its place if it asks again, so nobody ever comes to wait for who waits for it.
        """
        line = self._lines.setdefault(version, {})
        line[reader] = owner, where
        came = list(line.values())
        chain = [came[place] for place in ancestors(list(line).index(reader))]
        return [where for owner, where in chain if not is_over(owner)]

    def keep(self, versions: Collection[Version]) -> None:
        """Keep the relays of some versions, and forget all others."""
        self._lines = {
            version: line for version, line in self._lines.items() if version in versions
        }
