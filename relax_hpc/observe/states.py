"""The one word for what a run is doing or what became of it, and the exit code by which scripts can tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from relax_hpc.errors import EXIT_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, EXIT_NO_PROGRESS, EXIT_RETRY

OVER = ("finished", "failed", "stopped", "ended")
"""States of a run that goes on no more; `ended` has left no word, as after a Ctrl-C or a power loss."""
_GRAVEST_FIRST = (EXIT_NO_PROGRESS, EXIT_CONFIG, EXIT_RETRY, EXIT_INTERRUPTED, EXIT_DONE)


def state_of(finished: bool, stop: Mapping[str, Any], alive: bool, waits: str = "") -> str:
    """finished, stopping, running, starting, queued, failed, stopped or ended.

    ``stop``: {code, reason} of a stop that was asked for, see `requests.asked_to_stop`; ``alive``: some process of the
    run is at work; ``waits``: why none is yet ("starting", "queued"), else empty.
    """
    if finished:
        return "finished"
    if stop:
        return "stopping" if alive else "failed" if stop["code"] else "stopped"
    return "running" if alive else waits or "ended"


def exit_code(state: str, stop: Mapping[str, Any]) -> int:
    """Exit code that `relax-hpc run` would have ended with; 0 for a run that is finished or goes on.

    >>> exit_code("failed", {"code": 93}), exit_code("stopped", {"code": 0}), exit_code("ended", {})
    (93, 130, 75)
    """
    codes = {"stopped": EXIT_INTERRUPTED, "ended": EXIT_RETRY, "unreadable": EXIT_CONFIG}
    return int(stop["code"]) if state == "failed" else codes.get(state, EXIT_DONE)


def gravest(codes: Iterable[int]) -> int:
    """Gravest exit code of several runs; 0 of none.

    >>> gravest([0, 130, 75]), gravest([])
    (75, 0)
    """
    found = set(codes)
    return next((code for code in _GRAVEST_FIRST if code in found), max(found, default=EXIT_DONE))
