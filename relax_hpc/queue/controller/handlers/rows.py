"""Requests about rows: put them, report them as saved, and quarantine damaged ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.handlers.media import check_extras, without_media
from relax_hpc.queue.controller.messages import Refused, Request, check_size, parse_groups
from relax_hpc.queue.controller.planning.acceptance import find_refusals
from relax_hpc.queue.controller.registry import handles
from relax_hpc.queue.records import Owner
from relax_hpc.queue.storage.shard import SHARD_NAME, check_name

if TYPE_CHECKING:
    from relax_hpc.queue.controller.service import QueueService
    from relax_hpc.queue.plan import Plan

# Default of an argument. The handler never modifies it.
NO_EXTRAS: list[dict] = []


@handles("put")
def put(
    service: QueueService,
    request: Request,
    shard: dict,
    rows: list[dict],
    fields: list[str],
    lease: int = 0,
    saved: bool = True,
    extras: list[dict] = NO_EXTRAS,
) -> Any:
    """Put the rows of a new shard. If they are not ``saved``, others can read them, and they count
    after a `saved` request with the shard's name.

    ``extras``: `media` (ids) of some tickets, with the `tokens` of media: of each row, then of all
    distinct media (packed).
    """
    state = service.state
    known_answer = state.puts.recall(request.key)
    if known_answer is not None:
        return {"refused": known_answer}
    if check_name(shard["name"]) in state.shards.numbers:
        raise Refused("refused", f"put: the queue has a shard {shard['name']}; a name is used once")
    held = state.leases.get(lease)
    _check_fields(service.plan, fields, lease, held.task if held else "")
    check_size("put: shard", shard)
    groups, owner = parse_groups(rows, fields), request.owner
    refused = find_refusals(state, owner, groups, lease)
    if extras:
        row_counts = {} if lease else {ticket: sum(counts) for ticket, counts, *_ in groups}
        check_extras(extras, row_counts)
        refused = without_media(state, extras) | refused
    # Only generated rows declare the rows of episodes. Fields of a task belong to declared rows.
    taken = [
        (ticket, lengths, codes, b"" if lease else episodes)
        for ticket, episodes, lengths, codes in groups
        if ticket not in refused
    ]
    media = {extra["ticket"]: extra.get("tokens", b"") for extra in extras}
    service.record(
        op="put",
        key=request.key,
        owner=owner,
        shard=shard,
        rows=taken,
        fields=fields,
        refused=refused,
        lease=lease if held and held.owner == owner else 0,
        saved=saved,
        **({"media": media} if extras else {}),
    )
    return {"refused": refused}


def _check_fields(plan: Plan, fields: list[str], lease: int, task: str) -> None:
    """Refused: generated rows without a needed field or with a lease, or fields of a task without a
    lease, or without a field that the task adds."""
    if ("token_ids" in fields) == bool(lease):
        raise Refused("refused", f"put: {fields} {'with' if lease else 'without'} a lease")
    needed = plan.needed
    if lease:
        needed = plan.tasks[task].gives if task else ()
    if (task and not needed) or not set(needed).issubset(fields):
        raise Refused(
            "refused", f"put: {task or 'generated rows'}: found {fields}, needed {list(needed)}"
        )


@handles("saved")
def saved(service: QueueService, request: Request, names: list[str]) -> Any:
    """Count the rows of the shards ``names``, which are on disk and all put by this incarnation."""
    shards = service.state.shards
    numbers = {name: shards.numbers[name] for name in names if name in shards.numbers}
    foreign = [name for name, number in numbers.items() if shards[number].owner != request.owner]
    if foreign:
        raise Refused("refused", f"saved: {foreign[0]} was put by another incarnation")
    count_as_saved(service, set(numbers.values()))
    # These shards lost their last user before their files were written, so the files were not
    # deleted then.
    shards.garbage += [
        name for name in names if name not in shards.numbers and _is_shard_of(name, request.owner)
    ]
    return {}


def count_as_saved(service: QueueService, numbers: Iterable[int]) -> None:
    """Record that these shards are on disk, unless that is recorded already."""
    unsaved = sorted(number for number in numbers if service.state.shards[number].unsaved)
    if unsaved:
        service.record(op="saved", shards=unsaved)


def _is_shard_of(name: str, owner: Owner) -> bool:
    """Whether a shard of this name belongs to the incarnation."""
    match = SHARD_NAME.match(check_name(name))
    return match is not None and (match[1], int(match[2])) == owner


@handles("quarantine")
def quarantine(
    service: QueueService, request: Request, lease: int, tickets: list[int], reason: str
) -> Any:
    """Drop rows of a lease that no task can use. Their tickets are generated again from other
    prompts."""
    if not reason:
        raise Refused(
            "refused", "quarantine: reason: found an empty text, expected the fault, in a word"
        )
    held = service.state.leases.get(lease)
    if held is None or held.owner != request.owner:
        return {}
    bad = sorted(set(tickets).intersection(held.tickets))
    readable = [ticket for ticket in bad if service.state.is_trained_by_any(ticket)]
    if readable:
        raise Refused(
            "refused", f"quarantine: another trainer could read {readable}; can this node not?"
        )
    if bad:
        service.record(op="quarantine", tickets=bad, reason=reason)
    return {}
