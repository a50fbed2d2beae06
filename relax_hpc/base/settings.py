"""Parts of dataclasses of settings, for those who may not import `relax_hpc.config`."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def bounded(default: Any, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field whose value must lie in [low, high]; the loader reports violations by file
    and key."""
    return field(default=default, metadata={"low": low, "high": high})
