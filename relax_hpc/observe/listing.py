"""`relax-hpc list`: the runs below a folder, one line each; from their files, and one question to Slurm for all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_hpc.config import load_resolved
from relax_hpc.errors import ConfigError
from relax_hpc.metrics.read import is_step, read_metrics
from relax_hpc.observe.states import exit_code, gravest, state_of
from relax_hpc.observe.status import SLURM_S
from relax_hpc.observe.status_view import duration
from relax_hpc.rendezvous.signs import said
from relax_hpc.rundir import RunDir
from relax_hpc.slurm.commands import Job, Slurm, SlurmError
from relax_hpc.slurm.submissions import Ledger
from relax_hpc.supervise.launch_records import all_ended, is_there, last_beat_s, members_of
from relax_hpc.supervise.requests import asked_to_stop
from relax_hpc.transfer_queue.client import BEAT_FILE_S

_DEPTH = 3
_ROW = "{:<28} {:<9} {:>12} {:>8}  {:<7} {}"


def main(folder: str, as_json: bool = False) -> int:
    """Print the runs below ``folder``, newest first; the exit code is that of the gravest, see `states.exit_code`."""
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; name one that holds run directories")
    rows = runs(root)
    if as_json:
        print(json.dumps(rows))
        return gravest(row["exit_code"] for row in rows)
    print(_ROW.format("RUN", "STATE", "STEP", "AGE", "LAYOUT", "JOBS"))
    for row in rows:
        step, age = f"{row['trained_steps']}/{row['steps']}", duration(row["age_s"])
        print(_ROW.format(row["run"], row["state"], step, age, row["layout"], " ".join(row["jobs"]) or "-"))
    return gravest(row["exit_code"] for row in rows)


def runs(root: Path, slurm: Slurm | None = None) -> list[dict[str, Any]]:
    """Row for each run as its files tell; `age_s`: seconds since it was made."""
    found = [RunDir(path) for path in run_directories(root)]
    jobs = _own_jobs(slurm) if any(run.submit.exists() for run in found) else None
    rows = [_row(run, root.absolute(), jobs) for run in found]
    return sorted(rows, key=lambda row: row["age_s"])


def run_directories(root: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Folders that hold a run, not deeper than ``depth`` below ``root``, which may be one itself."""
    if (root / "config.yaml").is_file() and (root / "token").is_file():
        yield root
        return
    if depth:
        for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
            if entry.is_dir() and not entry.name.startswith("."):
                yield from run_directories(Path(entry.path), depth - 1)


def _row(run: RunDir, root: Path, jobs: dict[str, Job] | None) -> dict[str, Any]:
    """Row of the list for a run; ``jobs``: None if Slurm has not said which there are."""
    about = {"run": str(run.root.relative_to(root)), "run_dir": str(run.root), "jobs": []}
    about |= {"age_s": time.time() - run.token_file.stat().st_mtime, "trained_steps": 0, "steps": 0, "layout": "-"}
    try:
        config = load_resolved(run.root)
    except ConfigError as error:
        return about | {"state": "unreadable", "exit_code": exit_code("unreadable", {}), "error": str(error)}
    submitted = {entry.job for entry in Ledger(run).entries()}
    own = submitted & (jobs or {}).keys()
    steps = [row["step"] + 1 for row in read_metrics(run.root) if is_step(row)]
    living = [name for name in members_of(run, config) if not all_ended(run, config, name)]
    beat_s = min((last_beat_s(run, name) for name in living), default=float("inf"))
    about |= {"trained_steps": max(steps, default=0), "steps": config.steps, "layout": config.layout}
    about |= {"jobs": sorted(own, key=int), "last_beat_s": beat_s if beat_s < float("inf") else None}
    # What squeue does not know any more has ended, however young its last beat is.
    beats = beat_s < config.liveness.lease_s + BEAT_FILE_S or any(is_there(run, name) for name in living)
    alive = beats and bool(own or not submitted or jobs is None)
    stop, waits = asked_to_stop(run), _waits(run, [jobs[job] for job in own] if jobs else [])
    state = state_of(run.finished.exists(), stop, alive, waits)
    return about | {"state": state, "exit_code": exit_code(state, stop)}


def _waits(run: RunDir, jobs: list[Job]) -> str:
    """Reason why nothing beats of a run that has not ended."""
    if said(run.preparing) or any(job.state != "PENDING" for job in jobs):
        return "starting"
    return "queued" if jobs else ""


def _own_jobs(slurm: Slurm | None) -> dict[str, Job] | None:
    try:
        return (slurm or Slurm(timeout_s=SLURM_S, tries=1)).own_jobs()
    except SlurmError:
        return None
