"""The supervisor's decisions, over groups of tiny real processes and a hub that is made up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.config.groups import roles_of
from relax_hpc.config.schema import Config, GroupConfig
from relax_hpc.errors import EXIT_DONE, EXIT_RETRY, ConfigError, FencedError, NoProgressError, RelaxError
from relax_hpc.rendezvous.exit_mark import leave_mark
from relax_hpc.rendezvous.process import STOP_SIGNALS
from relax_hpc.rendezvous.roster import claim_incarnation
from relax_hpc.rundir import RunDir
from relax_hpc.supervise import requests, supervisor
from relax_hpc.supervise.console import Terminal
from relax_hpc.supervise.disk_watch import NoRoom
from relax_hpc.supervise.group import Incarnation, Member, Unavailable
from relax_hpc.supervise.launch_records import Launch, read_mark, record
from relax_hpc.supervise.processes import Processes
from relax_hpc.supervise.supervisor import RELEASED, Outcome, Supervisor
from relax_hpc.transfer_queue.client.status import Status
from tests.queue_helpers import make_run

DEADLINE_S = 20.0
FULL = OSError(28, "No space left on device")
ROLE = """
import json, os, signal, sys
what, mark = sys.argv[1:]
def say(status, code, reason=""):
    with open(mark + ".new", "w") as file:
        json.dump({"status": status, "code": code, "reason": reason}, file)
    os.rename(mark + ".new", mark)
    os._exit(code)
if what == "lives":
    signal.signal(signal.SIGUSR2, lambda *_: say("stopped", 75, "asked to stop"))
    print("lives", flush=True)
    while True:
        signal.pause()
elif what == "deaf":
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    print("lives", flush=True)
    while True:
        signal.pause()
elif what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif what != "crashes":
    status, code = what.split(":")
    say(status, int(code), "it says so")
