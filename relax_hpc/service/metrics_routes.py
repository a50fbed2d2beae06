"""`GET /metrics`: the state of the run for Prometheus, from memory.

A scrape never waits for the hub or a disk. A hub that does not answer is a sample,
`relax_hub_up 0`, and the newest known values stay, so that the target is never missing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from aiohttp import web

from relax_hpc import __version__
from relax_hpc.base.versions import Version
from relax_hpc.cluster.events.conditions import EVENTS
from relax_hpc.cluster.events.log import active_events
from relax_hpc.cluster.supervise.unsaved_work import find_unsaved_work
from relax_hpc.config.groups import base_name
from relax_hpc.config.schema import Config
from relax_hpc.ops.track import TrackerFollower, follower_states
from relax_hpc.queue.client import QueueStatus
from relax_hpc.queue.operations import ENGINE_STATES, ExternalEngine
from relax_hpc.service.documentation import documented
from relax_hpc.service.live_run import LiveRun
from relax_hpc.service.open_metrics import CONTENT_TYPE, Exposition, add_tags, describe_tag

_FILES_S = 10.0
"""Seconds between two reads of the states of trackers and of the log of events."""

NO_EVENTS: Mapping[str, int] = MappingProxyType({})


def routes(live: LiveRun) -> list[web.AbstractRouteDef]:
    """The route of the metrics."""
    files = _FileStates(live)
    # The first call compiles patterns, which no scrape should wait for.
    describe_tag("reward/mean")

    @documented(answers={200: "application/openmetrics-text"})
    async def metrics(request: web.Request) -> web.Response:
        """Newest metrics of the run in the format OpenMetrics."""
        files.refresh()
        body = expose(live, files.trackers, files.events).encode()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    return [web.get("/metrics", metrics)]


class _FileStates:
    """States of trackers and events, read from files in a thread from time to time."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self.trackers: list[tuple[str, TrackerFollower, int]] = []
        self.events: Counter[str] = Counter()
        """Number of active events by name."""

    def refresh(self) -> None:
        """Begin to read them, if they are old and no read is in progress."""
        if self._reading and not self._reading.done():
            return
        if time.monotonic() - self._read_at > _FILES_S:
            self._read_at = time.monotonic()
            self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        run = self._live.run
        try:
            self.trackers = await asyncio.to_thread(lambda: list(follower_states(run)))
            active = await asyncio.to_thread(active_events, run)
        except OSError as error:
            self._live.counts[f"update_{type(error).__name__}"] += 1
            return
        self.events = Counter(event for event, _ in active)


def expose(
    live: LiveRun,
    trackers: Iterable[tuple[str, TrackerFollower, int]] = (),
    events: Mapping[str, int] = NO_EVENTS,
) -> str:
    """All metrics of a run, as OpenMetrics. ``events``: number of active events by name."""
    exposition = Exposition()
    _add_run(exposition, live)
    if live.status is not None:
        _add_status(exposition, live.config, live.status)
        _add_engines(exposition, live, live.status)
    add_tags(exposition, live.metrics.values)
    _add_operations(exposition, live)
    _add_service(exposition, live.counts)
    for name, follower, missing in trackers:
        text = "failures of relax-hpc track with a tracker"
        exposition.add(
            "relax_tracker_failures", follower.failures, text, {"tracker": name}, "counter"
        )
        text = "bytes of metrics.jsonl that a tracker has not logged"
        exposition.add("relax_tracker_missing_bytes", missing, text, {"tracker": name})
    for event in EVENTS:
        text = "events that were reported to people and are not resolved"
        exposition.add("relax_events_active", events.get(event, 0), text, {"event": event})
    text = "series that were left out of this answer, because their name has too many"
    exposition.add("relax_exposition_left_out", exposition.left_out, text)
    return exposition.text()


def _add_run(out: Exposition, live: LiveRun) -> None:
    config = live.config
    names = {"name": config.name, "layout": config.layout, "version": __version__}
    out.add("relax_run", 1, "the run", names, "info")
    answered = live.status is not None
    out.add("relax_hub_up", float(not live.is_hub_away), "1: the hub answers; 0: it does not")
    since_s = live.status_age_s if answered else time.time() - live.started_at
    text = "seconds since the hub's last answer, or since the start of the service"
    out.add("relax_hub_silent_seconds", since_s, text)
    out.add("relax_run_steps", config.steps, "training steps of the whole run")
    if live.metrics.time:
        out.add("relax_run_step", live.metrics.step, "newest trained step, from 0")
        age_s = max(0.0, time.time() - live.metrics.time)
        out.add("relax_run_step_age_seconds", age_s, "seconds since the end of the newest step")


