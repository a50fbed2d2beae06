"""Requests about media of prompt groups that are under way: they are named before they are
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
"""Media of a prompt group at most, all its attempts together."""


@handles("media")
def media(service: QueueService, request: Request, ticket: int, ids: list[str]) -> Any:
    """The prompt group of ``ticket`` needs these media, which are stored as soon as this is
    answered with true."""
    try:
        fresh = {check_id(media_id) for media_id in ids}.difference(service.state.media.of(ticket))
    except MediaError as error:
        raise Refused("refused", f"media: {error}") from error
    found = len(fresh) + len(service.state.media.of(ticket))
    if found > MAX_MEDIA:
        text = (
            f"media: ticket {ticket} has {found} of them, allowed {MAX_MEDIA}; join small ones "
            "into one"
        )
        raise Refused("refused", text)
    group = service.state.groups.get(ticket)
    if not group or group.owner != request.owner:
        return {"named": False}
    if fresh:
        service.record(op="media", ticket=ticket, ids=sorted(fresh))
    return {"named": True}


def check_extras(extras: list[dict], rows: dict[int, int]) -> None:
    """Refused unless the extras of a put are as they should be, and about some of its tickets,
    which have so many ``rows``."""
    for extra in extras:
        ids, ticket, tokens = extra.get("media"), extra.get("ticket"), extra.get("tokens", b"")
        good = type(ids) is list and all(type(media_id) is str for media_id in ids)
        good = good and type(ticket) is int and ticket in rows
        if not good or not (tokens == b"" or is_packed(tokens, rows[ticket] + 1)):
            expected = (
                "the ticket of a generated row, media (ids), and tokens (packed, of each "
                "row and of all)"
            )
            raise Refused("refused", f"put: extras: found {extra!r:.80}, expected {expected}")


def without_media(state: QueueState, extras: list[dict]) -> dict[int, str]:
    """Prompt groups of a put that name media which they have not said they need, with the
    reason."""
    named = {extra["ticket"]: extra["media"] for extra in extras}
    return {
        ticket: "unknown_media"
        for ticket, ids in named.items()
        if not set(ids) <= set(state.media.of(ticket))
    }
