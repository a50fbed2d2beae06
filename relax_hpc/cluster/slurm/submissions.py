"""Ledger of the Slurm jobs that were submitted for a run, and what for: numbered files in
<run>/submit/jobs."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass, field
from typing import Literal

from relax_hpc.base.disk_waits import has_passed_in, retry_write
from relax_hpc.base.rundir import RunDir, read_map, write_numbered


@dataclass(frozen=True, slots=True)
class Entry:
    """One job. `kind`: `run` is a whole heterogeneous run, `group` one group, `spare` a held job of
    a group."""

    job: str
    kind: Literal["run", "group", "successor", "spare"]
    group: str = ""
    after: str = ""
    """Job that a successor waits for; empty for others."""
    attempt: int = 0
    options: list[str] = field(default_factory=list)
    """Options of sbatch for this job alone."""
    time: float = field(default_factory=time.time)


_FULL_S = 10.0
"""Seconds to wait for a disk at most: a supervisor has more to do."""
_NAME = re.compile(r"\d{6}\.json", re.ASCII)
_KINDS = {
    "job": str,
    "kind": str,
    "group": str,
    "after": str,
    "attempt": int,
    "options": list,
    "time": (int, float),
}


class Ledger:
    """Jobs that were submitted for a run. It only ever grows: a job that is in it may have
    ended."""

    def __init__(self, run: RunDir) -> None:
        self.folder = run.submit / "jobs"

    def add(self, entry: Entry) -> None:
        """Add a job; on a full disk after a while, as nobody would know of a job that only Slurm
        has."""
        data = json.dumps(asdict(entry)).encode()
        retry_write(
            self.folder, lambda: write_numbered(self.folder, ".json", data), has_passed_in(_FULL_S)
        )

    def give_way(self, job: str) -> None:
        """Note, before we cancel ``job`` ourselves, that its end is not the user's wish."""
        folder = self.folder.with_name("given_way")
        folder.mkdir(parents=True, exist_ok=True)
        retry_write(folder / job, (folder / job).touch, has_passed_in(_FULL_S))

    def gave_way(self, job: str) -> bool:
        return (self.folder.with_name("given_way") / job).exists()

    def predecessor(self, job: str) -> str:
        """Job that a successor waited for; empty: ``job`` is none."""
        return next(
            (
                entry.after
                for entry in self.entries()
                if entry.job == job and entry.kind == "successor"
            ),
            "",
        )

    def entries(self) -> list[Entry]:
        """Entries, oldest first."""
        paths = [
            path for path in sorted(self.folder.glob("[0-9]*.json")) if _NAME.fullmatch(path.name)
        ]
        found = (read_map(path, **_KINDS) for path in paths)
        return [
            Entry(**{name: value[name] for name in _KINDS})
            for value in found
            if value.get("job", "").isdecimal()
        ]

    def last(self, group: str) -> Entry | None:
        """The job that was last submitted for a group alone, whatever became of it."""
        found = [entry for entry in self.living() if entry.kind == "group" and entry.group == group]
        return found[-1] if found else None

    def newest(self, group: str) -> Entry | None:
        """The job that has a group to itself; None also if that gave way: the job of the whole run
        has it again."""
        last = self.last(group)
        return None if last is None or self.gave_way(last.job) else last

    def superseded(self, job: str, group: str) -> bool:
        """Whether ``job`` was given back, or its group to another one after it."""
        last = self.last(group)
        later = (
            last is not None
            and last.job != job
            and any(entry.job == job for entry in self.entries())
        )
        return later or self.gave_way(job)

    def living(self) -> list[Entry]:
        """Entries since the run was last submitted as one job; all, where every group has a job of
        its own."""
        entries = self.entries()
        whole = [number for number, entry in enumerate(entries) if entry.kind == "run"]
        return entries[whole[-1] :] if whole else entries

    def successors(self, attempt: int) -> list[Entry]:
        return [
            entry
            for entry in self.entries()
            if entry.kind == "successor" and entry.attempt == attempt
        ]

    def spares(self, group: str = "") -> list[Entry]:
        """Held jobs that were not used yet, of one group or of all."""
        entries = self.entries()
        used = {entry.job for entry in entries if entry.kind == "group"}
        return [
            e for e in entries if e.kind == "spare" and e.job not in used and group in ("", e.group)
        ]
