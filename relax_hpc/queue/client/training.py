"""Training: steps, checkpoints, and whose turn it is where the actor and the engines share
devices."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from relax_hpc.config.roles import POLICY
from relax_hpc.queue.client.answers import Checkpoint, StepTrained
from relax_hpc.queue.client.connection import Submit, nothing, then


class Training:
    """Requests of a trainer, and of engines that share the actor's devices. Every method returns a
    future.

    ``task``: the trainer's, if it is not the policy's.
    """

    def __init__(self, submit: Submit) -> None:
        self._submit = submit

    def resume(self, step: int, task: str = POLICY) -> Future[None]:
        """Begin this incarnation with ``step``. For the policy, rows made with later weights are
        rolled back, and other trainers that trained on them go back too; another trainer gets the
        rows of later steps again."""
        return then(self._submit("resume", step=step, task=task), nothing)

    def settled(self, leases: Sequence[int]) -> Future[list[int]]:
        """Tickets of ``leases`` that nothing can take away any more, once that is known of all of
        them."""
        return then(self._submit("settled", leases=list(leases)), lambda answer: answer["tickets"])

    def trained(self, step: int, leases: Sequence[int], task: str = POLICY) -> Future[StepTrained]:
        """Report that ``step`` was trained on all that these leases hold."""
        return then(
            self._submit("trained", step=step, leases=list(leases), task=task), StepTrained.of
        )

    def checkpoints(self, task: str = POLICY) -> Future[list[Checkpoint]]:
        """The trainer's parts of those of the surviving lineage, oldest first."""
        return then(self._submit("checkpoints", task=task), Checkpoint.of_answer)

    def checkpoint(self, step: int, name: str, digest: str, task: str = POLICY) -> Future[None]:
        """The trainer's part of the checkpoint of ``step``, in folder ``name``, counts from here
        on."""
        return then(
            self._submit("checkpoint", step=step, name=name, digest=digest, task=task), nothing
        )

    def whole(self, step: int, seen: int) -> Future[tuple[bool, int]]:
        """Whether all trainers have saved ``step``, and how many steps all have trained: answered
        once the one is so, or the other is not ``seen`` any more."""
        submitted = self._submit("whole", step=step, seen=seen)
        return then(submitted, lambda answer: (answer["whole"], answer["trained_steps"]))

    def take_turn(self, side: str, step: int = 0) -> Future[None]:
        """Answered when the devices are free for ``side``: the actor that is to train ``step``, or
        the engines."""
        return then(self._submit("take_turn", side=side, step=step), nothing)

    def end_turn(self) -> Future[None]:
        """Report that the actor has made room."""
        return then(self._submit("end_turn"), nothing)

    def step_generated(self, step: int) -> Future[None]:
        """Answered when all rows of ``step`` are there and on disk: no engine is needed before the
        next version."""
        return then(self._submit("step_generated", step=step), nothing)

    def rest(self, reader: str, step: int) -> Future[None]:
        """The engine ``reader`` has made room, having nothing more to do for ``step``."""
        return then(self._submit("rest", reader=reader, step=step), nothing)
