"""The user's commands on a run of this machine: one group started again with another setting, scaled, stopped.

All of it among files that nobody of ours wrote, which supervisor, hub, roles and commands meet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from relax_hpc.metrics.read import read_metrics
from tests.audit import audit
from tests.requirements import requires
from tests.run_helpers import Running, running
from tests.stray_files import scatter

requires("mpi", "torch", "megatron", "transformers")

SETTINGS = {"steps": 100_000, "max_staleness": 1, "groups": {"reference": None}, "liveness": {"beat_s": 0.2}}


def call(live: Running, verb: str, *words: str) -> str:
    """What a command about the run prints; it succeeds."""
    command = [sys.executable, "-m", "relax_hpc", verb, str(live.run.root), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{live.story()}"
    return done.stdout


def listens_at(process: psutil.Process) -> list[str]:
    return [one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]


def test_commands_on_a_living_run(tmp_path: Path) -> None:
    """Whose groups of one rank ask neither for MPI, which ends every process here, nor for sockets beyond a plane's."""
    (tmp_path / "mpi4py.py").write_text("import os\nos._exit(7)\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with running(tmp_path, SETTINGS | {"site": {"env": {"PYTHONPATH": paths}}}) as live:
        live.wait_for_step(1, 120)
        for role in ("actor", "actor_fwd", "rollout", "advantages", "controller"):
            assert set(found := listens_at(live.processes(role)[0])) == {"127.0.0.1"} and len(found) == 1, role
        others = [p.pid for role in ("actor", "actor_fwd", "controller") for p in live.processes(role)]
        no_requests = scatter(live.run.root)
        call(live, "resubmit", "--group", "rollout", "--rollout.temperature", "0.9")
        assert live.epochs("rollout") == 2
        call(live, "scale", "--replicas", "2")
        puts = "rollout-2 generates"
        live.wait_until(lambda: json.loads(call(live, "status", "--json"))["groups"]["rollout-2"]["puts"], puts, 60)
        call(live, "scale", "--replicas", "1")
        groups = json.loads(call(live, "status", "--json"))["groups"]
        assert "rollout-2" not in groups and groups["rollout"]["state"] in ("running", "suspect")
        assert [p.pid for role in ("actor", "actor_fwd", "controller") for p in live.processes(role)] == others
        answers = [path.read_text() for path in sorted((live.run.root / "requests").glob("*.answer.json"))]
        assert all("no request" in text for text in answers[:no_requests]) and len(answers) == no_requests + 3
        assert "is saved in" in call(live, "stop")
        assert live.wait(10) == 130
    steps = max(row["step"] for row in read_metrics(live.run.root))
    with running(
        tmp_path, SETTINGS | {"rollout": {"temperature": 0.9}}, None, "--resume", "--steps", str(steps + 20)
    ) as live:
        live.finish(120)
    assert not audit(live.run).problems
