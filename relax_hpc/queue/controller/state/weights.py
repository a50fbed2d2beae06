"""Published versions of the weights, those of them on disk, and their readers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relax_hpc.base.versions import Version
from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.controller.state.lineage import Lineage
from relax_hpc.queue.controller.topics import ADMISSION, NEWS
from relax_hpc.queue.records import Owner

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


@dataclass(slots=True)
class Weights:
    """Versions of which readers are told."""

    lineage: Lineage
    published: dict[Version, str] = field(default_factory=dict)
    """Digest of the manifest of each published version."""
    filed: dict[Version, str] = field(default_factory=dict)
    """Digest of the listing of its files, for each version that is on disk too."""
    newest: Version | None = None
    readers: dict[str, tuple[Owner, Version]] = field(default_factory=dict)
    """Version that each reader serves, or may still be loading."""
    evaluator: str = ""
    """Reader that was told last to evaluate what it serves."""

    def newer(self, after: Version, multiple_of: int = 1) -> Version | None:
        """The newest published version, if it is in the lineage and above ``after``; of those whose
        numbers are multiples, if that is asked for."""
        newest = self.newest if multiple_of == 1 else self._newest_of(self.published, multiple_of)
        return newest if newest is not None and newest > after and newest in self.lineage else None

    def newest_filed(self, multiple_of: int = 1) -> Version | None:
        """The newest version of the lineage that is on disk, of those whose numbers are
        multiples."""
        return self._newest_of(self.filed, multiple_of)

    def _newest_of(self, versions: Iterable[Version], multiple_of: int) -> Version | None:
        """The newest of ``versions`` in the lineage whose number is a multiple."""
        return max(
            (v for v in versions if not v.number % multiple_of and v in self.lineage), default=None
        )

    def retirable(self, refresh_every: int) -> list[Version]:
        """Published versions below the newest that no reader serves or may still be loading, oldest
        first."""
        if self.newest is None:
            return []
        wanted = [self.newest, *(version for _, version in self.readers.values())]
        # What is in memory alone goes with the actor.
        wanted += [newest] if (newest := self.newest_filed()) else []
        if refresh_every:
            wanted += [newest] if (newest := self.newest_filed(refresh_every)) else []
        floor = min(wanted)
        return sorted(version for version in self.published if version < floor)

    def publish_lag(self, step: int) -> int:
        """Version ``step``, which was trained, minus the oldest that anybody generates or scores
        with."""
        served = [version for _, version in self.readers.values() if version in self.lineage]
        return step - min((version.number for version in served), default=step)

    def retire(self, version: Version) -> None:
        self.published.pop(version, None)
        self.filed.pop(version, None)

    def end_readers(self, group: str, below: int) -> None:
        """Incarnations of ``group`` before incarnation ``below`` read nothing any more."""
        self.readers = {
            k: v for k, v in self.readers.items() if not (v[0][0] == group and v[0][1] < below)
        }

    def dump(self) -> Any:
        published, filed = (
            {str(v): digest for v, digest in some.items()} for some in (self.published, self.filed)
        )
        readers = {name: (owner, str(version)) for name, (owner, version) in self.readers.items()}
        return published, filed, str(self.newest) if self.newest else "", readers, self.evaluator

    def load(self, values: Any) -> None:
        published, filed, newest, readers, self.evaluator = values
        self.published = {Version.parse(name): digest for name, digest in published.items()}
        self.filed = {Version.parse(name): digest for name, digest in filed.items()}
        self.newest = Version.parse(newest) if newest else None
        self.readers = {
            name: ((who[0], who[1]), Version.parse(v)) for name, (who, v) in readers.items()
        }


@applies("publish")
def publish(state: QueueState, version: str, digest: str) -> None:
    state.weights.newest = Version.parse(version)
    state.weights.published[state.weights.newest] = digest
    state.woken.add(NEWS)


@applies("filed")
def file(state: QueueState, version: str, digest: str) -> None:
    state.weights.filed[Version.parse(version)] = digest


@applies("retire")
def retire(state: QueueState, versions: list[str]) -> None:
    for version in versions:
        state.weights.retire(Version.parse(version))


@applies("evaluate")
def evaluate(state: QueueState, reader: str) -> None:
    """Note who evaluates: nobody else is told to, not by a hub that begins anew either."""
    state.weights.evaluator = reader


@applies("serve")
def serve(state: QueueState, reader: str, owner: Owner, version: str) -> None:
    state.weights.readers[reader] = (owner, Version.parse(version))
    # Who serves nothing any more evaluates nothing either: another reader may have to.
    state.woken |= {ADMISSION, NEWS}
