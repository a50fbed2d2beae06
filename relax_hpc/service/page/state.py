"""State of a run for the page, as JSON values that the page's script shows without calculation.

A table is {columns, rows}, whose cells are texts; `tone` of a row is good, busy or bad. Text of
models and other programs has no control characters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from relax_hpc.base.disk_waits import describe_wait
from relax_hpc.base.error_origin import shorten
from relax_hpc.base.metrics.read import Metrics
from relax_hpc.base.terminal_text import escape_controls
from relax_hpc.base.versions import Version
from relax_hpc.cluster.supervise.unsaved_work import describe_unsaved_work
from relax_hpc.ops.observe.status_view import duration
from relax_hpc.queue.operations import JOINING, ExternalEngine, Operation
from relax_hpc.service.page.curves import GENERATING, READY, STALENESS, Row, make_charts

_GOOD = {"running", "done", "finished", "active", "completed"}
_BAD = {"dead", "suspect", "ended", "failed", "stopped", "lost", "partial", "unknown"}
_MIN_SHARE = 0.01
_MAX_CHARS = 2000
"""Characters of a text that is not of a sample, at most."""
_ROLES = ("rollout", "actor_fwd", "reference", "teacher", "critic", "advantages", "actor")
"""Roles in the order of the data flow; others follow."""


def describe_run(
    status: Mapping[str, Any],
    metrics: Metrics,
    events: Sequence[Mapping[str, Any]],
    operations: Sequence[Operation] = (),
    external: Sequence[ExternalEngine] = (),
) -> dict[str, Any]:
    """State of a run.

    ``status``: see `relax_hpc.ops.observe.status`. ``operations``: newest first. ``external``:
    engines that were started elsewhere.
    """
    rows = metrics.rows
    state = {
        "run": _describe_head(status),
        "progress": {"trained": status["trained_steps"], "steps": status["steps"]},
        "figures": _figures(status, rows),
        "notices": _notices(status),
        "charts": make_charts(metrics),
        "waits": _shares(status["shares"]),
        "queue": _queue(status, rows),
        "groups": _groups(status),
        "engines": _engines(status, external),
        "operations": _operations(operations, status["time"]),
        "events": list(events),
    }
    return without_controls(state, _MAX_CHARS)


def without_controls(value: Any, max_chars: int | None = None) -> Any:
    """``value`` with `escape_controls` applied to every text in it, keys included.

    ``max_chars``: of each text; the middle of a longer one is left out. None: no limit.
    """
    if isinstance(value, str):
        text = value if max_chars is None else shorten(value, max_chars)
        return escape_controls(text)
    if isinstance(value, Mapping):
        return {
            escape_controls(str(key)): without_controls(item, max_chars)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_controls(item, max_chars) for item in value]
    return value


def tone_of(state: str) -> str:
    """Colour of a state: good, busy or bad.

    >>> tone_of("ACTIVE"), tone_of("queued"), tone_of("lost")
    ('good', 'busy', 'bad')
    """
    lower = state.lower()
    if lower in _GOOD:
        return "good"
    return "bad" if lower in _BAD else "busy"


def _describe_head(status: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": status["name"],
        "folder": status["run_dir"],
        "layout": status["layout"],
        "state": status["state"],
        "tone": tone_of(status["state"]),
        "time": status["time"],
    }


def _figures(status: Mapping[str, Any], rows: Sequence[Row]) -> list[dict[str, str]]:
    """The most important numbers: {name, value, note}."""
    figures = []

    def add(name: str, value: str, note: str = "") -> None:
        figures.append({"name": name, "value": value, "note": note})

    if status["state"] == "running" and status["eta_s"] is not None:
        add("Time to go", duration(status["eta_s"]), "estimate")
    if status["reward"] is not None:
        add("Reward", f"{status['reward']:.3f}", "mean of the newest step")
    held_out = status["held_out"] or {"step": 0, "scores": {}}
    for name, score in held_out["scores"].items():
        set_name, _, score_name = name.partition("/")
        add(set_name, f"{score:.3f}", f"held-out {score_name}, step {held_out['step']}")
    if status["step_s"] is not None:
        add("Time of a step", duration(status["step_s"]), "mean of the last 20 steps")
    if status["tokens_per_s"]:
        add("Generation", f"{status['tokens_per_s']:,.0f} tokens/s", "newest step")
    staleness = _newest(rows, STALENESS)
    if staleness is not None:
        add("Staleness", f"{staleness:.2f} versions", "mean of the newest step")
    return figures


def _newest(rows: Sequence[Row], tag: str) -> float | None:
    """Newest finite value of ``tag``; None: it has no value."""
    for row in reversed(rows):
        if math.isfinite(row.get(tag, math.nan)):
            return row[tag]
    return None


def _notices(status: Mapping[str, Any]) -> list[dict[str, str]]:
    """Problems, and then waits, that a person should know first: {text, tone}."""
    problems, waits = list[str](), list[str]()
    reason = " ".join(status["stop"]["reason"].split()) if status["stop"] else ""
    if reason:
        problems.append(f"{status['state']}: {reason}")
    if status.get("unsaved"):
        problems.append(f"Checkpoint: {describe_unsaved_work(status['unsaved'])}")
    for disk in status.get("disk", ()):
        problems.append(f"Disk: {disk['who']}: {describe_wait(disk)}")
    if status.get("nothing_learned"):
        problems.append(f"Nothing was learned in the last step: {status['nothing_learned']}")
    if status["state"] == "running" and not status["hub"]:
        problems.append("The hub does not answer. Values are those of files.")
    if status["preparing"]:
        waits.append(f"Preparing: {status['preparing']}")
    for wait in status["waits"]:
        waits.append(
            f"Waits for {wait['group']}, which {wait['why']}: {duration(wait['since_s'])} so far; "
            f"fails in {duration(wait['left_s'])}."
        )
    return [
        *({"text": text, "tone": "bad"} for text in problems),
        *({"text": text, "tone": "busy"} for text in waits),
    ]


def _shares(shares: Mapping[str, Any]) -> dict[str, Any]:
    """Parts of each role's time in the newest steps: its work, and its waits for other roles.

    {steps, roles: [{role, parts: [{name, share, waits}]}]}; work comes first, largest first.
    """
    order = {role: number for number, role in enumerate(_ROLES)}
    roles = []
    for role in sorted(shares["roles"], key=lambda name: (order.get(name, len(order)), name)):
        times = shares["roles"][role]
        work = [(name, share, False) for name, share in times["at"].items() if name != "wait"]
        waits = [(f"waits for {peer}", share, True) for peer, share in times["for"].items()]
        unnamed = times["at"].get("wait", 0.0) - sum(times["for"].values())
        waits.append(("waits", unnamed, True))
        intervals = [
            {"name": name, "share": round(share, 4), "waits": is_wait}
            for name, share, is_wait in (*_largest_first(work), *_largest_first(waits))
            if share >= _MIN_SHARE
        ]
        roles.append({"role": role, "parts": intervals})
    return {"steps": shares["steps"], "roles": roles}


def _largest_first(shares: Iterable[tuple[str, float, bool]]) -> list[tuple[str, float, bool]]:
    return sorted(shares, key=lambda share: -share[1])


def _queue(status: Mapping[str, Any], rows: Sequence[Row]) -> list[dict[str, str]]:
    """Depth of the queue and what it dropped: {name, value, note}.

    Without an answer of the hub, the depth is that of the newest step.
    """
    figures = []
    depth, ages = status.get("depth") or {}, status.get("oldest_s") or {}
    for key, tag, name in (
        ("generating", GENERATING, "in generation"),
        ("ready", READY, "waiting for training"),
    ):
        count, age_s = depth.get(key), ages.get(key)
        note = f"oldest {duration(age_s)}" if count and age_s is not None else ""
        if count is None:
            count, note = _newest(rows, tag), "at the newest step"
        if count is not None:
            figures.append({"name": f"prompt groups {name}", "value": f"{count:.0f}", "note": note})
    dropped = status.get("dropped") or {}
    reasons = ", ".join(f"{name} {count}" for name, count in sorted(dropped.items()))
    total = f"{sum(dropped.values()):,}"
    figures.append({"name": "samples dropped", "value": total, "note": reasons})
    return figures


def make_table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> dict[str, Any]:
    """A table of rows (tone, cells), without the columns that are empty in every row.

    >>> make_table(["group", "job"], [("good", ["actor", ""])])
    {'columns': ['group'], 'rows': [{'tone': 'good', 'cells': ['actor']}]}
    """
    used = [k for k in range(len(columns)) if any(cells[k] for _, cells in rows)]
    return {
        "columns": [columns[k] for k in used],
        "rows": [{"tone": tone, "cells": [cells[k] for k in used]} for tone, cells in rows],
    }


def _groups(status: Mapping[str, Any]) -> dict[str, Any]:
    """Groups, those with a problem first."""
    columns = ["group", "state", "roles", "nodes", "job", "incarnation", "age", "time left"]
    columns += ["last sign", "activity"]
    is_over = status["finished"]
    rows = []
    for name, group in status["groups"].items():
        reason = " ".join(group["reason"].split())
        progress = f"step {group['step']}" if "step" in group else ""
        cells = [
            name,
            group["state"],
            ", ".join(group["roles"]),
            group["nodes"] or "",
            group["job"] or "",
            str(group["incarnation"] or ""),
            "" if is_over else _duration(group["age_s"]),
            _duration(group["time_left_s"]),
            _duration(group["last_beat_s"]),
            "; ".join(filter(None, (progress, group["doing"], reason))),
        ]
        rows.append((tone_of(group["state"]), cells))
    rows.sort(key=lambda row: ("bad", "busy", "good").index(row[0]))
    return make_table(columns, rows)


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _engines(status: Mapping[str, Any], external: Sequence[ExternalEngine]) -> dict[str, Any]:
    """Engines: those that serve, those that were removed, and those that were started elsewhere."""
    weights, removed = status.get("weights") or {}, status.get("without") or {}
    served = weights.get("served", {})
    newest = Version.parse(weights["newest"]).number if weights else 0
    # State and note of each engine.
    states = dict.fromkeys(served, ("active", ""))
    states |= {name: (state, "removed (rollout.without)") for name, state in removed.items()}
    for engine in external:
        state = f"{engine.state}: {engine.phase}" if engine.state == JOINING else engine.state
        note = " ".join(filter(None, (engine.url or engine.member, engine.reason, engine.detail)))
        states[engine.name] = (state, note)
    rows = []
    for name, (state, note) in states.items():
        version = served.get(name, "")
        lag = str(newest - Version.parse(version).number) if version else ""
        rows.append((tone_of(state), [name, state, version, lag, note]))
    return make_table(["engine", "state", "version", "versions behind", "note"], rows)


def _operations(operations: Sequence[Operation], now: float) -> dict[str, Any]:
    """Scaling operations. ``now``: wall-clock seconds."""
    rows = []
    for operation in operations:
        jobs = [
            f"job {job}{_start_of(operation, group, now)}" for group, job in operation.jobs.items()
        ]
        cells = [
            operation.id,
            operation.kind.replace("_", " "),
            operation.state,
            ", ".join(operation.engines),
            duration(now - operation.created_at),
            duration(operation.deadline_at - now) if operation.is_unfinished else "",
            "; ".join(filter(None, (operation.reason, operation.detail, *jobs))),
        ]
        rows.append((tone_of(operation.state), cells))
    columns = ["operation", "kind", "state", "engines", "age", "time left", "detail"]
    return make_table(columns, rows)


def _start_of(operation: Operation, group: str, now: float) -> str:
    start = operation.expected_start.get(group)
    return f", expected to start in {duration(start - now)}" if start else ""
