"""`relax-hpc list`: the runs below a folder, one line each; from their files, and one question to
Slurm for all."""

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
from relax_hpc.ops.observe.run_state import UNREADABLE, exit_code, gravest, signs_of, state_of
from relax_hpc.ops.observe.status import SLURM_S
from relax_hpc.ops.observe.status_view import duration

_DEPTH = 3
_ROW = "{:<28} {:<9} {:>12} {:>8}  {:<7} {}"


def main(folder: str, as_json: bool = False) -> int:
    """Print the runs below ``folder``, newest first; the exit code is that of the gravest, see
    `states.exit_code`."""
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; name one that holds run directories")
    # One that may not be read is an error, and below it a row.
    os.scandir(root).close()
    rows = runs(root)
    if as_json:
        print(json.dumps(rows))
        return gravest(row["exit_code"] for row in rows)
    print(_ROW.format("RUN", "STATE", "STEP", "AGE", "LAYOUT", "JOBS"))
    for row in rows:
        step, age = f"{row['trained_steps']}/{row['steps']}", duration(row["age_s"])
        print(
            _ROW.format(
                row["run"], row["state"], step, age, row["layout"], " ".join(row["jobs"]) or "-"
            )
        )
    return gravest(row["exit_code"] for row in rows)


def runs(root: Path, slurm: Slurm | None = None) -> list[dict[str, Any]]:
    """Row for each run as its files tell; `age_s`: seconds since it was made."""
    records = {path: _read_run(RunDir(path)) for path in run_directories(root)}
    readable = [record for record in records.values() if not isinstance(record, str)]
    jobs = _ask_squeue(chain.from_iterable(ids for _, ids in readable), slurm)
    rows = [_row(path, root.absolute(), record, jobs) for path, record in records.items()]
    return sorted(rows, key=lambda row: row["age_s"])


def run_directories(root: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Folders that hold a run, or that this user may not look into, not deeper than ``depth`` below
    ``root``, which may be such a one itself."""
    try:
        if (root / "config.yaml").is_file() and (root / "token").is_file():
            yield root
            return
        entries = sorted(os.scandir(root), key=lambda entry: entry.name) if depth else []
    except OSError:
        yield root
        return
    for entry in entries:
        if not entry.name.startswith(".") and _is_folder(entry):
            yield from run_directories(Path(entry.path), depth - 1)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # A link in a circle, or into a folder of somebody else.
        return False


def _read_run(run: RunDir) -> tuple[Config, list[str]] | str:
    """Configuration of a run, and ids of its jobs unless it is finished; or why they cannot be
    read."""
    try:
        config = load_resolved(run.root)
        may_have_jobs = run.submit.is_dir() and not run.finished.exists()
        return config, submitted_jobs(run, config) if may_have_jobs else []
    except (ConfigError, OSError) as error:
        return _sentence(error)


def _sentence(error: ConfigError | OSError) -> str:
    return (explain_path_error(error) if isinstance(error, OSError) else "") or str(error)


def _ask_squeue(ids: Iterable[str], slurm: Slurm | None) -> dict[str, SlurmJob] | None:
    """The jobs among ``ids`` that squeue knows, asked in one call; None: it does not answer.

    By their ids, as they may be another user's.
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
    """Row of the list for a run; ``record``: see `_read_run`; ``jobs``: None if Slurm does not
    answer."""
    absolute = path.absolute()
    row: dict[str, Any] = {
        "run": str(absolute.relative_to(root)),
        "run_dir": str(absolute),
        "jobs": [],
    }
    row |= {"age_s": time.time() - _made_at(path), "trained_steps": 0, "steps": 0, "layout": "-"}
    unreadable = {"state": UNREADABLE, "exit_code": exit_code(UNREADABLE, {})}
    if isinstance(record, str):
        return row | unreadable | {"error": record}
    config, ids = record
    own_jobs = None if jobs is None else [jobs[job] for job in ids if job in jobs]
    try:
        return row | _what_it_does(RunDir(path), config, own_jobs)
    except (ConfigError, OSError) as error:
        return row | unreadable | {"error": _sentence(error)}


def _what_it_does(run: RunDir, config: Config, jobs: list[SlurmJob] | None) -> dict[str, Any]:
    """State, progress and jobs of a run that can be read."""
    steps = [row["step"] + 1 for row in read_metrics(run.root) if is_step(row)]
    living = [name for name in members_of(run, config) if not all_ended(run, config, name)]
    beat_s = min((last_beat_s(run, name) for name in living), default=float("inf"))
    signs = signs_of(run, config, jobs)
    state = state_of(signs)
    return {
        "trained_steps": max(steps, default=0),
        "steps": config.steps,
        "layout": config.layout,
        "jobs": sorted({job.id for job in jobs or ()}, key=int),
        "last_beat_s": beat_s if beat_s < float("inf") else None,
        "state": state,
        "exit_code": exit_code(state, signs.stop),
    }


def _made_at(path: Path) -> float:
    """Time at which a run was made, or its folder was last changed where its files cannot be looked
    at; now, if it was removed meanwhile."""
    for file in (RunDir(path).token_file, path):
        with contextlib.suppress(OSError):
            return file.stat().st_mtime
    return time.time()
