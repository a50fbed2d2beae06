"""How much of a fuzzer, flood or search a session runs: little in every test run, all of it in
`env/test.sh --all`."""

from __future__ import annotations

import os


def effort(short: int, whole: int) -> int:
    """``short``, or ``whole`` where RELAX_WHOLE is set, as `env/test.sh --all` does."""
    return whole if os.environ.get("RELAX_WHOLE") else short