sys.exit(1)
"""
"""What a role does: live until it is asked to end, be killed, crash, or leave a mark of "status:code"."""


class Hub:
    """In place of the connection to the queue: it never answers, and remembers what it was told."""

    def __init__(self, run: RunDir, config: Config, name: str, incarnation: int) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.status = Status(self.submit)

    def submit(self, op: str, timeout: float | None = None, **args: Any) -> Future:
        self.told.append((op, args))
        return Future()

    def close(self) -> None:
        self.told.append(("close", {}))


class Tiny(Processes):
    """Processes that say when they are asked to end."""

    def __init__(self, world: World, name: str, incarnation: int, members: list[Member]) -> None:
        super().__init__(world.run, name, incarnation, members)
        self.world = world

    def ask_to_end(self) -> None:
        others = {name for name, group in self.world.supervisor.groups.items() if group.members and group.alive()}
        self.world.asked.append((self.name, others - {self.name}))
        super().ask_to_end()


class Adopted(Incarnation):
    """Runs elsewhere: an earlier supervisor has started it."""

    outlives = True
    fate = "runs"

    def ask_to_end(self) -> None:
        self.fate = "asked"

    def ask_for_stacks(self) -> None:
        """Nobody is there."""

    def kill(self) -> None:
        self.fate = "killed"

    def leave(self) -> None:
        self.fate = "left"


class World:
    """A run, its supervisor, and a launcher that starts what `plans` say: a word an incarnation, the last for ever."""

    def __init__(self, path: Path, layout: str = "local") -> None:
        self.run = make_run(path / "run")
        self.config = Config(layout=layout)
        self.config.groups = {n: GroupConfig(roles=[n]) for n in ("rollout", "actor", "reference")}
        self.config.groups["hub"] = GroupConfig()
        self.config.liveness.beat_s, self.config.liveness.stop_timeout_s = 0.05, 5.0
        self.plans: dict[str, list[str]] = {}
        self.started: list[tuple[str, int]] = []
        self.asked: list[tuple[str, set[str]]] = []
        self.handed: list[tuple[str, str]] = []
        self.adopted: dict[str, Incarnation] = {}
        self.answers: dict[str, Any] = {"whole": True, "ending": False, "hand_over": "", "lost": False}
        self.on_start: Callable[[str, int], None] = lambda *_: None

    # -- as a launcher -----------------------------------------------------------------------------------------

    def start(self, name: str, incarnation: int, launch: Launch) -> Incarnation:
        self.run.logs(name, incarnation).mkdir(parents=True)
        record(self.run, name, incarnation, launch)
        plan = self.plans.get(name, ["lives"])
        what = plan.pop(0) if len(plan) > 1 else plan[0]
        members = [
            Member.of(role, self._process(what, name, incarnation, role)) for role in roles_of(self.config, name)
        ]
        self.started.append((name, incarnation))
        self.on_start(name, incarnation)
        return Tiny(self, name, incarnation, members)

    def _process(self, what: str, name: str, incarnation: int, role: str) -> subprocess.Popen:
        mark = str(self.run.exit_mark(name, incarnation, role))
        words = [sys.executable, "-S", "-E", "-c", ROLE, what, mark]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
        if what in ("lives", "deaf"):
            assert process.stdout.readline() == b"lives\n"
        process.stdout.close()
        return process

    def adopt(self, name: str, incarnation: int) -> Incarnation | None:
        return self.adopted.get(name)

    def _answer(self, what: str) -> Any:
        answer = self.answers[what]
        answer = answer.pop(0) if isinstance(answer, list) else answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    def whole(self, name: str) -> bool:
        return self._answer("whole")

    def lost(self, name: str) -> bool:
        return self._answer("lost")

    def ending(self) -> bool:
        return self._answer("ending")

    def hand_over(self, name: str, reason: str) -> str:
        self.handed.append((name, reason))
        return self._answer("hand_over")

    # -- the supervisor ----------------------------------------------------------------------------------------

    def supervise(self, *names: str, then: Callable[[], Any] = lambda: None) -> Outcome:
        """Supervise ``names`` to the end; ``then`` is called every round."""
        terminal = Terminal(self.run, self.config, steps=False)
        deadline = time.monotonic() + DEADLINE_S

        def tick() -> None:
            assert time.monotonic() < deadline, (self.run.root / "supervisor.log").read_text()
            then()

        self.supervisor = Supervisor(self.run, self.config, "supervisor", names, lambda _: self, 1, terminal)
        self.supervisor.each_tick = tick
        try:
            with self.supervisor:
                return self.supervisor.supervise()
        finally:
            terminal.close()

    def told(self, op: str) -> list[dict[str, Any]]:
        assert isinstance(self.supervisor.client, Hub)
        return [args for name, args in self.supervisor.client.told if name == op]

    def said(self) -> str:
        return (self.run.root / "supervisor.log").read_text()

    def once(self, *actions: Callable[[], Any]) -> Callable[[], None]:
        """Each action in a round of its own."""
        left = list(actions)
        return lambda: left.pop(0)() if left else None


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(supervisor, "QueueClient", Hub)
    monkeypatch.setattr(supervisor, "_AGAIN_S", 0.05)
    former = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield World(tmp_path)
    for number, handler in former.items():
        signal.signal(number, handler)


# -- ends of groups ----------------------------------------------------------------------------------------------------


def at_first_in_vain(act: Callable[..., Any], *fails: BaseException) -> Callable[..., Any]:
    """``act``, each of whose first calls fails with one of ``fails``."""
    left = list(fails)

    def acting(*about: Any) -> Any:
        if left:
            raise left.pop(0)
        return act(*about)

    return acting


def test_what_cannot_be_started_at_the_beginning_is_tried_again(world: World) -> None:
    world.start, world.plans = at_first_in_vain(world.start, Unavailable("no answer")), {"rollout": ["done:0"]}
    assert world.supervise("rollout") is Outcome.FINISHED
    assert world.started == [("rollout", 2)]


@pytest.mark.parametrize(("since_s", "over"), [(59.0, False), (61.0, True)])
def test_a_wait_for_a_group_ends_in_good_order_at_its_limit(world: World, since_s: float, over: bool) -> None:
    world.config.liveness.longest_wait_s = 60.0

    def wait() -> None:
        world.supervisor.liveness.lacking = {"actor": {"why": "is not there", "since_s": since_s}}

    stop = [wait, lambda: None, lambda: None, lambda: requests.ask_to_stop(world.run)]
    assert world.supervise("hub", "rollout", then=world.once(*stop)) is Outcome.STOPPED
    asked = requests.asked_to_stop(world.run)
    assert asked["code"] == (EXIT_RETRY if over else EXIT_DONE)
    assert ("actor: is not there, and the others have waited" in asked["reason"]) == over
    assert not world.told("down") or world.asked, "in good order"


def test_a_disk_that_fills_at_the_beginning_is_waited_for(world: World) -> None:
    world.start, world.plans = at_first_in_vain(world.start, FULL), {"rollout": ["done:0"]}
    assert world.supervise("rollout") is Outcome.FINISHED


def test_a_stop_that_a_full_disk_does_not_take_is_asked_for_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.config.liveness.longest_wait_s = 60.0

    def wait() -> None:
        world.supervisor.liveness.lacking = {"actor": {"why": "is not there", "since_s": 61.0}}

    monkeypatch.setattr(requests, "ask_to_stop", at_first_in_vain(requests.ask_to_stop, FULL))
    assert world.supervise("hub", "rollout", then=wait) is Outcome.STOPPED
    assert requests.asked_to_stop(world.run)["code"] == EXIT_RETRY


@pytest.mark.parametrize(("fault", "words"), [("crashes", "ended with code 1"), ("killed", "ended by signal 9")])
def test_a_group_that_dies_comes_back_while_the_others_go_on(world: World, fault: str, words: str) -> None:
    world.plans = {"rollout": [fault, "done:0"], "actor": ["done:0"]}
    assert world.supervise("rollout", "actor") is Outcome.FINISHED
    assert world.started == [("rollout", 1), ("actor", 1), ("rollout", 2)]
    assert world.told("down") == [{"group": "rollout", "incarnation": 1}]
    assert words in world.said()
    assert "ended by its supervisor" in read_mark(world.run, "rollout", 1, "rollout")["reason"]


def test_one_role_of_several_takes_its_group_along(world: World) -> None:
    world.config.groups["both"] = GroupConfig(roles=["actor", "reference"])
    world.on_start = lambda name, incarnation: (
        incarnation == 1 and leave_mark(world.run.exit_mark("both", 1, "actor"), 75, "oh")
    )
    world.plans = {"both": ["lives", "done:0"]}

    def kill_first() -> None:
        group = world.supervisor.groups["both"]
        if group.incarnation == 1:
            group.members[0].process.kill()

    assert world.supervise("both", then=kill_first) is Outcome.FINISHED
    assert world.started == [("both", 1), ("both", 2)]
    assert "both: actor: oh" in world.said()


@pytest.mark.parametrize(
    ("mark", "error", "code"), [("failed:78", ConfigError, 78), ("failed:93", NoProgressError, 93)]
)
def test_what_trying_again_cannot_mend_ends_the_run(world: World, mark: str, error: type, code: int) -> None:
    world.plans = {"actor": [mark]}
    with pytest.raises(error, match=r"actor: it says so \(log: .*logs/actor/inc-000001"):
        world.supervise("rollout", "actor")
    assert requests.asked_to_stop(world.run)["code"] == code
    assert world.started == [("rollout", 1), ("actor", 1)]


def test_a_group_may_be_one_that_ends_the_run(world: World) -> None:
    world.config.groups["actor"].on_failure = "stop_run"
    world.plans = {"actor": ["failed:75"]}
    with pytest.raises(RelaxError, match=r"it says so; groups.actor.on_failure is stop_run"):
        world.supervise("actor")
    assert requests.asked_to_stop(world.run)["code"] == 75


def goes_on_in_a_job(world: World) -> None:
    """What happens to a group that was handed over: its job starts it, and it comes to its good end."""
    if world.supervisor.elsewhere and not world.supervisor.groups.keys() & {"rollout"}:
        incarnation = claim_incarnation(world.run, "rollout")
        world.run.logs("rollout", incarnation).mkdir(parents=True)
        leave_mark(world.run.exit_mark("rollout", incarnation, "rollout"))


@pytest.mark.parametrize(("policy", "whole"), [("resubmit", True), ("restart", False)])
def test_a_group_goes_to_a_job_of_its_own(world: World, policy: str, whole: bool) -> None:
    world.config.groups["rollout"].on_failure = policy
    world.plans = {"rollout": ["crashes"]}
    world.answers |= {"whole": whole, "hand_over": "77"}
    assert world.supervise("rollout", then=lambda: goes_on_in_a_job(world)) is Outcome.FINISHED
    assert world.started == [("rollout", 1)] and world.supervisor.elsewhere == {"rollout": "77"}
    assert [name for name, _ in world.handed] == ["rollout"]


def test_where_no_job_can_be_had_a_group_starts_on_what_is_left(world: World) -> None:
    world.plans = {"rollout": ["crashes", "done:0"]}
    world.answers |= {"whole": False}
    assert world.supervise("rollout") is Outcome.FINISHED
    assert world.started == [("rollout", 1), ("rollout", 2)] and len(world.handed) == 1


def test_where_no_job_can_be_had_and_nothing_is_left_the_job_makes_way(world: World) -> None:
    world.plans = {"rollout": ["crashes"]}
    world.answers |= {"whole": False, "lost": True}
    assert world.supervise("rollout", "actor") is Outcome.INTERRUPTED
    assert world.started == [("rollout", 1), ("actor", 1)] and "sbatch_on_nodes and spares" in world.said()


@pytest.mark.parametrize("error", [Unavailable("slurmctld is down"), OSError(28, "No space left on device")])
def test_an_outage_ends_nothing_but_is_waited_for(world: World, error: Exception) -> None:
    world.plans = {"rollout": ["crashes", "done:0"]}
    world.answers |= {"whole": [error, False, True], "hand_over": [error]}
    assert world.supervise("rollout", "actor", then=lambda: end_the_actor(world)) is Outcome.FINISHED
    assert world.started == [("rollout", 1), ("actor", 1), ("rollout", 2)]
    assert world.said().count("rollout: cannot be brought back yet") == 2


@pytest.mark.parametrize("what", ["requests.pending", "requests.asked_to_stop", "fruitless"])
def test_a_read_that_fails_is_tried_again(world: World, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """As of a shared file system one of whose servers is away; a group that ended meanwhile comes back."""
    room, _, name = what.rpartition(".")
    where = getattr(supervisor, room) if room else supervisor
    real, ill = getattr(where, name), [OSError(5, "Input/output error")] * 3

    def read(*words: Any, **named: Any) -> Any:
        if ill and len(world.started) > 1:
            raise ill.pop()
        return real(*words, **named)

    monkeypatch.setattr(where, name, read)
    world.plans = {"rollout": ["crashes", "crashes", "crashes", "crashes", "done:0"]}
    assert world.supervise("rollout", "actor", then=lambda: end_the_actor(world)) is Outcome.FINISHED
    assert not ill and [name for name, _ in world.started].count("rollout") == 5
    assert world.said().count("Input/output error; see whether its file system is well") == 1


def test_no_job_is_asked_for_while_nothing_can_be_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not even be written down that there is one: another would be asked for at the next try."""
    monkeypatch.setattr(supervisor, "_AGAIN_S", 0.0)
    world.plans, world.answers["whole"], full = {"actor": ["killed"]}, False, [True, True]

    def room() -> None:
        if "actor" in world.supervisor.groups or not full:
            return
        full.pop()
        assert not world.handed
        raise NoRoom("full")

    def then() -> None:
        world.supervisor.disk.check_room = room
        if world.handed:
            requests.ask_to_stop(world.run)

    world.answers["hand_over"] = "12"
    world.on_start = lambda *_: setattr(world.supervisor.disk, "check_room", room)
    assert world.supervise("actor", then=then) is Outcome.STOPPED
    assert [name for name, _ in world.handed] == ["actor"] and not full


