"""`python -m relax_hpc.roles.replay`: one rank of a replay. It trains steps of a run again, on the
rows that the journal of the run names.

The rank runs the actor's own code (`TrainerRole`, `Policy`). Only the client of the queue differs:
it answers from the plan of the replay, so that no hub, rollout or forward role runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

from relax_hpc.base.cuda_allocator import expand_segments
from relax_hpc.base.errors import EXIT_DONE, RelaxError
from relax_hpc.base.machine.own_environment import restart_with_compat_driver
from relax_hpc.base.metrics.spans import Spans
from relax_hpc.base.versions import Version
from relax_hpc.config import Config, load_resolved
from relax_hpc.net.rendezvous.network import own_address
from relax_hpc.net.rendezvous.process import SignalFlag, die_with_parent, set_private_umask
from relax_hpc.net.rendezvous.world import join_world, single_rank_world
from relax_hpc.net.transport import SlabPool
from relax_hpc.queue.client import Claim, QueueClient, StepTrained, read_rows
from relax_hpc.queue.inspect.replay_plan import ReplayDir, ReplayPlan
from relax_hpc.queue.process_context import Context
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.media import MediaStore
from relax_hpc.queue.storage.shard_store import ShardReader, open_planes, shard_files

INCARNATION = 1
"""Incarnation of all processes of a replay, and of the versions that they publish."""
_ROLE = "actor"


def _done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


class PlannedQueue:
    """Answers the requests of an actor from a plan, in place of `QueueClient`.

    It has the part of the interface that the actor uses. Requests that would change a run, such as
    quarantine, end the replay.
    """

    def __init__(self, run: ReplayDir, config: Config, plan: ReplayPlan) -> None:
        self.run, self.plan = run, plan
        self.values: dict[int, dict[str, float]] = {}
        """Metrics of each trained step."""
        self._windows: Iterator[Claim] = chain.from_iterable(plan.steps)
        self._pool = SlabPool()
        owner = f"replay-{os.getpid()}"
        planes = open_planes(run, config, plan.group, owner, self._pool)
        self.store = ShardReader(shard_files(run, config), planes)
        self.store.pool = self._pool  # type: ignore[attr-defined]  # as ShardStore, which writes
        self.beat = SimpleNamespace(
            paused_s=0.0, is_blocked=False, unsaved={}, set_phase=lambda phase: None
        )
        self.training = SimpleNamespace(settled=self._settled, trained=self._trained)
        self.weights = SimpleNamespace(publish=lambda version, digest: _done([]))
        self.status = SimpleNamespace(report=self._report, note=self._note)

    def submit_claim(self, task: str, *_: object, **__: int) -> Future[Claim]:
        """The next window of the plan. After the last one, a future that is never done."""
        window = next(self._windows, None)
        return Future() if window is None else _done(window)

    @cached_property
    def media(self) -> MediaStore:
        """Media of the run. The store creates its folder, so it is opened at its first use."""
        return MediaStore(self.run.media, durable=False)

    def rows(self, claim: Claim) -> list[Row]:
        """Rows of a window; see `read_rows`."""
        return read_rows(self.store, claim)

    def quarantine(self, claim: Claim, tickets: Sequence[int], reason: str) -> NoReturn:
        """RelaxError: rows of a trained step are damaged, or differ from what was trained."""
        raise RelaxError(
            f"replay: rows of step {claim.step} cannot be used ({reason}, prompt groups "
            f"{', '.join(map(str, tickets))}); see {self.run.shards}"
        )

    def return_claim(self, claim: Claim) -> None:
        """Called after `quarantine`, which does not return."""

    def _settled(self, leases: Sequence[int]) -> Future[list[int]]:
        windows = [claim for claim in chain.from_iterable(self.plan.steps) if claim.lease in leases]
        return _done(list(chain.from_iterable(claim.tickets for claim in windows)))

    def _trained(self, step: int, leases: Sequence[int], task: str) -> Future[StepTrained]:
        return _done(StepTrained(staleness=[0], lag=0))

    def _report(
        self, role: str, step: int, values: Mapping[str, float], seconds: Mapping[str, float]
    ) -> None:
        self.values[step] = dict(values)
        self.run.write_steps(self.values)

    def _note(self, *note: object) -> None:
        print("replay:", *note, flush=True)


def replay(context: Context, plan: ReplayPlan) -> None:
    """Train the steps of the plan in this rank."""
    # These modules import torch, which takes seconds.
    from relax_hpc.queue.storage.media import read_placeholders
    from relax_hpc.roles.actor import Policy
    from relax_hpc.roles.ranks import Ranks
    from relax_hpc.roles.trainer_role import TrainerRole
    from relax_hpc.training.checkpoint import store
    from relax_hpc.training.model import PolicyModel
    from relax_hpc.training.models.hf_files import read_config

    class ReplayedPolicy(Policy):
        """The policy without engines, which neither need files nor share its devices."""

        def publish(self, number: int, due: bool = False) -> None:
            self.publisher.publish(Version(context.incarnation, number))

    config = context.config
    ranks = Ranks(context, config.actor.parallel)
    model = PolicyModel(
        read_config(context.model), config.model, config.actor.parallel, config.actor
    )
    model.load_hf(context.model)
    policy = ReplayedPolicy(context, ranks, model)
    # Files of versions are for engines and readers.
    policy.publisher.refresh_every = 0
    policy.held_out = None
    role = TrainerRole(
        context, ranks, config.actor, policy.trainer, policy, read_placeholders(context.model)
    )
    role.checkpoints = cast(Any, _NoCheckpoints())
    role.warm_up()
    if plan.checkpoint:
        folder = context.run.checkpoints / plan.checkpoint["name"]
        store.load(folder, policy.trainer, ranks.control, plan.checkpoint["digest"])
    policy.publish(plan.first)
    for step in range(plan.first, plan.last + 1):
        role.train(step)
        role.await_step_ack(step)
    policy.settle()
    ranks.close()


class _NoCheckpoints:
    """Stands for `Checkpoints`. A replay saves none."""

    def save(self, step: int) -> None:
        """Do nothing."""

    def values(self, step: int) -> dict[str, float]:
        """No metrics."""
        return {}


def make_context(run: ReplayDir, config: Config, plan: ReplayPlan) -> Context:
    """Meet the other ranks, and connect the leader with the plan."""
    ranks, address = config.actor.parallel.ranks, own_address(config, plan.group)
    world = single_rank_world(address)
    if ranks > 1:
        world = join_world(address, ranks, config.site.mpi, config.liveness.start_timeout_s)
    logs = run.logs(plan.group, INCARNATION)
    spans = Spans(logs / f"spans-{_ROLE}-{world.rank}.jsonl", _ROLE, time.monotonic())
    client = cast(QueueClient, PlannedQueue(run, config, plan)) if world.is_leader else None
    return Context(run, config, plan.group, _ROLE, INCARNATION, world, client, spans, SignalFlag())


def main(argv: list[str] | None = None) -> int:
    """Replay the plan in ``--folder``. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m relax_hpc.roles.replay", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args(argv)
    die_with_parent()
    set_private_umask()
    plan, config = ReplayPlan.read(args.folder), load_resolved(args.folder)
    if config.model.device == "cuda":
        restart_with_compat_driver("relax_hpc.roles.replay", argv or sys.argv[1:])
        expand_segments(os.environ)
    try:
        replay(make_context(ReplayDir(args.folder, Path(plan.source)), config, plan), plan)
    except RelaxError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return EXIT_DONE


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    # A thread waits for a window after the last one, and threads of libraries remain.
    os._exit(exit_code)