def _add_status(out: Exposition, config: Config, status: QueueStatus) -> None:
    out.add("relax_run_finished", status.finished, "1: all steps are trained and saved")
    out.add("relax_rows_accepted", status.accepted, "rows accepted by the queue", kind="counter")
    for reason, count in status.dropped.items():
        out.add(
            "relax_rows_dropped", count, "rows dropped, by reason", {"reason": reason}, "counter"
        )
    for what, count in status.noted.items():
        kind, _, reason = what.partition("/")
        text = "incidents: faults of engines and environments, bad prompts ..."
        out.add("relax_incidents", count, text, {"kind": kind, "reason": reason}, "counter")
    for state, number in status.depth.items():
        out.add(
            "relax_queue_groups", number, "prompt groups in the queue, by state", {"state": state}
        )
    for state, seconds in status.oldest_s.items():
        text = "age of the oldest prompt group, by state"
        out.add("relax_queue_oldest_seconds", seconds or 0.0, text, {"state": state})
    text = "bytes of rows that wait for training"
    out.add("relax_queue_untrained_bytes", status.untrained_bytes, text)
    out.add("relax_disk_waits", len(status.disk), "writes that wait for a disk")
    text = "connections that did not prove that they hold the token of the run"
    out.add("relax_refused_connections", status.refused_connections, text, kind="counter")
    unsaved = find_unsaved_work(config, status.beats, status.trained_steps)
    text = "seconds of work that no checkpoint has, because checkpoints fail; 0: none failed"
    out.add("relax_unsaved_seconds", unsaved.get("seconds", 0.0), text)
    _add_groups(out, status)


def _add_groups(out: Exposition, status: QueueStatus) -> None:
    """Ages of heartbeats, incarnations and waits, by group."""
    ages: dict[str, float] = {}
    members: Counter[str] = Counter()
    for beat in status.beats.values():
        group = str(beat["group"])
        ages[group] = max(ages.get(group, 0.0), float(beat["age_s"]))
        members[group] += 1
    for group, age_s in ages.items():
        text = "age of the oldest last heartbeat of a group's processes"
        out.add("relax_group_beat_age_seconds", age_s, text, {"group": group})
        text = "processes of a group that have sent heartbeats"
        out.add("relax_group_processes", members[group], text, {"group": group})
    for group, incarnation in status.incarnations.items():
        text = "incarnation of a group; it rises with each restart"
        out.add("relax_group_incarnation", incarnation, text, {"group": group})
    for group in {*ages, *status.lacking}:
        waited_s = float(status.lacking.get(group, {}).get("since_s", 0.0))
        text = "seconds for which other groups have waited for a group; 0: it is present"
        out.add("relax_group_awaited_seconds", waited_s, text, {"group": group})


def _add_engines(out: Exposition, live: LiveRun, status: QueueStatus) -> None:
    """Versions and states of engines, and of other readers of weights."""
    newest = Version.parse(status.newest).number if status.newest else 0
    out.add("relax_weights_newest_version", newest, "number of the newest published version")
    for name, version in status.readers.items():
        group, engine = _split_engine(name)
        served = Version.parse(version)
        labels = {"group": group, "engine": engine}
        prefix = "relax_engine" if _has_engines(live.config, group) else "relax_reader"
        # An engine that has left, or is being replaced, reports a version without an incarnation.
        is_up = bool(served.incarnation)
        out.add(f"{prefix}_up", is_up, "1: it generates or scores with a version", labels)
        if is_up:
            out.add(f"{prefix}_version", served.number, "number of its version", labels)
            lag = max(0, newest - served.number)
            out.add(f"{prefix}_lag_versions", lag, "versions behind the newest one", labels)
    for external in live.present.external if live.present else ():
        _add_external(out, external)


def _add_external(out: Exposition, external: ExternalEngine) -> None:
    group, engine = _split_engine(external.name)
    for state in ENGINE_STATES:
        labels = {"group": group, "engine": engine, "relax_engine_state": state}
        is_state = float(external.state == state)
        text = "state of an engine that was started elsewhere"
        out.add("relax_engine_state", is_state, text, labels, "stateset")


def _split_engine(name: str) -> tuple[str, str]:
    group, _, engine = name.partition("/")
    return group, engine or "0"


def _has_engines(config: Config, group: str) -> bool:
    base = base_name(group, config.groups)
    return bool(base) and "rollout" in config.groups[base].roles


def _add_operations(out: Exposition, live: LiveRun) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for operation in live.wanted.operations:
        counts[operation.kind, operation.state] += 1
    for kind in ("scale_out", "scale_in"):
        states = {state: count for (of, state), count in counts.items() if of == kind}
        text = "unfinished operations that add or remove engines"
        for state, count in (states or {"none": 0}).items():
            out.add("relax_operations", count, text, {"kind": kind, "state": state})


def _add_service(out: Exposition, counts: Mapping[str, Any]) -> None:
    for name, count in counts.items():
        what, _, detail = name.partition("_")
        if what == "status":
            text = "answers of the service, by HTTP status"
            out.add("relax_service_answers", count, text, {"status": detail}, "counter")
        else:
            text = "updates of the service's state that failed, and refused requests"
            out.add("relax_service_failures", count, text, {"what": name}, "counter")