def end_the_actor(world: World) -> None:
    """Once rollout is back."""
    if ("rollout", 2) in world.started and "actor" in world.supervisor.groups:
        leave_mark(world.run.exit_mark("actor", 1, "actor"))
        world.supervisor.groups["actor"].members[0].process.kill()


def test_what_no_waiting_mends_is_raised(world: World) -> None:
    error = Unavailable("sbatch: invalid partition")
    error.later = False
    world.plans, world.answers = {"rollout": ["crashes"]}, world.answers | {"whole": error}
    with pytest.raises(Unavailable):
        world.supervise("rollout")


def test_going_in_circles_ends_the_run(world: World) -> None:
    world.config.liveness.max_restarts = 2
    world.plans = {"rollout": ["crashes"]}
    with pytest.raises(NoProgressError, match=r"rollout: ended 3 times without new samples.*max_restarts=2"):
        world.supervise("rollout", "actor")
    assert world.started == [("rollout", 1), ("actor", 1), ("rollout", 2), ("rollout", 3)]
    assert requests.asked_to_stop(world.run)["code"] == 93


def test_progress_between_two_deaths_lets_it_go_on(world: World) -> None:
    world.config.liveness.max_restarts = 1
    world.plans = {"rollout": [*["crashes"] * 5, "done:0"]}

    def progress(name: str, incarnation: int) -> None:
        world.supervisor.liveness.progress = (incarnation, 0, 0)

    world.on_start = progress
    assert world.supervise("rollout") is Outcome.FINISHED
    assert len(world.started) == 6


