"""The connecting end: the connection of a rollout process or a forwarder to the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from relax_hpc.base.errors import DeadlineError
from relax_hpc.base.rundir import RunDir
from relax_hpc.net.transport.calls import CallLink
from relax_hpc.net.transport.exchange import Message
from relax_hpc.net.transport.sockets import FrameConnection, connect
from relax_hpc.rollout.agents.gateway.address import GatewayAddress, newest_address, purpose_of

_CONNECT_S = 5.0
"""Seconds for one attempt to connect."""
_RETRY_S = 0.2
"""Seconds between two attempts."""


class Link(CallLink):
    """A connection to the gateway at ``address``, opened by `reach`; for one event loop."""

    def __init__(
        self,
        address: GatewayAddress,
        connection: FrameConnection,
        serve: Callable[[Message], Awaitable[Message]],
    ) -> None:
        super().__init__(connection, serve)
        self.address = address


async def reach(
    run: RunDir, serve: Callable[[Message], Awaitable[Message]], limit_s: float
) -> Link:
    """Connect to the newest gateway of a run. ``serve`` answers the gateway's calls. DeadlineError:
    there is no gateway within ``limit_s``."""
    deadline, reason = time.monotonic() + limit_s, "no gateway has published its address"
    while time.monotonic() < deadline:
        address = await asyncio.to_thread(newest_address, run)
        if address:
            try:
                connection = await asyncio.to_thread(
                    connect,
                    address.endpoint,
                    run.token(),
                    purpose_of(address.incarnation),
                    _CONNECT_S,
                )
                return Link(address, connection, serve)
            except OSError as error:
                reason = f"{address.endpoint}: {error}"
        await asyncio.sleep(_RETRY_S)
    raise DeadlineError(
        f"no gateway within {limit_s:.0f} s: {reason}; open the log of role gateway in logs/hub"
    )
