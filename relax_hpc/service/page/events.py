"""The newest events of a run, from small files of its directory: problems, starts and ends of
groups, returns to an earlier step, first failures, checkpoints, the end."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from relax_hpc.base.foreign_files import parse_json, read_in_run
from relax_hpc.base.metrics.first_failures import parse_failure
from relax_hpc.base.metrics.read import Metrics
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.events.log import read_notifications
from relax_hpc.cluster.supervise.launch_records import read_launch, read_mark
from relax_hpc.cluster.supervise.requests import read_stop_request
from relax_hpc.config import Config
from relax_hpc.config.groups import group_roles
from relax_hpc.net.rendezvous.roster import latest_incarnation

MAX_EVENTS = 100
_MAX_INCARNATIONS = 50
"""Newest incarnations of a group that are read. A group in a crash loop can have thousands."""
_MAX_CHECKPOINTS = 20
_FAILURE_BYTES = 1 << 20
Event = tuple[float, str]
"""Wall-clock seconds, and a text of one line."""


def recent_events(
    run: RunDir, config: Config, groups: Iterable[str], metrics: Metrics
) -> list[dict[str, Any]]:
    """The newest events, newest first: {time, text}. ``groups``: names of all groups."""
    events = [
        *_notifications(run),
        *_rollbacks(metrics),
        *_failures(run),
        *_checkpoints(run),
        *_end(run),
    ]
    for group in groups:
        events += _incarnations(run, config, group)
    return [{"time": time, "text": text} for time, text in heapq.nlargest(MAX_EVENTS, events)]


def _notifications(run: RunDir) -> Iterator[Event]:
    """Events about problems, which `site.on_event` gets too."""
    for line in read_notifications(run):
        if "sent" not in line:
            about = " ".join(filter(None, (line["event"].replace("_", " "), line["subject"])))
            yield line["time"], f"{line['state']}: {about}: {line['detail']}"


def _rollbacks(metrics: Metrics) -> Iterator[Event]:
    for (_, step), time in zip(metrics.rollbacks, metrics.rollback_times, strict=True):
        yield time, f"training returned to step {step} and repeats the steps after it"


def _incarnations(run: RunDir, config: Config, group: str) -> Iterator[Event]:
    newest = latest_incarnation(run, group)
    for incarnation in range(max(1, newest - _MAX_INCARNATIONS + 1), newest + 1):
        launch = read_launch(run, group, incarnation)
        if launch is not None and launch.launched_at:
            job = f" in job {launch.job}" if launch.job else ""
            yield launch.launched_at, f"{group}: started incarnation {incarnation}{job}"
        for role in group_roles(config, group):
            mark = read_mark(run, group, incarnation, role)
            if mark:
                text = f"{group}: {role} of incarnation {incarnation} ended: {mark['status']}"
                reason = " ".join(mark["reason"].split())
                path = run.exit_mark(group, incarnation, role)
                yield _modified_at(path), f"{text}, {reason}" if reason else text


def _failures(run: RunDir) -> Iterator[Event]:
    """The first failure of each kind."""
    try:
        lines = read_in_run(run.failures, _FAILURE_BYTES).splitlines()
    except OSError:
        return
    for line in lines:
        failure = parse_failure(line)
        if failure is not None:
            time = parse_json(line).get("time")
            if type(time) in (int, float):
                yield time, f"{failure.group}: first failure of its kind: {failure.headline}"


def _checkpoints(run: RunDir) -> Iterator[Event]:
    for step, path in run.saved()[-_MAX_CHECKPOINTS:]:
        marker = path / "COMPLETE.json"
        if marker.exists():
            yield _modified_at(marker), f"checkpoint of step {step} is complete"


def _end(run: RunDir) -> Iterator[Event]:
    stop = read_stop_request(run)
    if stop:
        text = f"stop requested: {stop['reason']}"
        if stop["code"]:
            text = f"the run failed with exit code {stop['code']}: {stop['reason']}"
        yield _modified_at(run.stop), " ".join(text.split())
    if run.finished.exists():
        yield _modified_at(run.finished), "the run finished: all steps are trained"


def _modified_at(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