def test_a_hang_is_a_death(world: World) -> None:
    world.plans = {"rollout": ["deaf", "done:0"]}
    hangs = world.once(lambda: world.supervisor.hangs("rollout", "rollout", 1, "has given no sign"))
    assert world.supervise("rollout", then=hangs) is Outcome.FINISHED
    world.supervisor.hangs("rollout", "rollout", 1, "of an incarnation that is over")
    assert world.started == [("rollout", 1), ("rollout", 2)]


@pytest.mark.parametrize("layout", ["jobs", "het"])
def test_what_a_silent_group_of_others_held_goes_to_others(world: World, layout: str) -> None:
    names = ("hub", "actor") if layout == "het" else ("actor",)
    silent = world.once(
        lambda: world.supervisor.hangs("rollout-2", "", 3, "has given no sign"),
        lambda: requests.ask_to_stop(world.run),
    )
    world.supervise(*names, then=silent)
    expected = [{"group": "rollout-2", "incarnation": 3}] if "hub" in names else []
    assert [told for told in world.told("down") if told["group"] != "actor"] == expected
    assert [name for name, _ in world.started] == list(names)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_asked_to_stop_the_actor_ends_first_and_the_hub_last(world: World) -> None:
    names = ["hub", "rollout", "actor", "reference"]
    stop = world.once(lambda: requests.ask_to_stop(world.run))
    assert world.supervise(*names, then=stop) is Outcome.STOPPED
    assert [name for name, _ in world.asked] in (
        ["actor", "rollout", "reference", "hub"],
        ["actor", "reference", "rollout", "hub"],
    )
    assert world.asked[0][1] == {"hub", "rollout", "reference"} and world.asked[-1][1] == set()
    assert not world.supervisor.groups
    marks = [read_mark(world.run, name, 1, role) for name in names for role in roles_of(world.config, name)]
    assert [mark["status"] for mark in marks] == ["stopped"] * 4


