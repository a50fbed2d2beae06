"""Numbers of the commands that started or resumed a run."""

from __future__ import annotations

from relax_hpc.base.rundir import RunDir, write_numbered
from relax_hpc.config import Config


def new_attempt(directory: RunDir) -> int:
    """Record one more command that starts or resumes the run; its number."""
    return int(write_numbered(directory.root / "attempts", "").name)


def latest_attempt(directory: RunDir) -> int:
    """Number of the newest command that started or resumed the run; 0 before the first."""
    names = [path.name for path in (directory.root / "attempts").glob("[0-9]*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def start_order(config: Config) -> list[str]:
    """The groups of a run, the hub first."""
    return ["hub", *(name for name in config.groups if name != "hub")]
