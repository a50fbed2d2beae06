"""Status of a run, from the run directory, and from the hub and Slurm if they answer."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.metrics.first_failures import read_failures
from relax_hpc.base.metrics.learning_signal import why_nothing_learned
from relax_hpc.base.metrics.read import is_step, read_metrics
from relax_hpc.base.metrics.shares import shares_of_time
from relax_hpc.base.rundir import RunDir, read_map
from relax_hpc.base.versions import Version
from relax_hpc.cluster.events.log import active_events
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError, SlurmJob
from relax_hpc.cluster.slurm.job_lookup import known_jobs
from relax_hpc.cluster.slurm.node_probe import excluded_nodes
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise.launch_records import all_ended
from relax_hpc.cluster.supervise.requests import read_stop_request
from relax_hpc.cluster.supervise.unsaved_work import find_unsaved_work
from relax_hpc.cluster.supervise.waits import find_waits
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.groups import groups_that_train
from relax_hpc.config.roles import POLICY
from relax_hpc.net.rendezvous.life_signs import read_activity
from relax_hpc.net.rendezvous.roster import latest_card
from relax_hpc.ops.observe.run_state import decide_state, exit_code, is_disk_full, read_signs
from relax_hpc.ops.observe.status_groups import all_names, group_status
from relax_hpc.ops.track import follower_states, is_fresh
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.records import OBSERVER_INCARNATION

SLURM_S = 2.0
"""Seconds to wait for slurmctld. It serves the whole cluster, so a status makes one query without
a retry."""
_MARKER = "COMPLETE.json"
_SKIPPED_ROWS = "queue/bad_prompt_"
_PACE_STEPS = 20
"""Number of last steps over which the pace of a run is measured."""


def status(
    run: RunDir,
    patience_s: float = 3.0,
    slurm: Slurm | None = None,
    rows: Sequence[Mapping[str, Any]] | None = None,
    hub: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Status of a run as JSON values. Unknown values are None or missing.

    ``patience_s``: time to wait for the hub; `hub` says whether it answered. ``slurm``: None skips
    the query of jobs. For a caller that knows them: ``rows``, of `read_metrics`, and ``hub``, the
    answer of the hub, empty if it does not answer.
    """
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    config = load_resolved(run.root)
    finished, stop = run.finished.exists(), read_stop_request(run)
    if hub is None:
        hub = {} if finished else _query_hub(run, config, patience_s)
    hub = dict(hub)
    jobs, squeue_answers = _jobs(run, config, slurm)
    groups = {
        name: group_status(run, config, name, hub, jobs, squeue_answers, bool(stop))
        for name in all_names(run, config, jobs)
    }
    result: dict[str, Any] = {
        "run_dir": str(run.root),
        "name": config.name,
        "layout": config.layout,
        "time": time.time(),
        "finished": finished,
        "hub": bool(hub),
        "squeue": squeue_answers,
        "stop": stop,
        "jobs": _job_rows(run, jobs),
        "excluded_nodes": excluded_nodes(run),
        "checkpoint": last_checkpoint(run, config),
        "preparing": read_activity(run.preparing),
        "groups": groups,
    }
    if rows is None:
        rows = read_metrics(run.root)
    result |= _training(run, config, hub, rows) | hub | {"weights": _weights(hub)}
    result.setdefault("disk", [] if finished else _full_disk(run))
    result["unsaved"] = find_unsaved_work(config, hub.get("beats", {}), result["trained_steps"])
    result["without"] = _removed_engines(run, config, result["weights"])
    result["waits"] = find_waits(config, hub.get("lacking", {}), groups)
    result["events"] = [] if finished else [list(key) for key in active_events(run)]
    result["trackers"] = _trackers(run)
    signs = read_signs(run, config, jobs.values() if squeue_answers else None, result["hub"])
    state = decide_state(signs)
    return result | {"state": state, "exit_code": exit_code(state, stop)}


def last_checkpoint(run: RunDir, config: Config) -> dict[str, Any] | None:
    """{"step", "path", "age_s"} of the newest complete checkpoint.

    A checkpoint is complete when each trainer has saved its part.
    """
    complete = [(step, path) for step, path in run.saved() if (path / _MARKER).exists()]
    for role in groups_that_train(config.groups):
        if role != POLICY:
            saved = {step for step, path in run.saved(role) if (path / _MARKER).exists()}
            complete = [(step, path) for step, path in complete if step in saved]
    if not complete:
        return None
    times = {path: (path / _MARKER).stat().st_mtime for _, path in complete}
    step, path = max(complete, key=lambda checkpoint: times[checkpoint[1]])
    return {"step": step, "path": str(path), "age_s": time.time() - times[path]}