def test_what_does_not_end_is_killed_and_nobody_waits_for_its_word(world: World) -> None:
    world.config.liveness.stop_timeout_s = 0.3
    world.plans = {"actor": ["deaf"]}
    stop = world.once(lambda: requests.ask_to_stop(world.run))
    assert world.supervise("actor", "rollout", then=stop) is Outcome.STOPPED
    assert read_mark(world.run, "actor", 1, "actor")["reason"] == "ended by its supervisor"


def test_a_signal_interrupts_and_a_second_one_cuts_the_waiting_short(world: World) -> None:
    world.config.liveness.stop_timeout_s = 60.0
    world.plans = {"actor": ["deaf"]}

    def again() -> None:
        if world.asked and world.supervisor.interrupted == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def interrupt() -> None:
        world.supervisor.each_wait = again
        os.kill(os.getpid(), signal.SIGTERM)

    assert world.supervise("actor", then=world.once(interrupt)) is Outcome.INTERRUPTED
    assert world.supervisor.interrupted == 2


def test_roles_that_were_told_of_the_end_before_the_supervisor_interrupt_it(world: World) -> None:
    world.plans, world.answers = {"actor": ["stopped:75"]}, world.answers | {"ending": True}
    assert world.supervise("rollout", "actor") is Outcome.INTERRUPTED
    assert world.started == [("rollout", 1), ("actor", 1)]


