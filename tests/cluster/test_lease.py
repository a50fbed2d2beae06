"""The right to supervise: one process holds it, and it passes on when that one is killed, stopped,
or done."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_RETRY, DeadlineError, FencedError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise import lease as module
from relax_hpc.cluster.supervise.lease import Lease, read_outcome, write_outcome
from relax_hpc.cluster.supervise.supervisor import Outcome
from relax_hpc.commands import head
from relax_hpc.commands.head import Head, _claim_node
from relax_hpc.config.schema import Config, LivenessConfig
from relax_hpc.net.rendezvous.roster import claim_incarnation, latest_incarnation
from relax_hpc.training.weights.node_cache import Staging, staging_root
from tests.helpers.queue_helpers import make_run
from tests.helpers.small_disk import small_disk

pytestmark = pytest.mark.run

LIMITS = LivenessConfig(beat_s=0.05, lease_s=0.6)
CANDIDATE = """
import sys, time
from relax_hpc.config.schema import LivenessConfig
from relax_hpc.base.errors import FencedError
from relax_hpc.cluster.supervise.lease import Lease
from relax_hpc.net.rendezvous.roster import claim_incarnation
from relax_hpc.base.rundir import RunDir
run = RunDir(sys.argv[1])
incarnation = 0
print("waits", flush=True)
while not incarnation:
    lease = Lease(run, "supervisor", LivenessConfig(beat_s=0.05, lease_s=0.6), sys.argv[2])
    while not lease.is_free():
        time.sleep(0.02)
    try:
        incarnation = claim_incarnation(run, "supervisor", lease.former)
    except (FencedError, OSError):
        time.sleep(0.02)
lease.acquire(incarnation)
print("holds", flush=True)
sys.stdin.readline()
lease.release()
print("gave up", flush=True)
sys.stdin.readline()
"""


class Candidates:
    """Processes that wait for the lease of one run."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.processes: list[subprocess.Popen] = []

    def start(self, node: str) -> subprocess.Popen:
        words = [sys.executable, "-c", CANDIDATE, str(self.run.root), node]
        root = Path(__file__).resolve().parents[2]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
        )
        self.processes.append(process)
        assert process.stdout.readline() == "waits\n"
        return process

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=10)

    def holder(self, node: str) -> subprocess.Popen:
        process = self.start(node)
        assert process.stdout.readline() == "holds\n"
        return process


@pytest.fixture
def candidates(tmp_path: Path) -> Iterator[Candidates]:
    made = Candidates(make_run(tmp_path / "run"))
    yield made
    made.end()


def taken_over(process: subprocess.Popen) -> float:
    """Seconds until a candidate holds the lease."""
    begun = time.monotonic()
    assert process.stdout.readline() == "holds\n"
    return time.monotonic() - begun


def looks(run: RunDir, node: str, seconds: float) -> bool:
    """Whether a candidate on ``node`` finds the lease free within ``seconds``."""
    lease, deadline = Lease(run, "supervisor", LIMITS, node), time.monotonic() + seconds
    while time.monotonic() < deadline:
        if lease.is_free():
            return True
        time.sleep(0.02)
    return False


def test_a_held_lease_is_not_free(candidates: Candidates) -> None:
    assert looks(candidates.run, "a", 0.1), "nobody ever held it"
    candidates.holder("a")
    assert not looks(candidates.run, "a", 1.0) and not looks(candidates.run, "b", 1.0)


def test_a_killed_holder_is_noticed_at_once_on_its_node_and_after_the_lease_elsewhere(
    candidates: Candidates,
) -> None:
    holder = candidates.holder("a")
    holder.kill()
    holder.wait(60)
    assert looks(candidates.run, "a", 0.5)
    far = Lease(candidates.run, "supervisor", LIMITS, "b")
    assert not far.is_free(), "it has only just looked"
    begun = time.monotonic()
    assert looks(candidates.run, "b", 5.0) and time.monotonic() - begun >= LIMITS.lease_s


def test_a_stopped_holder_loses_it_after_the_lease(candidates: Candidates) -> None:
    holder, waiting = candidates.holder("a"), candidates.start("a")
    holder.send_signal(signal.SIGSTOP)
    assert taken_over(waiting) < 10
    holder.send_signal(signal.SIGCONT)
    assert latest_incarnation(candidates.run, "supervisor") == 2, (
        "by which the first sees that it is over"
    )


def test_a_holder_that_lives_through_an_outage_keeps_it(tmp_path: Path) -> None:
    """Nobody can beat on a disk that is read-only for longer than a lease, and nobody takes that
    for a death."""
    with small_disk(tmp_path / "disk") as disk:
        everybody = Candidates(make_run(disk.folder / "run"))
        try:
            holder, waiting = everybody.holder("a"), everybody.start("b")
            with disk.read_only():
                assert not looks(everybody.run, "c", 3 * LIMITS.lease_s)
                with pytest.raises(OSError, match="Read-only"):
                    claim_incarnation(everybody.run, "supervisor", former=1)
            assert not looks(everybody.run, "c", 3 * LIMITS.lease_s)
            assert latest_incarnation(everybody.run, "supervisor") == 1 and holder.poll() is None
            holder.kill()
            holder.wait(60)
            assert taken_over(waiting) < 10
        finally:
            everybody.end()


