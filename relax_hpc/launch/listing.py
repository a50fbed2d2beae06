"""`relax-hpc list`: the runs below a folder, one line each; from their files, and one question to Slurm for all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_hpc.config import load_resolved
from relax_hpc.errors import EXIT_DONE, ConfigError
from relax_hpc.launch.records import last_beat_s, members_of
from relax_hpc.launch.requests import asked_to_stop
from relax_hpc.launch.slurm.commands import Job, Slurm, SlurmError
from relax_hpc.launch.slurm.ledger import Ledger
from relax_hpc.launch.status import SLURM_S
from relax_hpc.launch.status_view import duration
from relax_hpc.metrics.read import read_metrics
from relax_hpc.rundir import RunDir
from relax_hpc.transfer_queue.client import BEAT_FILE_S

_DEPTH = 3
_ROW = "{:<28} {:<9} {:>12} {:>8}  {:<7} {}"


def main(folder: str, as_json: bool = False) -> int:
    """Print the runs below ``folder``, newest first."""
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; name one that holds run directories")
    rows = runs(root)
    if as_json:
        print(json.dumps(rows))
        return EXIT_DONE
    print(_ROW.format("RUN", "STATE", "STEP", "AGE", "LAYOUT", "JOBS"))
    for row in rows:
        step, age = f"{row['trained_steps']}/{row['steps']}", duration(row["age_s"])
        print(_ROW.format(row["run"], row["state"], step, age, row["layout"], " ".join(row["jobs"]) or "-"))
    return EXIT_DONE


def runs(root: Path, slurm: Slurm | None = None) -> list[dict[str, Any]]:
    """What the files of each run say; `age_s` is since it was made."""
    found = [RunDir(path) for path in run_directories(root)]
    jobs = _own_jobs(slurm) if any(run.submit.exists() for run in found) else {}
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


def _row(run: RunDir, root: Path, jobs: dict[str, Job]) -> dict[str, Any]:
    about = {"run": str(run.root.relative_to(root)), "run_dir": str(run.root), "jobs": []}
    about |= {"age_s": time.time() - run.token_file.stat().st_mtime, "trained_steps": 0, "steps": 0, "layout": "-"}
    try:
        config = load_resolved(run.root)
    except ConfigError as error:
        return about | {"state": "unreadable", "error": str(error)}
    own = {entry.job for entry in Ledger(run).entries()} & jobs.keys()
    steps = [row["step"] + 1 for row in read_metrics(run.root) if "reward/mean" in row]
    beat_s = min(last_beat_s(run, name) for name in members_of(run, config))
    about |= {"trained_steps": max(steps, default=0), "steps": config.steps, "layout": config.layout}
    about |= {"jobs": sorted(own, key=int), "last_beat_s": beat_s if beat_s < float("inf") else None}
    return about | {"state": _state(run, beat_s, config.liveness.lease_s, [jobs[job] for job in own])}


def _state(run: RunDir, beat_s: float, lease_s: float, jobs: list[Job]) -> str:
    if run.finished.exists():
        return "finished"
    beats = beat_s < lease_s + BEAT_FILE_S
    if asked := asked_to_stop(run):
        return "stopping" if beats and jobs else "failed" if asked["code"] else "stopped"
    if beats:
        return "running"
    running = any(job.state != "PENDING" for job in jobs)
    return "starting" if running else "queued" if jobs else "ended"


def _own_jobs(slurm: Slurm | None) -> dict[str, Job]:
    try:
        return (slurm or Slurm(timeout_s=SLURM_S, tries=1)).own_jobs()
    except SlurmError:
        return {}
