"""The supervisor is asked to end, is taken over, and is asked to start, restart and release members
meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from relax_hpc.base.errors import FencedError
from relax_hpc.cluster.supervise import requests
from relax_hpc.cluster.supervise.group import Incarnation, Member, Unavailable
from relax_hpc.cluster.supervise.launch_records import Launch, read_mark
from relax_hpc.cluster.supervise.supervisor import RELEASED, Outcome
from relax_hpc.config.groups import group_roles
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark
from relax_hpc.net.rendezvous.roster import claim_incarnation
from tests.cluster.supervisor_helpers import Adopted, World, world_fixture  # noqa: F401

# -- the end ---------------------------------------------------------------------------------------


def test_asked_to_stop_the_actor_ends_first_and_the_hub_last(world: World) -> None:
    names = ["hub", "rollout", "actor", "reference"]
    stop = world.once(lambda: requests.request_stop(world.run))
    assert world.supervise(*names, then=stop) is Outcome.STOPPED
    assert [name for name, _ in world.asked] in (
        ["actor", "rollout", "reference", "hub"],
        ["actor", "reference", "rollout", "hub"],
    )
    assert world.asked[0][1] == {"hub", "rollout", "reference"} and world.asked[-1][1] == set()
    assert not world.supervisor.table.supervised
    marks = [
        read_mark(world.run, name, 1, role)
        for name in names
        for role in group_roles(world.config, name)
    ]
    assert [mark["status"] for mark in marks] == ["stopped"] * 4


def test_what_does_not_end_is_killed_and_nobody_waits_for_its_word(world: World) -> None:
    world.config.liveness.stop_timeout_s = 0.3
    world.plans = {"actor": ["deaf"]}
    stop = world.once(lambda: requests.request_stop(world.run))
    assert world.supervise("actor", "rollout", then=stop) is Outcome.STOPPED
    assert read_mark(world.run, "actor", 1, "actor")["reason"] == "ended by its supervisor"


def test_a_signal_interrupts_and_a_second_one_cuts_the_waiting_short(world: World) -> None:
    world.config.liveness.stop_timeout_s = 60.0
    world.plans = {"actor": ["deaf"]}

    def again() -> None:
        if world.asked and world.supervisor.interrupted == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def interrupt() -> None:
        world.supervisor.before_wait = again
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


# -- taking over -----------------------------------------------------------------------------------


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
        lambda: write_exit_mark(
            world.run.exit_mark("rollout", group.incarnation, "rollout"), 75, "lost its node"
        )
    )
    assert world.supervise("rollout", then=fail) is Outcome.FINISHED
    assert world.started == [("rollout", 2)] and group.fate == "killed"


def test_what_was_done_before_is_not_started_again(world: World) -> None:
    incarnation = claim_incarnation(world.run, "rollout")
    world.run.logs("rollout", incarnation).mkdir(parents=True)
    write_exit_mark(world.run.exit_mark("rollout", incarnation, "rollout"))
    assert world.supervise("rollout") is Outcome.FINISHED
    assert world.started == []


def test_a_fenced_supervisor_touches_nothing_that_its_successor_has(world: World) -> None:
    mine, lost = adopted(world, "rollout"), adopted(world, "actor")

    def successor() -> None:
        claim_incarnation(world.run, "supervisor")
        claim_incarnation(world.run, "actor")

    with pytest.raises(FencedError, match="supervisor 2 has taken over"):
        world.supervise("rollout", "actor", "reference", then=world.once(successor))
    assert (mine.fate, lost.fate) == ("left", "killed"), (
        "an older incarnation than the newest is nobody's"
    )
    assert world.told("down") == [] and world.asked == []
    assert not world.supervisor.table.supervised["reference"].members, "its own children go with it"


def test_a_supervisor_that_fails_leaves_what_another_can_take_over(world: World) -> None:
    mine = adopted(world, "rollout")

    def bug() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        world.supervise("rollout", "actor", then=world.once(bug))
    assert mine.fate == "left" and not world.supervisor.table.supervised["actor"].members


def test_a_fenced_supervisor_that_is_told_to_stop_stops_nothing(world: World) -> None:
    mine = adopted(world, "rollout")

    def stop() -> None:
        claim_incarnation(world.run, "supervisor")
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(FencedError):
        world.supervise("rollout", then=world.once(stop))
    assert mine.fate == "left"


# -- requests --------------------------------------------------------------------------------------


def asks(world: World, *wanted: tuple[str, str]) -> Callable[[], None]:
    """Requests one after the other, then the order to stop."""
    orders = [
        lambda op=op, group=group: requests.send_request(world.run, op, group)
        for op, group in wanted
    ]
    rounds = [order for each in orders for order in (each, lambda: None)]
    return world.once(*rounds, lambda: requests.request_stop(world.run))


def test_members_of_a_local_run_are_started_restarted_and_released(world: World) -> None:
    # The last is of nobody: it is done, and ends nothing.
    wanted = [
        ("start", "rollout-2"),
        ("restart", "rollout"),
        ("release", "rollout-2"),
        ("release", "rollout-9"),
    ]
    assert world.supervise("rollout", "actor", then=asks(world, *wanted)) is Outcome.STOPPED
    assert world.started == [("rollout", 1), ("actor", 1), ("rollout-2", 1), ("rollout", 2)]
    assert [name for name, _ in world.asked[:2]] == ["rollout", "rollout-2"], "in good order"
    assert "rollout-2" not in world.supervisor.table.names and not requests.pending_requests(
        world.run, lambda _: True
    )


def test_a_start_that_is_asked_for_twice_starts_once(world: World) -> None:
    world.supervise("rollout", then=asks(world, ("start", "rollout-2"), ("start", "rollout-2")))
    assert world.started == [("rollout", 1), ("rollout-2", 1)]


@pytest.mark.parametrize(
    "error", [Unavailable("slurmctld is down"), OSError(28, "No space left on device")]
)
def test_a_restart_that_cannot_be_now_is_done_later(world: World, error: Exception) -> None:
    start, fails = world.start, [error]

    def once_in_vain(
        name: str, incarnation: int, launch: Launch, ahead: Incarnation | None
    ) -> Incarnation:
        if incarnation > 1 and fails:
            raise fails.pop()
        return start(name, incarnation, launch)

    world.start = once_in_vain
    world.supervise("rollout", then=asks(world, ("restart", "rollout")))
    assert not fails and [name for name, _ in world.started] == ["rollout", "rollout"]


def test_requests_about_groups_of_others_are_left_to_them(world: World) -> None:
    world.config.layout = "het"
    world.supervise(
        "rollout",
        then=asks(world, ("restart", "actor"), ("start", "rollout-2"), ("restart", "nobody")),
    )
    assert world.started == [("rollout", 1)]
    assert len(requests.pending_requests(world.run, lambda _: True)) == 3


def test_a_group_that_is_released_goes_on_in_a_job_that_somebody_else_submits(world: World) -> None:
    world.config.layout = "het"
    then = world.once(
        lambda: requests.send_request(world.run, "release", "rollout"),
        lambda: None,
        world.end_the_actor,
    )
    assert (
        world.supervise("rollout", "actor", then=lambda: (then(), world.go_on_in_a_job()))
        is Outcome.FINISHED
    )
    assert world.handed == [("rollout", RELEASED)] and world.supervisor.table.detached == {
        "rollout": ""
    }
    assert world.started == [("rollout", 1), ("actor", 1)]


def test_a_supervisor_all_of_whose_groups_are_released_is_no_longer_needed(world: World) -> None:
    world.config.layout = "jobs"
    then = world.once(lambda: requests.send_request(world.run, "release", "rollout"))
    assert world.supervise("rollout", then=then) is Outcome.RELEASED
    assert [name for name, _ in world.asked] == ["rollout"]
