"""The supervisor's decisions when groups end: who comes back, where, and what ends the run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from relax_hpc.base.errors import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_RETRY,
    ConfigError,
    NoProgressError,
    RelaxError,
)
from relax_hpc.cluster.supervise import failures, requests, starts
from relax_hpc.cluster.supervise.disk_watch import NoDiskSpace
from relax_hpc.cluster.supervise.group import Unavailable
from relax_hpc.cluster.supervise.launch_records import read_mark
from relax_hpc.cluster.supervise.supervisor import Outcome
from relax_hpc.config.schema import GroupConfig
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark
from relax_hpc.queue.client.status import StatusRequests
from tests.cluster.supervisor_helpers import Adopted, World, world_fixture  # noqa: F401

FULL = OSError(28, "No space left on device")


def at_first_in_vain(act: Callable[..., Any], *fails: BaseException) -> Callable[..., Any]:
    """``act``, each of whose first calls fails with one of ``fails``."""
    left = list(fails)

    def acting(*about: Any) -> Any:
        if left:
            raise left.pop(0)
        return act(*about)

    return acting


def test_what_cannot_be_started_at_the_beginning_is_tried_again(world: World) -> None:
    world.start, world.plans = (
        at_first_in_vain(world.start, Unavailable("no answer")),
        {"rollout": ["done:0"]},
    )
    assert world.supervise("rollout") is Outcome.FINISHED
    assert world.started == [("rollout", 2)]


@pytest.mark.parametrize(("since_s", "over"), [(59.0, False), (61.0, True)])
def test_a_wait_for_a_group_ends_in_good_order_at_its_limit(
    world: World, since_s: float, over: bool
) -> None:
    world.config.liveness.longest_wait_s = 60.0

    def wait() -> None:
        world.supervisor.liveness.awaited_groups = {
            "actor": {"why": "is not there", "since_s": since_s}
        }

    stop = [wait, lambda: None, lambda: None, lambda: requests.request_stop(world.run)]
    assert world.supervise("hub", "rollout", then=world.once(*stop)) is Outcome.STOPPED
    asked = requests.read_stop_request(world.run)
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
        world.supervisor.liveness.awaited_groups = {
            "actor": {"why": "is not there", "since_s": 61.0}
        }

    monkeypatch.setattr(requests, "request_stop", at_first_in_vain(requests.request_stop, FULL))
    assert world.supervise("hub", "rollout", then=wait) is Outcome.STOPPED
    assert requests.read_stop_request(world.run)["code"] == EXIT_RETRY


@pytest.mark.parametrize(
    ("fault", "words"), [("crashes", "ended with code 1"), ("killed", "ended by signal 9")]
)
def test_a_group_that_dies_comes_back_while_the_others_go_on(
    world: World, fault: str, words: str
) -> None:
    world.plans = {"rollout": [fault, "done:0"], "actor": ["done:0"]}
    assert world.supervise("rollout", "actor") is Outcome.FINISHED
    assert world.started == [("rollout", 1), ("actor", 1), ("rollout", 2)]
    assert world.told("down") == [{"group": "rollout", "incarnation": 1}]
    assert words in world.said()
    assert "ended by its supervisor" in read_mark(world.run, "rollout", 1, "rollout")["reason"]


def test_one_role_of_several_takes_its_group_along(world: World) -> None:
    world.config.groups["both"] = GroupConfig(roles=["actor", "reference"])
    world.on_start = lambda name, incarnation: (
        incarnation == 1 and write_exit_mark(world.run.exit_mark("both", 1, "actor"), 75, "oh")
    )
    world.plans = {"both": ["lives", "done:0"]}

    def kill_first() -> None:
        group = world.supervisor.table.supervised["both"]
        if group.incarnation == 1:
            group.members[0].process.kill()

    assert world.supervise("both", then=kill_first) is Outcome.FINISHED
    assert world.started == [("both", 1), ("both", 2)]
    assert "both: actor: oh" in world.said()


@pytest.mark.parametrize(
    ("mark", "error", "code"), [("failed:78", ConfigError, 78), ("failed:93", NoProgressError, 93)]
)
def test_what_trying_again_cannot_mend_ends_the_run(
    world: World, mark: str, error: type, code: int
) -> None:
    world.plans = {"actor": [mark]}
    with pytest.raises(error, match=r"actor: it says so \(log: .*logs/actor/inc-000001"):
        world.supervise("rollout", "actor")
    assert requests.read_stop_request(world.run)["code"] == code
    assert world.started == [("rollout", 1), ("actor", 1)]


def hub_answers(monkeypatch: pytest.MonkeyPatch, trained_steps: int, worked: list[str]) -> None:
    """Have the hub answer with this progress."""
    nothing: dict[str, Any] = {
        "accepted": 0,
        "checkpoints": [],
        "lacking": {},
        "disk": [],
        "beats": {},
    }
    answer: Future[Any] = Future()
    answer.set_result(SimpleNamespace(trained_steps=trained_steps, worked=worked, **nothing))
    monkeypatch.setattr(StatusRequests, "get", lambda self, timeout=None: answer)


def test_a_programming_error_before_progress_ends_the_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work of another role is no progress of this one."""
    hub_answers(monkeypatch, trained_steps=0, worked=["rollout"])
    world.plans = {"actor": ["mistyped"]}
    with pytest.raises(ConfigError, match=r"actor: NameError: name 'x' is not defined \(log: "):
        world.supervise("rollout", "actor")
    assert requests.read_stop_request(world.run)["code"] == 78
    assert world.started == [("rollout", 1), ("actor", 1)]


