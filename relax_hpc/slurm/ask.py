"""Programs that are run for what they say."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence


def ask(
    argv: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """How ``argv`` ended and what it said, with nothing to read and bytes that are no text replaced.

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