def _training(
    run: RunDir, config: Config, hub: dict[str, Any], all_rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Steps, pace and throughput, from rows of metrics if the hub does not answer."""
    rows = [row for row in all_rows if is_step(row)]
    newest = rows[-1] if rows else {}
    trained = hub.get("trained_steps", newest["step"] + 1 if rows else 0)
    # Steps of an earlier incarnation of the hub are excluded: the pause of a restart is no pace.
    recent = [row for row in rows[-_PACE_STEPS:] if row["incarnation"] == newest["incarnation"]]
    step_s = None
    if len(recent) > 1:
        step_s = (recent[-1]["time"] - recent[0]["time"]) / (len(recent) - 1)
    dropped = read_map(run.finished, dropped=dict).get("dropped", _counts(newest, "queue/dropped_"))
    return {
        "trained_steps": trained,
        "steps": config.steps,
        "step_s": step_s,
        "eta_s": step_s * (config.steps - trained) if step_s is not None else None,
        "reward": newest.get("reward/mean"),
        "nothing_learned": why_nothing_learned(newest, config.algorithm.updates),
        "tokens_per_s": newest.get("perf/rollout_tokens_per_s"),
        "shares": {"steps": len(recent), "roles": shares_of_time(recent)},
        "dropped": dropped,
        "held_out": _held_out(all_rows),
        "failures": failures_of(run),
        "left_out": _counts(newest, _SKIPPED_ROWS),
    }


def _counts(row: Mapping[str, Any], prefix: str) -> dict[str, int]:
    """Counts in a row of metrics whose tags begin with ``prefix``, by the end of the tag."""
    values = {
        tag.removeprefix(prefix): value for tag, value in row.items() if tag.startswith(prefix)
    }
    return {name: int(value) for name, value in values.items() if math.isfinite(value)}


def _held_out(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """{"step", "scores"} of the newest evaluation; scores have their tags without `eval/`."""
    for row in reversed(rows):
        scores = {
            tag.removeprefix("eval/"): value
            for tag, value in row.items()
            if tag.startswith("eval/") and math.isfinite(value)
        }
        if scores:
            return {"step": row["step"], "scores": dict(sorted(scores.items()))}
    return None


def failures_of(run: RunDir) -> list[dict[str, str]]:
    """The first failure of each kind in a run, see `FirstFailure`, each with its `headline`."""
    return [
        {**asdict(failure), "headline": failure.headline} for failure in read_failures(run.root)
    ]


def _trackers(run: RunDir) -> list[dict[str, Any]]:
    """State of each tracker that `relax-hpc track` feeds or has fed."""
    return [
        {
            "name": name,
            "works": is_fresh(follower),
            "failures": follower.failures,
            "last_failure": follower.last_failure,
            "missing_bytes": missing,
        }
        for name, follower, missing in follower_states(run)
    ]


def _removed_engines(run: RunDir, config: Config, weights: dict[str, Any] | None) -> dict[str, str]:
    """Engines in rollout.without: `leaving` while they still serve, then `left`."""
    served = weights["served"] if weights else {}
    states = dict[str, str]()
    for group_name, group in config.groups.items():
        if "rollout" in group.roles:
            for engine in load_resolved(run.root, group_name).rollout.without:
                states[engine] = "leaving" if engine in served else "left"
    return states


def _weights(hub: dict[str, Any]) -> dict[str, Any] | None:
    """Newest version, the version of each engine, and the largest lag of an engine."""
    if not hub.get("newest"):
        return None
    newest = Version.parse(hub["newest"]).number
    # An engine that has left or is being replaced reports a version without an incarnation.
    served = {
        name: version
        for name, version in hub["readers"].items()
        if Version.parse(version).incarnation
    }
    lags = [newest - Version.parse(version).number for version in served.values()]
    return {"newest": hub["newest"], "served": served, "lag": max(lags, default=0)}


def _jobs(run: RunDir, config: Config, slurm: Slurm | None) -> tuple[dict[str, SlurmJob], bool]:
    """Jobs of the run in squeue, and whether squeue answered."""
    if slurm is None or not any(run.submit.glob("jobs/*.json")):
        return {}, False
    try:
        return known_jobs(run, config, slurm, with_components=True), True
    except SlurmError:
        return {}, False


def _job_rows(run: RunDir, jobs: dict[str, SlurmJob]) -> list[dict[str, Any]]:
    entries = {entry.job: entry for entry in Ledger(run).entries()}
    rows = []
    for job in jobs.values():
        entry = entries.get(job.id)
        rows.append(
            {
                "job": job.id,
                "name": job.name,
                "kind": entry.kind if entry else "component",
                "state": job.state,
                "reason": "" if job.reason == "None" else job.reason,
                "nodes": job.node_list,
                "time_left_s": job.time_left_s,
            }
        )
    return sorted(rows, key=lambda row: int(row["job"]))


def _full_disk(run: RunDir) -> list[dict[str, Any]]:
    """An entry of `disk` if the disk is full, as far as this is visible without writing to it."""
    if not is_disk_full(run):
        return []
    return [
        {
            "who": "the run",
            "path": str(run.root),
            "errno": errno.ENOSPC,
            "seconds": 0.0,
            "loose": False,
        }
    ]


def _query_hub(run: RunDir, config: Config, patience_s: float) -> dict[str, Any]:
    """The hub's answer, or an empty dictionary."""
    card = latest_card(run, "hub")
    if card is None or not card.endpoint or all_ended(run, config, "hub"):
        # Do not wait for a hub that has not started, or has recorded its end.
        return {}
    try:
        with QueueClient(run, config, "observer", OBSERVER_INCARNATION) as client:
            return client.status.get(timeout=patience_s).result().message()
    except RelaxError:
        # For example: another user can read the run directory, but not the token that the hub
        # requires.
        return {}
