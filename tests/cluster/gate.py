"""A filter of prompt groups that keeps all of them, and stops a run at a step until a test
continues it: what the test waits for then happens before the run ends, however slow the machine
is."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_hpc.base.metrics.read import read_metrics

_FOLDER = "RELAX_TEST_GATE"
_LOOK_S = 0.05
STEP = 2
"""Newest step in the metrics with which a closed gate stops the run."""


def close(folder: Path) -> dict[str, Any]:
    """Close the gate of the run in ``folder``/run; settings of the run."""
    _gate(folder).touch()
    path = os.pathsep.join((str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")))
    # The engines may be in the actor's group.
    groups = {
        name: {"env": {_FOLDER: str(folder), "PYTHONPATH": path}} for name in ("rollout", "actor")
    }
    return {"rollout": {"filter": "tests.cluster.gate:passes"}, "groups": groups}


def open_again(folder: Path) -> None:
    """Let the run continue."""
    _gate(folder).unlink()


def passes(rewards: Sequence[float]) -> bool:
    """Wait while the gate is closed; at staleness 0 no later step is generated meanwhile."""
    folder = Path(os.environ[_FOLDER])
    while _gate(folder).exists() and _newest_step(folder / "run") >= STEP:
        time.sleep(_LOOK_S)
    return True


def _gate(folder: Path) -> Path:
    return folder / "closed"


def _newest_step(root: Path) -> int:
    return max((row["step"] for row in read_metrics(root) if "reward/mean" in row), default=-1)