def test_an_outage_of_any_length_counts_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it that only just everything can be written again when a lease is over, or that nothing
    can be read."""
    run, clock, out = make_run(tmp_path / "run"), [0.0], [errno.EROFS]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(module, "probe_folder", lambda *_: {"errno": out[0]} if out else {})
    claim_incarnation(run, "supervisor")
    lease = Lease(run, "supervisor", LIMITS, "b")
    lease.path.write_text('{"incarnation": 1}')

    def free_within(leases: float) -> bool:
        end = clock[0] + leases * LIMITS.lease_s
        while clock[0] < end and not lease.is_free():
            clock[0] += 0.02
        return clock[0] < end

    assert not free_within(0.95)
    out.clear()
    assert not free_within(0.5), "half of one at least is left to beat in"
    with monkeypatch.context() as patch:
        patch.setattr(module, "latest_incarnation", ill)
        assert not free_within(3)
    assert not free_within(0.9) and free_within(0.2)


def ill(*_: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


def test_of_several_that_see_it_free_one_gets_it(candidates: Candidates) -> None:
    """The others wait for a lease that is being taken, and no incarnation is spent on them."""
    holder = candidates.holder("a")
    waiting = [candidates.start(node) for node in ("a", "a", "b", "b")]
    for lives in range(1, 4):
        holder.kill()
        holder.wait(60)
        ready, _, _ = select.select([process.stdout for process in waiting], [], [], 10.0)
        holder = next(process for process in waiting if process.stdout in ready)
        taken_over(holder)
        waiting.remove(holder)
        assert latest_incarnation(candidates.run, "supervisor") == 1 + lives


def test_who_has_taken_it_and_does_not_beat_is_waited_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lease = Lease(run, "supervisor", LIMITS, "a")
    lease.acquire(claim_incarnation(run, "supervisor"))
    lease.release()
    other = Lease(run, "supervisor", LIMITS, "b")
    assert other.is_free() and claim_incarnation(run, "supervisor", other.former) == 2
    assert not Lease(run, "supervisor", LIMITS, "c").is_free(), (
        "it is given up, but not to this one"
    )
    with pytest.raises(
        FencedError, match="another process has just claimed supervisor incarnation 2"
    ):
        claim_incarnation(run, "supervisor", former=1)
    assert looks(run, "c", 5.0)


def test_who_gives_up_lets_the_next_have_it_at_once(candidates: Candidates) -> None:
    holder, waiting = candidates.holder("a"), candidates.start("b")
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "gave up\n"
    assert taken_over(waiting) < 10
    assert holder.poll() is None


def test_what_another_allocation_holds_is_free_once_that_is_gone(candidates: Candidates) -> None:
    holder = candidates.holder("a")
    over: list[str] = []
    lease = Lease(
        candidates.run, "supervisor", LIMITS, "b", "8-1", gone=lambda allocation: allocation in over
    )
    deadline = time.monotonic() + 2 * LIMITS.lease_s
    while time.monotonic() < deadline:
        assert not lease.is_free(), "it beats, and Slurm says that its job runs"
    over.append("")
    assert lease.is_free() and holder.poll() is None


@pytest.mark.parametrize("text", ["", "{", '{"node": "a"}', "[]", "null", "x" * 128])
def test_a_torn_lease_is_held_until_it_stands_still(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path / "run")
    lease = Lease(run, "supervisor", LIMITS, "a")
    claim_incarnation(run, "supervisor")
    lease.path.write_text(text)
    assert not lease.is_free()
    assert looks(run, "a", 5.0)


def test_long_node_names_leave_nothing_behind(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lease = Lease(run, "supervisor", LIMITS, "n" * 200)
    lease.acquire(claim_incarnation(run, "supervisor"))
    lease.release()
    assert Lease(run, "supervisor", LIMITS, "b").is_free() and json.loads(lease.path.read_text())


def test_a_holder_that_gets_nowhere_beats_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    lease = Lease(run, "supervisor", LIMITS, "a")
    lease.acquire(claim_incarnation(run, "supervisor"))
    lease._renewed_until = 0.0
    assert looks(run, "b", 5.0)
    former = lease.path.read_text()
    lease.renew()
    deadline = time.monotonic() + 5.0
    while lease.path.read_text() == former:
        assert time.monotonic() < deadline, "it goes on when it gets on"
        time.sleep(0.02)
    claim_incarnation(run, "supervisor")
    lease.stop_beating()


def test_a_head_is_seen_by_those_that_come_to_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    first = _claim_node(run, "", "7-0")
    assert first and _claim_node(run, "", "7-0") is None and _claim_node(run, "hub", "7-0")
    assert _claim_node(run, "", "7-1") and _claim_node(run, "", "8-0"), (
        "another life, or another job of the run"
    )
    assert _claim_node(make_run(tmp_path / "other"), "", "7-0"), "another run"
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SLURMD_NODENAME", "another")
        assert _claim_node(run, "", "7-0")
    first.close()
    assert _claim_node(run, "", "7-0")


SQUATTER = """
import os, socket, sys
os.setresuid(*[int(sys.argv[1])] * 3)
taken = socket.socket(socket.AF_UNIX)
taken.bind(b"\\0" + bytes.fromhex(sys.argv[2]))
if sys.argv[3] == "listens":
    taken.listen()
