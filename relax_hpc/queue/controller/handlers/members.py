"""Requests about members: their beats, and the supervisor's reports of ended incarnations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.handlers.rows import count_as_saved
from relax_hpc.queue.controller.messages import Refused, Request, check_size
from relax_hpc.queue.controller.registry import handles

if TYPE_CHECKING:
    from relax_hpc.queue.controller.service import QueueService

# Defaults of arguments. Handlers never modify them.
NO_SHARDS: list[str] = []
NO_WAIT: dict[str, Any] = {}


@handles("beat")
def beat(
    service: QueueService,
    request: Request,
    member: str,
    holds: list[str] = NO_SHARDS,
    disk: dict = NO_WAIT,
    **content: Any,
) -> Any:
    """The beat of a process. ``disk``: a write of the process that fails.

    ``holds``: shards in its memory, all of them put and on disk. The answer says which of them no
    process needs any more, whether timeouts are paused, and for which disk a process waits.
    """
    check_size("beat", content)
    _check_disk(disk)
    if request.owner[1]:
        service.beats.take(request.owner, member, content, disk)
    shards = service.state.shards
    # The controller may have lost a `saved` request: its answer, or its record with the end of the
    # journal. So a held shard counts as saved.
    unsaved = {
        shards[number].descriptor["name"]: number
        for number in shards.unsaved.get(request.owner, ())
    }
    count_as_saved(service, [unsaved[name] for name in holds if name in unsaved])
    free = [name for name in holds if name not in shards.numbers]
    answer: dict[str, Any] = {"free": free, "stands": service.presence.paused}
    wait = service.beats.disk_wait()
    if wait:
        answer["waits"] = wait
    return answer


def _check_disk(disk: dict) -> None:
    """Refused: it is neither empty nor a failing write as of `Waits.longest`."""
    kinds = {"path": str, "errno": int, "seconds": float, "loose": bool}
    if disk and {name: type(value) for name, value in disk.items()} != kinds:
        raise Refused("refused", f"beat: disk: found {disk!r:.80}, expected {', '.join(kinds)}")


@handles("withdraw")
def withdraw(service: QueueService, request: Request, number: int) -> Any:
    """Forget the client's request ``number``, for whose answer it no longer waits, and take back
    the tickets or the lease that it got.

    An engine that is removed withdraws its requests. So none of them is answered to a later engine
    with the same name.
    """
    state, client = service.state, request.key.rpartition("#")[0]
    key = f"{client}#{number}"
    service.waiting.withdraw(key)
    is_done = state.admissions.recall(request.key) is not None
    tickets = () if is_done else state.admissions.recall(key) or ()
    for ticket in tickets:
        group = state.groups.get(ticket)
        if group and group.owner == request.owner and ticket in state.tickets.generating:
            service.record(op="give_back", owner=request.owner, key=request.key, ticket=ticket)
    lease = state.leases.by_key.get(key, 0)
    if lease:
        service.record(op="release", lease=lease)
    return {}


@handles("down")
def down(service: QueueService, request: Request, group: str, incarnation: int) -> Any:
    """Record that a supervisor saw an incarnation end."""
    service.record(op="down", group=group, incarnation=incarnation)
    service.waiting.drop((group, incarnation))
    service.beats.forget((group, incarnation))
    return {}
