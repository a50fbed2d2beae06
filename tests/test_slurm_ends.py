"""How the Slurm job of a run ends before it does, and what comes after: time limits, lost hubs, crash loops.

The engine is `simulated`: a rollout stub in SGLang's place, which env/test.sh --all puts in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relax_hpc.errors import EXIT_NO_PROGRESS
from relax_hpc.sandbox import Sandbox
from relax_hpc.supervise.requests import asked_to_stop
from tests.requirements import requires
from tests.run_helpers import ALL, rollbacks
from tests.slurm_runs import ENDLESS, START_S, SlurmRun, submitted
from tests.slurm_sandbox import private_sandbox, requires_sandbox

requires("torch", "megatron", "transformers", "mpi")
requires_sandbox()

pytestmark = pytest.mark.slurm

SMALLER = {"steps": ENDLESS, "rollout": {"replicas": 1}, "groups": {"rollout": {"resources": {"nodes": 1}}}}
LIMIT_S = 120.0
"""Slurm looks at time limits twice a minute."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """Room for a run and its successor."""
    with private_sandbox(nodes=13) as own:
        yield own


def test_a_heterogeneous_job_ends_into_its_successor(sandbox: Sandbox, tmp_path: Path) -> None:
    with submitted(sandbox, tmp_path, "het", SMALLER) as live:
        live.wait_for_step(2)
        with succeeded(live, "the early signal of the time limit during a weight publish"):
            live.signal_job(live.job("hub"), "weight publish")
        with succeeded(live, "the time limit"):
            # The whole run has a minute left, and that is when it is to make way.
            sandbox.client("scontrol", "update", f"jobid={live.job('hub')}", "timelimit=1")
        assert not rollbacks(live.run), "steps were lost although there was time to save them"
        nodes = hub_nodes(live)
        with succeeded(live, "power loss of both nodes of the hub"):
            for node in nodes:
                sandbox.kill_node(node, down=True)
            for node in nodes:
                sandbox.start_node(node)
        if ALL:
            live.finish_soon()
        else:
            live.stop()


@pytest.mark.parametrize("layout", ["het", "jobs"] if ALL else ["het"])
def test_a_crash_loop_ends_the_run(layout: str, sandbox: Sandbox, tmp_path: Path) -> None:
    # Of roles alone: what looks at their nodes before would find it out.
    crash = "import os, sys\nif '--role' in sys.orig_argv:\n    os._exit(7)\n"
    (tmp_path / "sitecustomize.py").write_text(crash)
    groups = {"rollout": {"env": {"PYTHONPATH": str(tmp_path)}}}
    with submitted(sandbox, tmp_path, layout, {"groups": groups, "liveness": {"max_restarts": 2}}) as live:
        asked = live.wait_until(lambda: asked_to_stop(live.run), "it gives up", START_S)
        assert asked["code"] == EXIT_NO_PROGRESS and "max_restarts" in asked["reason"]
        live.assert_nothing_left()
        live.survived("a crash loop: it ends with code 93 and gives everything back")
        assert (live.incarnations("rollout"), live.incarnations("actor")) == (3, 1)
        ended = sandbox.client("scontrol", "show", "job", live.jobs[0])
        assert f"ExitCode={EXIT_NO_PROGRESS}:0" in ended


@contextmanager
def succeeded(live: SlurmRun, fault: str) -> Iterator[None]:
    """In the block the job of the run ends; the next one goes on with every group, and training with every step."""
    former, incarnation = live.job("hub"), live.incarnations("actor")
    yield
    live.wait_until(lambda: live.incarnations("actor") > incarnation, "the successor has started", LIMIT_S)
    live.goes_on()
    assert live.job("hub") != former
    live.wait_until(lambda: f"{former}+0 " not in live.queued(), "the former job is gone", START_S)
    live.survived(fault)


def hub_nodes(live: SlurmRun) -> list[str]:
    """Both nodes of component 0."""
    job = live.job("hub")
    lines = [line.split() for line in live.sandbox.client("squeue", "--noheader", "--format=%A %N").splitlines()]
    (nodes,) = [words[1] for words in lines if words[0] == job]
    return live.sandbox.client("scontrol", "show", "hostnames", nodes).split()
