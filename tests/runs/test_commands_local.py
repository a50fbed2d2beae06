"""The user's commands on a run of this machine: one group started again with another setting,
scaled, stopped.

All of it among files that nobody of ours wrote, which supervisor, hub, roles and commands meet.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import relax_hpc
from relax_hpc.base.errors import EXIT_CONFIG
from relax_hpc.base.metrics.read import read_metrics
from relax_hpc.base.protocol import PROTOCOL
from relax_hpc.ops.observe.status import status
from tests.helpers.audit import audit
from tests.helpers.run_helpers import Running, merged, running
from tests.helpers.stray_files import scatter
from tests.requirements import requires

requires("mpi", "torch", "megatron", "transformers")

pytestmark = pytest.mark.run

SETTINGS = {
    "steps": 100_000,
    "max_staleness": 1,
    "groups": {"reference": None},
    "liveness": {"beat_s": 0.2},
}
# Steps are slow, so that a run which is only asked things leaves the processors to who asks.
SETTINGS |= {
    "rollout": {"replicas": 2, "engine": {"kind": "simulated", "simulated": {"response_s": 0.5}}}
}
HOTTER = merged(SETTINGS, {"rollout": {"temperature": 0.9}})


def upgraded(folder: Path, protocol: int = PROTOCOL) -> Path:
    """A copy of the package that speaks ``protocol``, and reports one metric more.

    Compiled modules are copied too: files keep their times, so only what is changed is compiled.
    """
    package = folder / "relax_hpc"
    shutil.copytree(Path(relax_hpc.__file__).parent, package)
    replace(package / "base/protocol.py", f"PROTOCOL = {PROTOCOL}\n", f"PROTOCOL = {protocol}\n")
    replace(
        package / "queue/process_context.py",
        "step, values, self",
        'step, values | {f"upgraded/{self.role}": 1.0}, self',
    )
    return folder


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def ask(live: Running, verb: str, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """A command about the run, which ends with ``code``."""
    command = [sys.executable, "-m", "relax_hpc", verb, str(live.run.root), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, f"{done.stderr}\n{live.story()}"
    return done


def call(live: Running, verb: str, *words: str, code: int = 0) -> str:
    """What a command about the run prints; it ends with ``code``."""
    return ask(live, verb, *words, code=code).stdout


def served(live: Running) -> dict[str, Any]:
    """Weights that each replica serves. Waits look at it in this process: a command would take the
    processors from what they wait for."""
    return (status(live.run)["weights"] or {}).get("served", {})


def listens_at(process: psutil.Process) -> list[str]:
    return [
        one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN
    ]


def assert_over(live: Running, state: str, code: int) -> None:
    """Nobody has to wait for a lease until it shows that the run goes on no more."""
    found = json.loads(call(live, "status", "--json", code=code))
    assert found["state"] == state and not found["hub"]
    assert {group["state"] for group in found["groups"].values()} <= {"ended", "done"}
    (row,) = json.loads(call(live, "list", "--json", code=code))
    assert (row["state"], row["exit_code"]) == (state, code)


def test_commands_on_a_living_run(tmp_path: Path) -> None:
    """Whose groups of one rank ask neither for MPI, which ends every process here, nor for sockets
    beyond a plane's."""
    (tmp_path / "mpi4py.py").write_text("import os\nos._exit(7)\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with running(tmp_path, SETTINGS | {"site": {"env": {"PYTHONPATH": paths}}}) as live:
        live.wait_for_step(1, 120)
        for role in ("actor", "actor_fwd", "rollout", "advantages", "controller"):
            assert (
                set(found := listens_at(live.processes(role)[0])) == {"127.0.0.1"}
                and len(found) == 1
            ), role
        said = live.output.read_text()
        for name in ("actor", "actor_fwd"):
            assert re.search(
                rf"^\[ +[\d.]+s\] {name}: (importing libraries|.*loading)", said, re.M
            ), said
        assert "warm start" not in said
        others = [
            p.pid for role in ("actor", "actor_fwd", "controller") for p in live.processes(role)
        ]
        no_requests = scatter(live.run.root)
        assert (
            "are all engines of process 0 of rollout"
            in ask(live, "scale", "--without", "0,1", code=78).stderr
        )
        assert (
            "found 'rollout/2', allowed: rollout/0 to 1"
            in ask(live, "scale", "--without", "2", code=78).stderr
        )
        call(live, "scale", "--without", "1")
        live.wait_until(
            lambda: status(live.run)["without"] == {"rollout/1": "left"},
            "left",
            30,
        )
        assert live.incarnations("rollout") == 1 and "without: rollout/1 (left)" in call(
            live, "status"
        )
        newer, other = upgraded(tmp_path / "newer"), upgraded(tmp_path / "other", PROTOCOL + 1)
        refused = ask(
            live, "resubmit", "--group", "rollout", "--code", str(other), code=EXIT_CONFIG
        ).stderr
        assert f"--code: found code of protocol {PROTOCOL + 1} in {other}" in refused
        assert live.incarnations("rollout") == 1
        call(
            live,
            "resubmit",
            "--group",
            "rollout",
            "--code",
            str(newer),
            "--rollout.temperature",
            "0.9",
        )
        assert live.incarnations("rollout") == 2
        live.wait_until(
            lambda: "upgraded/rollout" in live.run.metrics.read_text(),
            "the newer code's metric",
            60,
        )
        assert json.loads(call(live, "status", "--json"))["without"] == {"rollout/1": "left"}, (
            "kept over a restart"
        )
        assert live.incarnations("rollout") == 2
        call(live, "scale", "--replicas", "2")
        puts = "rollout-2 generates"
        live.wait_until(
            lambda: status(live.run)["groups"]["rollout-2"]["puts"],
            puts,
            60,
        )
        call(live, "scale", "--replicas", "1")
        found = json.loads(call(live, "status", "--json"))
        groups = found["groups"]
        assert "rollout-2" not in groups and groups["rollout"]["state"] in ("running", "suspect")
        assert found["without"] and "rollout/1" not in found["weights"]["served"]
        assert [
            p.pid for role in ("actor", "actor_fwd", "controller") for p in live.processes(role)
        ] == others
        answers = [
            path.read_text() for path in sorted((live.run.root / "requests").glob("*.answer.json"))
        ]
        assert (
            all("no request" in text for text in answers[:no_requests])
            and len(answers) == no_requests + 3
        )
        assert "is saved in" in call(live, "stop")
        assert live.wait(60) == 130
        assert_over(live, "stopped", 130)
    steps = max(row["step"] for row in read_metrics(live.run.root))
    with running(tmp_path, HOTTER, None, "--resume", "--steps", str(steps + 5)) as live:
        live.finish(120)
        assert_over(live, "finished", 0)
    assert not audit(live.run).problems
    with running(tmp_path, HOTTER, None, "--resume", "--steps", "100000") as live:
        live.wait_until(lambda: live.processes("rollout"), "rollout has begun", 60)
        call(live, "stop", "--now")
        assert live.wait(60) == 130 and "stopped" in live.output.read_text().splitlines()[-2]
        assert_over(live, "stopped", 130)
    aside = merged(HOTTER, {"rollout": {"without": ["rollout/0"]}})
    with running(tmp_path, aside, None, "--resume", "--steps", "100000") as live:
        live.wait_until(lambda: live.processes("actor_fwd"), "all groups have begun", 60)
        live.wait_until(lambda: "rollout/1" in served(live), "one serves", 60)
        assert "rollout/0" not in served(live)
        call(live, "scale", "--without", "")
        live.wait_until(
            lambda: {"rollout/0", "rollout/1"} <= served(live).keys(), "the other is back", 60
        )
        live.process.kill()
        live.process.wait(60)
        assert_over(live, "ended", 75)
