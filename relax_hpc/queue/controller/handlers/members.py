"""Requests about members: they say that they are there; the supervisor says that one is not."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.handlers.rows import count_as_saved
from relax_hpc.queue.controller.messages import Refused, Request, check_size
from relax_hpc.queue.controller.registry import handles

if TYPE_CHECKING:
    from relax_hpc.queue.controller.service import QueueService

NO_WAIT: dict = MappingProxyType({})


@handles("beat")
def beat(
    service: QueueService,
    request: Request,
    member: str,
    holds: list[str] = (),
    disk: dict = NO_WAIT,
    **about: Any,
) -> Any:
    """A member is there. ``disk``: a write of its own that does not succeed.

    Answered with those of the shards that it ``holds`` in memory, all of them put and on disk, that
    nobody needs any more; whether clocks stand; and for which disk somebody waits.
    """
    check_size("beat", about)
    _check_disk(disk)
    if request.owner[1]:
        service.beats.take(request.owner, member, about, disk)
    shards = service.state.shards
    # An answer to `saved` may have been lost, and with a journal's end what it was about.
    unsaved = {
        shards[number].descriptor["name"]: number
        for number in shards.unsaved.get(request.owner, ())
    }
    count_as_saved(service, [unsaved[name] for name in holds if name in unsaved])
    free, waits = [name for name in holds if name not in shards.numbers], service.beats.disk_wait()
    return {"free": free, "stands": service.presence.paused, **({"waits": waits} if waits else {})}


def _check_disk(disk: dict) -> None:
    """Refused unless it is empty, or says of a write that does not succeed what `Waits.longest`
    does."""
    kinds = {"path": str, "errno": int, "seconds": float, "loose": bool}
    if disk and {name: type(value) for name, value in disk.items()} != kinds:
        raise Refused("refused", f"beat: disk: found {disk!r:.80}, expected {', '.join(kinds)}")


@handles("withdraw")
def withdraw(service: QueueService, request: Request, number: int) -> Any:
    """Nobody waits for the answer to the client's request ``number`` any more: it waits no longer,
    and what was granted to it is taken back. An engine that leaves withdraws its requests, so that
    none is answered to another engine that comes back under the same name."""
    state, client = service.state, request.key.rpartition("#")[0]
    key = f"{client}#{number}"
    service.waiting.withdraw(key)
    is_done = state.admissions.recall(request.key) is not None
    for ticket in () if is_done else state.admissions.recall(key) or ():
        group = state.groups.get(ticket)
        if group and group.owner == request.owner and ticket in state.tickets.generating:
            service.record(op="give_back", owner=request.owner, key=request.key, ticket=ticket)
    if lease := state.leases.by_key.get(key, 0):
        service.record(op="release", lease=lease)
    return {}


@handles("down")
def down(service: QueueService, request: Request, group: str, incarnation: int) -> Any:
    """Note that a supervisor saw an incarnation end."""
    service.record(op="down", group=group, incarnation=incarnation)
    service.waiting.drop((group, incarnation))
    service.beats.forget((group, incarnation))
    return {}
