"""Start of a group's next incarnation while the present one works, for groups that import for long.

The ranks of the next incarnation connect to each other, import, and wait. If the present
incarnation fails, they receive a signal to begin. Then the run does not wait for processes, MPI and
libraries. They are children of the same launcher with the same command as any other start, so they
have the same step, cores and environment. They hold no devices, no weights and no connections.

A number is used for one set of ranks only. If an incarnation that was started ahead is discarded,
its number is not used again.
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
from relax_hpc.config.groups import rank_count
from relax_hpc.config.roles import RANKED
from relax_hpc.net.rendezvous.roster import latest_incarnation

_BEGIN = b"\n"


class StartAhead:
    """Incarnations that one supervisor has started ahead, at most one for each group."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        launcher: Callable[[str], Launcher],
        say: Callable[[str], None],
    ):
        self.run, self.config, self.launcher, self.say = run, config, launcher, say
        self.waiting: dict[str, Incarnation] = {}
        self._working_since: dict[tuple[str, int], float] = {}
        """Time at which each incarnation was first seen working, monotonic seconds."""
        self._tried: set[tuple[str, int]] = set()
        """Incarnations whose next one was started ahead. This is tried only once."""

    def update(
        self,
        groups: Mapping[str, Incarnation],
        beats: Mapping[str, Mapping[str, Any]],
        done: Set[str],
    ) -> None:
        """Start incarnations that are due, and end those that are not needed. ``beats``: the
        heartbeats that the hub has."""
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

    def claim_next(self, name: str, claim: Callable[[str], int]) -> tuple[int, Incarnation | None]:
        """The number of the group's next incarnation, taken by ``claim``, and the incarnation that
        waits under this number, if it can be used. The caller then calls `begin`."""
        while True:
            incarnation = claim(name)
            ahead = self.take(name, incarnation)
            # A discarded incarnation may still run under this number and write its logs and marks.
            if ahead or not self.run.logs(name, incarnation).exists():
                return incarnation, ahead

    def take(self, name: str, incarnation: int) -> Incarnation | None:
        """The processes that wait to be ``incarnation``, if a new start would use the same
        commands. The caller then calls `begin`."""
        group = self.waiting.get(name)
        if group is None or group.incarnation != incarnation or has_ended(group):
            return None
        commands = self.launcher(name).commands(name, incarnation)
        is_current = all(commands.get(member.role) == member.command for member in group.members)
        return group if is_current else None

    def begin(self, name: str, incarnation: int) -> None:
        """Signal the ranks that wait to be ``incarnation`` to begin. Ranks of another incarnation
        are discarded."""
        group = self.waiting.get(name)
        if group is None or group.incarnation != incarnation:
            self.drop(name)
            return
        self._forget(name)
        for member in group.members:
            # srun 22.05 passes its standard input, and the end of it, to every task of its step,
            # so that one pipe reaches the ranks on all nodes.
            assert member.command is not None and member.child.stdin is not None
            ranks = rank_count(member.command.config, name, member.role)
            # If a rank has just ended, its process shows that.
            with contextlib.suppress(OSError):
                member.child.stdin.write(_BEGIN * ranks)
        _close_input(group)

    def dismiss(self) -> None:
        """Make all waiting processes end by themselves; `drop` kills those that remain."""
        for group in self.waiting.values():
            _close_input(group)

    def drop(self, *names: str) -> None:
        """End the processes that wait for these groups."""
        for name in names:
            group = self._forget(name)
            if group:
                _close_input(group)
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
        """Whether all ``roles`` of ``group`` have worked for long enough, and its next incarnation
        was not tried yet."""
        key, limit_s = (group.name, group.incarnation), self.config.liveness.start_ahead_s
        if not limit_s or key in self._tried:
            return False
        working_roles = {
            member.partition("/")[2]
            for member, beat in beats.items()
            if (beat["group"], beat["incarnation"]) == key and not beat.get("loads", True)
        }
        if not roles <= working_roles:
            return False
        now = time.monotonic()
        return now - self._working_since.setdefault(key, now) >= limit_s

    def _start(self, name: str, group: Incarnation, roles: list[str]) -> None:
        self._tried.add((name, group.incarnation))
        incarnation = 1 + latest_incarnation(self.run, name)
        # Processes that an earlier supervisor started ahead may still wait under this number.
        while self.run.logs(name, incarnation).exists():
            incarnation += 1
        try:
            self.waiting[name] = self.launcher(name).start_ahead(name, incarnation, roles)
        except (RelaxError, OSError) as error:
            # The present incarnation does not depend on it.
            self.say(f"{name}: incarnation {incarnation} cannot be started ahead: {error}")
        else:
            self.say(f"{name}: a standby is ready (incarnation {incarnation}) in case it fails")


def _close_input(group: Incarnation) -> None:
    """Close the input of waiting ranks. Ranks that have not received the signal to begin end."""
    for member in group.members:
        assert member.child.stdin is not None
        with contextlib.suppress(OSError):
            member.child.stdin.close()


def has_ended(group: Incarnation) -> bool:
    """Whether one of the processes of ``group`` has ended."""
    return any(member.child.poll() is not None for member in group.members)