def test_a_role_that_stops_for_no_reason_is_started_again(world: World) -> None:
    world.plans = {"actor": ["stopped:75", "done:0"]}
    assert world.supervise("actor") is Outcome.FINISHED
    assert world.started == [("actor", 1), ("actor", 2)]


# -- taking over -------------------------------------------------------------------------------------------------------


def adopted(world: World, name: str) -> Adopted:
    """A group of which an earlier supervisor has started an incarnation."""
    incarnation = claim_incarnation(world.run, name)
    world.run.logs(name, incarnation).mkdir(parents=True)
    world.adopted[name] = group = Adopted(world.run, name, incarnation, [Member(name)])
    return group


def test_what_runs_is_taken_over_and_watched_by_its_marks(world: World) -> None:
    group = adopted(world, "rollout")
    world.plans = {"rollout": ["done:0"]}
    fail = world.once(
        lambda: leave_mark(world.run.exit_mark("rollout", group.incarnation, "rollout"), 75, "lost its node")
    )
    assert world.supervise("rollout", then=fail) is Outcome.FINISHED
    assert world.started == [("rollout", 2)] and group.fate == "killed"


def test_what_was_done_before_is_not_started_again(world: World) -> None:
    incarnation = claim_incarnation(world.run, "rollout")
    world.run.logs("rollout", incarnation).mkdir(parents=True)
    leave_mark(world.run.exit_mark("rollout", incarnation, "rollout"))
    assert world.supervise("rollout") is Outcome.FINISHED
    assert world.started == []


def test_a_fenced_supervisor_touches_nothing_that_its_successor_has(world: World) -> None:
    mine, lost = adopted(world, "rollout"), adopted(world, "actor")

    def successor() -> None:
        claim_incarnation(world.run, "supervisor")
        claim_incarnation(world.run, "actor")

    with pytest.raises(FencedError, match="supervisor 2 has taken over"):
        world.supervise("rollout", "actor", "reference", then=world.once(successor))
    assert (mine.fate, lost.fate) == ("left", "killed"), "an older incarnation than the newest is nobody's"
    assert world.told("down") == [] and world.asked == []
    assert not world.supervisor.groups["reference"].members, "its own children go with it"


def test_a_supervisor_that_fails_leaves_what_another_can_take_over(world: World) -> None:
    mine = adopted(world, "rollout")

    def bug() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        world.supervise("rollout", "actor", then=world.once(bug))
    assert mine.fate == "left" and not world.supervisor.groups["actor"].members


