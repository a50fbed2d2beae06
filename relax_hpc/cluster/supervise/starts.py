"""Starts of groups, and their return after a failure: in place, in a job of their own, or later."""

from __future__ import annotations

import time
from collections.abc import Callable

from relax_hpc.base.disk_waits import describe_write_error, is_temporary
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise.disk_watch import NoRoom
from relax_hpc.cluster.supervise.failures import Failures
from relax_hpc.cluster.supervise.group import Launcher, Unavailable
from relax_hpc.cluster.supervise.group_table import Roll
from relax_hpc.cluster.supervise.launch_records import Launch, record
from relax_hpc.cluster.supervise.start_ahead import Ahead
from relax_hpc.cluster.supervise.wakeups import Wakeups
from relax_hpc.config import Config
from relax_hpc.config.groups import group_of
from relax_hpc.net.rendezvous.roster import claim_incarnation, latest_incarnation

_AGAIN_S, _OUTAGE_S = 10.0, 3600.0
"""Seconds between tries to bring back a group that cannot be now, and seconds for which it is
tried."""


def claim(run: RunDir, name: str, former: int | None = None) -> int:
    """Number of the next incarnation; ``former`` as for `claim_incarnation`. NoRoom: on a disk that
    takes nothing."""
    try:
        return claim_incarnation(run, name, former)
    except OSError as error:
        if not is_temporary(error):
            raise
        raise NoRoom(describe_write_error(run.rendezvous(name), error)) from error


class Starts:
    """Starts of the groups in ``roll`` by their launchers. ``leave`` ends this job for its
    successor."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        roll: Roll,
        launcher: Callable[[str], Launcher],
        failures: Failures,
        wakeups: Wakeups,
        say: Callable[[str], None],
        leave: Callable[[], None],
    ) -> None:
        self.run, self.config, self.roll, self.launcher, self.failures = (
            run,
            config,
            roll,
            launcher,
            failures,
        )
        self.wakeups, self.say, self.leave = wakeups, say, leave
        self.disk = failures.disk
        self.ahead = Ahead(run, config, launcher, say)
        self.again: dict[str, tuple[str, float, float]] = {}
        """Groups that could not be brought back yet: why they ended, when, and when they are tried
        again."""

    def begin(self, name: str) -> None:
        """Take over what runs of a group, or start it."""
        launcher, incarnation = self.launcher(name), latest_incarnation(self.run, name)
        if incarnation and (group := launcher.adopt(name, incarnation)):
            self.roll.here[name] = group
            self.say(f"{name}: taken over at incarnation {incarnation}")
        elif name == "hub" or not self.roll.all_done(name):
            # Whoever is not done needs the controller, whatever became of the roles beside it.
            self.start_soon(name)

    def start_soon(self, name: str) -> None:
        """Start a group, now or as soon as what that needs answers."""
        try:
            self.start(name)
        except (Unavailable, OSError) as error:
            if not (is_temporary(error) or getattr(error, "later", False)):
                raise
            now = time.monotonic()
            self.again[name] = (str(error), now, now)

    def turn_away(self, name: str, reason: str) -> None:
        """Refuse to start a group on its nodes; counts as a start, so that this does not go on for
        ever."""
        try:
            record(
                self.run,
                name,
                claim(self.run, name),
                Launch(self.failures.attempt, self.failures.progress()),
            )
        except (NoRoom, OSError) as error:
            # It does not begin before there is room.
            if not (is_temporary(error) or isinstance(error, NoRoom)):
                raise
        self.failures.count(name, reason)
        self.bring_back(name, reason)

    def start(self, name: str) -> None:
        """Start the next incarnation of a group."""
        self.disk.check_room()
        self.again.pop(name, None)
        incarnation, ahead = self.ahead.next(name, lambda name: claim(self.run, name))
        launch = Launch(self.failures.attempt, self.failures.progress())
        self.roll.here[name] = group = self.launcher(name).start(name, incarnation, launch, ahead)
        self.ahead.begin(name, incarnation)
        for member in group.members:
            self.wakeups.watch(member)
        roles = ", ".join(member.role for member in group.members)
        self.say(
            f"{name}: started incarnation {incarnation} "
            f"({roles}){', which waited' if ahead else ''}"
        )

    def bring_back(self, name: str, reason: str) -> None:
        """Have a group started again as its policy says; later, if what that needs does not answer
        now."""
        now = time.monotonic()
        _, since, _ = self.again.pop(name, ("", now, now))
        try:
            in_place = (
                group_of(self.config, name).on_failure == "restart" and name not in self.roll.unfit
            )
            if in_place and self.launcher(name).whole(name):
                self.start(name)
            else:
                self.hand_over(name, reason)
        except (Unavailable, OSError) as error:
            passes = isinstance(error, NoRoom) or is_temporary(error)
            if not passes and (now - since > _OUTAGE_S or not getattr(error, "later", True)):
                raise
            self.again[name] = (reason, since, time.monotonic() + _AGAIN_S)
            self.say(
                f"{name}: cannot be brought back yet, tried again in {_AGAIN_S:.0f} s: {error}"
            )

    def due_again(self) -> list[tuple[str, str]]:
        """Groups to be tried again now, and why each had ended."""
        now = time.monotonic()
        return [(name, reason) for name, (reason, _, due) in self.again.items() if now >= due]

    def hand_over(self, name: str, reason: str) -> None:
        """Give a group to a job of its own; where that cannot be, start it again in place, or make
        way."""
        self.disk.check_room()
        self.ahead.drop(name)
        self.say(f"{name}: not here any more: {reason}")
        if job := self.launcher(name).hand_over(name, reason):
            self.roll.elsewhere[name] = job
            self.say(f"{name}: goes on in job {job}")
        elif self.launcher(name).lost(name):
            self._make_way(name)
        else:
            self.start(name)

    def replace_elsewhere(self, name: str, reason: str) -> None:
        """Replace a group that ran in a job of its own and has lost that too."""
        self.say(f"{name}: {reason}")
        self.failures.judge(name, reason)
        if job := self.launcher(name).hand_over(name, reason):
            self.roll.elsewhere[name] = job
        else:
            self._make_way(name)

    def _make_way(self, name: str) -> None:
        """End the job for its successor: there is no place for a group in this one."""
        self.say(
            f"{name}: no other job can be had for it (see site.sbatch_on_nodes and spares): "
            "making way"
        )
        self.leave()
