"""The rollout role: generates prompt groups and puts them into the queue until the run is
finished."""

from __future__ import annotations

from relax_hpc.queue.process_context import Context
from relax_hpc.roles.event_loop import run_until_stopped
from relax_hpc.rollout.rollout_rank import Rollout


def run(context: Context) -> None:
    """Generate until the run is finished."""

    async def serve() -> None:
        await Rollout(context).serve()

    run_until_stopped(serve, context.stop)
