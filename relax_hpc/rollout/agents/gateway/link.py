"""The connecting end: a rollout process, or a forwarder, at the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from relax_hpc.base.errors import DeadlineError
from relax_hpc.base.rundir import RunDir
from relax_hpc.net.transport.calls import CallLink
from relax_hpc.net.transport.exchange import Message
from relax_hpc.net.transport.sockets import FrameConnection, connect
from relax_hpc.rollout.agents.gateway.place import Place, newest_place, purpose_of

_CONNECT_S = 5.0
"""Seconds for a try to connect."""
_AGAIN_S = 0.2
"""Seconds between two tries."""


class Link(CallLink):
    """A connection to the gateway at a place, opened by `reach`; for one event loop."""

    def __init__(
        self,
        place: Place,
        connection: FrameConnection,
        serve: Callable[[Message], Awaitable[Message]],
    ) -> None:
        super().__init__(connection, serve)
        self.place = place


async def reach(
    run: RunDir, serve: Callable[[Message], Awaitable[Message]], limit_s: float
) -> Link:
    """A connection to the newest gateway of a run; ``serve`` answers what it asks. DeadlineError:
    there is none within ``limit_s``."""
    until, why = time.monotonic() + limit_s, "none has said where it is"
    while time.monotonic() < until:
        if place := await asyncio.to_thread(newest_place, run):
            try:
                made = await asyncio.to_thread(
                    connect, place.endpoint, run.token(), purpose_of(place.incarnation), _CONNECT_S
                )
                return Link(place, made, serve)
            except OSError as error:
                why = f"{place.endpoint}: {error}"
        await asyncio.sleep(_AGAIN_S)
    raise DeadlineError(
        f"no gateway within {limit_s:.0f} s: {why}; open the log of role gateway in logs/hub"
    )
