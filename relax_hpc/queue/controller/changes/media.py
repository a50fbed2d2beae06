"""Changes of media: prompt groups need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_hpc.queue.controller.registry import applies

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState


@applies("media")
def hold_media(state: QueueState, ticket: int, ids: list[str]) -> None:
    state.media.hold(ticket, ids)
