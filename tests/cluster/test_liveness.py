"""Which roles are taken for dead, by what the hub answers about their beats."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from relax_hpc.base.errors import DeadlineError, RelaxError
from relax_hpc.cluster.supervise import liveness
from relax_hpc.cluster.supervise.group import Member
from relax_hpc.cluster.supervise.liveness import Liveness
from relax_hpc.config.schema import LivenessConfig

LIMITS = LivenessConfig(beat_s=1.0, lease_s=30.0, start_timeout_s=600.0, hang_s=1800.0)
STARTED: Any = object()
"""In place of a process that this supervisor has started."""


def status(beats: dict[str, Any]) -> SimpleNamespace:
    """What of a `QueueStatus` is looked at."""
    return SimpleNamespace(
        beats=beats,
        trained_steps=3,
        accepted=40,
        checkpoints=[{}],
        lacking={},
        readers={},
        disk=[],
    )


class World:
    """A clock, a hub that answers what it is told, and groups of one role each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.asked: list[Future] = []
        self.status = SimpleNamespace(get=self.get)
        monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.hub = 0
        self.liveness = Liveness(self, LIMITS, hub_incarnation=lambda: self.hub)
        self.groups: dict[str, Any] = {}

    def get(self, timeout: float) -> Future[SimpleNamespace]:
        assert timeout == LIMITS.lease_s
        self.asked.append(Future())
        return self.asked[-1]

    def group(
        self, name: str, incarnation: int = 1, roles: tuple[str, ...] = (), process: Any = STARTED
    ) -> None:
        members = [Member(role, process) for role in roles or (name,)]
        self.groups[name] = SimpleNamespace(incarnation=incarnation, members=members)

    def look(self, done: frozenset[str] = frozenset()) -> list[tuple]:
        return self.liveness.poll(self.groups, done)

    def round(
        self, *beats: dict[str, Any], seconds: float = 2.0, done: frozenset[str] = frozenset()
    ) -> list[tuple]:
        """The hub is asked once, and answers at once."""
        self.now += seconds
        assert self.look(done) == []
        found = {f"{b['group']}/{b.pop('member', b['group'])}": b for b in map(dict, beats)}
        self.asked[-1].set_result(status(found))
        return self.look(done)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def beat(
    group: str, incarnation: int = 1, age_s: float = 0.5, busy_s: float = 0.0, **more: Any
) -> dict[str, Any]:
    return {"group": group, "incarnation": incarnation, "age_s": age_s, "busy_s": busy_s, **more}


def test_the_hub_is_asked_every_other_beat_and_never_twice_at_a_time(world: World) -> None:
    assert world.look() == [] and not world.asked
    world.now += 2.0
    world.look()
    world.now += 10.0
    world.look()
    assert len(world.asked) == 1
    world.asked[0].set_result(status({}))
    assert world.look() == [] and world.liveness.progress == (3, 40, 1)
    world.look()
    assert len(world.asked) == 2


def test_a_silent_role_is_dead_when_two_answers_say_so(world: World) -> None:
    world.group("actor")
    world.group("rollout")
    quiet = beat("actor", age_s=30.5)
    assert world.round(quiet, beat("rollout")) == []
    assert world.round(beat("actor"), beat("rollout")) == [], "it was the hub that had been stopped"
    assert world.round(quiet, beat("rollout")) == []
    assert world.round(quiet, beat("rollout")) == [
        ("actor", "actor", 1, "has sent no heartbeat for 30 s")
    ]


def test_the_slowest_of_several_ranks_counts_and_other_roles_and_incarnations_do_not(
    world: World,
) -> None:
    world.group("rollout", incarnation=2)
    others = [beat("rollout", 1, age_s=99.0), beat("rollout", 2, member="rollouter", age_s=99.0)]
    for _ in range(2):
        assert world.round(beat("rollout", 2), *others) == []
    ranks = [beat("rollout", 2), beat("rollout", 2, member="rollout-1", age_s=31.0)]
    world.round(*ranks)
    assert [dead[:3] for dead in world.round(*ranks)] == [("rollout", "rollout", 2)]


