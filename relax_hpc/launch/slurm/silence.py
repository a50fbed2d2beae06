"""Groups in jobs of their own that fall silent with their supervisor: the node is gone, and Slurm misses it late."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from relax_hpc.launch.slurm.commands import Slurm, SlurmError
from relax_hpc.launch.slurm.whereabouts import own_job
from relax_hpc.launch.supervisor import Supervisor
from relax_hpc.rendezvous.roster import latest_epoch
from relax_hpc.rundir import RunDir
from relax_hpc.transfer_queue.plan import SUPERVISOR


class Silence:
    """Gives a group to another job when neither it nor the supervisor in its job has given a sign for a lease.

    ``submit`` is told the group and a node to avoid, and returns the job; empty: none can be had, and Slurm itself
    brings the old one back when it has missed the node (SlurmdTimeout, and then its credentials' expiry).
    """

    def __init__(self, run: RunDir, slurm: Slurm, lease_s: float, submit: Callable[[str, str], str]) -> None:
        self.run, self.slurm, self.lease_s, self.submit = run, slurm, lease_s, submit
        self._seen: dict[str, tuple[str, float]] = {}
        """Group -> its supervisor's last beat, and since when that stands still by the clock here."""
        self._suspects: dict[str, int] = {}

    def suspect(self, name: str, epoch: int) -> None:
        """No member of ``epoch`` of a group has given a sign for a lease."""
        self._suspects[name] = epoch

    def tick(self, supervisor: Supervisor, names: Iterable[str]) -> None:
        """Look at the supervisors of ``names``; to be called once a beat."""
        for name in names:
            self._look(name)
        for name, epoch in list(self._suspects.items()):
            still_s = time.monotonic() - self._seen.get(name, ("", time.monotonic()))[1]
            if latest_epoch(self.run, name) > epoch:
                del self._suspects[name]
            elif still_s > self.lease_s:
                # Asked again at the next beat if Slurm does not answer.
                with contextlib.suppress(SlurmError):
                    self._replace(supervisor, name, still_s)
                    del self._suspects[name]

    def _look(self, name: str) -> None:
        try:
            beat = (self.run.rendezvous(f"{SUPERVISOR}-{name}") / "lease").read_text()
        except OSError:
            return
        if self._seen.get(name, ("", 0.0))[0] != beat:
            self._seen[name] = (beat, time.monotonic())

    def _replace(self, supervisor: Supervisor, name: str, still_s: float) -> None:
        job = own_job(self.run, name)
        found = self.slurm.jobs(job).get(job) if job else None
        if found is None or found.state != "RUNNING" or found.used_s < still_s:
            # Slurm has missed it by now, and may have brought it back already; or somebody has ended it.
            return
        supervisor.count_failure(name, f"job {job} has given no sign for {self.lease_s:.0f} s")
        batch_node = self.slurm.hostnames(found.node_list)[0]
        if new := self.submit(name, batch_node):
            supervisor.terminal.say(f"{name}: no sign of its supervisor on {batch_node} either: goes on in job {new}")
            if name in supervisor.elsewhere:
                supervisor.elsewhere[name] = new
            self.slurm.cancel(job)
