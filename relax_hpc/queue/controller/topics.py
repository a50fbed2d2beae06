"""Topics of requests that cannot be answered yet: a change of the state names those whose wait it
may end."""

from __future__ import annotations

ADMISSION, DISK, NEWS, TURN, ALL = "admission", "disk", "news", "turn", "all"
"""Topics besides those that `rows_for` gives. ALL may end any wait."""


def rows_for(task: str) -> str:
    """Topic of a claim of ``task`` that waits."""
    return f"rows for {task}"
