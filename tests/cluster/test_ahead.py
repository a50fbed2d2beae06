"""What is started ahead: when, for whom it is of use, how it ends; by tiny processes, and a rank
without libraries."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base import cuda_context
from relax_hpc.base.cuda_context import has_cuda_context
from relax_hpc.base.rundir import RunDir, write_json
from relax_hpc.cluster.supervise.group import Member
from relax_hpc.cluster.supervise.processes import (
    INCARNATION_VARIABLE,
    LocalProcesses,
    WaitingProcesses,
    incarnation_tag,
)
from relax_hpc.cluster.supervise.requests import GroupRequest
from relax_hpc.net.rendezvous.roster import claim_incarnation, latest_incarnation
from relax_hpc.ops.observe.status_groups import started_ahead
from tests.cluster.supervisor_helpers import World, world_fixture  # noqa: F401
from tests.helpers.queue_helpers import make_run

DEADLINE_S = 120.0


@pytest.fixture
def at_work(world: World) -> World:
    """Groups that are looked at as if all of them were at work all the time."""
    world.config.liveness.start_ahead_s = 0.001
    return world


def watch(world: World, *actions: Callable[[], bool]) -> Callable[[], None]:
    """For `supervise`: all groups beat, and the actions are done, each again until it says that it
    is done."""
    left = list(actions)

    def tick() -> None:
        supervisor = world.supervisor
        supervisor.liveness.beats = {
            f"{name}/{name}": {
                "group": name,
                "incarnation": group.incarnation,
                "loads": False,
                "busy_s": 0.0,
            }
            for name, group in supervisor.table.supervised.items()
        }
        supervisor.liveness.poll = lambda *_: []
        if left and left[0]():
            left.pop(0)

    return tick


def waits(world: World, name: str = "actor") -> subprocess.Popen | None:
    group = world.supervisor.starts.ahead.waiting.get(name)
    return group.members[0].process if group else None


def kills(world: World, name: str = "actor") -> Callable[[], bool]:
    """Once its next incarnation waits, the present one is killed."""

    def kill() -> bool:
        if not waits(world, name):
            return False
        world.supervisor.table.supervised[name].members[0].process.kill()
        return True

    return kill


def ends(world: World, incarnations: int, name: str = "actor") -> Callable[[], bool]:
    """A signal, once so many incarnations of the group were started."""

    def end() -> bool:
        if sum(group == name for group, _ in world.started) < incarnations:
            return False
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    return end


def test_a_group_that_ends_goes_on_in_what_was_started_ahead(at_work: World) -> None:
    seen: list[int] = []

    def look() -> bool:
        if process := waits(at_work):
            seen.append(process.pid)
        return bool(seen)

    def same() -> bool:
        group = at_work.supervisor.table.supervised.get("actor")
        if group is None or group.incarnation != 2:
            return False
        assert group.members[0].process.pid == seen[0]
        return (at_work.run.logs("actor", 2) / "log").read_text() == "lives\n"

    at_work.supervise(
        "rollout", "actor", then=watch(at_work, look, kills(at_work), same, ends(at_work, 2))
    )
    said = at_work.said()
    assert [start for start in at_work.started if start[0] == "actor"] == [
        ("actor", 1),
        ("actor", 2),
    ]
    assert (
        "actor: started incarnation 2 (actor), which waited" in said
        and "rollout: incarnation" not in said
    )
    assert not at_work.supervisor.starts.ahead.waiting
    mark = json.loads(at_work.run.exit_mark("actor", 2, "actor").read_text())
    assert mark["status"] == "stopped", "it took the place of the first, and was asked to end"


def test_what_was_started_ahead_by_other_settings_or_code_is_not_used(at_work: World) -> None:
    def changes() -> bool:
        if not (process := waits(at_work)):
            return False
        at_work.env = at_work.env | {"PYTHONPATH": "/another/code"}
        at_work.supervisor.table.supervised["actor"].members[0].process.kill()
        at_work.former = process
        return True

    at_work.supervise("actor", then=watch(at_work, changes, ends(at_work, 2)))
    # Its number went with it: it may have said something under that.
    assert at_work.started == [("actor", 1), ("actor", 3)]
    assert "which waited" not in at_work.said()
    assert at_work.former.wait(DEADLINE_S) is not None


def test_what_was_started_ahead_may_be_killed(at_work: World) -> None:
    """It is not tried again for the same incarnation, and the number is not used."""

    def kill() -> bool:
        if process := waits(at_work):
            process.kill()
        return bool(process)

    def gone() -> bool:
        return not at_work.supervisor.starts.ahead.waiting

    def kill_the_actor() -> bool:
        at_work.supervisor.table.supervised["actor"].members[0].process.kill()
        return True

    at_work.supervise("actor", then=watch(at_work, kill, gone, kill_the_actor, ends(at_work, 2)))
    assert at_work.started == [("actor", 1), ("actor", 3)]
    assert at_work.said().count("incarnation 2, started ahead, has ended before it was needed") == 1
    assert at_work.said().count("a standby is ready (incarnation 2)") == 1


@pytest.mark.parametrize("what", ["release", "restart", "end"])
def test_a_command_about_the_group_finds_nothing_that_began_before(
    at_work: World, what: str
) -> None:
    former: list[subprocess.Popen] = []

    def ask() -> bool:
        if not (process := waits(at_work)):
            return False
        former.append(process)
        if what == "end":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            at_work.supervisor._serve(GroupRequest(1, what, "actor"))
            assert "actor" not in at_work.supervisor.starts.ahead.waiting
        return True

    def stop() -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    at_work.supervise(
        "actor", "rollout", then=watch(at_work, ask, *([stop] if what != "end" else []))
    )
    assert former[0].wait(DEADLINE_S) is not None
    assert at_work.started.count(("actor", 2)) == 0 and at_work.run.logs("actor", 2).exists()


def test_nothing_is_started_ahead_unless_it_is_asked_for_and_for_nobody_who_has_little_to_import(
    world: World,
) -> None:
    world.config.liveness.start_ahead_s = 0.0
    rounds = iter(range(20))
    world.supervise("rollout", "actor", then=watch(world, lambda: next(rounds) > 5, ends(world, 1)))
    assert "ahead" not in world.said()


# -- a rank ----------------------------------------------------------------------------------------

RANK = """
import argparse, json, os, sys, threading
from pathlib import Path
from relax_hpc.net.rendezvous.process import die_with_parent, SignalFlag
from relax_hpc.roles import start_ahead as ahead
from relax_hpc.base.rundir import RunDir
die_with_parent()
ahead._LOOK_S = 0.05
seen = {}
def imports():
    seen["low"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    seen["score"] = Path("/proc/self/oom_score_adj").read_text().strip()
args = argparse.Namespace(group="actor", incarnation=2, role="actor", deadline=None)
score = Path("/proc/self/oom_score_adj").read_text()
try:
    ahead.wait_to_begin(RunDir(sys.argv[1]), args, imports, True, SignalFlag())
except ahead.NotNeededError as error:
    print(error)
    sys.exit(0)
after = Path("/proc/self/oom_score_adj").read_text()
empty = sys.stdin.read() == "" and os.readlink("/proc/self/fd/0") == os.devnull
print(json.dumps(seen | {"same": after == score, "nice": os.getpriority(os.PRIO_PROCESS, 0), "empty": empty,
                         "threads": threading.active_count()}))
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = make_run(tmp_path / "run")
    made.logs("actor", 2).mkdir(parents=True)
    claim_incarnation(made, "actor")
    return made


@pytest.fixture
def rank(run: RunDir) -> Iterator[subprocess.Popen]:
    words = [sys.executable, "-c", RANK, str(run.root)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        yield process
        process.kill()


def is_waiting(process: subprocess.Popen) -> None:
    """It says so."""
    line = process.stdout.readline()
    assert line.startswith("actor: started ahead, waits: "), line


def test_a_rank_begins_when_it_is_told(run: RunDir, rank: subprocess.Popen) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    is_waiting(rank)
    out, _ = rank.communicate("\n", timeout=DEADLINE_S)
    found = json.loads(out)
    assert found.pop("low") == 19 and found.pop("score") == "1000"
    assert found == {"same": True, "nice": before, "empty": True, "threads": 1}
    assert not list(run.logs("actor", 2).glob("ahead-*")), "it waits no more"


def test_a_rank_that_waits_is_shown(run: RunDir, rank: subprocess.Popen) -> None:
    is_waiting(rank)
    future: Future = Future()
    deadline = DEADLINE_S / 0.01
    while not (found := started_ahead(run, "actor", 1)) and (deadline := deadline - 1):
        with pytest.raises(TimeoutError):
            future.result(0.01)
    assert [(one["incarnation"], one["role"]) for one in found] == [(2, "actor")] and found[0][
        "memory_mb"
    ] > 0
    assert started_ahead(run, "actor", 2) == [], "what began before is no news"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("hangs up", "its supervisor no longer needs it"),
        ("another begins", "incarnation 2 started without it"),
        ("finished", "the run is over"),
    ],
)
def test_a_rank_that_nobody_needs_ends_without_a_mark(
    run: RunDir, rank: subprocess.Popen, what: str, says: str
) -> None:
    is_waiting(rank)
    if what == "hangs up":
        rank.stdin.close()
    elif what == "another begins":
        claim_incarnation(run, "actor")
    else:
        write_json(run.finished, {})
    assert rank.wait(DEADLINE_S) == 0 and says in rank.stdout.read()
    assert latest_incarnation(run, "actor") == (2 if what == "another begins" else 1)
    assert not list(run.logs("actor", 2).iterdir()), "neither a mark nor a note"


