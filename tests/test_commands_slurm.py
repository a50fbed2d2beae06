"""One long run with a Slurm job for each group: its jobs make way and come back, and it obeys the user's commands.

The engine is `simulated`: a rollout stub in SGLang's place, which env/test.sh --all puts in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relax_hpc.sandbox import Sandbox
from tests.requirements import requires
from tests.run_helpers import ALL, rollbacks
from tests.slurm_runs import ENDLESS, SlurmRun, submitted
from tests.slurm_sandbox import private_sandbox, requires_sandbox

requires("torch", "megatron", "transformers", "mpi")
requires_sandbox()

pytestmark = pytest.mark.slurm

PREEMPTION = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=urgent Nodes=ALL PriorityTier=9",
)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """Jobs of its partition `urgent` take the nodes of others."""
    with private_sandbox(nodes=8, extra=PREEMPTION) as own:
        yield own


def test_jobs_come_back_and_obey(sandbox: Sandbox, tmp_path: Path) -> None:
    with submitted(sandbox, tmp_path, "jobs", {"steps": ENDLESS}) as live:
        live.wait_for_step(1)
        jobs_make_way(live)
        found = groups(live)
        assert [group["job"] for group in found.values()] == live.jobs
        assert all(group["nodes"] and group["time_left_s"] > 3000 for group in found.values())
        rollout = replaced_by_a_smaller_one(live)
        scaled_out_and_in(live)
        assert "supervisor: " in live.call("logs", "-n", "2")
        listed = live.call("list")
        assert "running" in listed and rollout in listed
        live.finish_soon()
        assert "--nodes=1" in (live.run.submit / "rollout.sbatch").read_text()
        assert set(groups(live)) == {"hub", "rollout", "actor", "actor_fwd"}


def jobs_make_way(live: SlurmRun) -> None:
    """At time limits and preemption, having saved: each is queued again under its number."""
    also = [("actor", "checkpoint"), ("actor", "training")] if ALL else []
    for group, moment in [("rollout", "generation"), *also]:
        with comes_back(live, group, f"the early signal of the time limit during a {moment}"):
            live.signal_job(live.job(group), moment)
    with comes_back(live, "actor", "preemption of the actor during a checkpoint"):
        (node, *_) = live.nodes_of("actor")
        live.at("checkpoint")
        live.sandbox.client("srun", "--partition=urgent", "--exclusive", f"--nodelist={node}", "true")
    assert not rollbacks(live.run), "steps were lost although there was time to save them"


@contextmanager
def comes_back(live: SlurmRun, group: str, fault: str) -> Iterator[None]:
    """In the block the job of a group ends in good order; it is queued again under its number."""
    job, incarnation = live.job(group), live.incarnations(group)
    with live.only(group, fault):
        yield
    assert live.job(group) == job and live.mark(group, incarnation, group)["status"] in ("stopped", "failed")


def replaced_by_a_smaller_one(live: SlurmRun) -> str:
    """The new job of rollout."""
    former, incarnation = live.job("rollout"), live.incarnations("rollout")
    with live.only("rollout", "resubmit with another size"):
        size = ["--nodes", "1", "--rollout.replicas", "1"]
        job = live.call("resubmit", "--group", "rollout", *size, "--parsable").strip()
    rollout = groups(live)["rollout"]
    assert job not in live.jobs and (rollout["job"], rollout["incarnation"], rollout["ranks"]) == (
        job,
        incarnation + 1,
        1,
    )
    assert "," not in rollout["nodes"] and "-" not in rollout["nodes"]
    assert former not in live.queued()
    return job


def scaled_out_and_in(live: SlurmRun) -> None:
    member = live.call("scale", "--replicas", "2", "--time", "30", "--parsable").strip()
    live.wait_until(lambda: generates(live, "rollout-2"), "rollout-2 generates", live.patience_s)
    found = groups(live)
    assert found["rollout-2"]["job"] == member and found["rollout-2"]["time_left_s"] < 1800
    live.call("scale", "--replicas", "1")
    live.goes_on()
    live.survived("scale out by a replica, and in again")
    assert "rollout-2" not in groups(live) and member not in live.queued()


def groups(live: SlurmRun) -> dict[str, dict]:
    return json.loads(live.call("status", "--json"))["groups"]


def generates(live: SlurmRun, group: str) -> bool:
    return bool(live.status()["groups"].get(group, {}).get("puts"))
