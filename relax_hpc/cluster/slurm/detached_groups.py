"""Groups of a heterogeneous run that went on in jobs of their own: looked after from afar, and
taken back at its end.

A successor has a component for every group again. It could not start where a group stayed away on
nodes of its own, and no others are free; so with the job of the whole run these end too, after
their groups have saved.
"""

from __future__ import annotations

import contextlib
import time

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.allocation import Allocation
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError
from relax_hpc.cluster.slurm.lost_jobs import refuse_vain_jobs
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise.launch_records import all_done, all_ended, read_launch
from relax_hpc.cluster.supervise.supervisor import Supervisor
from relax_hpc.cluster.supervise.verdict import GONE, Evidence, Fate, verdict
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.groups import group_of
from relax_hpc.net.rendezvous.roster import latest_incarnation

_ASK_S, _SOON_S = 10.0, 2.0
"""Seconds between looks at their jobs (slurmctld serves the whole cluster): mostly, and after a
group's end."""
_RESIZED = "it was submitted again with other resources than its component has"
_NO_COMPONENT = "its component was given back"


class Moved:
    """Moved groups of the job around ``allocation``, which has a place for each."""

    def __init__(self, run: RunDir, config: Config, slurm: Slurm, allocation: Allocation) -> None:
        self.run, self.config, self.slurm, self.allocation = run, config, slurm, allocation
        self.ledger = Ledger(run)
        self._asked = time.monotonic()

    def find(self, supervisor: Supervisor) -> None:
        """Tell a supervisor that begins which of its groups live elsewhere, and which cannot be in
        their component."""
        for name in supervisor.roll.names:
            if all_done(self.run, self.config, name):
                continue
            if entry := self.ledger.newest(name):
                supervisor.roll.elsewhere[name] = entry.job
            elif why := self._unfit(name):
                supervisor.roll.unfit[name] = why

    def _unfit(self, name: str) -> str:
        place = self.allocation.places[name]
        if place.het and self.ledger.gave_way(place.job):
            return _NO_COMPONENT
        return _RESIZED if place.het and self._resized(name) else ""

    def _resized(self, name: str) -> bool:
        """Whether a group asks for other resources by now than the components of this run were
        submitted with."""
        now = group_of(load_resolved(self.run.root, name), name).resources
        return now != group_of(self.config, name).resources

    # -- while the job goes on ---------------------------------------------------------------------

    def tick(self, supervisor: Supervisor) -> None:
        """Look for groups whose job is gone: they get another one, or are taken back. To be called
        once a beat."""
        waited_s = time.monotonic() - self._asked
        soon = waited_s >= _SOON_S and any(
            self._has_ended(name) for name in supervisor.roll.elsewhere
        )
        if supervisor.roll.elsewhere and (soon or waited_s >= _ASK_S):
            self._asked = time.monotonic()
            with contextlib.suppress(SlurmError, OSError):
                self._look(supervisor)

    def _has_ended(self, name: str) -> bool:
        """Whether a group has left its marks in the job that it has now, but is not done."""
        launch, entry = (
            read_launch(self.run, name, latest_incarnation(self.run, name)),
            self.ledger.last(name),
        )
        here = launch is not None and entry is not None and launch.job == entry.job
        return (
            here
            and all_ended(self.run, self.config, name)
            and not all_done(self.run, self.config, name)
        )

    def _look(self, supervisor: Supervisor) -> None:
        """A job that is gone before its group is done is replaced, as often as a group may be
        started."""
        last = {
            name: entry for name in supervisor.roll.elsewhere if (entry := self.ledger.last(name))
        }
        jobs = self.slurm.jobs(*(entry.job for entry in last.values()))
        for name, entry in last.items():
            state = jobs[entry.job].state if entry.job in jobs else GONE
            if all_done(self.run, self.config, name):
                continue
            if self.ledger.gave_way(entry.job):
                if supervisor.roll.elsewhere[name] and (
                    state == GONE or all_ended(self.run, self.config, name)
                ):
                    self._take_back(supervisor, name)
                continue
            supervisor.roll.elsewhere[name] = entry.job
            dead = verdict(Evidence(job=state), self.config.liveness).fate is Fate.DEAD
            # One asked for just now may take a moment to show.
            # What is asked for on a full disk could not even be written down.
            if dead and time.time() - entry.time > _ASK_S and not supervisor.disk.hinders():
                refuse_vain_jobs(supervisor, self.ledger, name)
                supervisor.starts.replace_elsewhere(name, f"job {entry.job} is gone")

    def _take_back(self, supervisor: Supervisor, name: str) -> None:
        """Take a group back whose job gave way before it saw this one, because the predecessor's
        was gone."""
        del supervisor.roll.elsewhere[name]
        if why := self._unfit(name):
            supervisor.roll.unfit[name] = why
        supervisor.bring_back(name, why or "its job gave way")

    # -- at its end --------------------------------------------------------------------------------

    def take_along(self, name: str) -> bool:
        """Have the job of a group give way, while the hub is still there to save to; whether it
        does."""
        job = self._job(name)
        # On a full disk nobody can be told: such a job gives way when it finds this one gone.
        with contextlib.suppress(OSError):
            if job:
                self.ledger.give_way(job)
            return bool(job)
        return False

    def jobs(self) -> list[str]:
        """Jobs that are to be given back with this job."""
        return [job for name in self.config.groups if (job := self._job(name))]

    def _job(self, name: str) -> str:
        """The job that a group has or had to itself; empty: none, or one that it could not leave
        for a successor's.

        Further members of a group have no component, and jobs as short as the user wished: those
        stay.
        """
        entry = self.ledger.last(name) if name in self.config.groups else None
        comes_back = self.config.site.sbatch_on_nodes or not self._resized(name)
        return entry.job if entry and comes_back else ""