def test_a_fenced_supervisor_that_is_told_to_stop_stops_nothing(world: World) -> None:
    mine = adopted(world, "rollout")

    def stop() -> None:
        claim_incarnation(world.run, "supervisor")
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(FencedError):
        world.supervise("rollout", then=world.once(stop))
    assert mine.fate == "left"


# -- requests ----------------------------------------------------------------------------------------------------------


def asks(world: World, *wanted: tuple[str, str]) -> Callable[[], None]:
    """Requests one after the other, then the order to stop."""
    orders = [lambda op=op, group=group: requests.ask(world.run, op, group) for op, group in wanted]
    rounds = [order for each in orders for order in (each, lambda: None)]
    return world.once(*rounds, lambda: requests.ask_to_stop(world.run))


def test_members_of_a_local_run_are_started_restarted_and_released(world: World) -> None:
    # The last is of nobody: it is done, and ends nothing.
    wanted = [("start", "rollout-2"), ("restart", "rollout"), ("release", "rollout-2"), ("release", "rollout-9")]
    assert world.supervise("rollout", "actor", then=asks(world, *wanted)) is Outcome.STOPPED
    assert world.started == [("rollout", 1), ("actor", 1), ("rollout-2", 1), ("rollout", 2)]
    assert [name for name, _ in world.asked[:2]] == ["rollout", "rollout-2"], "in good order"
    assert "rollout-2" not in world.supervisor.names and not requests.pending(world.run, lambda _: True)


def test_a_start_that_is_asked_for_twice_starts_once(world: World) -> None:
    world.supervise("rollout", then=asks(world, ("start", "rollout-2"), ("start", "rollout-2")))
    assert world.started == [("rollout", 1), ("rollout-2", 1)]


@pytest.mark.parametrize("error", [Unavailable("slurmctld is down"), OSError(28, "No space left on device")])
def test_a_restart_that_cannot_be_now_is_done_later(world: World, error: Exception) -> None:
    start, fails = world.start, [error]

    def once_in_vain(name: str, incarnation: int, launch: Launch) -> Incarnation:
        if incarnation > 1 and fails:
            raise fails.pop()
        return start(name, incarnation, launch)

    world.start = once_in_vain
    world.supervise("rollout", then=asks(world, ("restart", "rollout")))
    assert not fails and [name for name, _ in world.started] == ["rollout", "rollout"]


def test_requests_about_groups_of_others_are_left_to_them(world: World) -> None:
    world.config.layout = "het"
    world.supervise("rollout", then=asks(world, ("restart", "actor"), ("start", "rollout-2"), ("restart", "nobody")))
    assert world.started == [("rollout", 1)]
    assert len(requests.pending(world.run, lambda _: True)) == 3


def test_a_group_that_is_released_goes_on_in_a_job_that_somebody_else_submits(world: World) -> None:
    world.config.layout = "het"
    then = world.once(lambda: requests.ask(world.run, "release", "rollout"), lambda: None, end_actor_of(world))
    assert world.supervise("rollout", "actor", then=lambda: (then(), goes_on_in_a_job(world))) is Outcome.FINISHED
    assert world.handed == [("rollout", RELEASED)] and world.supervisor.elsewhere == {"rollout": ""}
    assert world.started == [("rollout", 1), ("actor", 1)]


def end_actor_of(world: World) -> Callable[[], None]:
    def end() -> None:
        leave_mark(world.run.exit_mark("actor", 1, "actor"))
        world.supervisor.groups["actor"].members[0].process.kill()

    return end


def test_a_supervisor_all_of_whose_groups_are_released_is_no_longer_needed(world: World) -> None:
    world.config.layout = "jobs"
    then = world.once(lambda: requests.ask(world.run, "release", "rollout"))
    assert world.supervise("rollout", then=then) is Outcome.RELEASED
    assert [name for name, _ in world.asked] == ["rollout"]
