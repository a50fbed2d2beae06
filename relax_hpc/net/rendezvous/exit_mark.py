"""Exit mark of a role: how it ended, in a file that its supervisor reads."""

from __future__ import annotations

import math
from pathlib import Path

from relax_hpc.base.disk_waits import has_passed_in, is_temporary, retry_write
from relax_hpc.base.errors import EXIT_DONE
from relax_hpc.base.rundir import read_map, write_json

_FAILED_S = 3.0


def write_exit_mark(
    path: Path,
    code: int = EXIT_DONE,
    reason: str = "",
    stopped: bool = False,
    patience_s: float = _FAILED_S,
    start_error: str = "",
    is_programming_error: bool = False,
) -> None:
    """Write the mark of a role that ended with ``code``; another rank's stays if its code is as
    high or higher.

    ``start_error``: see `relax_hpc.base.errors.find_start_error`. ``is_programming_error``: the
    role ended with `relax_hpc.base.errors.ProgrammingError`.

    On a full disk that of a failure is tried for ``patience_s`` seconds: a supervisor sees without
    it that one failed.
    """
    # What a power loss has emptied says nothing.
    if read_map(path, code=int).get("code", code - 1) >= code:
        return
    status = "stopped" if stopped else "failed" if code else "done"
    mark = {"status": status, "code": code, "reason": reason}
    if start_error:
        mark["start_error"] = start_error
    if is_programming_error:
        mark["is_programming_error"] = True
    try:
        # What is done and does not say so would be done again.
        until = has_passed_in(math.inf if status == "done" else patience_s)
        retry_write(path, lambda: write_json(path, mark), until)
    except OSError as error:
        if status == "done" or not is_temporary(error):
            raise
