"""`relax-hpc list`: the runs below a folder, from their files and one query to Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.metrics.read import is_step, read_metrics
from relax_hpc.base.path_errors import explain_path_error
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm, SlurmError, SlurmJob
from relax_hpc.cluster.slurm.job_lookup import submitted_jobs
from relax_hpc.cluster.supervise.launch_records import all_ended, last_beat_s, members_of
from relax_hpc.config import Config, load_resolved
from relax_hpc.ops.observe.run_state import (
    UNREADABLE,
    decide_state,
    exit_code,
    read_signs,
    worst_exit_code,
)
from relax_hpc.ops.observe.status import SLURM_S
from relax_hpc.ops.observe.status_view import duration

_DEPTH = 3
_ROW = "{:<28} {:<9} {:>12} {:>8}  {:<7} {}"


def main(folder: str, as_json: bool = False) -> int:
    """Print the runs below ``folder``, newest first.

    Returns the most serious exit code of the runs, see `run_state`.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; name one that has run directories")
    # An unreadable root is an error; an unreadable folder below it is a row.
    os.scandir(root).close()
    rows = runs(root)
    if as_json:
        print(json.dumps(rows))
        return worst_exit_code(row["exit_code"] for row in rows)
    print(_ROW.format("RUN", "STATE", "STEP", "AGE", "LAYOUT", "JOBS"))
    for row in rows:
        step, age = f"{row['trained_steps']}/{row['steps']}", duration(row["age_s"])
        jobs = " ".join(row["jobs"]) or "-"
        print(_ROW.format(row["run"], row["state"], step, age, row["layout"], jobs))
    return worst_exit_code(row["exit_code"] for row in rows)


def runs(root: Path, slurm: Slurm | None = None) -> list[dict[str, Any]]:
    """A row for each run below ``root``; `age_s`: seconds since the run was created."""
    records = {path: _read_run(RunDir(path)) for path in run_directories(root)}
    readable = [record for record in records.values() if not isinstance(record, str)]
    jobs = _query_squeue(chain.from_iterable(ids for _, ids in readable), slurm)
    rows = [_row(path, root.absolute(), record, jobs) for path, record in records.items()]
    return sorted(rows, key=lambda row: row["age_s"])


def run_directories(root: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Run directories and unreadable folders at most ``depth`` levels below ``root``.

    ``root`` itself may be one.
    """
    try:
        if (root / "config.yaml").is_file() and (root / "token").is_file():
            yield root
            return
        entries = sorted(os.scandir(root), key=lambda entry: entry.name) if depth else []
    except OSError:
        yield root
        return
    for entry in entries:
        if not entry.name.startswith(".") and _is_directory(entry):
            yield from run_directories(Path(entry.path), depth - 1)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # A circle of links, or a link into a folder that this user cannot read.
        return False


def _read_run(run: RunDir) -> tuple[Config, list[str]] | str:
    """Configuration and job ids of a run, or the reason why they cannot be read.

    A finished run has no ids.
    """
    try:
        config = load_resolved(run.root)
        may_have_jobs = run.submit.is_dir() and not run.finished.exists()
        return config, submitted_jobs(run, config) if may_have_jobs else []
    except (ConfigError, OSError) as error:
        return _describe_error(error)


def _describe_error(error: ConfigError | OSError) -> str:
    return (explain_path_error(error) if isinstance(error, OSError) else "") or str(error)


def _query_squeue(ids: Iterable[str], slurm: Slurm | None) -> dict[str, SlurmJob] | None:
    """The jobs with these ids in squeue, by one query; None if squeue does not answer.

    The query names ids instead of a user, because runs may belong to other users.
    """
    try:
        return (slurm or Slurm(timeout_s=SLURM_S, tries=1)).jobs(*ids)
    except SlurmError:
        return None


def _row(
    path: Path,
    root: Path,
    record: tuple[Config, list[str]] | str,
    jobs: Mapping[str, SlurmJob] | None,
) -> dict[str, Any]:
    """Row of a run. ``record``: see `_read_run`. ``jobs``: None if Slurm does not answer."""
    absolute = path.absolute()
    row: dict[str, Any] = {
        "run": str(absolute.relative_to(root)),
        "run_dir": str(absolute),
        "jobs": [],
        "age_s": time.time() - _creation_time(path),
        "trained_steps": 0,
        "steps": 0,
        "layout": "-",
    }
    unreadable = {"state": UNREADABLE, "exit_code": exit_code(UNREADABLE, {})}
    if isinstance(record, str):
        return row | unreadable | {"error": record}
    config, ids = record
    own_jobs = None if jobs is None else [jobs[job] for job in ids if job in jobs]
    try:
        return row | _describe_run(RunDir(path), config, own_jobs)
    except (ConfigError, OSError) as error:
        return row | unreadable | {"error": _describe_error(error)}


def _describe_run(run: RunDir, config: Config, jobs: list[SlurmJob] | None) -> dict[str, Any]:
    """State, progress and jobs of a run that can be read."""
    steps = [row["step"] + 1 for row in read_metrics(run.root) if is_step(row)]
    living = [name for name in members_of(run, config) if not all_ended(run, config, name)]
    beat_s = min((last_beat_s(run, name) for name in living), default=float("inf"))
    signs = read_signs(run, config, jobs)
    state = decide_state(signs)
    return {
        "trained_steps": max(steps, default=0),
        "steps": config.steps,
        "layout": config.layout,
        "jobs": sorted({job.id for job in jobs or ()}, key=int),
        "last_beat_s": beat_s if beat_s < float("inf") else None,
        "state": state,
        "exit_code": exit_code(state, signs.stop),
    }


def _creation_time(path: Path) -> float:
    """Time at which a run was created.

    If its files cannot be read, the time of the last change of the folder; if it has been removed,
    now.
    """
    for file in (RunDir(path).token_file, path):
        with contextlib.suppress(OSError):
            return file.stat().st_mtime
    return time.time()