@pytest.mark.parametrize(
    "progress",
    [{"trained_steps": 1, "worked": []}, {"trained_steps": 0, "worked": ["actor"]}, None],
    ids=["a_step", "this_role", "unknown"],
)
def test_a_programming_error_after_progress_is_retried(
    world: World, monkeypatch: pytest.MonkeyPatch, progress: dict[str, Any] | None
) -> None:
    """Also if the hub does not answer: its progress is unknown then."""
    world.config.liveness.lease_s = 0.1
    if progress:
        hub_answers(monkeypatch, **progress)
    world.plans = {"actor": ["mistyped", "done:0"]}
    assert world.supervise("actor") is Outcome.FINISHED
    assert world.started == [("actor", 1), ("actor", 2)]


def test_a_group_may_be_one_that_ends_the_run(world: World) -> None:
    world.config.groups["actor"].on_failure = "stop_run"
    world.plans = {"actor": ["failed:75"]}
    with pytest.raises(RelaxError, match=r"it says so; groups.actor.on_failure is stop_run"):
        world.supervise("actor")
    assert requests.read_stop_request(world.run)["code"] == 75


@pytest.mark.parametrize(("policy", "whole"), [("resubmit", True), ("restart", False)])
def test_a_group_goes_to_a_job_of_its_own(world: World, policy: str, whole: bool) -> None:
    world.config.groups["rollout"].on_failure = policy
    world.plans = {"rollout": ["crashes"]}
    world.answers |= {"whole": whole, "hand_over": "77"}
    assert world.supervise("rollout", then=world.go_on_in_a_job) is Outcome.FINISHED
    assert world.started == [("rollout", 1)] and world.supervisor.table.detached == {
        "rollout": "77"
    }
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
    assert (
        world.started == [("rollout", 1), ("actor", 1)]
        and "sbatch_on_nodes and spares" in world.said()
    )


def end_when_rollout_is_back(world: World) -> None:
    if ("rollout", 2) in world.started and "actor" in world.supervisor.table.supervised:
        world.end_the_actor()


@pytest.mark.parametrize(
    "error", [Unavailable("slurmctld is down"), OSError(28, "No space left on device")]
)
def test_an_outage_ends_nothing_but_is_waited_for(world: World, error: Exception) -> None:
    world.plans = {"rollout": ["crashes", "done:0"]}
    world.answers |= {"whole": [error, False, True], "hand_over": [error]}
    assert (
        world.supervise("rollout", "actor", then=lambda: end_when_rollout_is_back(world))
        is Outcome.FINISHED
    )
    assert world.started == [("rollout", 1), ("actor", 1), ("rollout", 2)]
    assert world.said().count("rollout: cannot be restarted yet") == 2


@pytest.mark.parametrize(
    "what",
    ["requests.pending_requests", "requests.read_stop_request", "failures.count_fruitless_starts"],
)
def test_a_read_that_fails_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As of a shared file system one of whose servers is away; a group that ended meanwhile comes
    back."""
    room, _, name = what.partition(".")
    where = {"requests": requests, "failures": failures}[room]
    real, ill = getattr(where, name), [OSError(5, "Input/output error")] * 3

    def read(*words: Any, **named: Any) -> Any:
        if ill and len(world.started) > 1:
            raise ill.pop()
        return real(*words, **named)

    monkeypatch.setattr(where, name, read)
    world.plans = {"rollout": ["crashes", "crashes", "crashes", "crashes", "done:0"]}
    assert (
        world.supervise("rollout", "actor", then=lambda: end_when_rollout_is_back(world))
        is Outcome.FINISHED
    )
    assert not ill and [name for name, _ in world.started].count("rollout") == 5
    # On a busy machine the wait may be over between two of them, and is said again.
    assert "Input/output error; see whether its file system is well" in world.said()


def test_no_job_is_asked_for_while_nothing_can_be_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not even be written down that there is one: another would be asked for at the next
    try."""
    monkeypatch.setattr(starts, "_AGAIN_S", 0.0)
    world.plans, world.answers["whole"], full = {"actor": ["killed"]}, False, [True, True]

    def room() -> None:
        if "actor" in world.supervisor.table.supervised or not full:
            return
        full.pop()
        assert not world.handed
        raise NoDiskSpace("full")

    def then() -> None:
        world.supervisor.disk.check_space = room
        if world.handed:
            requests.request_stop(world.run)

    world.answers["hand_over"] = "12"
    world.on_start = lambda *_: setattr(world.supervisor.disk, "check_space", room)
    assert world.supervise("actor", then=then) is Outcome.STOPPED
    assert [name for name, _ in world.handed] == ["actor"] and not full


