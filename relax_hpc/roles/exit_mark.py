"""How a role ended, in a file that its supervisor reads."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from relax_hpc.errors import EXIT_DONE
from relax_hpc.rundir import write_json


def leave_mark(path: Path, code: int = EXIT_DONE, reason: str = "") -> None:
    """Write the mark of a role that ended with ``code``; another rank's stays if its code is as high or higher."""
    with contextlib.suppress(FileNotFoundError):
        if json.loads(path.read_bytes())["code"] >= code:
            return
    write_json(path, {"status": "failed" if code else "done", "code": code, "reason": reason})
