"""What requests wait for that cannot be answered yet: a change of the state names the topics that it may end."""

from __future__ import annotations

ADMISSION, DISK, NEWS, TURN, ALL = "admission", "disk", "news", "turn", "all"
"""The topics, with those that `rows_for` gives. ALL may end any wait."""


def rows_for(task: str) -> str:
    """What a claim of ``task`` waits for."""
    return f"rows for {task}"
