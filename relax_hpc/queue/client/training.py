"""Requests about training: steps, checkpoints, and turns where the actor and the engines share
devices."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from relax_hpc.config.roles import POLICY
from relax_hpc.queue.client.answers import Checkpoint, StepTrained
from relax_hpc.queue.client.connection import Submit, ignore_answer, then


class TrainingRequests:
    """Requests of a trainer, and of engines that share the actor's devices. Every method returns a
    future.

    ``task``: task of the trainer, if it is not the policy's.
    """

    def __init__(self, submit: Submit) -> None:
        self._submit = submit

    def resume(self, step: int, task: str = POLICY) -> Future[None]:
        """Begin this incarnation with ``step``. If the policy resumes, rows of later weights are
        rolled back, and other trainers that trained on them resume earlier too. Another trainer
        gets the rows of later steps again."""
        return then(self._submit("resume", step=step, task=task), ignore_answer)

    def settled(self, leases: Sequence[int]) -> Future[list[int]]:
        """Tickets of ``leases`` that are on disk, as soon as this is known of all of them."""
        return then(self._submit("settled", leases=list(leases)), lambda answer: answer["tickets"])

    def trained(self, step: int, leases: Sequence[int], task: str = POLICY) -> Future[StepTrained]:
        """Report that ``step`` was trained on all rows of these leases."""
        return then(
            self._submit("trained", step=step, leases=list(leases), task=task),
            StepTrained.from_answer,
        )

    def checkpoints(self, task: str = POLICY) -> Future[list[Checkpoint]]:
        """The trainer's parts of all checkpoints in the surviving lineage, oldest first."""
        return then(self._submit("checkpoints", task=task), Checkpoint.list_from_answer)

    def checkpoint(self, step: int, name: str, digest: str, task: str = POLICY) -> Future[None]:
        """Report that the trainer's part of the checkpoint of ``step`` is in folder ``name``."""
        return then(
            self._submit("checkpoint", step=step, name=name, digest=digest, task=task),
            ignore_answer,
        )

    def whole(self, step: int, seen: int) -> Future[tuple[bool, int]]:
        """Whether all trainers have saved ``step``, and how many steps all have trained. It waits
        until all have saved it, or the number of trained steps is no longer ``seen``."""
        submitted = self._submit("whole", step=step, seen=seen)
        return then(submitted, lambda answer: (answer["whole"], answer["trained_steps"]))

    def take_turn(self, side: str, step: int = 0) -> Future[None]:
        """A future that is done when the devices are free for ``side``: the actor, to train
        ``step``, or the engines."""
        return then(self._submit("take_turn", side=side, step=step), ignore_answer)

    def end_turn(self) -> Future[None]:
        """Report that the actor has freed the devices."""
        return then(self._submit("end_turn"), ignore_answer)

    def step_generated(self, step: int) -> Future[None]:
        """A future that is done when all rows of ``step`` are on disk: no engine is needed before
        the next version."""
        return then(self._submit("step_generated", step=step), ignore_answer)

    def end_engine_turn(self, reader: str, step: int) -> Future[None]:
        """Report that the engine ``reader`` has no work left for ``step`` and has freed the
        devices."""
        return then(self._submit("rest", reader=reader, step=step), ignore_answer)
