"""The user's commands on a run in the sandbox's Slurm: looked at, changed, scaled, stopped, and gone on with."""

from __future__ import annotations

import json
from pathlib import Path

from relax_hpc.launch import requests
from relax_hpc.sandbox import Sandbox
from tests.requirements import requires
from tests.slurm_runs import ENDLESS, SlurmRun, submitted
from tests.slurm_sandbox import requires_sandbox

requires("torch", "megatron", "transformers", "mpi")
requires_sandbox()


def groups(live: SlurmRun) -> dict[str, dict]:
    return json.loads(live.call("status", "--json"))["groups"]


def generates(live: SlurmRun, group: str) -> bool:
    return bool(live.status()["groups"].get(group, {}).get("puts"))


def test_commands_on_a_living_run(sandbox: Sandbox, tmp_path: Path) -> None:
    with submitted(sandbox, tmp_path, "jobs", {"steps": ENDLESS}) as live:
        live.wait_for_step(1)
        found = groups(live)
        assert [group["job"] for group in found.values()] == live.jobs
        assert all(group["nodes"] and group["time_left_s"] > 3000 for group in found.values())

        with live.only("rollout", "resubmit with another size"):
            size = ["--nodes", "1", "--rollout.replicas", "1"]
            job = live.call("resubmit", "--group", "rollout", *size, "--parsable").strip()
        rollout = groups(live)["rollout"]
        assert job not in live.jobs and (rollout["job"], rollout["epoch"], rollout["ranks"]) == (job, 2, 1)
        assert "," not in rollout["nodes"] and "-" not in rollout["nodes"]
        assert live.jobs[1] not in live.queued()

        member = live.call("scale", "--replicas", "2", "--time", "30", "--parsable").strip()
        live.wait_until(lambda: generates(live, "rollout-2"), "rollout-2 generates", live.patience_s)
        found = groups(live)
        assert found["rollout-2"]["job"] == member and found["rollout-2"]["time_left_s"] < 1800
        live.call("scale", "--replicas", "1")
        live.goes_on()
        live.survived("scale out by a replica, and in again")
        assert "rollout-2" not in groups(live) and member not in live.queued()

        assert "supervisor: " in live.call("logs", "-n", "2")
        listed = live.call("list")
        assert "running" in listed and job in listed

        said = live.call("stop")
        assert "is saved in" in said and not live.queued() and not live.processes()
        live.resume(ENDLESS)
        assert "--nodes=1" in (live.run.submit / "rollout.sbatch").read_text()
        live.goes_on()
        assert set(groups(live)) == {"hub", "rollout", "actor", "actor_fwd"}
        requests.ask_to_stop(live.run, 93, "in circles")
        live.wait_until(lambda: not live.queued(), "its jobs left the queue", 60.0)
        assert "failed (exit 93: in circles)" in live.call("status")
