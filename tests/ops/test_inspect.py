"""Stacks of processes by each tool, and the srun commands that reach a group's nodes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import SlurmJob
from relax_hpc.config import Config
from relax_hpc.config.schema import GroupConfig
from relax_hpc.ops.inspect import thread_stacks
from relax_hpc.ops.inspect.attach import select_rank
from relax_hpc.ops.inspect.on_node import NodeProcess, main, read_node
from relax_hpc.ops.inspect.rank_processes import find_processes
from relax_hpc.ops.inspect.slurm_access import GroupAccess
from tests.cluster.test_stacks import CODE


@contextmanager
def hanging_rank(run: RunDir) -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """Rank 0 of an actor, which hangs in C code with the interpreter's lock, and its child."""
    logs = run.logs("actor", 2)
    logs.mkdir(parents=True)
    words = ["--run_dir", str(run.root), "--group", "actor", "--role", "actor"]
    with (logs / "actor-rank-0.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", CODE, *words, "--incarnation", "2"],
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=Path(__file__).parents[2],
        )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline().split()[1]))
    try:
        yield psutil.Process(process.pid), child
    finally:
        child.kill()
        process.kill()
        process.wait()
        process.stdout.close()


def install(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``script`` the only tool."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    monkeypatch.setattr(
        thread_stacks, "find_tool", lambda wanted: str(path) if wanted == name else ""
    )


def test_stacks_of_a_rank_that_hangs_in_c_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes them itself. Its child, which cannot, is not killed. A tool that works is used, and
    one that may not trace a process is not the end."""
    run = RunDir(tmp_path / "run")
    with hanging_rank(run) as (rank, child):
        install(tmp_path, "none", "", monkeypatch)
        first, second = read_node(run, "actor", 2, with_stacks=True)
        assert (first.pid, first.role, first.rank, first.is_rank) == (rank.pid, "actor", 0, True)
        assert "in hangs" in first.stacks and "in waits" in first.stacks
        assert first.stacks.count("most recent call first") == 2
        assert "kernel: 2 threads: " in first.stacks
        assert (second.pid, second.rank, second.name) == (child.pid, 0, "sleep 600")
        assert "no Python stacks: py-spy is not installed" in second.stacks
        assert child.is_running() and child.status() == psutil.STATUS_SLEEPING

        install(tmp_path, "py-spy", 'echo "$@"', monkeypatch)
        texts = [process.stacks for process in read_node(run, "actor", 2, True, native=True)]
        assert [text.splitlines()[0] for text in texts] == [
            f"dump --native --pid {process.pid}" for process in (rank, child)
        ]
        install(tmp_path, "py-spy", "echo Permission denied >&2; exit 1", monkeypatch)
        first, second = read_node(run, "actor", 2, with_stacks=True)
        assert "in hangs" in first.stacks and "py-spy: Permission denied" in second.stacks
        assert not find_processes(run, "actor", 1) and not find_processes(run, "rollout", 2)

        assert (
            main(
                [
                    "--run",
                    str(run.root),
                    "--name",
                    "actor",
                    "--number",
                    "2",
                    "--output",
                    str(tmp_path),
                ]
            )
            == 0
        )
    assert len(list(tmp_path.glob("actor-*.json"))) == 1
    assert thread_stacks.describe_process(find_processes_of(rank.pid)) == "has ended"


def find_processes_of(pid: int) -> thread_stacks.RankProcess:
    return thread_stacks.RankProcess(pid, "actor", 0, "actor", True, "")


def access(tmp_path: Path, job: SlurmJob | None, **site: object) -> GroupAccess:
    config = Config(groups={"actor": GroupConfig(roles=["actor"])})
    config.groups["actor"].resources.gpus_per_node = 4
    for name, value in site.items():
        setattr(config.site, name, value)
    return GroupAccess(RunDir(tmp_path), config, "actor", 1, job)


def test_a_step_reaches_the_nodes_of_a_job_or_of_a_component(tmp_path: Path) -> None:
    plain = SlurmJob("7", "actor", "RUNNING", 2, "n[1-2]", "", None, 1.0)
    component = SlurmJob("9", "actor", "RUNNING", 2, "n[1-2]", "", None, 1.0, "8", 1)
    command = access(tmp_path, plain).srun(["program"])
    assert command[:2] == ["srun", "--jobid=7"] and command[-1] == "program"
    assert {"--nodes=2", "--ntasks=2", "--overlap", "--gpus-per-node=4"} <= {*command}
    assert not any(word.startswith("--nodelist") for word in command)
    command = access(tmp_path, component, srun_options={"mem": None}).srun(["sh"], "n2", ["--pty"])
    assert command[1:3] == ["--jobid=8", "--het-group=1"]
    assert {"--nodes=1", "--nodelist=n2", "--pty"} <= {*command} and "--mem=0" not in command


def test_a_rank_is_selected_by_its_role_and_number(tmp_path: Path) -> None:
    processes = [
        NodeProcess("n1", 10, "gateway", 0, "gateway", True, ""),
        NodeProcess("n1", 11, "rollout", 0, "rollout", True, ""),
        NodeProcess("n1", 12, "rollout", 0, "engine", False, ""),
        NodeProcess("n2", 13, "rollout", 1, "rollout", True, ""),
    ]
    group = access(tmp_path, None)
    assert select_rank(group, processes, "", 0).pid == 10
    assert select_rank(group, processes, "rollout", 0).pid == 11
    assert select_rank(group, processes, "", 1).pid == 13
    with pytest.raises(ConfigError, match="found rollout rank 2 of group actor, allowed: gateway"):
        select_rank(group, processes, "rollout", 2)
    with pytest.raises(RelaxError, match="none of its ranks runs now"):
        select_rank(group, processes[2:3], "", 0)
