"""Requests about logs of attempts: append segments, and drop attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.messages import MAX_WHOLE, Refused, Request, check_size
from relax_hpc.queue.controller.planning.segments import find_refusal
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
    """Append segments, which are already on disk, to the logs of attempts that the client owns; or,
    with ``spare``, of whole attempts without a ticket."""
    state = service.state
    known_answer = state.puts.recall(request.key)
    if known_answer is not None:
        return {"refused": known_answer}
    if check_name(shard["name"]) in state.shards.numbers:
        raise Refused(
            "refused", f"append: the queue has a shard {shard['name']}; a name is used once"
        )
    missing = set(UNSCORED).difference(fields)
    if missing:
        raise Refused("refused", f"append: {min(missing)} is missing in the fields {fields}")
    check_size("append: shard", shard)
    growths = [_parse_growth(log, service.plan.samples_per_prompt) for log in logs]
    if len({growth[0] for growth in growths}) < len(growths):
        raise Refused(
            "refused", "append: a ticket occurs twice; a request appends to one attempt of a ticket"
        )
    reasons = {growth[0]: find_refusal(state, request.owner, growth, spare) for growth in growths}
    refused = {ticket: reason for ticket, reason in reasons.items() if reason}
    service.record(
        op="append",
        key=request.key,
        owner=request.owner,
        shard=shard,
        fields=fields,
        growths=growths,
        spare=spare,
        refused=refused,
    )
    return {"refused": refused}


@handles("drop_attempt")
def drop_attempt(
    service: QueueService, request: Request, ticket: int, attempt: int, reason: str
) -> Any:
    """Drop an attempt and its log: the present one of ``ticket``, which starts again, or a spare
    one."""
    state = service.state
    if not reason:
        raise Refused(
            "refused", "drop_attempt: reason: found an empty text, expected why, in a word"
        )
    if not 0 <= ticket < state.tickets.next:
        raise Refused("refused", f"drop_attempt: ticket: found {ticket}, allowed: admitted tickets")
    if state.puts.recall(request.key) is None:
        group = state.groups.get(ticket)
        spare = group is None or (group.owner, group.attempt) != (request.owner, attempt)
        service.record(
            op="drop_attempt",
            key=request.key,
            owner=request.owner,
            ticket=ticket,
            spare=spare,
            reason=reason,
        )
    return {}


def _parse_growth(log: dict, samples_per_prompt: int) -> Growth:
    """Growth of one log in a request. Refused: it is malformed."""
    ticket, attempt, versions = log.get("ticket"), log.get("attempt"), log.get("versions")
    segments = log.get("segments")
    if (
        not _are_naturals([ticket, attempt])
        or not _are_naturals(versions)
        or not _are_segments(segments, samples_per_prompt)
    ):
        form = f"[episode below {samples_per_prompt}, row, start, tokens, 0 or 1: ended]"
        raise Refused(
            "refused",
            f"append: logs: found {log!r:.80}, expected ticket, attempt, versions, segments as "
            f"{form}",
        )
    return log["ticket"], log["attempt"], log["segments"], log["versions"]


def _are_segments(segments: Any, samples_per_prompt: int) -> bool:
    """Whether it is a list of segments, at most one of each row."""
    if type(segments) is not list or not segments:
        return False
    for segment in segments:
        if not _are_naturals(segment) or len(segment) != 5:
            return False
        if segment[0] >= samples_per_prompt or segment[4] > 1:
            return False
    return len({(episode, row) for episode, row, *_ in segments}) == len(segments)


def _are_naturals(values: Any) -> bool:
    return type(values) is list and all(
        type(value) is int and 0 <= value < MAX_WHOLE for value in values
    )
