"""A trainer role's part of checkpoints: saved beside training, counted once the queue has journaled
it, resumed from.

A checkpoint is one cut over all roles of a run that train: it is whole when each has saved its part
of the same step, and only what is whole is resumed from.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.rundir import checkpoint_name
from relax_hpc.config.roles import POLICY
from relax_hpc.config.schema import CheckpointConfig
from relax_hpc.queue.client import Checkpoint, then
from relax_hpc.queue.process_context import Context
from relax_hpc.roles.ranks import Ranks
from relax_hpc.training.checkpoint import store
from relax_hpc.training.checkpoint.saver import Saver
from relax_hpc.training.trainer import Trainer

_WORDS = 500


class Checkpoints:
    """Checkpoints of one rank; every rank makes and calls it alike."""

    def __init__(self, context: Context, ranks: Ranks, trainer: Trainer) -> None:
        self.context, self.config, self.ranks, self.trainer = (
            context,
            context.config,
            ranks,
            trainer,
        )
        settings, client = self.config.checkpoint, context.client
        self.saver = Saver(
            trainer,
            ranks.channel(settings.timeout_s),
            settings.timeout_s,
            self._note_unsaved,
            settings.max_failures,
            stands=lambda: client is None or client.beat.is_blocked,
        )
        self.saved: tuple[int, float] = 0, time.time()
        """Newest step that this role has saved, and when that was, of the wall clock."""
        self.part = "" if context.role == POLICY else context.role
        """Part of the names of its folders; empty for the policy."""

    def load(self) -> int:
        """Load this role's part of the newest checkpoint that verifies; the step to begin with: 0
        if there is none.

        RelaxError if there are some and none verifies: to begin anew would lose all that they hold,
        and a filesystem that is ill now may have them whole later.
        """
        role = self.context.role
        self.saver.prepare()
        self.context.report_phase("")
        found = self.ranks.ask(lambda client: then(client.training.checkpoints(role), _messages))
        points = [
            point for point in reversed([Checkpoint(**about) for about in found]) if point.whole
        ]
        step = self._newest(points) if points else 0
        self.saved = step, time.time()
        self.saver.ready()
        self.ranks.ask(lambda client: client.training.resume(step, role))
        self.context.report_phase("")
        return step

    def _newest(self, points: Sequence[Checkpoint]) -> int:
        """The step of the first of ``points``, newest first, that verifies."""
        failures = []
        for point in points:
            directory = self.context.run.checkpoints / point.name
            self.context.report_phase(f"loading checkpoint {point.name}")
            try:
                return int(
                    store.load(directory, self.trainer, self.ranks.control, point.digest)["step"]
                )
            except store.CheckpointError as error:
                print(f"skipping a checkpoint that does not verify: {error}", flush=True)
                failures.append(str(error))
        raise RelaxError(
            f"checkpoints: none of {len(points)} verifies ({failures[0]}); bring one back as it "
            "was, or go on from the weights of a version in a new run"
        )

    def save(self, step: int) -> None:
        """Save everything that training step ``step`` needs; what is older than `keep_last` goes
        once it is saved."""
        with self.context.spans("checkpoint", step=step):
            incarnation = self.context.incarnation
            name, first = (
                checkpoint_name(self.part, incarnation, step),
                step * self.config.prompts_per_step,
            )
            meta = {
                "step": step,
                "first_ticket": first,
                "seed": self.config.seed,
                "incarnation": incarnation,
            }
            journal = partial(self.journal, step, time.time(), name)
            self.saver.save(self.context.run.checkpoints / name, meta, journal)

    def journal(self, step: int, at: float, name: str, digest: str) -> None:
        """A checkpoint counts from here on. In the leader's saving thread."""
        client, root = self.context.client, self.context.run.checkpoints
        client.training.checkpoint(step, name, digest, self.context.role).result()
        self.saved, client.beat.unsaved = (step, at), {}
        points = client.training.checkpoints(self.context.role).result()
        kept = {point.name for point in kept_points(points, self.config.checkpoint)}
        store.remove_others(root, kept, self.context.incarnation, self.part)

    def _note_unsaved(self, why: str) -> None:
        """Note that a checkpoint was not written, in the leader's saving thread."""
        client, (step, at) = self.context.client, self.saved
        client.status.note("checkpoint_unwritten", why, "unwritten")
        client.beat.unsaved = {
            "step": step,
            "since": at,
            "failed": self.saver.failed,
            "why": why[:_WORDS],
        }

    def unsaved(self, step: int, saved: int) -> bool:
        """Whether there is something to save at ``step``, ``saved`` being the last that was tried;
        for all ranks."""
        with self.context.spans("checkpoint", step=step):
            self.saver.wait()
        return self.ranks.tell({"unsaved": step > saved or bool(self.saver.failure)})["unsaved"]

    def settle(self) -> None:
        """Wait for what is still being written."""
        with self.context.spans("checkpoint"):
            self.saver.settle()

    def values(self, step: int) -> dict[str, float]:
        """Scalars after training step ``step``: how many steps a resume would lose."""
        return {
            "perf/unsaved_steps": step + 1 - self.saved[0],
            "perf/unsaved_checkpoints": self.saver.failed,
        }


def _messages(points: list[Checkpoint]) -> list[dict[str, Any]]:
    return [asdict(point) for point in points]


def kept_points(points: list[Checkpoint], config: CheckpointConfig) -> list[Checkpoint]:
    """The checkpoints that stay: the last whole ones, every so-manyth, and what others have yet to
    save their part of.

    >>> points = [Checkpoint(step=step, incarnation=1, name=f"c{step}", digest="") for step in (10,
    ...     20, 30, 40)]
    >>> points.append(Checkpoint(step=50, incarnation=1, name="c50", digest="", whole=False))
    >>> [point.step for point in kept_points(points, CheckpointConfig(keep_last=1, keep_every=20))]
    [20, 40, 50]
    """
    every, whole = config.keep_every, [point for point in points if point.whole]
    old, last = whole[: -config.keep_last], whole[-config.keep_last :]
    return (
        [p for p in old if every and not p.step % every]
        + last
        + [point for point in points if not point.whole]
    )
