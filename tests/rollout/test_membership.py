"""Engines that leave a process because of changed settings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from relax_hpc.base.rundir import RunDir
from relax_hpc.config import dump, load, load_resolved
from relax_hpc.config.changes import add_change
from relax_hpc.rollout.engines.pool import EngineId
from relax_hpc.rollout.membership import Membership

DEADLINE_S = 20.0


class RecordedPool:
    """A pool whose engines serve until they are removed."""

    def __init__(self, count: int) -> None:
        self.members = {number: SimpleNamespace(leaving=asyncio.Event()) for number in range(count)}
        self.has_removed = asyncio.Event()

    def remove(self, number: int) -> None:
        self.members[number].leaving.set()
        self.has_removed.set()


def test_a_change_between_the_start_of_a_process_and_its_first_check_counts(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    settings: dict[str, Any] = {"rollout.replicas": 2, "liveness.beat_s": 0.05}
    dump(load([], settings), run.config)
    config = load_resolved(run.root, "rollout")
    add_change(run, config, "rollout", [], {"rollout.without": ["rollout/1"]})

    async def follow() -> list[int]:
        pool = RecordedPool(2)
        context = SimpleNamespace(run=run, config=config, group="rollout")
        engines = [EngineId(0, 0), EngineId(1, 1)]
        membership = Membership(cast(Any, context), engines, cast(Any, pool))
        following = asyncio.create_task(membership.follow())
        async with asyncio.timeout(DEADLINE_S):
            await pool.has_removed.wait()
        following.cancel()
        return [number for number, member in pool.members.items() if member.leaving.is_set()]

    assert asyncio.run(follow()) == [1]
