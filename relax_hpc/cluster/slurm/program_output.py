"""Programs that are run for what they say."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence


def ask(
    argv: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Result of ``argv``, which gets nothing to read; bytes in its output that are no text are
    replaced.

    OSError: it cannot be started. subprocess.TimeoutExpired: it was killed after ``timeout_s``.
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
