"""Holders of media, and the record that adds media to a holder.

A holder is registered before its media are stored, so media without a holder can be deleted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.registry import applies

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


@dataclass(slots=True)
class MediaHolders:
    """Media ids by holder: a ticket, or the negative number of a spare.

    >>> media = MediaHolders()
    >>> media.hold(7, ["a", "b"]); media.hold(8, ["a"])
    >>> media.release(7)
    >>> media.counts, media.garbage
    (Counter({'a': 1}), ['b'])
    """

    holders: dict[int, tuple[str, ...]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """Number of holders of each medium."""
    garbage: list[str] = field(default_factory=list, compare=False)
    """Media that lost their last holder. `take_garbage` empties the list."""

    def media_of(self, holder: int) -> tuple[str, ...]:
        return self.holders.get(holder, ())

    def hold(self, holder: int, ids: Iterable[str]) -> None:
        """Add media to ``holder``."""
        present = self.media_of(holder)
        added = sorted(set(ids).difference(present))
        if added:
            self.holders[holder] = (*present, *added)
            self.counts.update(added)

    def release(self, holder: int) -> None:
        """Remove ``holder``, which needs no media any more."""
        for media_id in self.holders.pop(holder, ()):
            self.counts[media_id] -= 1
            if not self.counts[media_id]:
                del self.counts[media_id]
                self.garbage.append(media_id)

    def take_garbage(self) -> list[str]:
        """Take the media whose files can be deleted, because they still have no holder."""
        garbage, self.garbage = self.garbage, []
        return [media_id for media_id in garbage if media_id not in self.counts]

    def dump(self) -> Any:
        return self.holders

    def load(self, values: Any) -> None:
        self.holders = {holder: tuple(ids) for holder, ids in values.items()}
        self.counts = Counter(chain.from_iterable(self.holders.values()))


@applies("media")
def hold_media(state: QueueState, ticket: int, ids: list[str]) -> None:
    state.media.hold(ticket, ids)
