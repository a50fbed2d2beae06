"""What lives without giving a sign is taken for dead; who looks at a live run sees it; nobody runs
it twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.audit import audit
from tests.helpers.run_helpers import LIGHT, Running, merged, running
from tests.requirements import requires

requires("mpi", "torch", "megatron", "transformers")

pytestmark = pytest.mark.run

LEASE_S = 3.0
REWARD = """
import ctypes, os
from relax_hpc.rewards import REWARDS

def hold_the_lock():
    os.unlink(os.environ["HANG_FILE"])
    while True:
        # Unlike CDLL this does not let go of the interpreter's lock: nothing else in the process goes on.
        ctypes.PyDLL(None).sleep(600)

def partial(sample):
    if os.path.exists(os.environ["HANG_FILE"]):
        hold_the_lock()
    return REWARDS["answer_partial"](sample)
"""
SETTINGS = merged(
    LIGHT,
    {
        "steps": 60,
        "rollout": {
            "reward": "hanging:partial",
            "reward_workers": 0,
            # It is asked things before it has finished, however busy the machine is.
            "engine": {"simulated": {"response_s": 0.4}},
        },
        "groups": {"reference": {"roles": ["reference"]}},
        "liveness": {"beat_s": 0.2, "lease_s": LEASE_S, "stop_timeout_s": 5.0},
    },
)


def cli(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "relax_hpc", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def freeze(run: Running, group: str, role: str) -> None:
    """Stop ``role`` and wait until its group was started again, the others untouched."""
    roles = ("rollout", "actor", "reference", "controller")
    run.wait_until(lambda: all(map(run.processes, roles)), "everybody is there", 20 * LEASE_S)
    others = {name: [p.pid for p in run.processes(name)] for name in roles if name != role}
    incarnations = run.incarnations(group)
    run.processes(role)[0].send_signal(signal.SIGSTOP)
    run.wait_until(
        lambda: run.incarnations(group) == incarnations + 1,
        f"{group} was started again",
        20 * LEASE_S,
    )
    assert {name: [p.pid for p in run.processes(name)] for name in others} == others


def hang(run: Running) -> None:
    """Have a reward hold the interpreter's lock for ever; where, the log of its rank says when it
    was replaced."""
    incarnations = run.incarnations("rollout")
    (run.run.root / "hang").touch()
    run.wait_until(
        lambda: run.incarnations("rollout") == incarnations + 1,
        "rollout was started again",
        20 * LEASE_S,
    )
    told = (run.run.logs("rollout", incarnations) / "rollout-rank-0.log").read_text()
    threads = told.split("Thread 0x")
    assert len(threads) > 4 and sum("in hold_the_lock" in thread for thread in threads) == 1
    assert any(
        "in serve_forever" in thread or "asyncio/base_events" in thread for thread in threads
    ), "the main one"


def test_hung_roles_are_replaced_and_a_live_run_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hanging.py").write_text(REWARD)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(":")])
    )
    monkeypatch.setenv("HANG_FILE", str(tmp_path / "run" / "hang"))
    with running(tmp_path, SETTINGS) as run:
        run.wait_for_step(1, 120)
        seen = json.loads(cli("status", str(run.run.root), "--json").stdout)
        assert seen["hub"] and not seen["finished"] and seen["steps"] == 60
        assert all(group["last_beat_s"] < 60 for group in seen["groups"].values())
        again = cli("run", "--run_dir", str(run.run.root), "--resume")
        assert (
            again.returncode == 78
            and "is running; look with" in again.stderr
            and again.stderr.count("\n") == 1
        )
        hang(run)
        freeze(run, "reference", "reference")
        freeze(run, "hub", "controller")
        run.finish(200)
    said = run.output.read_text()
    assert said.count("rollout has sent no heartbeat for 3 s, taken for dead; stacks: ") == 1
    assert said.count("reference has sent no heartbeat for 3 s, taken for dead") == 1
    assert said.count("controller has not answered for 3 s, taken for dead") == 1
    assert not audit(run.run).problems
    table = cli("status", str(run.run.root)).stdout
    assert "finished" in table and all(name in table for name in ("hub", "rollout", "reference"))
    fewer = cli("run", "--run_dir", str(run.run.root), "--resume", "--steps", "10")
    assert fewer.returncode == 78 and "steps: found 10, but step 60 is checkpointed" in fewer.stderr
