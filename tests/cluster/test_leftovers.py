"""What a group's processes have started ends with it, though it is nobody's child any more."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise import processes
from relax_hpc.cluster.supervise.launch_records import UNKNOWN, Launch
from relax_hpc.cluster.supervise.processes import (
    INCARNATION_VARIABLE,
    LocalLauncher,
    LocalProcesses,
    incarnation_tag,
    kill_leftovers,
)
from relax_hpc.config.load import dump, load
from relax_hpc.net.rendezvous.roster import claim_incarnation
from tests.helpers.queue_helpers import make_run
from tests.helpers.run_helpers import write_config

ROLE = """
import pathlib, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
pathlib.Path(sys.argv[1] + ".new").write_text(str(child.pid))
pathlib.Path(sys.argv[1] + ".new").rename(sys.argv[1])
signal.pause()
"""
"""Starts, as a user's reward may, what does not die with it; and says its number."""
LAUNCH = Launch(1, UNKNOWN)
PAUSE = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]


@pytest.fixture(name="run")
def run_fixture(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path / "run")
    dump(load([write_config(tmp_path / "config.yaml", {})]), run.config)
    return run


@pytest.fixture(name="start")
def start_fixture(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], tuple[LocalProcesses, psutil.Process]]]:
    """Starts an incarnation of a group; it, and what its role has started."""
    started: list[LocalProcesses] = []

    def start(incarnation: int) -> tuple[LocalProcesses, psutil.Process]:
        said = tmp_path / f"said-{incarnation}"
        monkeypatch.setattr(
            processes, "role_command", lambda *_: [sys.executable, "-c", ROLE, str(said)]
        )
        assert claim_incarnation(run, "rollout") == incarnation
        started.append(LocalLauncher(run).start("rollout", incarnation, LAUNCH))
        role = psutil.Process(started[-1].members[0].process.pid)
        while not said.exists():
            assert role.is_running() and role.status() != psutil.STATUS_ZOMBIE
        return started[-1], psutil.Process(int(said.read_text()))

    yield start
    for one in started:
        one.kill()


def gone(process: psutil.Process) -> bool:
    return not psutil.wait_procs([process], timeout=10.0)[1]


def test_what_a_killed_role_has_started_ends_when_its_group_does(start) -> None:
    group, child = start(1)
    group.members[0].process.send_signal(signal.SIGKILL)
    group.members[0].process.wait()
    assert child.is_running(), "nothing else ends it"
    group.kill()
    assert gone(child)


def test_what_was_left_behind_with_its_supervisor_ends_before_the_next_start(start) -> None:
    group, child = start(1)
    # As after a kill of all but the child.
    group.members[0].process.kill()
    group.members[0].process.wait()
    group.detach()
    _, younger = start(2)
    assert gone(child) and younger.is_running()


def test_nobody_else_is_ended(run: RunDir) -> None:
    others = [
        incarnation_tag(run, "rollout", 3),
        incarnation_tag(run, "rollout-2", 1),
        incarnation_tag(RunDir(run.root / "x"), "rollout", 1),
        "rollout",
    ]
    others += ["rollout one " + str(run.root), ""]
    living = [
        subprocess.Popen(
            PAUSE, stdout=subprocess.PIPE, env={INCARNATION_VARIABLE: text}, start_new_session=True
        )
        for text in (incarnation_tag(run, "rollout", 2), *others)
    ]
    try:
        for process in living:
            process.stdout.readline()
        kill_leftovers(run, "rollout", 2)
        assert living[0].wait(60) == -signal.SIGKILL
        assert [process.poll() for process in living[1:]] == [None] * len(others)
    finally:
        for process in living:
            process.kill()
            process.communicate()
