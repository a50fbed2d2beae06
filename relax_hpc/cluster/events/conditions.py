"""Conditions of a run that people want to hear about. Pure functions of observations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from relax_hpc.base.disk_waits import describe_wait
from relax_hpc.base.versions import Version
from relax_hpc.cluster.supervise.unsaved_work import describe_unsaved_work
from relax_hpc.config.groups import base_name
from relax_hpc.config.schema import Config, EventsConfig

WAITING, UNSAVED, NO_PROGRESS = "waiting", "unsaved_work", "no_progress"
NON_FINITE, GOODPUT, DISK, ENGINE_LOST = "non_finite_loss", "falling_goodput", "disk", "engine_lost"
RUN_ENDED, RUN_FAILED = "run_ended", "run_failed"
EVENTS = (
    *(RUN_ENDED, RUN_FAILED, WAITING, UNSAVED, NO_PROGRESS),
    *(NON_FINITE, GOODPUT, DISK, ENGINE_LOST),
)
"""Names of all events."""
IMMEDIATE = (NON_FINITE, RUN_ENDED, RUN_FAILED)
"""Events that are reported without `events.hold_s`: what they are about has happened."""
PACE_STEPS = 200
"""Number of last steps whose pace is the usual one."""
_RECENT_STEPS = 5
"""Number of last steps whose goodput is compared with the usual one."""
_LEAST_STEPS = 20
"""Number of steps after which a usual goodput is known."""
_RECOVERED = 0.2
"""Share of the usual goodput, above `events.goodput_share`, at which a run has recovered."""
_FINITE_STEPS = 3
"""Number of finite steps after which a loss that was not finite is resolved."""
_SLOW_STEPS, _LEAST_WAIT_S = 10.0, 600.0
"""Multiple of the usual step time, and least seconds, after which a run makes no progress."""

Key = tuple[str, str]
"""Name of an event and its subject: a group, a folder, an engine; empty: the run."""


@dataclass(slots=True, kw_only=True)
class Observations:
    """Knowledge of a supervisor about a run. Times are in seconds."""

    now: float
    """Wall-clock time."""
    steps: Sequence[Mapping[str, Any]] = ()
    """Last lines of training steps of metrics.jsonl, oldest first."""
    progress_since: float = 0.0
    """Wall-clock time since which the run could have trained: the newest of the last step, the end
    of the last wait, and the start of the supervisor."""
    awaited_groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Groups that other groups wait for, see `GroupPresence.report`."""
    hub_silent_s: float = 0.0
    """Seconds since the hub's last answer."""
    disks: Collection[Mapping[str, Any]] = ()
    """Writes that wait for a disk."""
    unsaved: Mapping[str, Any] = field(default_factory=dict)
    """Work that no checkpoint has, see `find_unsaved_work`."""
    readers: Mapping[str, str] = field(default_factory=dict)
    """Version of each engine and other reader of weights."""
    lost_engines: Mapping[str, str] = field(default_factory=dict)
    """Engines that were started elsewhere and are lost, with the reason."""
    removed_engines: Collection[str] = ()
    """Engines that a user has removed."""


def find_conditions(
    observed: Observations, config: Config, active: Collection[Key] = ()
) -> dict[Key, str]:
    """Conditions that are true now, each with one line of text. ``active``: events that were
    raised and are not resolved; some of them end at another bound than they begin."""
    bounds = config.events
    conditions: dict[Key, str] = {}
    for group, wait in observed.awaited_groups.items():
        if wait["since_s"] > bounds.waiting_s:
            text = f"{group}: {wait['why']}; others have waited for it {wait['since_s']:.0f} s"
            conditions[WAITING, group] = text
    # The hub reports the waits for all other groups, but it cannot report its own absence.
    if observed.hub_silent_s > bounds.waiting_s:
        conditions[WAITING, "hub"] = f"hub: has not answered for {observed.hub_silent_s:.0f} s"
    if observed.unsaved and observed.unsaved["seconds"] > bounds.unsaved_s:
        conditions[UNSAVED, ""] = describe_unsaved_work(observed.unsaved)
    for disk in observed.disks:
        conditions[DISK, str(disk["path"])] = describe_wait(disk)
    conditions |= _lost_engines(observed, config)
    for event, text in (
        (NO_PROGRESS, _stall(observed, config)),
        (NON_FINITE, _non_finite(observed.steps)),
        (GOODPUT, _low_goodput(observed.steps, bounds, (GOODPUT, "") in active)),
    ):
        if text:
            conditions[event, ""] = text
    return conditions


