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
    """Versions that readers can pull."""

    lineage: Lineage
    published: dict[Version, str] = field(default_factory=dict)
    """Digest of the manifest of each published version."""
    filed: dict[Version, str] = field(default_factory=dict)
    """Digest of the listing of its files, for each version that is on disk too."""
    newest: Version | None = None
    readers: dict[str, tuple[Owner, Version]] = field(default_factory=dict)
    """Version that each reader serves, or may still be loading."""
    evaluator: str = ""
    """Reader that the queue last asked to evaluate its version."""

    def newer(self, after: Version, multiple_of: int = 1) -> Version | None:
        """The newest published version whose number is a multiple, if it is above ``after`` and in
        the lineage."""
        newest = self.newest if multiple_of == 1 else self._newest_of(self.published, multiple_of)
        if newest is None or newest <= after or newest not in self.lineage:
            return None
        return newest

    def newest_filed(self, multiple_of: int = 1) -> Version | None:
        """The newest version on disk, in the lineage, whose number is a multiple."""
        return self._newest_of(self.filed, multiple_of)

    def _newest_of(self, versions: Iterable[Version], multiple_of: int) -> Version | None:
        """The newest of ``versions`` in the lineage whose number is a multiple."""
        multiples = [version for version in versions if not version.number % multiple_of]
        return max((version for version in multiples if version in self.lineage), default=None)

    def retirable(self, refresh_every: int) -> list[Version]:
        """Published versions below the newest that no reader serves or may still be loading, oldest
        first."""
        if self.newest is None:
            return []
        # Versions that are only in memory are lost if the actor dies. So the newest on disk is
        # kept.
        kept = [self.newest_filed(), self.newest_filed(refresh_every) if refresh_every else None]
        # A reader that has left, or is lost, serves nothing, and must not keep all versions.
        served = [version for _, version in self.readers.values() if version.incarnation]
        wanted = [self.newest, *served]
        wanted += [version for version in kept if version is not None]
        floor = min(wanted)
        return sorted(version for version in self.published if version < floor)

    def publish_lag(self, step: int) -> int:
        """Version ``step``, which was trained, minus the oldest with which any reader generates or
        scores."""
        served = [version for _, version in self.readers.values() if version in self.lineage]
        return step - min((version.number for version in served), default=step)

    def retire(self, version: Version) -> None:
        self.published.pop(version, None)
        self.filed.pop(version, None)

    def end_readers(self, group: str, below: int) -> None:
        """Remove readers of incarnations of ``group`` before incarnation ``below``."""
        self.readers = {
            name: (owner, version)
            for name, (owner, version) in self.readers.items()
            if owner[0] != group or owner[1] >= below
        }

    def dump(self) -> Any:
        published = {str(version): digest for version, digest in self.published.items()}
        filed = {str(version): digest for version, digest in self.filed.items()}
        readers = {name: (owner, str(version)) for name, (owner, version) in self.readers.items()}
        return published, filed, str(self.newest) if self.newest else "", readers, self.evaluator

    def load(self, values: Any) -> None:
        published, filed, newest, readers, self.evaluator = values
        self.published = {Version.parse(name): digest for name, digest in published.items()}
        self.filed = {Version.parse(name): digest for name, digest in filed.items()}
        self.newest = Version.parse(newest) if newest else None
        self.readers = {
            name: ((owner[0], owner[1]), Version.parse(version))
            for name, (owner, version) in readers.items()
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
    """Set the reader that evaluates. No other reader is asked, also after a restart of the hub."""
    state.weights.evaluator = reader


@applies("serve")
def serve(state: QueueState, reader: str, owner: Owner, version: str) -> None:
    state.weights.readers[reader] = (owner, Version.parse(version))
    # A reader that ended cannot evaluate any more, so another one may have to.
    state.woken |= {ADMISSION, NEWS}
