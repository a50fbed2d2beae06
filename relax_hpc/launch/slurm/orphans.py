"""Components of a heterogeneous job whose run has gone: they would hold their nodes, idle, to their time limit.

When Slurm ends component 0 because it has lost its nodes, those with nodes left live on, and the head that would give
them back may be gone as well. So the first rank of each role looks after its own component.
"""

from __future__ import annotations

import time

from relax_hpc.config import Config
from relax_hpc.launch.lease import holder_of
from relax_hpc.launch.records import read_launch
from relax_hpc.launch.slurm.commands import Slurm, SlurmError
from relax_hpc.launch.slurm.endings import give_back
from relax_hpc.launch.verdict import GONE, Evidence, Fate, verdict
from relax_hpc.rundir import RunDir
from relax_hpc.transfer_queue.plan import SUPERVISOR

_ASK_S = 10.0
"""Between questions to slurmctld, which serves the whole cluster."""


class Orphan:
    """Whether the component of ``epoch`` of a group is one."""

    def __init__(self, run: RunDir, config: Config, slurm: Slurm, group: str, epoch: int) -> None:
        launch = read_launch(run, group, epoch)
        self.run, self.slurm, self.limits = run, slurm, config.liveness
        self.component = launch.job if launch else ""
        self.leader = launch.allocation.rpartition("-")[0] if launch else ""
        self._seen: tuple[object, float] = (None, time.monotonic())
        self._ask_at = 0.0

    def possible(self) -> bool:
        """Whether it is a component that can outlive the first one."""
        return bool(self.leader) and self.component != self.leader

    def look(self, now: float) -> bool:
        """Give the component back if nobody has supervised its job for two leases, and Slurm says that it is over.

        ``now``: of the monotonic clock. To be called again and again; whether it was done.
        """
        holder = holder_of(self.run, SUPERVISOR)
        # A successor in another job ends what is left of its predecessor, unless Slurm did not answer.
        beat = holder.get("beat") if holder.get("allocation", "").rpartition("-")[0] == self.leader else None
        if beat is not None and beat != self._seen[0]:
            self._seen = beat, now
        if now - self._seen[1] < 2 * self.limits.lease_s or now < self._ask_at:
            return False
        self._ask_at = now + _ASK_S
        try:
            job = self.slurm.jobs(self.leader).get(self.leader)
            said = verdict(Evidence(job=job.state if job else GONE), self.limits)
            if said.fate not in (Fate.DEAD, Fate.LEAVES):
                return False
            give_back(self.run, self.slurm, self.component)
        except (SlurmError, OSError):
            return False
        return True
