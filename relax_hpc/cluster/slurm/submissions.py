"""Ledger of the Slurm jobs that were submitted for a run, with the purpose of each: numbered files
in <run>/submit/jobs."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass, field
from typing import Literal

from relax_hpc.base.disk_waits import has_passed_in, retry_write
from relax_hpc.base.rundir import RunDir, read_map, write_numbered


@dataclass(frozen=True, slots=True)
class Submission:
    """One job. `kind`: `run` is the job of a whole heterogeneous run, `group` the separate job of
    one group, `successor` a job that follows another one, `spare` a held job of a group."""

    job: str
    kind: Literal["run", "group", "successor", "spare"]
    group: str = ""
    after: str = ""
    """Job that a successor waits for; empty for other kinds."""
    attempt: int = 0
    options: list[str] = field(default_factory=list)
    """Options of sbatch for this job only."""
    time: float = field(default_factory=time.time)


_FULL_S = 10.0
"""Seconds for which a write waits for a full disk. A supervisor cannot wait longer."""
_NAME = re.compile(r"\d{6}\.json", re.ASCII)
_KINDS: dict[str, type | tuple[type, ...]] = {
    "job": str,
    "kind": str,
    "group": str,
    "after": str,
    "attempt": int,
    "options": list,
    "time": (int, float),
}


class Ledger:
    """Jobs that were submitted for a run, also those that have ended. Entries are never removed.

    A job that relax_hpc cancels itself, because the run does not need it any more, is *retired*.
    """

    def __init__(self, run: RunDir) -> None:
        self.folder = run.submit / "jobs"

    def add(self, entry: Submission) -> None:
        """Add a job. On a full disk this waits for a while, because a job without an entry would
        be unknown to all commands."""
        data = json.dumps(asdict(entry)).encode()
        retry_write(
            self.folder, lambda: write_numbered(self.folder, ".json", data), has_passed_in(_FULL_S)
        )

    def mark_retired(self, job: str) -> None:
        """Record that relax_hpc will cancel ``job`` itself, so that its end does not count as a
        cancellation by the user."""
        folder = self.folder.with_name("given_way")
        folder.mkdir(parents=True, exist_ok=True)
        retry_write(folder / job, (folder / job).touch, has_passed_in(_FULL_S))

    def is_retired(self, job: str) -> bool:
        return (self.folder.with_name("given_way") / job).exists()

    def predecessor(self, job: str) -> str:
        """Job that the successor ``job`` waited for; empty if ``job`` is no successor."""
        for entry in self.entries():
            if entry.job == job and entry.kind == "successor":
                return entry.after
        return ""

    def entries(self) -> list[Submission]:
        """Entries, oldest first."""
        paths = [
            path for path in sorted(self.folder.glob("[0-9]*.json")) if _NAME.fullmatch(path.name)
        ]
        values = (read_map(path, **_KINDS) for path in paths)
        return [
            Submission(**{name: value[name] for name in _KINDS})
            for value in values
            if value.get("job", "").isdecimal()
        ]

    def last_separate_job(self, group: str) -> Submission | None:
        """The last separate job of a group, even if it was retired."""
        jobs = [
            entry
            for entry in self.current_submissions()
            if entry.kind == "group" and entry.group == group
        ]
        return jobs[-1] if jobs else None

    def separate_job(self, group: str) -> Submission | None:
        """The separate job of a group. None if it was retired, because the job of the whole run
        has the group again."""
        last = self.last_separate_job(group)
        return None if last is None or self.is_retired(last.job) else last

    def superseded(self, job: str, group: str) -> bool:
        """Whether ``job`` was retired, or a later job has its group."""
        if self.is_retired(job):
            return True
        last = self.last_separate_job(group)
        if last is None or last.job == job:
            return False
        return any(entry.job == job for entry in self.entries())

    def current_submissions(self) -> list[Submission]:
        """Entries since the last submission of the run as one job. All entries, if every group has
        a separate job."""
        entries = self.entries()
        run_jobs = [number for number, entry in enumerate(entries) if entry.kind == "run"]
        return entries[run_jobs[-1] :] if run_jobs else entries

    def successors(self, attempt: int) -> list[Submission]:
        return [
            entry
            for entry in self.entries()
            if entry.kind == "successor" and entry.attempt == attempt
        ]

    def spares(self, group: str = "") -> list[Submission]:
        """Held jobs that were not used yet, of ``group``, or of all groups if it is empty."""
        entries = self.entries()
        used = {entry.job for entry in entries if entry.kind == "group"}
        unused = [entry for entry in entries if entry.kind == "spare" and entry.job not in used]
        return [entry for entry in unused if group in ("", entry.group)]