def test_what_no_waiting_mends_is_raised(world: World) -> None:
    error = Unavailable("sbatch: invalid partition")
    error.is_temporary = False
    world.plans, world.answers = {"rollout": ["crashes"]}, world.answers | {"whole": error}
    with pytest.raises(Unavailable):
        world.supervise("rollout")


def test_going_in_circles_ends_the_run(world: World) -> None:
    world.config.liveness.max_restarts = 2
    world.plans = {"rollout": ["crashes"]}
    with pytest.raises(
        NoProgressError, match=r"rollout: ended 3 times without new samples.*max_restarts=2"
    ):
        world.supervise("rollout", "actor")
    assert world.started == [("rollout", 1), ("actor", 1), ("rollout", 2), ("rollout", 3)]
    assert requests.read_stop_request(world.run)["code"] == 93


MEMORY = "engine:ValueError: Loaded weights leave no memory, raise mem_fraction_static above 0.14"


def test_an_engine_that_fails_twice_by_the_same_error_ends_the_run(world: World) -> None:
    """Numbers in the error may differ, and others may be at work meanwhile."""
    world.plans = {"rollout": [f"{MEMORY}6", f"{MEMORY}7"]}

    def progress(name: str, incarnation: int) -> None:
        world.supervisor.liveness.progress = (incarnation, 0, 0)

    world.on_start = progress
    text = r"rollout: cannot start.*same error: ValueError: .*above 0\.147; correct"
    with pytest.raises(ConfigError, match=text):
        world.supervise("rollout", "actor")
    assert world.started == [("rollout", 1), ("actor", 1), ("rollout", 2)]
    assert requests.read_stop_request(world.run)["code"] == EXIT_CONFIG


@pytest.mark.parametrize(
    "plan",
    [
        [MEMORY, "engine:OSError: Stale file handle", MEMORY, "done:0"],
        ["crashes", MEMORY, MEMORY, "done:0"],
        [MEMORY, "killed", MEMORY, "done:0"],
    ],
    ids=["other errors", "was at work before", "was killed between"],
)
def test_an_engine_that_may_start_is_started_again(world: World, plan: list[str]) -> None:
    world.plans = {"rollout": plan}
    assert world.supervise("rollout") is Outcome.FINISHED
    assert len(world.started) == 4


@pytest.mark.parametrize("layout", ["local", "jobs"])
def test_a_further_member_that_never_starts_is_left_out(world: World, layout: str) -> None:
    world.config.layout = layout
    world.plans = {"rollout": ["done:0"], "rollout-2": [MEMORY]}
    names = ["rollout", "rollout-2"] if layout == "local" else ["rollout-2"]
    outcome = world.supervise(*names)
    assert outcome is (Outcome.FINISHED if layout == "local" else Outcome.RELEASED)
    assert [name for name, _ in world.started].count("rollout-2") == 2
    text = "rollout-2: not started again, the run continues without it: ValueError: Loaded"
    assert text in world.said()
    assert not requests.read_stop_request(world.run)


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
    hangs = world.once(
        lambda: world.supervisor.handle_dead_role("rollout", "rollout", 1, "has given no sign")
    )
    assert world.supervise("rollout", then=hangs) is Outcome.FINISHED
    world.supervisor.handle_dead_role("rollout", "rollout", 1, "of an incarnation that is over")
    assert world.started == [("rollout", 1), ("rollout", 2)]


@pytest.mark.parametrize("layout", ["jobs", "het"])
def test_what_a_silent_group_of_others_held_goes_to_others(world: World, layout: str) -> None:
    names = ("hub", "actor") if layout == "het" else ("actor",)
    silent = world.once(
        lambda: world.supervisor.handle_dead_role("rollout-2", "", 3, "has given no sign"),
        lambda: requests.request_stop(world.run),
    )
    world.supervise(*names, then=silent)
    expected = [{"group": "rollout-2", "incarnation": 3}] if "hub" in names else []
    assert [told for told in world.told("down") if told["group"] != "actor"] == expected
    assert [name for name, _ in world.started] == list(names)
