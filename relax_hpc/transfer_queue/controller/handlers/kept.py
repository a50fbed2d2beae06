"""What is not accepted yet: parts of prompt groups, surplus ones, and their media."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from relax_hpc.transfer_queue.controller.messages import MAX_WHOLE, Refused, Request, check_size
from relax_hpc.transfer_queue.controller.planning.step_sets import Room
from relax_hpc.transfer_queue.controller.registry import handles
from relax_hpc.transfer_queue.controller.state.kept import Handed
from relax_hpc.transfer_queue.plan import GENERATED
from relax_hpc.transfer_queue.records import NO_STEP, Owner
from relax_hpc.transfer_queue.storage.media import MediaError, check_id
from relax_hpc.transfer_queue.storage.shard import check_name

if TYPE_CHECKING:
    from relax_hpc.transfer_queue.controller.service import QueueService
    from relax_hpc.transfer_queue.controller.state.queue_state import QueueState

UNSCORED = tuple(name for name in GENERATED if name != "reward")
"""What rows have that are kept: rewards come when the group is whole."""
MAX_MEDIA = 256
"""Of a prompt group, all its attempts together."""
_NUMBERS = ("ticket", "attempt", "reused")


@handles("keep")
def keep(
    service: QueueService, request: Request, shard: dict, rows: list[dict], fields: list[str], surplus: bool
) -> Any:
    """Rows, on disk already, of groups that their maker generates; or whole groups that nobody asked for."""
    if (refused := service.state.puts.recall(request.key)) is not None:
        return {"refused": refused}
    if check_name(shard["name"]) in service.state.shards.numbers:
        raise Refused("refused", f"keep: the queue has a shard {shard['name']}; a name is used once")
    if missing := set(GENERATED if surplus else UNSCORED).difference(fields):
        raise Refused("refused", f"keep: {min(missing)} is missing in the fields {fields}")
    check_size("keep: shard", shard)
    groups = [_handed(row, service.plan.samples_per_prompt) for row in rows]
    if len({group[0] for group in groups}) < len(groups):
        raise Refused("refused", "keep: a ticket is there twice; of a prompt group one attempt comes in one piece")
    judge = _refuse_surplus if surplus else _refuse_part
    refused = {group[0]: why for group in groups if (why := judge(service.state, request.owner, group))}
    about = {"owner": list(request.owner), "shard": shard, "fields": fields, "surplus": surplus}
    service.record(op="keep", key=request.key, rows=groups, refused=refused, **about)
    return {"refused": refused}


@handles("media")
def media(service: QueueService, request: Request, ticket: int, ids: list[str]) -> Any:
    """The prompt group of ``ticket`` needs these media, which are stored as soon as this is answered with true."""
    try:
        fresh = {check_id(media_id) for media_id in ids}.difference(service.state.media.of(ticket))
    except MediaError as error:
        raise Refused("refused", f"media: {error}") from error
    found = len(fresh) + len(service.state.media.of(ticket))
    if found > MAX_MEDIA:
        text = f"media: ticket {ticket} has {found} of them, allowed {MAX_MEDIA}; join small ones into one"
        raise Refused("refused", text)
    group = service.state.groups.get(ticket)
    if not group or group.owner != request.owner:
        return {"named": False}
    if fresh:
        service.record(op="media", ticket=ticket, ids=sorted(fresh))
    return {"named": True}


def _handed(row: dict, samples_per_prompt: int) -> Handed:
    """One of the rows of a keep; Refused if it is not as it should be."""
    numbers, samples, versions = [row.get(name) for name in _NUMBERS], row.get("samples"), row.get("versions")
    good = _are_whole(numbers) and _are_whole(versions) and type(samples) is list and samples
    good = good and all(_are_whole(sample) and len(sample) == 3 and sample[1] > 0 for sample in samples)
    good = good and 0 <= numbers[2] <= sum(sample[1] for sample in samples)
    numbered = {k for k, _, _ in samples} if good else set()
    if not good or len(numbered) < len(samples) or not numbered.issubset(range(samples_per_prompt)):
        expected = f"{', '.join(_NUMBERS)}, versions, samples as [number below {samples_per_prompt}, tokens, finished]"
        raise Refused("refused", f"keep: rows: found {row!r:.80}, expected {expected}")
    return numbers[0], numbers[1], [[k, tokens, int(bool(end))] for k, tokens, end in samples], versions, numbers[2]


def _are_whole(values: Any) -> bool:
    return type(values) is list and all(type(value) is int and 0 <= value < MAX_WHOLE for value in values)


def _refuse_part(state: QueueState, owner: Owner, handed: Handed) -> str:
    """Why parts of a group in generation cannot be kept."""
    ticket, attempt, samples, versions, reused = handed
    group, kept = state.groups.get(ticket), state.kept.groups.get(ticket)
    if group is None or group.owner != owner or group.attempt != attempt:
        return "not_owner"
    known = kept.samples if kept and (kept.source, kept.attempt) == (ticket, attempt) else {}
    if reused > sum(known[k][1] for k, _, _ in samples if k in known):
        return "unknown_tokens"
    # Not older than what was promised when the ticket was admitted: its step may be planned.
    return _refuse_versions(
        state, versions, max(state.plan.step_of(ticket), group.last if state.tasks.in_sets else NO_STEP)
    )


def _refuse_surplus(state: QueueState, _: Owner, handed: Handed) -> str:
    """Why a whole group cannot be kept for a later ticket."""
    plan, shards = state.plan, state.shards
    if sum(finished for _, _, finished in handed[2]) != plan.samples_per_prompt:
        return "incomplete"
    if handed[4]:
        return "unknown_tokens"
    if state.progress.trained_steps >= plan.steps:
        return "unwanted"
    held = (*state.kept.surplus.values(), *state.kept.groups.values())
    if any((group.source, group.attempt) == (handed[0], handed[1]) for group in held):
        return "duplicate"
    groups = len(state.tickets.generating) + len(state.tickets.untrained) + len(state.kept.surplus)
    if shards.untrained_bytes >= plan.max_bytes or (groups + 1) * plan.samples_per_prompt > plan.max_rows:
        return "no_room"
    return _refuse_versions(state, handed[3], state.progress.trained_steps)


def _refuse_versions(state: QueueState, versions: Iterable[int], step: int) -> str:
    survive, oldest = state.lineage.origin(tuple(versions))
    if not survive or oldest < 0:
        return "rolled_back"
    return "" if oldest >= step - state.plan.max_staleness else "stale_version"


def surplus_for(state: QueueState, tickets: Iterable[int], version: int) -> dict[int, int]:
    """Of tickets whose rows would be made by version number ``version`` or later, those that get a surplus group, the
    oldest first, and its number."""
    given: dict[int, int] = {}
    if not state.kept.surplus:
        return given
    room, latest = Room(state), version + state.plan.max_staleness
    for ticket in tickets:
        step = state.plan.step_of(ticket)
        fits = (
            number
            for number, group in state.kept.surplus.items()
            if number not in given.values() and (last := state.last_step(group.versions)) >= step
            if not state.tasks.in_sets or last >= latest or room.moves(latest, last)
        )
        if ticket not in state.kept.groups and (number := next(fits, None)) is not None:
            given[ticket] = number
    return given


def kept_for(state: QueueState, tickets: Iterable[int]) -> list[dict[str, Any]]:
    """What is kept of them: where the newest of each sample lies, under which ticket's ids, and whose attempt."""
    found = []
    for ticket in tickets if state.kept.groups else ():
        if group := state.kept.groups.get(ticket):
            places = {
                number: [k for k, (at, *_) in group.samples.items() if at == number] for number in sorted(group.shards)
            }
            shards = [{**state.shards[number].descriptor, "samples": ks} for number, ks in places.items()]
            about = {"ticket": ticket, "source": group.source, "attempt": group.attempt}
            found.append({**about, "shards": shards})
    return found