PARENT = """
import subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
print(process.pid, flush=True)
process.wait()
"""


def test_a_rank_that_waits_dies_with_who_started_it(run: RunDir) -> None:
    words = [sys.executable, "-c", PARENT, sys.executable, "-c", RANK, str(run.root)]
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        descriptor = os.pidfd_open(int(process.stdout.readline()))
        is_waiting(process)
        process.kill()
        assert select.select([descriptor], [], [], DEADLINE_S)[0], "it lives on"
        os.close(descriptor)


def test_ranks_that_share_a_standard_input_are_told_one_by_one() -> None:
    """As their parent's children, which the local layout has; `srun` gives each a copy."""
    words = [
        sys.executable,
        "-m",
        "relax_hpc.cluster.supervise.ranks",
        "2",
        "-c",
        "import os; assert os.read(0, 1)",
    ]
    assert subprocess.run(words, input=b"\n\n", timeout=DEADLINE_S).returncode == 0
    assert subprocess.run(words, input=b"\n", timeout=DEADLINE_S).returncode == 1


def test_the_end_of_what_waits_is_not_that_of_the_incarnation_at_work(tmp_path: Path) -> None:
    run, sleeps = (
        make_run(tmp_path / "run"),
        [sys.executable, "-S", "-c", "import signal; signal.pause()"],
    )
    at_work = os.environ | {INCARNATION_VARIABLE: incarnation_tag(run, "actor", 1)}
    with subprocess.Popen(sleeps, env=at_work) as first, subprocess.Popen(sleeps) as second:
        WaitingProcesses(run, "actor", 2, [Member.from_process("actor", second)]).kill()
        assert second.returncode == -signal.SIGKILL and first.poll() is None
        LocalProcesses(run, "actor", 2, []).kill()
        assert first.wait(DEADLINE_S) == -signal.SIGKILL, "whoever begins finds nobody there"


