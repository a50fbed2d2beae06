"""Which roles hang: they live, but beat no more, never began to, or are at one piece of work for too long."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Set
from concurrent.futures import Future
from typing import Any

from relax_hpc.config.schema import LivenessConfig
from relax_hpc.errors import DeadlineError
from relax_hpc.launch.group import Incarnation
from relax_hpc.launch.records import UNKNOWN, Progress
from relax_hpc.transfer_queue.client import QueueClient
from relax_hpc.transfer_queue.plan import SUPERVISOR

_FIND_BEATS = 4
"""In so many beats every client has found the card of a new hub."""
Dead = tuple[str, str, int, str]
"""Group, role (empty: all of a group that is looked after elsewhere), epoch (0: any), and why it is taken for dead."""


class Lookout:
    """Asks the hub for the beats that it has, once a beat. `look` never waits; ``wake`` is called when it should look.

    A role is dead when two answers in a row say so: a hub that was stopped itself has beats to read first.
    """

    def __init__(
        self,
        client: QueueClient,
        limits: LivenessConfig,
        wake: Callable[[], None] = lambda: None,
        hub_epoch: Callable[[], int] = lambda: 0,
    ) -> None:
        """``hub_epoch``: of the newest hub that can be asked, 0 if there is none."""
        self.client, self.limits, self.wake, self.hub_epoch = client, limits, wake, hub_epoch
        self.progress: Progress = UNKNOWN
        """Of the run, by the newest answer."""
        self.silent_since: float | None = None
        """When the hub was last asked in vain; None while it answers."""
        self.silent: set[tuple[str, int]] = set()
        """Groups (and their epochs) that are looked after elsewhere, of whom a member gives no sign."""
        self.lacking: dict[str, dict[str, Any]] = {}
        """Groups that the others wait for, as the hub said last; see `Presence.told`."""
        self._next = time.monotonic() + min(limits.beat_s, limits.lease_s / 3)
        self._answer: Future | None = None
        self._asked = 0
        """Epoch of the hub that is to answer."""
        self._began: dict[int, float] = {}
        """When hubs, by epoch, were first looked for."""
        self._suspects: set[Dead] = set()
        self._quiet: set[tuple[str, int]] = set()
        self._seen: dict[tuple[str, int], float] = {}

    def look(self, groups: Mapping[str, Incarnation], done: Set[str]) -> list[Dead]:
        """Roles of ``groups`` but those ``done``, and other groups, that are dead; the hub if it owes an answer."""
        now, answer = time.monotonic(), self._answer
        if answer is None:
            if now >= self._next:
                self._next = now + min(self.limits.beat_s, self.limits.lease_s / 3)
                self._asked = self.hub_epoch()
                self._answer = self.client.submit("status", timeout=self.limits.lease_s)
                self._answer.add_done_callback(lambda _: self.wake())
            return []
        if not answer.done():
            return []
        self._answer = None
        if answer.exception():
            self._suspects, self._quiet, self.silent = set(), set(), set()
            return self._judge_hub(groups, now) if isinstance(answer.exception(), DeadlineError) else []
        found = answer.result()
        self.progress = (found["trained_steps"], found["accepted"], len(found["checkpoints"]))
        self.lacking = found.get("lacking", {})
        others = self._others(groups, found["beats"])
        suspects = self._judge(groups, done, found["beats"], now) | self._judge_others(others)
        dead, self._suspects = suspects & self._suspects, suspects
        silent = {key for key, ages in others.items() if max(ages) > self.limits.lease_s}
        self.silent, self._quiet = silent & self._quiet, silent
        return sorted(dead)

    def _judge_hub(self, groups: Mapping[str, Incarnation], now: float) -> list[Dead]:
        """It has not answered. One that was not there yet when it was asked has as long as others to start."""
        epoch, patience_s = groups["hub"].epoch if "hub" in groups else 0, self.limits.lease_s
        if epoch != self._asked:
            patience_s = self.limits.start_timeout_s
            if now - self._began.setdefault(epoch, now - self.limits.lease_s) <= patience_s:
                return []
        return [("hub", "controller", epoch, f"has not answered for {patience_s:.0f} s")]

    def _judge(
        self, groups: Mapping[str, Incarnation], done: Set[str], beats: Mapping[str, Mapping[str, Any]], now: float
    ) -> set[Dead]:
        suspects: set[Dead] = set()
        for name, group in groups.items():
            first = self._seen.setdefault((name, group.epoch), now)
            for role in {member.role for member in group.members} - {"controller"}:
                beating = [b for key, b in beats.items() if _is_of(key, b, name, role, group.epoch)]
                if f"{name}/{role}" not in done and (reason := self._reason(beating, group, now - first)):
                    suspects.add((name, role, group.epoch, reason))
        return suspects

    @staticmethod
    def _others(groups: Collection[str], beats: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, int], list[float]]:
        """Ages of the last beats of each group, and epoch, that somebody else looks after."""
        ages: dict[tuple[str, int], list[float]] = {}
        for beat in beats.values():
            if beat["group"] not in groups and not beat["group"].startswith(SUPERVISOR):
                ages.setdefault((beat["group"], beat["epoch"]), []).append(beat["age_s"])
        return ages

    def _judge_others(self, others: Mapping[tuple[str, int], list[float]]) -> set[Dead]:
        """Groups that somebody else looks after, and who may be as dead: no member has given a sign."""
        reason = f"has given no sign for {self.limits.lease_s:.0f} s"
        return {(name, "", epoch, reason) for (name, epoch), ages in others.items() if min(ages) > self.limits.lease_s}

    def _reason(self, beats: list[Mapping[str, Any]], group: Incarnation, known_s: float) -> str:
        """Why a role that beats so (each rank that talks) is taken for dead; empty: it is not."""
        limits = self.limits
        # One that was just started has to begin; an adopted one beats, but has to find a hub that was started anew.
        adopted = limits.lease_s + _FIND_BEATS * limits.beat_s
        patience = limits.start_timeout_s if any(m.process for m in group.members) else adopted
        if not beats:
            return f"has not begun to beat within {patience:.0f} s" if known_s > patience else ""
        if max(beat["age_s"] for beat in beats) > limits.lease_s:
            return f"has given no sign for {limits.lease_s:.0f} s"
        if max(beat["busy_s"] for beat in beats) > limits.hang_s:
            return f"has been at one piece of work for over {limits.hang_s:.0f} s"
        return ""


def _is_of(key: str, beat: Mapping[str, Any], name: str, role: str, epoch: int) -> bool:
    member = key.partition("/")[2]
    return (beat["group"], beat["epoch"]) == (name, epoch) and (member == role or member.startswith(f"{role}-"))
