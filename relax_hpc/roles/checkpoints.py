"""A trainer role's part of checkpoints: saved during training, and valid when the queue has
journaled it.

A checkpoint contains the same step of all roles that train. It is whole when each of them has saved
its part, and a run resumes only from a whole checkpoint.
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

_MAX_REASON_CHARS = 500


class Checkpoints:
    """Checkpoints of one rank. Every rank creates it and makes the same calls."""

    def __init__(self, context: Context, ranks: Ranks, trainer: Trainer) -> None:
        self.context = context
        self.config = context.config
        self.ranks = ranks
        self.trainer = trainer
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
        """Newest step that this role has saved, and the wall-clock time of the save."""
        self.part = "" if context.role == POLICY else context.role
        """Part of the names of its folders; empty for the policy."""

    def load(self) -> int:
        """Load this role's part of the newest checkpoint that verifies. Return the step to begin
        with: 0 if there is no checkpoint.

        RelaxError: checkpoints exist and none verifies. A start from the beginning would lose all
        work, and a filesystem with a fault may be repaired later.
        """
        role = self.context.role
        self.saver.prepare()
        self.context.report_phase("")
        messages = self.ranks.ask_queue(
            lambda client: then(client.training.checkpoints(role), _messages)
        )
        points = [Checkpoint(**message) for message in messages]
        points = [point for point in reversed(points) if point.whole]
        step = self._newest(points) if points else 0
        self.saved = step, time.time()
        self.saver.ready()
        self.ranks.ask_queue(lambda client: client.training.resume(step, role))
        self.context.report_phase("")
        return step

    def _newest(self, points: Sequence[Checkpoint]) -> int:
        """Load the first of ``points``, newest first, that verifies. Return its step."""
        failures = []
        for point in points:
            directory = self.context.run.checkpoints / point.name
            self.context.report_phase(f"loading checkpoint {point.name}")
            try:
                loaded = store.load(directory, self.trainer, self.ranks.control, point.digest)
                return int(loaded["step"])
            except store.CheckpointError as error:
                print(f"skipping a checkpoint that does not verify: {error}", flush=True)
                failures.append(str(error))
        raise RelaxError(
            f"checkpoints: none of {len(points)} verifies ({failures[0]}); restore one of them, or "
            "start a new run from the weights of a version"
        )

    def save(self, step: int) -> None:
        """Save everything that training step ``step`` needs. When it is saved, checkpoints older
        than `keep_last` are deleted."""
        with self.context.spans("checkpoint", step=step):
            incarnation = self.context.incarnation
            name = checkpoint_name(self.part, incarnation, step)
            first = step * self.config.prompts_per_step
            meta = {
                "step": step,
                "first_ticket": first,
                "seed": self.config.seed,
                "incarnation": incarnation,
            }
            journal = partial(self.journal, step, time.time(), name)
            self.saver.save(self.context.run.checkpoints / name, meta, journal)

    def journal(self, step: int, at: float, name: str, digest: str) -> None:
        """Make the checkpoint valid. It runs in the leader's saving thread."""
        client, root = self.context.client, self.context.run.checkpoints
        assert client is not None
        client.training.checkpoint(step, name, digest, self.context.role).result()
        self.saved, client.beat.unsaved = (step, at), {}
        points = client.training.checkpoints(self.context.role).result()
        kept = {point.name for point in checkpoints_to_keep(points, self.config.checkpoint)}
        store.remove_others(root, kept, self.context.incarnation, self.part)

    def _note_unsaved(self, reason: str) -> None:
        """Report that a checkpoint was not written. It runs in the leader's saving thread."""
        client, (step, at) = self.context.client, self.saved
        assert client is not None
        client.status.note("checkpoint_unwritten", reason, "unwritten")
        client.beat.unsaved = {
            "step": step,
            "since": at,
            "failed": self.saver.failed,
            "why": reason[:_MAX_REASON_CHARS],
        }

    def needs_save(self, step: int, saved: int) -> bool:
        """Whether the state at ``step`` has to be saved; ``saved`` is the step of the last attempt.
        The result is the same in all ranks."""
        with self.context.spans("checkpoint", step=step):
            self.saver.wait()
        return self.ranks.tell({"unsaved": step > saved or bool(self.saver.failure)})["unsaved"]

    def settle(self) -> None:
        """Wait until pending checkpoints are written."""
        with self.context.spans("checkpoint"):
            self.saver.settle()

    def values(self, step: int) -> dict[str, float]:
        """Return scalars after training step ``step``: the number of steps that a resume would
        repeat."""
        return {
            "perf/unsaved_steps": step + 1 - self.saved[0],
            "perf/unsaved_checkpoints": self.saver.failed,
        }


def _messages(points: list[Checkpoint]) -> list[dict[str, Any]]:
    return [asdict(point) for point in points]


def checkpoints_to_keep(points: list[Checkpoint], config: CheckpointConfig) -> list[Checkpoint]:
    """Return the checkpoints that are not deleted: the last whole ones, those of `keep_every`, and
    those of which other roles have not saved their part yet.

    >>> def saved(step, whole=True):
    ...     return Checkpoint(step=step, incarnation=1, name=f"c{step}", digest="", whole=whole)
    >>> points = [saved(10), saved(20), saved(30), saved(40, whole=False)]
    >>> settings = CheckpointConfig(keep_last=1, keep_every=20)
    >>> [point.step for point in checkpoints_to_keep(points, settings)]
    [20, 30, 40]
    """
    whole = [point for point in points if point.whole]
    old, last = whole[: -config.keep_last], whole[-config.keep_last :]
    every = config.keep_every
    permanent = [point for point in old if every and point.step % every == 0]
    return permanent + last + [point for point in points if not point.whole]
