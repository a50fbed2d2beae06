"""How a role ended, in a file that its supervisor reads."""

from __future__ import annotations

from pathlib import Path

from relax_hpc.errors import EXIT_DONE
from relax_hpc.rundir import read_map, write_json


def leave_mark(path: Path, code: int = EXIT_DONE, reason: str = "", stopped: bool = False) -> None:
    """Write the mark of a role that ended with ``code``; another rank's stays if its code is as high or higher."""
    # What a power loss has emptied says nothing.
    if read_map(path, code=int).get("code", code - 1) >= code:
        return
    status = "stopped" if stopped else "failed" if code else "done"
    write_json(path, {"status": status, "code": code, "reason": reason})
