"""Training: steps, checkpoints, and whose turn it is where the actor and the engines share devices."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from relax_hpc.transfer_queue.client.answers import Checkpoint, StepTrained
from relax_hpc.transfer_queue.client.connection import Submit, nothing, then


class Training:
    """What an actor says and asks, and engines that share its devices. Every method returns a future."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit

    def resume(self, step: int) -> Future[None]:
        """This incarnation begins with ``step``: what weights after it made is rolled back."""
        return then(self._submit("resume", step=step), nothing)

    def settled(self, leases: Sequence[int]) -> Future[list[int]]:
        """Tickets of ``leases`` that nothing can take away any more, once that is known of all of them."""
        return then(self._submit("settled", leases=list(leases)), lambda answer: answer["tickets"])

    def trained(self, step: int, leases: Sequence[int]) -> Future[StepTrained]:
        """``step`` was trained on all that these leases hold."""
        return then(self._submit("trained", step=step, leases=list(leases)), StepTrained.of)

    def checkpoints(self) -> Future[list[Checkpoint]]:
        """Those of the surviving lineage, oldest first."""
        return then(self._submit("checkpoints"), Checkpoint.of_answer)

    def checkpoint(self, step: int, name: str, digest: str) -> Future[None]:
        """The checkpoint in folder ``name`` counts from here on."""
        return then(self._submit("checkpoint", step=step, name=name, digest=digest), nothing)

    def take_turn(self, side: str, step: int = 0) -> Future[None]:
        """Answered when the devices are free for ``side``: the actor that is to train ``step``, or the engines."""
        return then(self._submit("take_turn", side=side, step=step), nothing)

    def end_turn(self) -> Future[None]:
        """The actor has made room."""
        return then(self._submit("end_turn"), nothing)

    def step_generated(self, step: int) -> Future[None]:
        """Answered when all rows of ``step`` are there and on disk: no engine is needed before the next version."""
        return then(self._submit("step_generated", step=step), nothing)

    def rest(self, reader: str, step: int) -> Future[None]:
        """The engine ``reader`` has made room, having nothing more to do for ``step``."""
        return then(self._submit("rest", reader=reader, step=step), nothing)
