"""Starts of groups, and restarts after a failure: in place, in a separate job, or later."""

from __future__ import annotations

import time
from collections.abc import Callable

from relax_hpc.base.disk_waits import describe_write_error, is_temporary
from relax_hpc.base.errors import EXIT_CONFIG
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise.disk_watch import NoDiskSpace
from relax_hpc.cluster.supervise.failures import Failures
from relax_hpc.cluster.supervise.group import Launcher, Unavailable
from relax_hpc.cluster.supervise.group_table import GroupTable
from relax_hpc.cluster.supervise.launch_records import Launch, record_launch
from relax_hpc.cluster.supervise.start_ahead import StartAhead
from relax_hpc.cluster.supervise.wakeups import Wakeups
from relax_hpc.config import Config
from relax_hpc.config.groups import group_settings
from relax_hpc.net.rendezvous.roster import claim_incarnation, latest_incarnation

_AGAIN_S, _OUTAGE_S = 10.0, 3600.0
"""Seconds between two attempts to restart a group, and seconds after which the supervisor stops
trying."""


def claim(run: RunDir, name: str, former: int | None = None) -> int:
    """Number of the next incarnation; ``former`` as for `claim_incarnation`. NoDiskSpace if the
    disk is full."""
    try:
        return claim_incarnation(run, name, former)
    except OSError as error:
        if not is_temporary(error):
            raise
        raise NoDiskSpace(describe_write_error(run.rendezvous(name), error)) from error


class GroupStarts:
    """Starts of the groups in ``table`` by their launchers. ``leave`` ends this job, so that its
    successor continues."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        table: GroupTable,
        launcher: Callable[[str], Launcher],
        failures: Failures,
        wakeups: Wakeups,
        say: Callable[[str], None],
        leave: Callable[[], None],
    ) -> None:
        self.run, self.config, self.table, self.launcher, self.failures = (
            run,
            config,
            table,
            launcher,
            failures,
        )
        self.wakeups, self.say, self.leave = wakeups, say, leave
        self.disk = failures.disk
        self.ahead = StartAhead(run, config, launcher, say)
        self.detected_at: dict[str, float] = {}
        """Groups that have failed and are not started again yet -> time at which that was found,
        seconds since 1970."""
        self.retries: dict[str, tuple[str, float, float]] = {}
        """Groups that could not be restarted yet, each with the reason of its end, the time of the
        first attempt, and the time of the next attempt."""

    def adopt_or_start(self, name: str) -> None:
        """Take over a group that still runs, or start it."""
        launcher, incarnation = self.launcher(name), latest_incarnation(self.run, name)
        if incarnation and (group := launcher.adopt(name, incarnation)):
            self.table.supervised[name] = group
            self.say(f"{name}: taken over at incarnation {incarnation}")
        elif name == "hub" or not self.table.all_done(name):
            # Groups that are not done need the controller, even if the hub's other roles are done.
            self.start_soon(name)

    def start_soon(self, name: str) -> None:
        """Start a group now, or later if a temporary error prevents it."""
        try:
            self.start(name)
        except (Unavailable, OSError) as error:
            if not (is_temporary(error) or getattr(error, "is_temporary", False)):
                raise
            now = time.monotonic()
            self.retries[name] = (str(error), now, now)

    def refuse_start(self, name: str, reason: str) -> None:
        """Refuse to start a group on its nodes, and bring it back elsewhere. This counts as a
        start, so that the number of repetitions is limited. If other nodes would not do either, end
        the run."""
        if name in self.table.hopeless:
            text = f"no node can run it: {reason}"
            self.failures.end_run(name, text, EXIT_CONFIG, has_log=False)
        try:
            record_launch(
                self.run,
                name,
                claim(self.run, name),
                Launch(self.failures.attempt, self.failures.progress()),
            )
        except (NoDiskSpace, OSError) as error:
            # On a full disk the group cannot start anyway.
            if not (is_temporary(error) or isinstance(error, NoDiskSpace)):
                raise
        self.failures.check_restart_limit(name, reason)
        self.bring_back(name, reason)

    def start(self, name: str) -> None:
        """Start the next incarnation of a group."""
        self.disk.check_space()
        self.retries.pop(name, None)
        incarnation, ahead = self.ahead.claim_next(name, lambda name: claim(self.run, name))
        launch = Launch(
            self.failures.attempt,
            self.failures.progress(),
            detected_at=self.detected_at.pop(name, 0.0),
            launched_at=time.time(),
        )
        group = self.launcher(name).start(name, incarnation, launch, ahead)
        self.table.supervised[name] = group
        self.ahead.begin(name, incarnation)
        for member in group.members:
            self.wakeups.watch(member)
        roles = ", ".join(member.role for member in group.members)
        suffix = ", which waited" if ahead else ""
        self.say(f"{name}: started incarnation {incarnation} ({roles}){suffix}")

    def bring_back(self, name: str, reason: str) -> None:
        """Restart a group according to its policy, or later if a temporary error prevents it."""
        now = time.monotonic()
        _, since, _ = self.retries.pop(name, ("", now, now))
        try:
            in_place = (
                group_settings(self.config, name).on_failure == "restart"
                and name not in self.table.unfit
            )
            if in_place and self.launcher(name).has_all_nodes(name):
                self.start(name)
            else:
                self.hand_over(name, reason)
        except (Unavailable, OSError) as error:
            is_temporary_error = isinstance(error, NoDiskSpace) or is_temporary(error)
            if not is_temporary_error and (
                now - since > _OUTAGE_S or not getattr(error, "is_temporary", True)
            ):
                raise
            self.retries[name] = (reason, since, time.monotonic() + _AGAIN_S)
            self.say(f"{name}: cannot be restarted yet, retry in {_AGAIN_S:.0f} s: {error}")

    def due_retries(self) -> list[tuple[str, str]]:
        """Groups whose next attempt is due, each with the reason of its end."""
        now = time.monotonic()
        return [(name, reason) for name, (reason, _, due) in self.retries.items() if now >= due]

    def hand_over(self, name: str, reason: str) -> None:
        """Give a group to a separate job. If that is not possible, restart it in place, or end
        this job if nodes are lost."""
        self.disk.check_space()
        # The supervisor of the other job launches it, and does not know when the failure was found.
        self.detected_at.pop(name, None)
        self.ahead.drop(name)
        self.say(f"{name}: cannot continue in this job: {reason}")
        job = self.launcher(name).hand_over(name, reason)
        if job:
            self.table.detached[name] = job
            self.say(f"{name}: continues in job {job}")
        elif self.launcher(name).has_lost_nodes(name):
            self._end_job(name)
        else:
            self.start(name)

    def replace_detached(self, name: str, reason: str) -> None:
        """Replace a group that has lost its separate job."""
        self.say(f"{name}: {reason}")
        self.failures.check_failure(name, reason)
        job = self.launcher(name).hand_over(name, reason)
        if job:
            self.table.detached[name] = job
        else:
            self._end_job(name)

    def _end_job(self, name: str) -> None:
        """End this job for its successor, because the group has no nodes in it."""
        self.say(
            f"{name}: no other job is available (see site.sbatch_on_nodes and spares): this job "
            "ends for its successor"
        )
        self.leave()