def _lost_engines(observed: Observations, config: Config) -> dict[Key, str]:
    """Engines that serve no version, and external engines that are lost."""
    conditions: dict[Key, str] = {}
    for name, version in observed.readers.items():
        group = base_name(name.partition("/")[0], config.groups)
        has_engines = bool(group) and "rollout" in config.groups[group].roles
        # An engine that has left, or is being replaced, reports a version without an incarnation.
        serves = bool(Version.parse(version).incarnation)
        if has_engines and not serves and name not in observed.removed_engines:
            conditions[ENGINE_LOST, name] = f"engine {name} serves no version of the weights"
    for name, reason in observed.lost_engines.items():
        conditions[ENGINE_LOST, name] = f"engine {name}: {reason or 'is lost'}"
    return conditions


def _stall(observed: Observations, config: Config) -> str:
    """Text if no step has ended for too long although nothing is waited for; else empty."""
    # A wait is not a failure. Events `waiting` and `disk` report it.
    if observed.awaited_groups or observed.disks:
        return ""
    limit_s = stall_limit_s(observed.steps, config)
    quiet_s = observed.now - observed.progress_since
    if quiet_s <= limit_s:
        return ""
    step = observed.steps[-1]["step"] if observed.steps else None
    last = "no step has ended" if step is None else f"no step has ended since step {step}"
    return f"{last}, for {quiet_s:.0f} s; expected at most {limit_s:.0f} s"


def stall_limit_s(steps: Sequence[Mapping[str, Any]], config: Config) -> float:
    """Seconds without a step after which a run makes no progress."""
    if config.events.no_progress_s:
        return config.events.no_progress_s
    durations = list(_durations(steps))
    # The first step of a run compiles kernels and fills the queue, so its time is unknown.
    if not durations:
        return config.liveness.hang_s
    return max(_LEAST_WAIT_S, _SLOW_STEPS * statistics.median(durations))


def _durations(steps: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """Seconds between the ends of consecutive steps of the same hub."""
    for before, after in pairwise(steps):
        # The pause of a restart is no pace.
        if before["incarnation"] == after["incarnation"] and after["time"] > before["time"]:
            yield after["time"] - before["time"]


def _non_finite(steps: Sequence[Mapping[str, Any]]) -> str:
    """Text if a loss of the last steps is not finite, or updates were skipped; else empty."""
    for step in reversed(steps[-_FINITE_STEPS:]):
        bad = [tag for tag, value in step.items() if tag.startswith("loss/") and _is_bad(value)]
        skipped = step.get("loss/skipped_updates", 0.0)
        # metrics.jsonl has null for nan and infinity, which its reader turns into nan.
        if bad:
            return f"step {step['step']}: {', '.join(sorted(bad))} is not finite"
        if skipped and skipped > 0:
            return f"step {step['step']}: {skipped:.0f} updates skipped, gradient not finite"
    return ""


def _is_bad(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _low_goodput(steps: Sequence[Mapping[str, Any]], bounds: EventsConfig, is_active: bool) -> str:
    """Text if the last steps train far fewer tokens per second than usual; else empty."""
    rates = list(_rates(steps))
    if not bounds.goodput_share or len(rates) < _LEAST_STEPS:
        return ""
    usual = statistics.median(rate for _, rate in rates)
    recent = rates[-_RECENT_STEPS:]
    # Tokens over the whole time, not a mean of rates: one slow step among fast ones counts fully.
    tokens = sum(seconds * rate for seconds, rate in recent)
    present = tokens / sum(seconds for seconds, _ in recent)
    # With one bound for both, a pace near it would raise and resolve the event again and again.
    share = bounds.goodput_share
    if is_active:
        share = min(share + _RECOVERED, 1.0)
    if present >= share * usual:
        return ""
    return (
        f"{present:.0f} trained tokens per second in the last {len(recent)} steps, "
        f"{present / usual:.0%} of the usual {usual:.0f}"
    )


def _rates(steps: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, float]]:
    """(seconds, trained tokens per second) of each step, waits before it included."""
    for before, after in pairwise(steps):
        seconds = after["time"] - before["time"]
        tokens = after.get("perf/trained_tokens", math.nan)
        if seconds > 0 and math.isfinite(tokens):
            yield seconds, tokens / seconds