print("taken", flush=True)
sys.stdin.read()
"""
NOBODY = 65534


@pytest.mark.parametrize("how", [pytest.param("listens", marks=pytest.mark.root), "is silent"])
def test_a_sign_that_another_user_has_taken_is_none(how: str, tmp_path: Path) -> None:
    """Its name is in /proc/net/unix for all to see; with it a run could be kept without a
    standby."""
    if how == "listens" and os.getuid():
        pytest.skip("being another user takes root")
    run = make_run(tmp_path / "run")
    sign = _claim_node(run, "", "7-0")
    assert sign
    name = sign.getsockname()[1:]
    sign.close()
    user = NOBODY if how == "listens" else os.getuid()
    words = [sys.executable, "-c", SQUATTER, str(user), name.hex(), how]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as squatter:
        assert squatter.stdout and squatter.stdout.readline() == "taken\n"
        assert _claim_node(run, "", "7-0") is not None
        squatter.kill()


class Waits:
    """A clock that a wait moves on by an hour at a time, and a supervisor."""

    def __init__(self) -> None:
        self.now, self.said = 0.0, list[str]()
        self.interrupted = 0
        self.terminal = SimpleNamespace(say=self.said.append)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 3600.0

    def check_fenced(self) -> None:
        assert self.now < 10 * 24 * 3600.0 or self.interrupted
        self.interrupted = int(self.now >= 9 * 24 * 3600.0)


@pytest.mark.parametrize(("longest_wait_s", "waited_h"), [(0.0, 9 * 24 + 1), (7200.0, 3)])
def test_who_waits_for_the_hub_does_so_as_long_as_others_wait(
    longest_wait_s: float, waited_h: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default until its own job ends; it may be queued for days."""
    run, world = make_run(tmp_path / "run"), Waits()
    config = Config(layout="jobs")
    config.liveness.longest_wait_s = longest_wait_s
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    wait: Any = Head(run, config, "actor")._await_hub
    monkeypatch.setattr(head, "time", world)
    ends = (
        pytest.raises(DeadlineError, match=r"liveness\.longest_wait_s=7200")
        if longest_wait_s
        else nullcontext()
    )
    with ends:
        assert not wait(
            SimpleNamespace(renew=lambda: None),
            world,
            SimpleNamespace(check_ending=lambda _: False),
        )
    assert world.now == waited_h * 3600.0 and world.said == [
        "waits for the hub, which has not started yet"
    ]


@pytest.mark.parametrize("group", ["", "actor"])
def test_a_version_that_is_staged_while_groups_are_ended_is_removed_too(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's second TERM cuts the waiting for groups short, and then they live until the
    supervisor leaves."""
    run = make_run(tmp_path / "run")

    class Stops:
        fenced, incarnation = False, 1

        def __enter__(self) -> Stops:
            return self

        def __exit__(self, *_: object) -> None:
            Staging(staging_root(run)).get("v1", lambda folder: None, 1.0).release()

        def supervise(self) -> Outcome:
            return Outcome.INTERRUPTED

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(head, "Supervisor", lambda *_: Stops())
    monkeypatch.setattr(head, "make_reconciler", lambda *_: None)
    monkeypatch.setattr(head, "prepare", lambda *_: True)
    ours: Any = Head(run, Config(layout="jobs"), group)
    monkeypatch.setattr(ours, "_await_hub", lambda *_: True)
    job = SimpleNamespace(
        launcher=lambda: SimpleNamespace(is_ending=None), begin=lambda _: None, on_interrupt=None
    )
    job.silent_groups = SimpleNamespace(suspect=None)
    lease = SimpleNamespace(former=0, acquire=lambda _: None, renew=lambda: None)
    assert ours._supervise(lease, job) == 75
    assert not staging_root(run).exists()


def test_the_outcome_is_that_of_one_life_of_one_job(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.rendezvous("supervisor").mkdir(parents=True)
    assert read_outcome(run, "supervisor", "7-0") is None
    write_outcome(run, "supervisor", "7-0", 75)
    assert (
        read_outcome(run, "supervisor", "7-0") == 75
        and read_outcome(run, "supervisor", "7-1") is None
    )


def test_a_full_disk_keeps_nobody_from_the_end_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends for want of room, or at its time limit meanwhile, has its job requeued after these
    two."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = make_run(tmp_path / "run")
    lease = Lease(run, "supervisor", LIMITS, "a")
    lease.acquire(claim_incarnation(run, "supervisor"))
    monkeypatch.setattr(module, "_OUTCOME_S", 0.0)
    monkeypatch.setattr(module, "write_json", full)
    monkeypatch.setattr(Lease, "_write", full)
    write_outcome(run, "supervisor", "7-0", EXIT_RETRY)
    lease.release()
    assert read_outcome(run, "supervisor", "7-0") is None
