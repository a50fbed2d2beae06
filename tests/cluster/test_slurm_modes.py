"""Deaths in the middle of runs of every mode, from on-policy to fully asynchronous, on Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_hpc.cluster.sandbox import Sandbox
from tests.cluster import gate
from tests.cluster.slurm_runs import START_S, SlurmRun, kill_fault, submitted
from tests.effort import effort
from tests.helpers.run_helpers import ALL, final_weights, merged, queue_rows, trained_steps
from tests.helpers.slurm_sandbox import requires_sandbox
from tests.helpers.small_disk import small_disk
from tests.requirements import requires
from tests.runs.test_reference_loop import (
    REGULARISED,
    Outcome,
    assert_close,
    assert_equal,
    reference,
)

requires("torch", "megatron", "transformers", "mpi")
requires_sandbox()

pytestmark = pytest.mark.slurm

ALONE: dict[str, Any] = {
    "max_staleness": 0,
    "actor": {"parallel": {"data": 1}},
    "rollout": {"replicas": 1},
    "groups": {
        name: {"resources": {"nodes": 1}} for name in ("hub", "rollout", "actor", "reference")
    },
}
"""A rank for each role, as in the reference loop."""
TURNS = {"colocate": True, "groups": {"rollout": None, "actor": {"roles": ["rollout", "actor"]}}}
INSIDE = {
    "groups": {"actor_fwd": None, "reference": None},
    "actor": {"forward": ["actor_fwd", "reference"]},
}
MODES = {"streamed": {}, "colocate": TURNS, "actor.forward": INSIDE}
LAYOUTS = ("het", "jobs") if ALL else ("het",)
FULL_S = 14.0
"""More than the lease, and than a rank's patience with its leader."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES if ALL else ["streamed"])
def test_deaths_change_nothing_at_staleness_0(
    sandbox: Sandbox, tmp_path: Path, layout: str, mode: str
) -> None:
    """Tokens, losses and weights stay those of the synchronous loop in one process."""
    with reference(tmp_path, REGULARISED) as expected:
        over = merged(
            merged(ALONE, REGULARISED | {"liveness": {"start_ahead_s": 0.1}}), MODES[mode]
        )
        over = merged(gate.close(tmp_path), over)
        with submitted(sandbox, tmp_path, layout, over, "transformers") as live:
            deaths(live, f" ({mode}, staleness 0)", gate_folder=tmp_path)
            live.finish()
            assert "actor: started incarnation 2 (actor), which waited" in live.log(), live.story()
            found = Outcome(trained_steps(live.run), queue_rows(live.run), final_weights(live.run))
        compare = assert_close if mode == "actor.forward" else assert_equal
        compare(found, expected())


@pytest.mark.skipif(
    not ALL, reason="staleness 1 and 4 in test_slurm_jobs.py and _het.py; whole: env/test.sh --all"
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_deaths_lose_nothing_at_any_staleness(
    sandbox: Sandbox, tmp_path: Path, layout: str, staleness: int
) -> None:
    over = {"steps": 16, "max_staleness": staleness, "rollout": {"over_sampling": 0.5}}
    with submitted(sandbox, tmp_path, layout, over) as live:
        deaths(live, f" (staleness {staleness})")
        live.finish()
        assert max(row["staleness/max"] for row in trained_steps(live.run)) <= staleness


@pytest.mark.skipif(
    not effort(0, 1), reason="one more whole run a layout: env/test.sh --all, or RELAX_WHOLE=1"
)
@pytest.mark.parametrize("layout", ["het", "jobs"])
def test_a_full_disk_is_noticed_by_everybody_and_ends_nobody(
    layout: str, sandbox: Sandbox, tmp_path: Path
) -> None:
    """Neither a rank that waits for its leader nor, where there are two heads, the one that waits
    for the other."""
    over = {
        "steps": 30,
        "queue": {"wait_timeout_s": 6.0},
        "groups": {"hub": {"resources": {"nodes": 2}}},
    }
    with (
        small_disk(tmp_path / "disk", "400m") as disk,
        submitted(sandbox, disk.folder, layout, over) as live,
    ):
        name = "supervisor" if layout == "het" else "supervisor-hub"
        live.wait_for_step(2)
        head = live.wait_until(lambda: live.lease_holder(name), "somebody supervises", START_S)
        with live.no_group_restarts(f"a disk without room for {FULL_S:.0f} s"):
            disk.fill()
            live.wait_until(lambda: full(live), "status says so", 10.0)
            live.wait_until(
                lambda: full(live) > FULL_S, f"somebody has waited for {FULL_S} s", 60.0
            )
            disk.free()
        assert live.lease_holder(name)["incarnation"] == head["incarnation"], live.story()
        live.finish()


def full(live: SlurmRun) -> float:
    """For how long somebody has waited for the disk, seconds."""
    return max((one["seconds"] for one in live.status().get("disk") or []), default=0.0)


def deaths(live: SlurmRun, mode: str, gate_folder: Path | None = None) -> None:
    """A rank of every role is killed, the last one in the middle of its work. With a closed gate,
    which stops the run: not before its successor waits."""
    for number, roles in enumerate((("rollout", "actor_fwd"), ("controller",), ("actor",))):
        live.wait_for_step(number if gate_folder or not number else live.step() + 1)
        for role in filter(live.processes, roles):
            if gate_folder and role == "actor":
                live.wait_until(
                    lambda: live.status()["groups"]["actor"]["ahead"], "its next one waits", START_S
                )
                gate.open_again(gate_folder)
            live.kill(role, moment="training" if role == "actor" else "")
            live.survived(kill_fault(role) + mode)
