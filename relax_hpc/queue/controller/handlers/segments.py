"""Requests about attempts at tickets that are under way: what is appended to their logs, and what
comes to nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.messages import MAX_WHOLE, Refused, Request, check_size
from relax_hpc.queue.controller.planning.segments import refusal
from relax_hpc.queue.controller.registry import handles
from relax_hpc.queue.plan import UNSCORED
from relax_hpc.queue.storage.shard import check_name

if TYPE_CHECKING:
    from relax_hpc.queue.controller.service import QueueService
    from relax_hpc.queue.controller.state.segments import Growth


@handles("append")
def append(
    service: QueueService,
    request: Request,
    shard: dict,
    logs: list[dict],
    fields: list[str],
    spare: bool = False,
) -> Any:
    """Segments, on disk already, of the attempts that tickets of the maker are at; or of whole ones
    that are spare."""
    state = service.state
    if (refused := state.puts.recall(request.key)) is not None:
        return {"refused": refused}
    if check_name(shard["name"]) in state.shards.numbers:
        raise Refused(
            "refused", f"append: the queue has a shard {shard['name']}; a name is used once"
        )
    if missing := set(UNSCORED).difference(fields):
        raise Refused("refused", f"append: {min(missing)} is missing in the fields {fields}")
    check_size("append: shard", shard)
    growths = [_growth(log, service.plan.samples_per_prompt) for log in logs]
    if len({growth[0] for growth in growths}) < len(growths):
        raise Refused(
            "refused",
            "append: a ticket is there twice; one of its attempts is appended to at a time",
        )
    refused = {
        growth[0]: why
        for growth in growths
        if (why := refusal(state, request.owner, growth, spare))
    }
    about = {"owner": request.owner, "shard": shard, "fields": fields, "spare": spare}
    service.record(op="append", key=request.key, growths=growths, refused=refused, **about)
    return {"refused": refused}


@handles("drop_attempt")
def drop_attempt(
    service: QueueService, request: Request, ticket: int, attempt: int, reason: str
) -> Any:
    """Drop all that there is of an attempt: of the one that ``ticket`` is at, which begins anew, or
    a spare one."""
    state = service.state
    if not reason:
        raise Refused(
            "refused", "drop_attempt: reason: found an empty text, expected why, in a word"
        )
    if not 0 <= ticket < state.tickets.next:
        raise Refused(
            "refused", f"drop_attempt: ticket: found {ticket}, allowed those that were admitted"
        )
    if state.puts.recall(request.key) is None:
        group = state.groups.get(ticket)
        spare = group is None or (group.owner, group.attempt) != (request.owner, attempt)
        about = {"ticket": ticket, "spare": spare, "reason": reason}
        service.record(op="drop_attempt", key=request.key, owner=request.owner, **about)
    return {}


def _growth(log: dict, samples_per_prompt: int) -> Growth:
    """Growth of one log that a request asks for; Refused if it is not as it should be."""
    numbers, segments, versions = (
        [log.get("ticket"), log.get("attempt")],
        log.get("segments"),
        log.get("versions"),
    )
    good = (
        _are_whole(numbers)
        and _are_whole(versions)
        and type(segments) is list
        and len(segments) > 0
    )
    good = good and all(_are_whole(segment) and len(segment) == 5 for segment in segments)
    good = good and all(segment[0] < samples_per_prompt and segment[4] < 2 for segment in segments)
    if not good or len({(episode, row) for episode, row, *_ in segments}) < len(segments):
        known = (
            f"segments as [episode below {samples_per_prompt}, row, start, tokens, 0 or 1: ended]"
        )
        raise Refused(
            "refused",
            f"append: logs: found {log!r:.80}, expected ticket, attempt, versions, {known}",
        )
    return numbers[0], numbers[1], segments, versions


def _are_whole(values: Any) -> bool:
    return type(values) is list and all(
        type(value) is int and 0 <= value < MAX_WHOLE for value in values
    )
