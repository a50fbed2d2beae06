"""Status of a run: from the hub if it answers, from Slurm if it answers, and from the run directory
in any case."""

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
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError, SlurmJob
from relax_hpc.cluster.slurm.job_lookup import known_jobs
from relax_hpc.cluster.slurm.node_probe import excluded_nodes
from relax_hpc.cluster.slurm.submissions import Ledger
from relax_hpc.cluster.supervise.launch_records import all_ended
from relax_hpc.cluster.supervise.requests import read_stop_request
from relax_hpc.cluster.supervise.unsaved_work import find_unsaved_work
from relax_hpc.cluster.supervise.waits import find_waits
from relax_hpc.config import Config, load_resolved
from relax_hpc.config.groups import trainers_of
from relax_hpc.config.roles import POLICY
from relax_hpc.net.rendezvous.life_signs import read_activity
from relax_hpc.net.rendezvous.roster import latest_card
from relax_hpc.ops.observe.run_state import exit_code, is_full, signs_of, state_of
from relax_hpc.ops.observe.status_groups import all_names, group_status
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.records import OBSERVER_INCARNATION

SLURM_S = 2.0
"""Seconds for an answer of slurmctld, which serves the whole cluster: one question a look, and no
second try."""
_MARKER = "COMPLETE.json"
_LEFT_OUT = "queue/bad_prompt_"
_PACE = 20
"""Steps by which the pace of a run is measured."""


def status(run: RunDir, patience_s: float = 3.0, slurm: Slurm | None = None) -> dict[str, Any]:
    """Everything that is known; JSON values. `hub`: it answered within ``patience_s``.

    ``slurm``: None does not ask for jobs. What could not be found out is None, or absent.
    """
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    config = load_resolved(run.root)
    finished, asked = run.finished.exists(), read_stop_request(run)
    found = {} if finished else _ask_hub(run, config, patience_s)
    jobs, squeue = _jobs(run, config, slurm)
    about = {
        "run_dir": str(run.root),
        "name": config.name,
        "layout": config.layout,
        "time": time.time(),
        "finished": finished,
        "hub": bool(found),
        "squeue": squeue,
        "stop": asked,
        "jobs": _job_rows(run, jobs),
        "excluded_nodes": excluded_nodes(run),
        "checkpoint": last_checkpoint(run, config),
        "preparing": read_activity(run.preparing),
        "groups": {
            name: group_status(run, config, name, found, jobs, squeue, bool(asked))
            for name in all_names(run, config, jobs)
        },
    }
    about |= _training(run, config, found) | found | {"weights": _weights(found)}
    about.setdefault("disk", [] if finished else _full(run))
    about["unsaved"] = find_unsaved_work(config, found.get("beats", {}), about["trained_steps"])
    about["without"] = _without(run, config, about["weights"])
    about["waits"] = find_waits(config, found.get("lacking", {}), about["groups"])
    state = state_of(signs_of(run, config, jobs.values() if squeue else None, about["hub"]))
    return about | {"state": state, "exit_code": exit_code(state, asked)}


def last_checkpoint(run: RunDir, config: Config) -> dict[str, Any] | None:
    """{"step", "path", "age_s"} of the newest whole checkpoint: all roles that train have saved
    their part of it."""
    others = [role for role in trainers_of(config.groups) if role != POLICY]
    steps = [
        {step for step, path in run.saved(role) if (path / _MARKER).exists()} for role in others
    ]
    parts = [(step, path) for step, path in run.saved() if (path / _MARKER).exists()]
    whole = [(step, path) for step, path in parts if all(step in saved for saved in steps)]
    if not whole:
        return None
    step, path = max(whole, key=lambda found: (found[1] / _MARKER).stat().st_mtime)
    return {
        "step": step,
        "path": str(path),
        "age_s": time.time() - (path / _MARKER).stat().st_mtime,
    }


