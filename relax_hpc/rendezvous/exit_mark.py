"""How a role ended, in a file that its supervisor reads."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from relax_hpc.errors import EXIT_DONE
from relax_hpc.rundir import write_json


def leave_mark(path: Path, code: int = EXIT_DONE, reason: str = "", stopped: bool = False) -> None:
    """Write the mark of a role that ended with ``code``; another rank's stays if its code is as high or higher."""
    # What a power loss has emptied says nothing.
    with contextlib.suppress(FileNotFoundError, ValueError):
        if json.loads(path.read_bytes())["code"] >= code:
            return
    status = "stopped" if stopped else "failed" if code else "done"
    write_json(path, {"status": status, "code": code, "reason": reason})
