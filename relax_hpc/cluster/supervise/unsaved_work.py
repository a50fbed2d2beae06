"""Work that would be lost in a failure, because the last checkpoints could not be written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from relax_hpc.cluster.supervise.incarnations import unit_of
from relax_hpc.cluster.supervise.waits import units_held_by
from relax_hpc.config import Config

_HOUR_S = 3600.0


def find_unsaved_work(
    config: Config, beats: Mapping[str, Mapping[str, Any]], trained_steps: int
) -> dict[str, Any]:
    """Checkpoints that trainers could not write, by their heartbeats, and the work at risk:
    `steps`, `seconds`, and hours `spent` of a `unit`.

    Empty if all checkpoints so far are written, or if none was due yet.
    """
    reports: list[dict[str, Any]] = [
        beat["unsaved"] for beat in beats.values() if beat.get("unsaved")
    ]
    if not reports:
        return {}
    oldest = min(reports, key=lambda report: report["step"])
    seconds, unit = max(0.0, time.time() - oldest["since"]), unit_of(config)
    spent = seconds / _HOUR_S * sum(units_held_by(config, name, unit) for name in config.groups)
    return {
        "step": oldest["step"],
        "failed": oldest["failed"],
        "why": oldest["why"],
        "steps": max(0, trained_steps - oldest["step"]),
        "seconds": seconds,
        "unit": unit,
        "spent": spent,
    }


def describe_unsaved_work(work: Mapping[str, Any]) -> str:
    """One line about unsaved work, for the terminal and `status`."""
    since = f"NOT SAVED since step {work['step']} ({work['failed']} failed: {work['why']})"
    minutes, spent = work["seconds"] / 60, f"{work['spent']:.1f} {work['unit']}-hours"
    return f"{since}; at risk: {work['steps']} steps, {minutes:.0f} minutes, {spent}"
