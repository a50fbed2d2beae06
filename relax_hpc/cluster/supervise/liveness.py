"""Beats of the run as the hub knows them, asked for again and again, and who is dead by them: see
`verdict`."""

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
"""Beats within which every client has found the card of a new hub."""
Who = tuple[str, str, int]
"""Group, role (empty: all of a group that is looked after elsewhere), incarnation."""
Dead = tuple[str, str, int, str]
"""Group, role (empty: all of a group that is looked after elsewhere), incarnation (0: any), and the
reason."""


class Liveness:
    """Asks the hub for the beats that it has, once a beat. `look` never waits; ``wake`` is called
    when it should look.

    A role is dead when two answers in a row say so: a hub that was stopped itself has beats to read
    first.
    """

    def __init__(
        self,
        client: QueueClient,
        limits: LivenessConfig,
        wake: Callable[[], None] = lambda: None,
        hub_incarnation: Callable[[], int] = lambda: 0,
        read_s: float = 0.0,
    ) -> None:
        """``hub_incarnation``: of the newest hub that can be asked, 0 if there is none. ``read_s``:
        in which the largest that a role loads is read, however slowly."""
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
        """Writes that do not succeed, of whomever, by the newest answer."""
        self.answered_at = time.monotonic()
        """Time of the newest answer, monotonic seconds."""
        self.beats: dict[str, dict[str, Any]] = {}
        """Beats of the newest answer."""
        self.silent_since: float | None = None
        """Time at which the hub was first asked in vain, monotonic seconds; None while it
        answers."""
        self.silent: set[tuple[str, int]] = set()
        """Groups (and their incarnations) that are looked after elsewhere, of whom a member gives
        no sign."""
        self.lacking: dict[str, dict[str, Any]] = {}
        """Groups that the others wait for, as the hub said last; see `Presence.report`."""
        self.doing: dict[str, str] = {}
        """Words of groups on what they are doing, where people should know: an engine's start takes
        minutes."""
        self._next = time.monotonic() + min(limits.beat_s, limits.lease_s / 3)
        self._answer: Future | None = None
        self._asked = 0
        """Incarnation of the hub that is to answer."""
        self._began: dict[int, float] = {}
        """Time at which each hub, by incarnation, was first looked for, monotonic seconds."""
        self._suspects: set[Dead] = set()
        self._quiet: set[tuple[str, int]] = set()
        self._seen: dict[tuple[str, int], float] = {}

    def look(self, groups: Mapping[str, Incarnation], done: Set[str]) -> list[Dead]:
        """Roles of ``groups`` but those ``done``, and other groups, that are dead; the hub if it
        owes an answer."""
        now, answer = time.monotonic(), self._answer
        if answer is None:
            if now >= self._next:
                self._next = now + min(self.limits.beat_s, self.limits.lease_s / 3)
                self._asked = self.hub_incarnation()
                self._answer = self.client.status.get(timeout=self.limits.lease_s)
                self._answer.add_done_callback(lambda _: self.wake())
            return []
        if not answer.done():
            return []
        self._answer = None
        if answer.exception():
            self._suspects, self._quiet, self.silent = set(), set(), set()
            return (
                self._judge_hub(groups, now)
                if isinstance(answer.exception(), DeadlineError)
                else []
            )
        found = answer.result()
        self.progress = (found.trained_steps, found.accepted, len(found.checkpoints))
        self.lacking = found.lacking
        self.disk, self.answered_at, self.beats = found.disk, now, found.beats
        self.doing = {
            beat["group"]: beat["doing"] for beat in found.beats.values() if beat.get("doing")
        }
        verdicts = {
            **self._of_roles(groups, done, found.beats, now),
            **self._of_others(groups, found.beats),
        }
        suspects = {(*who, said.reason) for who, said in verdicts.items() if said.fate is Fate.DEAD}
        dead, self._suspects = suspects & self._suspects, suspects
        silent = {
            (name, incarnation)
            for (name, role, incarnation), said in verdicts.items()
            if not role and said is not LIVES
        }
        self.silent, self._quiet = silent & self._quiet, silent
        return sorted(dead)

    def _judge_hub(self, groups: Mapping[str, Incarnation], now: float) -> list[Dead]:
        """Judge a hub that has not answered. One that was not there yet when asked has as long as
        others to start."""
        limits, incarnation = self.limits, groups["hub"].incarnation if "hub" in groups else 0
        found = Evidence(unanswered_s=limits.lease_s, patience_s=limits.lease_s)
        if incarnation != self._asked:
            since_s = now - self._began.setdefault(incarnation, now - limits.lease_s)
            found = Evidence(unanswered_s=since_s, patience_s=limits.start_timeout_s)
        said = verdict(found, limits)
        return [("hub", "controller", incarnation, said.reason)] if said.fate is Fate.DEAD else []

    def _of_roles(
        self,
        groups: Mapping[str, Incarnation],
        done: Set[str],
        beats: Mapping[str, Mapping[str, Any]],
        now: float,
    ) -> dict[Who, Verdict]:
        """Verdicts on roles that this supervisor looks after."""
        found = {}
        for name, group in groups.items():
            first = self._seen.setdefault((name, group.incarnation), now)
            for role in {member.role for member in group.members} - {"controller"}:
                if f"{name}/{role}" not in done:
                    mine = [
                        beat
                        for key, beat in beats.items()
                        if _is_of(key, beat, name, role, group.incarnation)
                    ]
                    patience_s = self._patience_s(group)
                    evidence = Evidence(
                        beats=mine, known_s=now - first, patience_s=patience_s, load_s=self._load_s
                    )
                    found[name, role, group.incarnation] = verdict(evidence, self.limits)
        return found

    def _of_others(
        self, groups: Collection[str], beats: Mapping[str, Mapping[str, Any]]
    ) -> dict[Who, Verdict]:
        """Verdicts on groups that another supervisor looks after, which may be as dead."""
        theirs: dict[Who, list[Mapping[str, Any]]] = {}
        for beat in beats.values():
            if beat["group"] not in groups and not beat["group"].startswith(SUPERVISOR):
                theirs.setdefault((beat["group"], "", beat["incarnation"]), []).append(beat)
        return {
            who: verdict(Evidence(beats=found, others=True), self.limits)
            for who, found in theirs.items()
        }

    def _patience_s(self, group: Incarnation) -> float:
        """One that was just started has to begin; an adopted one beats, but has to find a hub that
        was started anew."""
        adopted = self.limits.lease_s + _FIND_BEATS * self.limits.beat_s
        return (
            self.limits.start_timeout_s
            if any(member.process for member in group.members)
            else adopted
        )


def _is_of(key: str, beat: Mapping[str, Any], name: str, role: str, incarnation: int) -> bool:
    member = key.partition("/")[2]
    return (beat["group"], beat["incarnation"]) == (name, incarnation) and (
        member == role or member.startswith(f"{role}-")
    )
