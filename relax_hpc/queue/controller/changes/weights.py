"""Changes of versions of the weights: they are published, written to disk, served and retired."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_hpc.base.versions import Version
from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.controller.topics import ADMISSION, NEWS
from relax_hpc.queue.records import Owner

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


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
