"""Requests about media of prompt groups in generation. Media are registered before they are
stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.messages import Refused, Request
from relax_hpc.queue.controller.registry import handles
from relax_hpc.queue.lengths import is_packed
from relax_hpc.queue.storage.media import MediaError, check_id

if TYPE_CHECKING:
    from relax_hpc.queue.controller.service import QueueService
    from relax_hpc.queue.controller.state.queue_state import QueueState

MAX_MEDIA = 256
"""Most media of a prompt group, of all its attempts together."""


@handles("media")
def media(service: QueueService, request: Request, ticket: int, ids: list[str]) -> Any:
    """Register media of the prompt group of ``ticket``. The client stores them if the answer is
    true."""
    held = service.state.media.media_of(ticket)
    try:
        new_ids = {check_id(media_id) for media_id in ids}.difference(held)
    except MediaError as error:
        raise Refused("refused", f"media: {error}") from error
    count = len(new_ids) + len(held)
    if count > MAX_MEDIA:
        text = (
            f"media: ticket {ticket} has {count} of them, allowed {MAX_MEDIA}; join small ones "
            "into one"
        )
        raise Refused("refused", text)
    group = service.state.groups.get(ticket)
    if not group or group.owner != request.owner:
        return {"named": False}
    if new_ids:
        service.record(op="media", ticket=ticket, ids=sorted(new_ids))
    return {"named": True}


def check_extras(extras: list[dict], rows: dict[int, int]) -> None:
    """Refused: an extra of a put is malformed, or of a ticket that is not in ``rows``, the number
    of rows by ticket."""
    for extra in extras:
        if not _is_valid_extra(extra, rows):
            expected = (
                "the ticket of a generated row, media (ids), and tokens (packed, of each "
                "row and of all)"
            )
            raise Refused("refused", f"put: extras: found {extra!r:.80}, expected {expected}")


def _is_valid_extra(extra: dict, rows: dict[int, int]) -> bool:
    ids, ticket, tokens = extra.get("media"), extra.get("ticket"), extra.get("tokens", b"")
    if type(ids) is not list or any(type(media_id) is not str for media_id in ids):
        return False
    if type(ticket) is not int or ticket not in rows:
        return False
    return tokens == b"" or is_packed(tokens, rows[ticket] + 1)


def without_media(state: QueueState, extras: list[dict]) -> dict[int, str]:
    """Prompt groups of a put that refer to media which are not registered for them, with the
    reason."""
    ids_by_ticket = {extra["ticket"]: extra["media"] for extra in extras}
    return {
        ticket: "unknown_media"
        for ticket, ids in ids_by_ticket.items()
        if not set(ids) <= set(state.media.media_of(ticket))
    }
