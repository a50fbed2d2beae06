"""The preflight of planes: every pair is tried once, nothing is waited for longer than said, and
the table tells."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, Pipe

import msgpack
import pytest

from relax_hpc.net.rendezvous.process import die_with_parent
from relax_hpc.net.transport import (
    Descriptor,
    Plane,
    PlaneError,
    ShmPlane,
    SlabPool,
    TcpPlane,
    plane_check,
)
from relax_hpc.net.transport.plane_check import (
    PlaneTrial,
    choose_planes,
    describe_missing,
    format_trials,
    make_offer,
    try_offers,
    withdraw_offer,
)
from tests.helpers.plane_helpers import ROOT, TOKEN, WAIT_S

TIMEOUT_S = 10.0
ABSENT = {"rdma": "there is no package nixl-cu12"}


@contextmanager
def planes_here(token: bytes = TOKEN) -> Iterator[dict[str, Plane]]:
    """What a process has."""
    pool = SlabPool()
    planes: dict[str, Plane] = {"shm": ShmPlane(token, pool), "tcp": TcpPlane(token, "127.0.0.1")}
    try:
        yield planes
    finally:
        for plane in planes.values():
            plane.close()
        pool.close()


@contextmanager
def process_with_an_offer(name: str) -> Iterator[dict]:
    ours, theirs = Pipe()
    words = [sys.executable, "-m", "tests.net.test_plane_preflight", name, str(theirs.fileno())]
    with subprocess.Popen(words, cwd=ROOT, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        assert ours.poll(WAIT_S)
        yield msgpack.unpackb(ours.recv_bytes())
        ours.close()
        assert process.wait(WAIT_S) == 0


class Odd(Plane):
    """A plane that reads nothing, waits for ever, breaks or lies."""

    name = "odd"

    def __init__(self, how: str) -> None:
        self.how, self.ending = how, threading.Event()
        self.offered: set[str] = set()

    def publish(self, name: str, record: memoryview) -> Descriptor:
        if self.how == "full":
            raise PlaneError("odd: no room")
        self.offered.add(name)
        return {"bytes": bytes(record)}

    def path(self, descriptor: Descriptor) -> str:
        return "by pigeon"

    def read(self, descriptor: Descriptor, timeout_s: float) -> memoryview:
        if self.how == "hangs":
            self.ending.wait()
        if self.how == "breaks":
            raise ValueError("a wing is broken")
        return memoryview(descriptor["bytes"][::-1] if self.how == "lies" else descriptor["bytes"])

    def retire(self, name: str) -> None:
        self.offered.discard(name)

    def close(self) -> None:
        self.ending.set()


def try_odd(how: str) -> PlaneTrial:
    """One trial of ``Odd(how)``; the maker's is sound."""
    offer = make_offer("b/0", {"odd": Odd("")})
    plane = Odd(how)
    try:
        (trial,) = try_offers("a/0", {"odd": plane}, [offer], 0.0)
        return trial
    finally:
        plane.close()


def test_real_planes_of_real_processes_are_tried():
    with ExitStack() as stack:
        offers = [
            stack.enter_context(process_with_an_offer(name)) for name in ("actor/0", "actor/1")
        ]
        planes = stack.enter_context(planes_here())
        own = make_offer("rollout/0", planes, ABSENT)
        trials = try_offers("rollout/0", planes, [*offers, own], TIMEOUT_S, ABSENT)
    assert [(trial.maker, trial.plane, trial.ok) for trial in trials] == [
        (maker, plane, plane != "rdma")
        for maker in ("actor/0", "actor/1")
        for plane in ("shm", "rdma", "tcp")
    ]
    assert all(
        trial.reader == "rollout/0" and trial.path == trial.plane for trial in trials if trial.ok
    )
    assert all(0 < trial.seconds < TIMEOUT_S for trial in trials if trial.ok)
    assert choose_planes(trials) == {
        ("rollout/0", "actor/0"): "shm",
        ("rollout/0", "actor/1"): "shm",
    }
    assert {trial.why for trial in trials if not trial.ok} == {
        f"actor/{n}: {ABSENT['rdma']}" for n in (0, 1)
    }