def test_one_piece_of_work_may_take_long_but_not_for_ever(world: World) -> None:
    world.group("actor")
    for busy in (1800.0, 1801.0):
        assert world.round(beat("actor", busy_s=busy)) == []
    reason = "has worked on one task for over 1800 s"
    assert world.round(beat("actor", busy_s=1803.0)) == [("actor", "actor", 1, reason)]


def test_what_was_started_has_time_to_begin(world: World) -> None:
    world.group("actor")
    for seconds in (2.0, 599.0):
        assert world.round(seconds=seconds) == []
    assert world.round() == []
    assert world.round() == [
        ("actor", "actor", 1, "has sent no heartbeat within 600 s after its start")
    ]
    world.group("actor", incarnation=2)
    assert [world.round(), world.round()] == [[], []], "the next incarnation has as much"


def test_what_was_taken_over_has_beaten_before(world: World) -> None:
    world.group("actor", process=None)
    for seconds in (2.0, 33.0, 2.0):
        assert world.round(seconds=seconds) == []
    assert world.round() == [
        ("actor", "actor", 1, "has sent no heartbeat within 34 s after its start")
    ]


def test_roles_that_are_done_and_the_controller_are_left_alone(world: World) -> None:
    world.group("hub", roles=("controller", "advantages"))
    world.group("actor")
    done = frozenset({"actor/actor", "hub/advantages"})
    for _ in range(3):
        assert (
            world.round(
                beat("actor", age_s=99.0), beat("hub", member="advantages", age_s=99.0), done=done
            )
            == []
        )


def test_groups_of_others_are_dead_when_none_of_them_gives_a_sign(world: World) -> None:
    world.group("hub", roles=("controller",))
    half = [beat("rollout-2", age_s=99.0, member="rollout-1"), beat("rollout-2")]
    gone = [beat("rollout-3", 4, age_s=31.0), beat("rollout-3", 4, age_s=99.0, member="rollout-1")]
    supervisor = beat("supervisor-rollout-3", age_s=99.0)
    assert world.round(*half, *gone, supervisor) == []
    assert not world.liveness.silent
    assert world.round(*half, *gone, supervisor) == [
        ("rollout-3", "", 4, "has sent no heartbeat for 30 s")
    ]
    assert world.liveness.silent == {("rollout-2", 1), ("rollout-3", 4)}, (
        "of one a member is silent"
    )
    world.round(*half[1:], supervisor)
    assert not world.liveness.silent


def test_a_hub_that_was_not_there_when_it_was_asked_may_start_first(world: World) -> None:
    def in_vain(hub: int) -> list[tuple]:
        world.hub, world.now = hub, world.now + 2.0
        assert world.look() == []
        world.now += LIMITS.lease_s
        world.asked[-1].set_exception(DeadlineError("late"))
        return world.look()

    world.group("hub", incarnation=2)
    assert in_vain(hub=1) == in_vain(hub=1) == []
    assert in_vain(hub=2) == [("hub", "controller", 2, "has not answered for 30 s")]
    world.group("hub", incarnation=3)
    while not (found := in_vain(hub=2)):
        assert world.now < 3000.0
    assert found == [("hub", "controller", 3, "has not answered for 600 s")]


@pytest.mark.parametrize(
    ("error", "dead"), [(DeadlineError("late"), True), (RelaxError("closed"), False)]
)
def test_a_hub_that_owes_its_answer_is_dead(world: World, error: RelaxError, dead: bool) -> None:
    world.group("actor")
    world.round(beat("actor", age_s=99.0))
    world.now += 2.0
    world.look()
    world.asked[-1].set_exception(error)
    found = [("hub", "controller", 0, "has not answered for 30 s")]
    assert world.look() == (found if dead else [])
    assert world.round(beat("actor", age_s=99.0)) == [], "beats of before the silence count no more"


def test_one_part_of_loading_has_as_long_as_it_takes_to_read(world: World) -> None:
    world.liveness = Liveness(world, LIMITS, read_s=200.0)
    world.group("actor")
    slow, stuck = (beat("actor", loads=True, loading_s=seconds) for seconds in (1999.0, 2001.0))
    assert world.round(slow) == world.round(slow) == world.round(stuck) == []
    assert world.round(stuck) == [("actor", "actor", 1, "has loaded one part for over 2000 s")]
