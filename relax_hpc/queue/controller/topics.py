"""Topics for which requests wait. A change of the state names the topics of requests that it may
allow to answer."""

from __future__ import annotations

ADMISSION, DISK, NEWS, TURN, ALL = "admission", "disk", "news", "turn", "all"
OPERATIONS = "operations"
"""Topics in addition to those of `rows_for`. ALL may end any wait."""


def rows_for(task: str) -> str:
    """Topic of waiting claims of ``task``."""
    return f"rows for {task}"
