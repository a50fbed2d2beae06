"""Log of events, RUN/notifications.jsonl, and their hysteresis.

An event is raised when its condition has been true for `events.hold_s`, and resolved when it has
been false for `events.clear_s`. In between, nothing is reported. The log is also the memory: the
next supervisor knows from it what was raised, and what the command of the site has not received.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from relax_hpc.base.disk_waits import AppendFile
from relax_hpc.base.foreign_files import parse_json
from relax_hpc.base.rundir import RunDir, is_map
from relax_hpc.cluster.events.conditions import IMMEDIATE, Key
from relax_hpc.config.schema import EventsConfig

RAISED, RESOLVED = "raised", "resolved"
_READ_BYTES = 1 << 20
"""Bytes at the end of the log that are read. An event has a few hundred."""
_DETAIL_CHARS = 2000
_OLDEST_S = 24 * 3600.0
"""Age of an event in seconds above which it is not sent any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A line of the log. The names of the fields are keys of the line and of the document that the
    command gets."""

    number: int
    """Number of the event in its run, from 1."""
    event: str
    """Name, one of `EVENTS`."""
    state: str
    """`raised` or `resolved`."""
    subject: str
    """Group, engine or folder; empty: the run."""
    detail: str
    """One line of text."""
    time: float
    """Wall-clock time, seconds since 1970."""
    since: float
    """Time at which the condition became true."""
    step: int
    """Number of trained steps."""


@dataclass(slots=True)
class _Condition:
    detail: str
    true_since: float
    """Time since which the condition is true. It stays until the event is resolved."""
    false_since: float | None = None
    """Time since which a raised event's condition is false; None: it is true."""
    is_raised: bool = False


class EventLog:
    """Events of a run: decides which to report, and writes them."""

    def __init__(self, run: RunDir, bounds: EventsConfig) -> None:
        self._bounds = bounds
        self._conditions: dict[Key, _Condition] = {}
        self.unsent: list[Event] = []
        """Events that the command of the site has not received, oldest first."""
        self._number = 0
        self._load(run)
        self._file = AppendFile(run.notifications)

    @property
    def active(self) -> dict[Key, float]:
        """Raised events that are not resolved, with the times since which they are true."""
        return {
            key: condition.true_since
            for key, condition in self._conditions.items()
            if condition.is_raised
        }

    def update(self, true_conditions: Mapping[Key, str], now: float, step: int) -> list[Event]:
        """Events that follow from the conditions that are true ``now``."""
        events = []
        for key, detail in true_conditions.items():
            condition = self._conditions.setdefault(key, _Condition(detail, now))
            condition.detail, condition.false_since = detail, None
            hold_s = 0.0 if key[0] in IMMEDIATE else self._bounds.hold_s
            if not condition.is_raised and now - condition.true_since >= hold_s:
                condition.is_raised = True
                events.append(self._make(key, RAISED, condition, now, step))
        for key in [key for key in self._conditions if key not in true_conditions]:
            condition = self._conditions[key]
            # If a condition ends before `events.hold_s`, its time starts from zero the next time.
            if not condition.is_raised:
                del self._conditions[key]
                continue
            if condition.false_since is None:
                condition.false_since = now
            if now - condition.false_since >= self._bounds.clear_s:
                del self._conditions[key]
                events.append(self._make(key, RESOLVED, condition, now, step))
        self.flush()
        return events

    def report(self, event: str, detail: str, now: float, step: int) -> None:
        """Write an event about the whole run, unless the same one is active."""
        if (event, "") not in self._conditions:
            condition = self._conditions[event, ""] = _Condition(detail, now, is_raised=True)
            self._make((event, ""), RAISED, condition, now, step)
            self.flush()

    def resolve(self, event: str, detail: str, now: float, step: int) -> None:
        """End an event about the whole run, if it is active."""
        condition = self._conditions.pop((event, ""), None)
        if condition is not None:
            condition.detail = detail
            self._make((event, ""), RESOLVED, condition, now, step)
            self.flush()

    def resolve_all(self, now: float, step: int) -> None:
        """End all active events, because the run has ended."""
        for key in [key for key, condition in self._conditions.items() if condition.is_raised]:
            self._make(key, RESOLVED, self._conditions.pop(key), now, step)

    def drop(self, event: str) -> None:
        """Forget an active event about the whole run without a report."""
        self._conditions.pop((event, ""), None)

    def note_sent(self, event: Event, failures: int = 0) -> None:
        """Record that the command has received an event, or has failed too often with it."""
        self.unsent = [other for other in self.unsent if other.number != event.number]
        self._write({"sent": event.number, "failures": failures})

    def flush(self) -> None:
        """Write pending lines if the disk takes them."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _make(self, key: Key, state: str, condition: _Condition, now: float, step: int) -> Event:
        self._number += 1
        name, subject = key
        event = Event(
            number=self._number,
            event=name,
            state=state,
            subject=subject,
            detail=" ".join(condition.detail.split())[:_DETAIL_CHARS],
            time=now,
            since=condition.true_since,
            step=step,
        )
        self.unsent.append(event)
        self._write(asdict(event))
        return event

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def _load(self, run: RunDir) -> None:
        """Read what former supervisors have reported."""
        for line in read_notifications(run):
            if "sent" in line:
                self.unsent = [event for event in self.unsent if event.number != line["sent"]]
                continue
            event = Event(**{name: line[name] for name in Event.__slots__})
            self._number = max(self._number, event.number)
            self.unsent.append(event)
            key = event.event, event.subject
            if event.state == RAISED:
                self._conditions[key] = _Condition(event.detail, event.since, is_raised=True)
            else:
                self._conditions.pop(key, None)
        # After a long pause of a run, old news would only confuse people.
        oldest = time.time() - _OLDEST_S
        self.unsent = [event for event in self.unsent if event.time > oldest]


def read_notifications(run: RunDir) -> list[dict[str, Any]]:
    """The last lines of the log: events, and {"sent": number}. Invalid lines are left out."""
    kinds: dict[str, type | tuple[type, ...]] = {
        **dict.fromkeys(("event", "state", "subject", "detail"), str),
        **dict.fromkeys(("time", "since"), (int, float)),
        **dict.fromkeys(("number", "step"), int),
    }
    try:
        with run.notifications.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _READ_BYTES))
            texts = file.read().splitlines()
    except FileNotFoundError:
        return []
    lines = []
    for text in texts:
        # The first line is incomplete if the log is longer than the bytes that are read.
        try:
            line = parse_json(text)
        except ValueError:
            continue
        if is_map(line, **kinds) or is_map(line, sent=int):
            lines.append(line)
    return lines


def active_events(run: RunDir) -> list[Key]:
    """Raised events of a run that are not resolved, by its log."""
    active: dict[Key, None] = {}
    for line in read_notifications(run):
        if "sent" in line:
            continue
        key = line["event"], line["subject"]
        if line["state"] == RAISED:
            active[key] = None
        else:
            active.pop(key, None)
    return list(active)
