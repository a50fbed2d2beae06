"""Relays of a version of the weights: a few nodes read it from its producer, other nodes from them.

Relays are only in the hub's memory. After a restart of the hub, the first reader that asks reads
from the producer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from relax_hpc.base.versions import Version
from relax_hpc.queue.records import Owner

FAN_OUT = 2
"""Number of nodes that read from the same node: one link carries this many copies, and the chain of
nodes stays short."""
Where = Mapping[str, Any]


def ancestors(index: int) -> list[int]:
    """Indices of the nodes from which node ``index`` can read, the best first. The producer comes
    after them.

    >>> [ancestors(index) for index in range(7)]
    [[], [], [0], [0], [1], [1], [2, 0]]
    """
    indices = []
    while index >= FAN_OUT:
        index = index // FAN_OUT - 1
        indices.append(index)
    return indices


class Relays:
    """Readers of each version on other nodes, in the order in which they came, and where each of
    them forwards the version."""

    def __init__(self) -> None:
        self._readers: dict[Version, dict[str, tuple[Owner, Where]]] = {}

    def join(
        self,
        version: Version,
        reader: str,
        owner: Owner,
        where: Where,
        is_over: Callable[[Owner], object],
    ) -> list[Where]:
        """Addresses from which ``reader`` can pull ``version``, the best first.

        Readers whose incarnation ``is_over`` are left out.

        A reader keeps its index if it asks again. So no reader can ever wait for itself.
        """
        readers = self._readers.setdefault(version, {})
        readers[reader] = owner, where
        in_order = list(readers.values())
        sources = [in_order[index] for index in ancestors(list(readers).index(reader))]
        return [where for owner, where in sources if not is_over(owner)]

    def keep(self, versions: Collection[Version]) -> None:
        """Forget the relays of all other versions."""
        self._readers = {
            version: readers for version, readers in self._readers.items() if version in versions
        }
