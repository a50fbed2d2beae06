"""Exit mark of a role: a file with the result of the role, which its supervisor reads."""

from __future__ import annotations

import math
from pathlib import Path

from relax_hpc.base.disk_waits import has_passed_in, is_temporary, retry_write
from relax_hpc.base.errors import EXIT_DONE
from relax_hpc.base.rundir import read_map, write_json

_FAILED_S = 3.0
"""Seconds for which the mark of a failure is tried on a full disk."""


def write_exit_mark(
    path: Path,
    code: int = EXIT_DONE,
    reason: str = "",
    stopped: bool = False,
    patience_s: float = _FAILED_S,
    start_error: str = "",
    is_programming_error: bool = False,
) -> None:
    """Write the mark of a role that ended with ``code``.

    All ranks of a role share one mark. It is replaced only if ``code`` is higher than its code.
    ``start_error``: see `relax_hpc.base.errors.find_start_error`. ``is_programming_error``: the
    role ended with `relax_hpc.base.errors.ProgrammingError`. ``patience_s``: seconds for which the
    mark of a failure is tried on a full disk. A supervisor also detects a failure without it.
    """
    # A file that a power loss has emptied has no code, and is replaced.
    if read_map(path, code=int).get("code", code - 1) >= code:
        return
    unless_stopped = "failed" if code else "done"
    status = "stopped" if stopped else unless_stopped
    mark = {"status": status, "code": code, "reason": reason}
    if start_error:
        mark["start_error"] = start_error
    if is_programming_error:
        mark["is_programming_error"] = True
    try:
        # Without its mark, a role that has finished would be started again.
        until = has_passed_in(math.inf if status == "done" else patience_s)
        retry_write(path, lambda: write_json(path, mark), until)
    except OSError as error:
        if status == "done" or not is_temporary(error):
            raise
