"""Work that no checkpoint holds, because the last ones could not be written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from relax_hpc.cluster.supervise.incarnations import unit_of
from relax_hpc.cluster.supervise.waits import held_by
from relax_hpc.config import Config

_HOUR_S = 3600.0


def unsaved(
    config: Config, beats: Mapping[str, Mapping[str, Any]], trained_steps: int
) -> dict[str, Any]:
    """Checkpoints that trainers could not write, by their beats, and what is at risk: `steps`,
    `seconds`, and hours `spent` of a `unit`.

    Empty: all checkpoints so far are written, or none is due yet.
    """
    found = [beat["unsaved"] for beat in beats.values() if beat.get("unsaved")]
    told = min(found, key=lambda one: one["step"], default={})
    if not told:
        return {}
    seconds, unit = max(0.0, time.time() - told["since"]), unit_of(config)
    spent = seconds / _HOUR_S * sum(held_by(config, name, unit) for name in config.groups)
    about = {"step": told["step"], "failed": told["failed"], "why": told["why"]}
    return about | {
        "steps": max(0, trained_steps - told["step"]),
        "seconds": seconds,
        "unit": unit,
        "spent": spent,
    }


def in_words(found: Mapping[str, Any]) -> str:
    """Line of words for the terminal and `status`."""
    since = f"NOT SAVED since step {found['step']} ({found['failed']} failed: {found['why']})"
    minutes, spent = found["seconds"] / 60, f"{found['spent']:.1f} {found['unit']}-hours"
    return f"{since}; at risk: {found['steps']} steps, {minutes:.0f} minutes, {spent}"