def _training(run: RunDir, config: Config, found: dict[str, Any]) -> dict[str, Any]:
    """Steps, pace and throughput; the metrics file knows them while the hub does not answer."""
    all_rows = read_metrics(run.root)
    rows = [row for row in all_rows if is_step(row)]
    trained = found.get("trained_steps", rows[-1]["step"] + 1 if rows else 0)
    # What lies between two lives of the hub says nothing of the pace.
    last = [row for row in rows[-_PACE:] if row["incarnation"] == rows[-1]["incarnation"]]
    pace = (last[-1]["time"] - last[0]["time"]) / (len(last) - 1) if len(last) > 1 else None
    end = rows[-1] if rows else {}
    dropped = read_map(run.finished, dropped=dict).get("dropped", _counts(end, "queue/dropped_"))
    return {
        "trained_steps": trained,
        "steps": config.steps,
        "step_s": pace,
        "eta_s": pace * (config.steps - trained) if pace is not None else None,
        "reward": end.get("reward/mean"),
        "nothing_learned": why_nothing_learned(end, config.algorithm.updates),
        "tokens_per_s": end.get("perf/rollout_tokens_per_s"),
        "shares": {"steps": len(last), "roles": shares_of_time(last)},
        "dropped": dropped,
        "held_out": _held_out(all_rows),
        "failures": failures_of(run),
        "left_out": _counts(end, _LEFT_OUT),
    }


def _counts(row: Mapping[str, Any], prefix: str) -> dict[str, int]:
    """Counts in a row of metrics by what is behind the ``prefix`` of their tags."""
    values = {
        tag.removeprefix(prefix): value for tag, value in row.items() if tag.startswith(prefix)
    }
    return {name: int(value) for name, value in values.items() if math.isfinite(value)}


def _held_out(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """{"step", "scores"} of the newest evaluation, by names of metrics without `eval/`."""
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


def _without(run: RunDir, config: Config, weights: dict[str, Any] | None) -> dict[str, str]:
    """State of engines that are to serve no more: `leaving`, or `left`."""
    served = weights["served"] if weights else {}
    layers = [name for name, group in config.groups.items() if "rollout" in group.roles]
    names = (name for group in layers for name in load_resolved(run.root, group).rollout.without)
    return {name: "leaving" if name in served else "left" for name in names}


def _weights(found: dict[str, Any]) -> dict[str, Any] | None:
    """Newest version, what each engine serves, and how many versions the slowest is behind."""
    if not found.get("newest"):
        return None
    newest = Version.parse(found["newest"]).number
    # One that left, or is being replaced, serves a version of no incarnation.
    served = {
        name: version
        for name, version in found["readers"].items()
        if Version.parse(version).incarnation
    }
    behind = [newest - Version.parse(version).number for version in served.values()]
    return {"newest": found["newest"], "served": served, "lag": max(behind, default=0)}


def _jobs(run: RunDir, config: Config, slurm: Slurm | None) -> tuple[dict[str, SlurmJob], bool]:
    """Jobs of the run that squeue knows, and whether it answered."""
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
        about = {"job": job.id, "name": job.name, "kind": entry.kind if entry else "component"}
        about |= {
            "state": job.state,
            "reason": "" if job.reason == "None" else job.reason,
            "nodes": job.node_list,
        }
        rows.append(about | {"time_left_s": job.time_left_s})
    return sorted(rows, key=lambda row: int(row["job"]))


def _full(run: RunDir) -> list[dict[str, Any]]:
    """Signs of a full disk that can be seen without writing to it."""
    if not is_full(run):
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


def _ask_hub(run: RunDir, config: Config, patience_s: float) -> dict[str, Any]:
    card = latest_card(run, "hub")
    if card is None or not card.endpoint or all_ended(run, config, "hub"):
        # Nobody is waited for who has not begun, or has said that it ended.
        return {}
    try:
        with QueueClient(run, config, "observer", OBSERVER_INCARNATION) as client:
            return client.status.get(timeout=patience_s).result().message()
    except RelaxError:
        # Another user may read the run directory and not its token, which the hub asks for.
        return {}