class Driver:
    """CUDA's, of some devices; error 3: it was never initialised, 101: there is no such device."""

    def __init__(self, active: list[int] | None) -> None:
        self.active = active

    def cuDevicePrimaryCtxGetState(self, device: int, flags: Any, active: Any) -> int:
        if self.active is None or device >= len(self.active):
            return 3 if self.active is None else 101
        active._obj.value = self.active[device]
        return 0


@pytest.mark.parametrize(
    ("active", "found"), [(None, False), ([], False), ([0, 0], False), ([0, 1], True), ([1], True)]
)
def test_a_context_on_any_gpu_is_seen_whoever_made_it(
    active: list[int] | None, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is not asked: MPI and Triton make contexts that it does not know of."""
    assert not has_cuda_context(), "no driver is loaded here, and asking loads none"
    monkeypatch.setattr(cuda_context.ctypes, "CDLL", lambda name, mode: Driver(active))
    assert has_cuda_context() == found


def test_a_rank_whose_imports_take_a_gpu_waits_for_nobody(run: RunDir) -> None:
    code = RANK.replace("seen = {}", "seen = {}; ahead.has_cuda_context = lambda: True")
    words = [sys.executable, "-c", code, str(run.root)]
    done = subprocess.run(
        words, stdin=subprocess.PIPE, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert (
        "an import uses memory of a GPU that other processes use; set liveness.start_ahead_s: 0"
        in done.stdout
    )
