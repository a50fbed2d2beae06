"""Heartbeats of the run, which a supervisor requests from the hub, and the roles that are dead
because of them. `verdict` has the rules."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Set
from concurrent.futures import Future
from typing import Any

from relax_hpc.base.errors import DeadlineError
from relax_hpc.cluster.supervise.group import Incarnation
from relax_hpc.cluster.supervise.launch_records import UNKNOWN, Progress
from relax_hpc.cluster.supervise.verdict import LIVES, Evidence, Fate, Verdict, verdict
from relax_hpc.config.schema import LivenessConfig
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.plan import SUPERVISOR

_FIND_BEATS = 4
"""Heartbeat intervals within which every client finds the card of a new hub."""
RoleKey = tuple[str, str, int]
"""Group, role (empty: a whole group under another supervisor), incarnation."""
DeadRole = tuple[str, str, int, str]
"""Group, role (empty: a whole group under another supervisor), incarnation (0: any), reason."""


class Liveness:
    """Client that requests all heartbeats from the hub, once in each heartbeat interval.

    `poll` never waits; ``wake`` is called when an answer has arrived. A role is dead only if two
    consecutive answers say so, because a hub that was stopped itself must first read the heartbeats
    that arrived meanwhile.
    """

    def __init__(
        self,
        client: QueueClient,
        limits: LivenessConfig,
        wake: Callable[[], None] = lambda: None,
        hub_incarnation: Callable[[], int] = lambda: 0,
        read_s: float = 0.0,
    ) -> None:
        """``hub_incarnation`` returns the incarnation of the newest hub that can be asked, or 0.
        ``read_s``: seconds in which a slow disk delivers the largest file that a role loads."""
        self.client, self.limits, self.wake, self.hub_incarnation = (
            client,
            limits,
            wake,
            hub_incarnation,
        )
        self._load_s = max(limits.hang_s, limits.start_timeout_s) + read_s
        self.progress: Progress = UNKNOWN
        """Progress of the run, by the newest answer."""
        self.disk: list[dict[str, Any]] = []
        """Writes of all members that fail because of a disk, by the newest answer."""
        self.answered_at = time.monotonic()
        """Time of the newest answer, monotonic seconds."""
        self.beats: dict[str, dict[str, Any]] = {}
        """Heartbeats of the newest answer."""
        self.readers: Mapping[str, str] = {}
        """Version of each engine and other reader of weights, by the newest answer."""
        self.silent_since: float | None = None
        """Time of the first request that the hub did not answer, monotonic seconds; None while it
        answers."""
        self.silent: set[tuple[str, int]] = set()
        """Groups, with their incarnations, under another supervisor that have a silent member."""
        self.awaited_groups: dict[str, dict[str, Any]] = {}
        """Groups that other groups wait for, by the newest answer; see `GroupPresence.report`."""
        self.activities: dict[str, str] = {}
        """Present activity of groups whose activity the user should see, such as the start of an
        engine, which takes minutes."""
        self._next = time.monotonic() + min(limits.beat_s, limits.lease_s / 3)
        self._answer: Future | None = None
        self._asked_incarnation = 0
        """Incarnation of the hub that was asked last."""
        self._hub_expected_at: dict[int, float] = {}
        """Time since which each hub, by incarnation, is expected to answer, monotonic seconds."""
        self._suspects: set[DeadRole] = set()
        """Roles that were dead by the previous answer."""
        self._silent_before: set[tuple[str, int]] = set()
        """Groups that were silent by the previous answer."""
        self._first_seen: dict[tuple[str, int], float] = {}

    def poll(self, groups: Mapping[str, Incarnation], done: Set[str]) -> list[DeadRole]:
        """Dead roles of ``groups`` except those ``done``, and dead groups under other supervisors.
        They include the hub if its answer is overdue."""
        now, answer = time.monotonic(), self._answer
        if answer is None:
            if now >= self._next:
                self._send_request(now)
            return []
        if not answer.done():
            return []
        self._answer = None
        error = answer.exception()
        if error:
            self._suspects, self._silent_before, self.silent = set(), set(), set()
            return self._judge_hub(groups, now) if isinstance(error, DeadlineError) else []
        status = answer.result()
        self.progress = (status.trained_steps, status.accepted, len(status.checkpoints))
        self.awaited_groups, self.readers = status.lacking, status.readers
        self.disk, self.answered_at, self.beats = status.disk, now, status.beats
        self.activities = {
            beat["group"]: beat["doing"] for beat in status.beats.values() if beat.get("doing")
        }
        return self._judge_groups(groups, done, now)

    def _send_request(self, now: float) -> None:
        self._next = now + min(self.limits.beat_s, self.limits.lease_s / 3)
        self._asked_incarnation = self.hub_incarnation()
        self._answer = self.client.status.get(timeout=self.limits.lease_s)
        self._answer.add_done_callback(lambda _: self.wake())

    def _judge_groups(
        self, groups: Mapping[str, Incarnation], done: Set[str], now: float
    ) -> list[DeadRole]:
        """Roles and groups that are dead by the newest two answers."""
        verdicts = {**self._judge_roles(groups, done, now), **self._judge_other_groups(groups)}
        suspects = {
            (*key, judgement.reason)
            for key, judgement in verdicts.items()
            if judgement.fate is Fate.DEAD
        }
        dead, self._suspects = suspects & self._suspects, suspects
        silent = {
            (name, incarnation)
            for (name, role, incarnation), judgement in verdicts.items()
            if not role and judgement is not LIVES
        }
        self.silent, self._silent_before = silent & self._silent_before, silent
        return sorted(dead)

    def _judge_hub(self, groups: Mapping[str, Incarnation], now: float) -> list[DeadRole]:
        """Judge a hub that has not answered. A hub that did not run yet at the request has as much
        time as other groups to start."""
        limits, incarnation = self.limits, groups["hub"].incarnation if "hub" in groups else 0
        evidence = Evidence(unanswered_s=limits.lease_s, patience_s=limits.lease_s)
        if incarnation != self._asked_incarnation:
            since = self._hub_expected_at.setdefault(incarnation, now - limits.lease_s)
            evidence = Evidence(unanswered_s=now - since, patience_s=limits.start_timeout_s)
        judgement = verdict(evidence, limits)
        if judgement.fate is not Fate.DEAD:
            return []
        return [("hub", "controller", incarnation, judgement.reason)]

    def _judge_roles(
        self, groups: Mapping[str, Incarnation], done: Set[str], now: float
    ) -> dict[RoleKey, Verdict]:
        """Verdicts on the roles of this supervisor."""
        verdicts = {}
        for name, group in groups.items():
            first = self._first_seen.setdefault((name, group.incarnation), now)
            for role in {member.role for member in group.members} - {"controller"}:
                if f"{name}/{role}" in done:
                    continue
                beats = [
                    beat
                    for key, beat in self.beats.items()
                    if _is_of_role(key, beat, name, role, group.incarnation)
                ]
                evidence = Evidence(
                    beats=beats,
                    supervised_s=now - first,
                    patience_s=self._patience_s(group),
                    load_s=self._load_s,
                )
                verdicts[name, role, group.incarnation] = verdict(evidence, self.limits)
        return verdicts

    def _judge_other_groups(self, groups: Collection[str]) -> dict[RoleKey, Verdict]:
        """Verdicts on groups of other supervisors, which may have died with their supervisor."""
        beats_of: dict[RoleKey, list[Mapping[str, Any]]] = {}
        for beat in self.beats.values():
            if beat["group"] not in groups and not beat["group"].startswith(SUPERVISOR):
                beats_of.setdefault((beat["group"], "", beat["incarnation"]), []).append(beat)
        return {
            key: verdict(Evidence(beats=beats, has_other_supervisor=True), self.limits)
            for key, beats in beats_of.items()
        }

    def _patience_s(self, group: Incarnation) -> float:
        """Seconds until the first heartbeat of a group, at most. A new one has to start. An adopted
        one runs already, but has to find a restarted hub."""
        if any(member.process for member in group.members):
            return self.limits.start_timeout_s
        return self.limits.lease_s + _FIND_BEATS * self.limits.beat_s


def _is_of_role(key: str, beat: Mapping[str, Any], name: str, role: str, incarnation: int) -> bool:
    """Whether a heartbeat with ``key`` (`group/member`) is of a role, or of one of its ranks."""
    member = key.partition("/")[2]
    return (beat["group"], beat["incarnation"]) == (name, incarnation) and (
        member == role or member.startswith(f"{role}-")
    )
