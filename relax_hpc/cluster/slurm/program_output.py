"""Programs that are run for their output."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence


def run_program(
    argv: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Result of ``argv``, which has an empty standard input. Invalid UTF-8 in its output is
    replaced.

    Raises OSError if it cannot be started, and subprocess.TimeoutExpired if it was killed after
    ``timeout_s``.
    """
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        env=environment,
    )
