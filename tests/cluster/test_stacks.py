"""A process that hangs says where before it is killed; who cannot say it is not ended by the
question."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.slurm.steps import SlurmSteps
from relax_hpc.cluster.supervise import group
from relax_hpc.cluster.supervise.group import Member
from relax_hpc.cluster.supervise.processes import LocalProcesses
from relax_hpc.net.rendezvous.process import handles_stack_signal
from tests.helpers.fake_slurm import FakeSlurm

CODE = """
import ctypes, subprocess, sys, threading
from relax_hpc.net.rendezvous.process import install_stack_dump

def waits():
    threading.Event().wait()

def hangs():
    # Nobody else gets the interpreter's lock: no thread of Python could tell.
    ctypes.PyDLL(None).sleep(600)
    ctypes.PyDLL(None).sleep(600)

threading.Thread(target=waits, daemon=True).start()
engine = subprocess.Popen(["/bin/sleep", "600"])
install_stack_dump()
print("ready", engine.pid, file=sys.stdout, flush=True)
hangs()
"""


@contextmanager
def hanging(run: RunDir) -> Iterator[tuple[LocalProcesses, psutil.Process]]:
    """An incarnation whose only rank hangs in native code, and a child of it that knows of no such
    signal."""
    run.create()
    logs = run.logs("rollout", 1)
    logs.mkdir(parents=True)
    with (logs / "rollout-rank-0.log").open("ab") as log:
        words = [sys.executable, "-c", CODE]
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=log, cwd=Path(__file__).parents[2]
        )
    child = psutil.Process(int(process.stdout.readline().split()[1]))
    incarnation = LocalProcesses(run, "rollout", 1, [Member.from_process("rollout", process)])
    try:
        yield incarnation, child
    finally:
        incarnation.kill()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine on which everything takes longer."""
    monkeypatch.setattr(group, "_STACKS_S", 10.0)


def test_a_native_hang_leaves_the_stacks_of_all_threads(tmp_path: Path) -> None:
    with hanging(RunDir(tmp_path / "run")) as (incarnation, child):
        incarnation.dump_stacks()
        told = (tmp_path / "run/logs/rollout/inc-000001/rollout-rank-0.log").read_text()
        assert child.is_running() and child.status() == psutil.STATUS_SLEEPING, (
            "an engine is killed, not asked"
        )
        assert incarnation.members[0].process.poll() is None, "it goes on"
    current, other = told.split("Current thread")[1], told.split("Current thread")[0]
    assert (
        "in hangs" in current and "in waits" in other and told.count("most recent call first") == 2
    )


def test_one_that_is_stopped_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_STACKS_S", 0.05)
    with hanging(RunDir(tmp_path / "run")) as (incarnation, _):
        incarnation.members[0].process.send_signal(signal.SIGSTOP)
        incarnation.dump_stacks()
    assert (tmp_path / "run/logs/rollout/inc-000001/rollout-rank-0.log").read_text() == ""


def test_who_handles_the_signal_is_known() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        assert not handles_stack_signal(process.pid)
        process.kill()
    assert not handles_stack_signal(process.pid)


def test_the_steps_of_a_group_are_signalled_by_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun would not pass it on, and may be on a node that is gone."""
    monkeypatch.setattr(group, "_STACKS_S", 0.0)
    monkeypatch.setattr(group, "run_in_thread", lambda act: act())
    slurm = FakeSlurm(tmp_path / "slurm", monkeypatch)
    steps = {
        "7.3": "actor.actor.i000002",
        "7.4": "actor.actor.i000001",
        "7.5": "rollout.rollout.i000002",
    }
    slurm.set(jobs={"7": {"state": "RUNNING", "steps": steps}})
    run = RunDir(tmp_path / "run")
    run.create()
    SlurmSteps(run, "actor", 2, [Member("actor")], Slurm(), "7").dump_stacks()
    assert [call["argv"] for call in slurm.calls("scancel")] == [["--signal=USR1", "7.3"]]


def test_a_node_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm tries for 20 s to reach it, which the group would need in vain."""
    monkeypatch.setattr(group, "_STACKS_S", 0.05)
    asked, answers = threading.Event(), threading.Event()
    steps = SlurmSteps(RunDir(tmp_path / "run"), "actor", 2, [Member("actor")], Slurm(), "7")
    monkeypatch.setattr(SlurmSteps, "request_stacks", lambda _: (asked.set(), answers.wait(60)))
    steps.dump_stacks()
    assert asked.wait(60) and not answers.is_set()
    answers.set()
