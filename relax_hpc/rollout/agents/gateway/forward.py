"""`python -m relax_hpc.rollout.agents.gateway.forward --run_dir RUN`: the endpoint on a node
without the gateway.

It prints its address in one line. It ends with the process that started it, or when there has been
no gateway for a long time.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict
from pathlib import Path

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.rundir import RunDir
from relax_hpc.net.rendezvous.open_files import connection_limit
from relax_hpc.net.rendezvous.process import die_with_parent, set_private_umask
from relax_hpc.net.transport.calls import serve_nothing
from relax_hpc.net.transport.exchange import PeerGone
from relax_hpc.rollout.agents.gateway.broker import decode_reply
from relax_hpc.rollout.agents.gateway.front import Front, ProgramRequest, Reply
from relax_hpc.rollout.agents.gateway.link import Link, reach

_PATIENCE_S = 600.0
"""Seconds to wait for a new gateway after the connection to one was lost."""


class Forwarder:
    """The front of a node. It forwards requests to the gateway."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._link: Link | None = None
        self.front = Front(self._knows, self._forward)

    async def serve(self) -> None:
        """Serve until there is no gateway, and then raise DeadlineError."""
        self._link = await reach(self._run, serve_nothing, _PATIENCE_S)
        await self.front.start()
        print(self.front.url, flush=True)
        while True:
            await self._link.lost.wait()
            self._link = await reach(self._run, serve_nothing, _PATIENCE_S)

    async def _knows(self, key: str) -> bool:
        assert self._link
        try:
            return (await self._link.call(do="knows", key=key))["known"]
        except PeerGone:
            return False

    async def _forward(self, request: ProgramRequest) -> Reply:
        assert self._link
        try:
            return decode_reply(await self._link.call(do="request", **asdict(request)))
        except PeerGone as gone:
            return Reply.error(503, "gateway_gone", str(gone), request.path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m relax_hpc.rollout.agents.gateway.forward", description=__doc__
    )
    parser.add_argument("--run_dir", type=Path, required=True)
    set_private_umask()
    die_with_parent()
    connection_limit()
    try:
        asyncio.run(Forwarder(RunDir(parser.parse_args().run_dir)).serve())
    except RelaxError as error:
        raise SystemExit(f"forwarder: {error}") from None


if __name__ == "__main__":
    main()
