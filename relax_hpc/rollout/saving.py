"""Hands what is unfinished to the queue while it is made, so that a death loses little of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from relax_hpc.config.schema import RolloutConfig
from relax_hpc.errors import RelaxError
from relax_hpc.rollout.unfinished import Unfinished
from relax_hpc.transfer_queue.client import QueueClient
from relax_hpc.transfer_queue.client.partials import keep

_LAST_SAVE_S = 3.0
"""For the queue to take what is unfinished when the role is asked to stop."""


@asynccontextmanager
async def saving(client: QueueClient, shape: RolloutConfig, groups: Unfinished) -> AsyncIterator[None]:
    """Have the queue keep what there is of ``groups``, now and then and when the body is cancelled."""
    ended = asyncio.Event()

    async def save_now_and_then() -> None:
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(shape.save_partial_every_s):
                    await ended.wait()
                return
            await asyncio.to_thread(save, client, shape, groups)

    saver = asyncio.create_task(save_now_and_then())
    try:
        yield
    except asyncio.CancelledError:
        ended.set()
        await saver
        await asyncio.to_thread(save, client, shape, groups, _LAST_SAVE_S)
        raise
    finally:
        ended.set()
        await saver


def save(client: QueueClient, shape: RolloutConfig, groups: Unfinished, timeout: float | None = None) -> None:
    """Hand over what the queue does not have; if it cannot, no more is lost than with the process."""
    if shape.save_partial == "off":
        return
    made = groups.news(shape.save_partial == "tokens", shape.max_new_tokens)
    if made:
        try:
            rows, reused = groups.rows(made), groups.reused(list(made))
            groups.kept(made, keep(client, rows, dict(groups.work), reused, timeout=timeout))
        except (RelaxError, OSError) as error:
            print(f"{len(made)} samples of unfinished prompt groups were not saved: {error}", flush=True)
