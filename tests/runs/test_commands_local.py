"""Commands on a run of this machine: restart a group with another setting, scale it, stop the run.

The run directory has stray files, which supervisor, hub, roles and commands have to ignore.
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
from relax_hpc.net.rendezvous.roster import latest_incarnation
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
    "service": {"enabled": True},
}
# Slow steps, so that the run leaves the processors to the commands.
SETTINGS |= {
    "rollout": {"replicas": 2, "engine": {"kind": "simulated", "simulated": {"response_s": 0.5}}}
}
HOTTER = merged(SETTINGS, {"rollout": {"temperature": 0.9}})
KEPT_ROLES = ("actor", "actor_fwd", "controller")
"""Roles whose processes no command in this file may end before the run stops."""


def copy_package(folder: Path, protocol: int = PROTOCOL) -> Path:
    """Copy the package to ``folder``, with another ``protocol`` and one more metric.

    Files keep their times, so Python compiles only the changed modules again.
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


def run_command(
    live: Running, verb: str, *options: str, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command for the run. Its exit code must be ``code``."""
    command = [sys.executable, "-m", "relax_hpc", verb, str(live.run.root), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == code, f"{result.stderr}\n{live.story()}"
    return result


def command_output(live: Running, verb: str, *options: str, code: int = 0) -> str:
    """Standard output of a command for the run. Its exit code must be ``code``."""
    return run_command(live, verb, *options, code=code).stdout


def status_of_command(live: Running, code: int = 0) -> dict[str, Any]:
    return json.loads(command_output(live, "status", "--json", code=code))


def served_versions(live: Running) -> dict[str, Any]:
    """Weights that each replica serves.

    Waits call it in this process, because a command would take the processors from the run.
    """
    return (status(live.run)["weights"] or {}).get("served", {})


def listening_addresses(process: psutil.Process) -> list[str]:
    connections = process.net_connections("inet")
    return [
        connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN
    ]


def kept_processes(live: Running) -> list[int]:
    """Process ids of `KEPT_ROLES`."""
    processes = []
    for role in KEPT_ROLES:
        processes += live.processes(role)
    return [process.pid for process in processes]


# -- steps of the test -----------------------------------------------------------------------------


def assert_has_ended(live: Running, state: str, code: int) -> None:
    """Commands see the end of the run without waiting for the end of a lease."""
    view = status_of_command(live, code)
    assert view["state"] == state and not view["hub"]
    assert {group["state"] for group in view["groups"].values()} <= {"ended", "done"}
    (row,) = json.loads(command_output(live, "list", "--json", code=code))
    assert (row["state"], row["exit_code"]) == (state, code)


def assert_each_process_listens_at_one_local_address(live: Running) -> None:
    for role in ("actor", "actor_fwd", "rollout", "advantages", "controller"):
        process = live.processes(role)[0]
        assert listening_addresses(process) == ["127.0.0.1"], role


def assert_output_shows_how_models_are_loaded(live: Running) -> None:
    output = live.output.read_text()
    for name in ("actor", "actor_fwd"):
        pattern = rf"^\[ +[\d.]+s\] {name}: (importing libraries|.*loading)"
        assert re.search(pattern, output, re.M), output
    assert "warm start" not in output


def remove_an_engine(live: Running) -> None:
    """Let engine 1 leave. Numbers that leave no engine, or that do not exist, are refused."""
    refused = run_command(live, "scale", "--without", "0,1", code=EXIT_CONFIG)
    assert "the last engine of each process of group rollout stays" in refused.stderr
    refused = run_command(live, "scale", "--without", "2", code=EXIT_CONFIG)
    assert "found rollout/2, allowed: rollout/0, rollout/1" in refused.stderr
    command_output(live, "scale", "--without", "1")
    live.wait_until(lambda: status(live.run)["without"] == {"rollout/1": "left"}, "left", 30)
    assert live.incarnations("rollout") == 1
    assert "without: rollout/1 (left)" in command_output(live, "status")


def resubmit_with_new_code(live: Running, folder: Path) -> None:
    """Restart rollout with new code. Code of another protocol is refused."""
    other = copy_package(folder / "other", PROTOCOL + 1)
    options = ["--group", "rollout", "--code", str(other)]
    refused = run_command(live, "resubmit", *options, code=EXIT_CONFIG).stderr
    assert f"--code: found code of protocol {PROTOCOL + 1} in {other}" in refused
    assert live.incarnations("rollout") == 1
    options = ["--group", "rollout", "--code", str(copy_package(folder / "newer"))]
    command_output(live, "resubmit", *options, "--rollout.temperature", "0.9")
    assert live.incarnations("rollout") == 2
    live.wait_until(
        lambda: "upgraded/rollout" in live.run.metrics.read_text(), "the new code's metric", 60
    )
    # The engine that left is still absent after the restart.
    assert status_of_command(live)["without"] == {"rollout/1": "left"}
    assert live.incarnations("rollout") == 2


def add_and_remove_a_replica(live: Running) -> None:
    command_output(live, "scale", "--replicas", "2")
    live.wait_until(
        lambda: status(live.run)["groups"]["rollout-2"]["puts"], "rollout-2 generates", 60
    )
    command_output(live, "scale", "--replicas", "1")
    view = status_of_command(live)
    assert "rollout-2" not in view["groups"]
    assert view["groups"]["rollout"]["state"] in ("running", "suspect")
    assert view["without"] and "rollout/1" not in view["weights"]["served"]


def assert_stray_files_are_refused(live: Running, stray_requests: int) -> None:
    """The answers are those to the stray files and to the three commands."""
    paths = sorted((live.run.root / "requests").glob("*.answer.json"))
    answers = [path.read_text() for path in paths]
    assert len(answers) == stray_requests + 3
    assert all("no request" in text for text in answers[:stray_requests])


def stop_now(folder: Path) -> None:
    """Resume the run, and stop it while its groups start."""
    with running(folder, HOTTER, None, "--resume", "--steps", "100000") as live:
        live.wait_until(lambda: live.processes("rollout"), "rollout has started", 60)
        command_output(live, "stop", "--now")
        assert live.wait(60) == 130
        assert "stopped" in live.output.read_text().splitlines()[-2]
        assert_has_ended(live, "stopped", 130)


def return_an_engine_and_kill_the_run(folder: Path) -> None:
    """Resume the run without engine 0, let the engine return, and kill the supervisor."""
    settings = merged(HOTTER, {"rollout": {"without": ["rollout/0"]}})
    with running(folder, settings, None, "--resume", "--steps", "100000") as live:
        live.wait_until(lambda: live.processes("actor_fwd"), "all groups have started", 60)
        live.wait_until(lambda: "rollout/1" in served_versions(live), "engine 1 serves", 60)
        assert "rollout/0" not in served_versions(live)
        command_output(live, "scale", "--without", "")
        live.wait_until(
            lambda: {"rollout/0", "rollout/1"} <= served_versions(live).keys(), "both serve", 60
        )
        live.process.kill()
        live.process.wait(60)
        assert_has_ended(live, "ended", 75)


def assert_processes_can_be_inspected(live: Running) -> None:
    """All ranks show their stacks and resources, and a program beside a rank has its
    environment."""
    roles = ("controller", "advantages", "rollout", "actor")
    wanted = {f"resources/{role}_memory_bytes" for role in roles}
    # A role's values are in the line of the step after its report.
    live.wait_until(
        lambda: wanted <= set().union(*read_metrics(live.run.root)), "resources of all roles", 60
    )
    stacks = command_output(live, "stacks")
    for rank in ("hub/controller", "hub/advantages", "rollout/rollout", "actor/actor"):
        text = stacks.partition(f"== {rank} rank 0, process ")[2].partition("\n== ")[0]
        assert "__main__.py" in text and "kernel: " in text, stacks
    command = [sys.executable, "-m", "relax_hpc", "attach", str(live.run.root), "--group", "actor"]
    words = ["sh", "-c", 'echo "$RELAX_PID $RELAX_LOG $OMP_NUM_THREADS"; exit 3']
    done = subprocess.run([*command, "--", *words], capture_output=True, text=True)
    pid, log, threads = done.stdout.split()
    assert done.returncode == 3 and threads == "1", done
    assert "--role actor" in " ".join(psutil.Process(int(pid)).cmdline())
    assert Path(log) == live.run.rank_log(
        "actor", latest_incarnation(live.run, "actor"), "actor", 0
    )


def test_commands_on_a_run_in_progress(tmp_path: Path) -> None:
    """Groups of one rank do not need MPI, which ends every process here, and have no sockets but
    those of a plane."""
    (tmp_path / "mpi4py.py").write_text("import os\nos._exit(7)\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with running(tmp_path, SETTINGS | {"site": {"env": {"PYTHONPATH": paths}}}) as live:
        live.wait_for_step(1, 120)
        assert_each_process_listens_at_one_local_address(live)
        assert_output_shows_how_models_are_loaded(live)
        assert_processes_can_be_inspected(live)
        processes = kept_processes(live)
        stray_requests = scatter(live.run.root)
        remove_an_engine(live)
        resubmit_with_new_code(live, tmp_path)
        add_and_remove_a_replica(live)
        assert kept_processes(live) == processes
        assert_stray_files_are_refused(live, stray_requests)
        assert "is saved in" in command_output(live, "stop")
        assert live.wait(60) == 130
        assert_has_ended(live, "stopped", 130)
    steps = max(row["step"] for row in read_metrics(live.run.root))
    with running(tmp_path, HOTTER, None, "--resume", "--steps", str(steps + 5)) as live:
        live.finish(120)
        assert_has_ended(live, "finished", 0)
    assert not audit(live.run).problems
    stop_now(tmp_path)
    return_an_engine_and_kill_the_run(tmp_path)
