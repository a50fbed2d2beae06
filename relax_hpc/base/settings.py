"""Fields of dataclasses of settings, for packages that must not import `relax_hpc.config`."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def bounded(default: Any, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field with a value in [low, high]. The loader reports violations with file and
    key."""
    return field(default=default, metadata={"low": low, "high": high})
