"""The next incarnations of groups whose start is mostly imports, started while the present ones are
at work.

Their ranks meet, import, and wait; where the group ends before its time they are told to begin, and
nobody waits for processes, MPI and libraries. They are children of the same launcher by the same
command as any other start: in the same step, cores and environment. They hold no devices, no
weights and no connection.

A number is given to one set of ranks only: what was started ahead and is of no use takes its number
with it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Set
from typing import Any

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise.group import Incarnation, Launcher
from relax_hpc.config import Config
from relax_hpc.config.groups import ranks_of
from relax_hpc.config.roles import RANKED
from relax_hpc.net.rendezvous.roster import latest_incarnation

_BEGIN = b"\n"


class Ahead:
    """Incarnations that one supervisor has started ahead, at most one a group."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        launcher: Callable[[str], Launcher],
        say: Callable[[str], None],
    ):
        self.run, self.config, self.launcher, self.say = run, config, launcher, say
        self.waiting: dict[str, Incarnation] = {}
        self._at_work: dict[tuple[str, int], float] = {}
        """Time at which each incarnation was first seen at work, monotonic seconds."""
        self._tried: set[tuple[str, int]] = set()
        """Incarnations whose next one was started ahead: once, however that ended."""

    def look(
        self,
        groups: Mapping[str, Incarnation],
        beats: Mapping[str, Mapping[str, Any]],
        done: Set[str],
    ) -> None:
        """One round: start what is due, and end what nobody needs. ``beats``: as the hub has
        them."""
        for name, group in list(self.waiting.items()):
            if group.members and any(f"{name}/{member.role}" in done for member in group.members):
                self.drop(name)
            elif has_ended(group):
                self.say(
                    f"{name}: incarnation {group.incarnation}, started ahead, has ended before it "
                    "was needed"
                )
                self.drop(name)
        for name, group in groups.items():
            roles = [member.role for member in group.members if member.role in RANKED]
            if (
                roles
                and not done & {f"{name}/{role}" for role in roles}
                and self._is_due(group, set(roles), beats)
            ):
                self._start(name, group, roles)

    def next(self, name: str, claim: Callable[[str], int]) -> tuple[int, Incarnation | None]:
        """The number that the next incarnation of a group gets by ``claim``, and what waits to be
        that, if it is of use; `begin` comes next."""
        while True:
            incarnation = claim(name)
            ahead = self.take(name, incarnation)
            # Whatever else was started ahead under a number may still live, and say how it ended.
            if ahead or not self.run.logs(name, incarnation).exists():
                return incarnation, ahead

    def take(self, name: str, incarnation: int) -> Incarnation | None:
        """Take the waiting process group that is to be ``incarnation``, if a start would make the
        same of it now; `begin` comes next."""
        group = self.waiting.get(name)
        if group is None or group.incarnation != incarnation or has_ended(group):
            return None
        commands = self.launcher(name).commands(name, incarnation)
        return (
            group
            if all(commands.get(member.role) == member.command for member in group.members)
            else None
        )

    def begin(self, name: str, incarnation: int) -> None:
        """Have the ranks that wait to be ``incarnation`` begin; those of another one are of no use
        any more."""
        group = self.waiting.get(name)
        if group is None or group.incarnation != incarnation:
            self.drop(name)
            return
        self._forget(name)
        for member in group.members:
            # Who has just ended is noticed as such.
            with contextlib.suppress(OSError):
                member.process.stdin.write(
                    _BEGIN * ranks_of(member.command.config, name, member.role)
                )
        _hang_up(group)

    def dismiss(self) -> None:
        """Tell everybody who waits that nobody needs them; `drop` sees that they are gone."""
        for group in self.waiting.values():
            _hang_up(group)

    def drop(self, *names: str) -> None:
        """End the processes that wait for these groups."""
        for name in names:
            if group := self._forget(name):
                _hang_up(group)
                group.kill()

    def _forget(self, name: str) -> Incarnation | None:
        group = self.waiting.pop(name, None)
        if group:
            for path in self.run.logs(name, group.incarnation).glob("ahead-*.json"):
                with contextlib.suppress(OSError):
                    path.unlink()
        return group

    def _is_due(
        self, group: Incarnation, roles: set[str], beats: Mapping[str, Mapping[str, Any]]
    ) -> bool:
        """Whether ``group`` has worked for long enough, and its next incarnation was not tried
        yet."""
        which, limit_s = (group.name, group.incarnation), self.config.liveness.start_ahead_s
        if not limit_s or which in self._tried:
            return False
        at_work = {
            key.partition("/")[2]
            for key, beat in beats.items()
            if (beat["group"], beat["incarnation"]) == which and not beat.get("loads", True)
        }
        if not roles <= at_work:
            return False
        return time.monotonic() - self._at_work.setdefault(which, time.monotonic()) >= limit_s

    def _start(self, name: str, group: Incarnation, roles: list[str]) -> None:
        self._tried.add((name, group.incarnation))
        incarnation = 1 + latest_incarnation(self.run, name)
        # Those of an earlier supervisor may still wait.
        while self.run.logs(name, incarnation).exists():
            incarnation += 1
        try:
            self.waiting[name] = self.launcher(name).start_ahead(name, incarnation, roles)
        except (RelaxError, OSError) as error:
            # Nothing that works depends on it.
            self.say(f"{name}: incarnation {incarnation} cannot be started ahead: {error}")
        else:
            self.say(f"{name}: a standby is ready (incarnation {incarnation}) in case it fails")


def _hang_up(group: Incarnation) -> None:
    """Nothing more will be said to its ranks; without a word before they end."""
    for member in group.members:
        with contextlib.suppress(OSError):
            member.process.stdin.close()


def has_ended(group: Incarnation) -> bool:
    """Whether one of the processes of ``group`` has."""
    return any(member.process.poll() is not None for member in group.members)