def test_withdrawn_offers_and_other_tokens_are_told_apart():
    with (
        planes_here() as ours,
        planes_here() as theirs,
        planes_here(b"another token" * 4) as strange,
    ):
        offer = make_offer("b", theirs)
        refused = try_offers("a", strange, [offer], TIMEOUT_S)
        assert not any(trial.ok for trial in refused) and choose_planes(refused) == {("a", "b"): ""}
        assert all(trial.ok for trial in try_offers("a", ours, [offer], TIMEOUT_S))
        withdraw_offer("b", theirs)
        gone = try_offers("a", ours, [offer], TIMEOUT_S)
        assert all("retired" in trial.why and not trial.ok for trial in gone)


@pytest.mark.parametrize(
    ("how", "path", "why"),
    [
        ("", "by pigeon", ""),
        ("breaks", "by pigeon", "a wing is broken"),
        ("lies", "by pigeon", "the bytes differ from those that were published"),
        ("hangs", "", "hangs: no answer and no error in 0.1 s"),
    ],
)
def test_whatever_a_plane_does_it_goes_to_the_table(monkeypatch, how, path, why):
    monkeypatch.setattr(plane_check, "_GRACE_S", 10.0 if how != "hangs" else 0.1)
    trial = try_odd(how)
    assert (trial.ok, trial.path, trial.why) == (not why, path, why)


def test_what_one_side_lacks_is_said_with_the_reason():
    offer = make_offer("b", {"odd": Odd("full"), "even": Odd("")}, ABSENT)
    trials = try_offers(
        "a", {"odd": Odd(""), "mine": Odd("")}, [offer], TIMEOUT_S, {"even": "broken driver"}
    )
    assert {trial.plane: trial.why for trial in trials} == {
        "rdma": f"b: {ABSENT['rdma']}",
        "even": "a: broken driver",
        "mine": "b: not offered",
        "odd": "b: odd: no room",
    }


def test_offers_are_retired_by_name():
    plane = Odd("")
    make_offer("a/0", {"odd": plane})
    assert plane.offered == {"preflight-a-0"}
    withdraw_offer("a/0", {"odd": plane})
    assert plane.offered == set()


def trials_of(working: Mapping[str, bool]) -> list[PlaneTrial]:
    return [
        PlaneTrial("a", "b", name, ok, 0.0, why="" if ok else "no way")
        for name, ok in working.items()
    ]


@pytest.mark.parametrize(
    ("working", "chosen"),
    [
        ({"file": True, "tcp": True, "rdma": True, "shm": True}, "shm"),
        ({"shm": False, "file": True, "tcp": True, "rdma": True}, "rdma"),
        ({"shm": False, "rdma": False, "new": True, "file": True}, "file"),
        ({"new": True}, "new"),
        ({"tcp": False}, ""),
    ],
)
def test_the_best_that_works_is_chosen(working, chosen):
    assert choose_planes(trials_of(working)) == {("a", "b"): chosen}


def test_required_planes_that_fail_are_named():
    trials = trials_of({"shm": True, "rdma": False, "tcp": False})
    assert describe_missing(trials, ["shm", "rdma"]) == [
        "plane rdma is required, but a cannot read b by it: no way"
    ]


def test_the_table_is_for_reading():
    trials = [
        PlaneTrial("rollout/0", "actor/0", "shm", False, 0.0, why="rollout/0: another node"),
        PlaneTrial("rollout/0", "actor/0", "rdma", True, 0.01234, "verbs"),
        PlaneTrial("rollout/0", "actor/0", "tcp", True, 0.5, "tcp"),
    ]
    assert format_trials(trials).splitlines() == [
        "reader     maker    plane        seconds  path   why not",
        "rollout/0  actor/0  shm    --                    rollout/0: another node",
        "rollout/0  actor/0  rdma   ok *  0.0123   verbs",
        "rollout/0  actor/0  tcp    ok    0.5000   tcp",
    ]
    assert format_trials([]).split() == [
        "reader",
        "maker",
        "plane",
        "seconds",
        "path",
        "why",
        "not",
    ]


def main(name: str, fd: str) -> None:
    """Make an offer, send it, and wait until nobody needs it any more."""
    die_with_parent()
    pipe = Connection(int(fd))
    with planes_here() as planes:
        pipe.send_bytes(msgpack.packb(make_offer(name, planes, ABSENT)))
        pipe.poll(WAIT_S)
        withdraw_offer(name, planes)


if __name__ == "__main__":
    main(*sys.argv[1:])
