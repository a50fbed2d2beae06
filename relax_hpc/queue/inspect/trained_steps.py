"""The windows of rows on which the policy trained each step, from the journal of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from relax_hpc.base.rundir import RunDir
from relax_hpc.config import load_resolved
from relax_hpc.config.roles import POLICY
from relax_hpc.queue.client import Claim
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.inspect.journal_copy import JournalCopy
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.records import NO_STEP
from relax_hpc.queue.storage.shard import check_name


@dataclass(slots=True)
class TrainedStep:
    """A step in the surviving lineage."""

    incarnation: int
    """Incarnation of the policy that trained it."""
    windows: list[Claim] = field(default_factory=list)
    """Windows of the step in the order of training, without shards."""


class TrainingHistory:
    """Steps that the policy trained, and the rows of them that still exist. JournalError: the
    journal is damaged."""

    def __init__(self, run: RunDir) -> None:
        self.folder = run.shards
        self._state = QueueState(Plan.from_config(load_resolved(run.root)))
        self.steps: dict[int, TrainedStep] = {}
        for _ in JournalCopy(run).replay(self._state, self._take):
            pass
        trained = self._state.progress.trained[POLICY]
        self.steps = {step: value for step, value in self.steps.items() if step < trained}
        self.checkpoints: list[dict[str, Any]] = self._state.progress.parts(POLICY)
        """{step, incarnation, name, digest} of each checkpoint that was not replaced, oldest
        first. Its folder may have been deleted."""

    def windows(self, step: int) -> list[Claim] | None:
        """The windows of ``step`` with the shards that have their rows now; None: some rows do not
        exist any more."""
        claims = list[Claim]()
        for window in self.steps[step].windows:
            if any(ticket not in self._state.groups for ticket in window.tickets):
                return None
            needs = self._state.tasks[POLICY].needs
            tickets_by_shard = self._state.tickets_by_shard(window.tickets, needs)
            shards = list[dict[str, Any]]()
            for number, tickets in sorted(tickets_by_shard.items()):
                name = check_name(self._state.shards[number].descriptor["name"])
                if not (self.folder / name).exists():
                    return None
                # Planes of a process that has ended could hang.
                size = self._state.shards[number].descriptor["bytes"]
                shards.append({"name": name, "bytes": size, "planes": {}, "tickets": tickets})
            claims.append(Claim.from_message(asdict(window) | {"shards": shards}))
        return claims

    def kept_steps(self) -> list[int]:
        """Trained steps whose rows all exist, ascending."""
        return [step for step in sorted(self.steps) if self.windows(step) is not None]

    def _take(self, record: dict[str, Any]) -> None:
        """Note the leases of a step before the record that ends them is applied."""
        if record["op"] != "trained" or record["task"] != POLICY:
            return
        state, step = self._state, record["step"]
        trained = TrainedStep(state.lineage.incarnation)
        for number in record["leases"]:
            lease = state.leases[number]
            groups = [state.groups[ticket] for ticket in lease.tickets]
            positions = [group.position for group in groups if group.position != NO_STEP]
            claim = Claim(
                lease=number,
                step=step,
                tickets=tuple(lease.tickets),
                shards=(),
                min_version=0,
                place=min(positions, default=min(lease.tickets)),
                with_media=tuple(t for t in lease.tickets if t in state.media.holders),
                episodes=tuple(group.episodes for group in groups),
                assignment=lease.assignment,
            )
            trained.windows.append(claim)
        self.steps[step] = trained