def check_extras(extras: list[dict], tickets: list[int]) -> None:
    """Refused unless the extras of a put are as they should be, and about some of its ``tickets``."""
    for extra in extras:
        reused, media = extra.get("reused", 0), extra.get("media", [])
        good = type(reused) is int and reused >= 0 and type(media) is list
        good = good and all(type(media_id) is str for media_id in media)
        if not good or extra.get("ticket") not in tickets:
            expected = "the ticket of a generated row, reused (tokens) and media (ids)"
            raise Refused("refused", f"put: extras: found {extra!r:.80}, expected {expected}")


def reused_of(state: QueueState, extras: list[dict]) -> dict[int, int]:
    """Of a put, by ticket: how many tokens that are kept are among its rows, never more than there are."""
    said = {extra["ticket"]: extra["reused"] for extra in extras if "reused" in extra}
    groups = state.kept.groups
    return {ticket: min(tokens, groups[ticket].tokens) for ticket, tokens in said.items() if ticket in groups}


def without_media(state: QueueState, extras: list[dict]) -> dict[int, str]:
    """Of a put the prompt groups that name media which they have not said they need."""
    named = {extra["ticket"]: extra["media"] for extra in extras if "media" in extra}
    return {ticket: "unknown_media" for ticket, ids in named.items() if not set(ids) <= set(state.media.of(ticket))}
