"""Requests about rows: they are put, and come to be on disk; those that nobody may use are
named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.handlers.media import check_extras, without_media
from relax_hpc.queue.controller.messages import Refused, Request, check_size, rows_of
from relax_hpc.queue.controller.planning.acceptance import refusals
from relax_hpc.queue.controller.registry import handles
from relax_hpc.queue.plan import NEEDED
from relax_hpc.queue.records import Owner
from relax_hpc.queue.storage.shard import SHARD_NAME, check_name

if TYPE_CHECKING:
    from relax_hpc.queue.controller.service import QueueService
    from relax_hpc.queue.plan import Plan


@handles("put")
def put(
    service: QueueService,
    request: Request,
    shard: dict,
    rows: list[dict],
    fields: list[str],
    lease: int = 0,
    saved: bool = True,
    extras: list[dict] = (),
) -> Any:
    """Rows of a new shard. Not ``saved``, they can be read, and count once `saved` names the shard.

    ``extras``: of some tickets the ids of their `media`, and the `tokens` of each row that stand
    for them, and of all of them together (packed).
    """
    state = service.state
    if (refused := state.puts.recall(request.key)) is not None:
        return {"refused": refused}
    if check_name(shard["name"]) in state.shards.numbers:
        raise Refused("refused", f"put: the queue has a shard {shard['name']}; a name is used once")
    held = state.leases.get(lease)
    _check_fields(service.plan, fields, lease, held.task if held else "")
    check_size("put: shard", shard)
    groups, owner = rows_of(rows, fields), request.owner
    refused = refusals(state, owner, groups, lease)
    if extras:
        check_extras(
            extras, {} if lease else {ticket: sum(episodes) for ticket, episodes, *_ in groups}
        )
        refused = without_media(state, extras) | refused
    # What a task adds is of the rows that were declared.
    taken = [
        (t, lengths, codes, b"" if lease else rows)
        for t, rows, lengths, codes in groups
        if t not in refused
    ]
    about = {"owner": owner, "lease": lease if held and held.owner == owner else 0, "saved": saved}
    about |= (
        {"media": {extra["ticket"]: extra.get("tokens", b"") for extra in extras}} if extras else {}
    )
    service.record(
        op="put", key=request.key, shard=shard, rows=taken, fields=fields, refused=refused, **about
    )
    return {"refused": refused}


def _check_fields(plan: Plan, fields: list[str], lease: int, task: str) -> None:
    """Generated rows come whole and without a lease; a task adds what it gives, and perhaps
    more."""
    if ("token_ids" in fields) == bool(lease):
        raise Refused("refused", f"put: {fields} {'with' if lease else 'without'} a lease")
    needed = plan.tasks[task].gives if task else () if lease else NEEDED
    if (task and not needed) or not set(needed).issubset(fields):
        raise Refused(
            "refused", f"put: {task or 'generated rows'}: found {fields}, needed {list(needed)}"
        )


@handles("saved")
def saved(service: QueueService, request: Request, names: list[str]) -> Any:
    """The shards ``names``, all of them put by this incarnation, are on disk: their rows count."""
    shards = service.state.shards
    numbers = {name: shards.numbers[name] for name in names if name in shards.numbers}
    if others := [
        name for name, number in numbers.items() if shards[number].owner != request.owner
    ]:
        raise Refused("refused", f"saved: {others[0]} was put by another incarnation")
    count_as_saved(service, set(numbers.values()))
    # Of shards that nobody needs any more the files came too late to be removed with the others.
    shards.garbage += [
        name for name in names if name not in shards.numbers and _names_maker(name, request.owner)
    ]
    return {}


def count_as_saved(service: QueueService, numbers: Iterable[int]) -> None:
    """Count these shards as saved on disk: the rows of those that were not are accepted."""
    if waited := sorted(number for number in numbers if service.state.shards[number].unsaved):
        service.record(op="saved", shards=waited)


def _names_maker(name: str, owner: Owner) -> bool:
    """Whether a file of this name is of that incarnation."""
    made = SHARD_NAME.match(check_name(name))
    return made is not None and (made[1], int(made[2])) == owner


@handles("quarantine")
def quarantine(
    service: QueueService, request: Request, lease: int, tickets: list[int], reason: str
) -> Any:
    """Rows of a lease that nobody may use: they are dropped, and other prompts take the place of
    theirs."""
    if not reason:
        raise Refused(
            "refused", "quarantine: reason: found an empty text, expected what was wrong, in a word"
        )
    held = service.state.leases.get(lease)
    mine = set(held.tickets) if held and held.owner == request.owner else ()
    if bad := sorted(set(tickets).intersection(mine)):
        if known := [ticket for ticket in bad if service.state.is_trained_by_any(ticket)]:
            raise Refused(
                "refused", f"quarantine: another trainer could read {known}; can this node not?"
            )
        service.record(op="quarantine", tickets=bad, reason=reason)
    return {}
