"""A cluster without a node to spare: groups wait in the queue, jobs end in pieces, users cancel what they have.

The engine is `simulated`, also in env/test.sh --all: nothing here depends on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.errors import EXIT_NO_PROGRESS
from relax_hpc.launch.requests import asked_to_stop
from relax_hpc.sandbox import Sandbox
from tests.requirements import requires
from tests.slurm_runs import ENDLESS, START_S, SlurmRun, submitted
from tests.slurm_sandbox import private_sandbox, requires_sandbox

requires("torch", "megatron", "transformers", "mpi")
requires_sandbox()

WAIT_S = 3.0
SMALLER: dict[str, Any] = {
    "steps": ENDLESS,
    "rollout": {"replicas": 1},
    "actor": {"parallel": {"data": 1}},
    "groups": {"rollout": {"resources": {"nodes": 1}}, "actor": {"resources": {"nodes": 1, "options": {"hold": ""}}}},
    "queue": {"wait_timeout_s": WAIT_S},
    "liveness": {"max_restarts": 1},
}
"""In four jobs of a node each, the actor's held; whoever waits has less time than anything takes."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """As many nodes as the largest run here has."""
    with private_sandbox(nodes=7) as own:
        yield own


def test_who_waits_for_a_queued_group_is_not_judged(sandbox: Sandbox, tmp_path: Path) -> None:
    with submitted(sandbox, tmp_path, "jobs", SMALLER) as live:
        wait = live.wait_until(lambda: waits_for(live, "actor", 4 * WAIT_S), "the others wait", START_S)
        assert "is queued (JobHeld" in wait["why"] and wait["spent"] > 0 and 3000.0 < wait["left_s"] < 3600.0
        assert "waits for actor, which is queued (JobHeld" in live.call("status")
        sandbox.client("scontrol", "release", live.job("actor"))
        live.wait_for_step(2)
        assert {name: live.epochs(name) for name in ("hub", "rollout", "actor_fwd")} == dict.fromkeys(
            ("hub", "rollout", "actor_fwd"), 1
        ), live.story()
        live.stop()


def test_a_group_that_fails_itself_ends_what_is_queued_too(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(7)\n")
    groups = {"rollout": {"env": {"PYTHONPATH": str(tmp_path)}, "resources": {"nodes": 1}}}
    with submitted(sandbox, tmp_path, "jobs", SMALLER | {"groups": SMALLER["groups"] | groups}) as live:
        asked = live.wait_until(lambda: asked_to_stop(live.run), "it gives up", START_S)
        assert asked["code"] == EXIT_NO_PROGRESS and asked["reason"].startswith("rollout: ended 2 times")
        live.assert_nothing_left()
        assert (live.epochs("rollout"), live.epochs("actor")) == (2, 0)


def waits_for(live: SlurmRun, group: str, seconds: float) -> dict[str, Any]:
    """What status says of the wait for a group, once that has taken so long."""
    found = {wait["group"]: wait for wait in json.loads(live.call("status", "--json"))["waits"]}
    return found[group] if found.get(group, {"since_s": 0.0})["since_s"] > seconds else {}
