"""At staleness above 0 a step trains what is ready, long responses are trained on too, and nothing
comes too late.

The controller's real request handlers, and engines whose responses take as long as heavy tails have
it, on a clock that nobody waits for.
"""

from __future__ import annotations

import heapq
import itertools
import random
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from relax_hpc.base.versions import Version
from relax_hpc.config.schema import GroupConfig
from relax_hpc.queue.controller.planning.admission import explain_wait
from relax_hpc.queue.controller.planning.claims import awaited
from relax_hpc.queue.controller.planning.step_sets import FreePositions
from relax_hpc.queue.lengths import pack_lengths
from relax_hpc.queue.plan import GENERATED, Plan
from tests.effort import effort
from tests.helpers.queue_helpers import BUDGET, small
from tests.helpers.queue_in_memory import InMemory, contents


def desk_of(prompts: int, staleness: int, steps: int) -> InMemory:
    """Of a run whose actor needs nothing but generated rows."""
    config = small(prompts, 2, steps, staleness)
    config.groups = {name: GroupConfig(roles=[name]) for name in ("rollout", "actor")}
    return InMemory(Plan.from_config(config))


class Asker:
    """Sends requests to a service by the roles of a run."""

    def __init__(self, prompts: int, staleness: int, steps: int) -> None:
        self.service, self.keys, self.incarnations = (
            desk_of(prompts, staleness, steps),
            itertools.count(),
            {},
        )
        self.plan, self.state = self.service.plan, self.service.state
        self.ask("actor", "resume", step=0)
        self.publish(0)

    def ask(self, group: str, op: str, /, **args: Any) -> Any:
        return self.service.ask(
            group, self.incarnations.get(group, 1), f"k{next(self.keys)}", op, **args
        )

    def publish(self, number: int) -> None:
        self.ask("actor", "publish", version=str(Version(1, number)), digest="d")

    def admit(self, engine: str, version: int, count: int = BUDGET) -> list[int]:
        self.ask(engine, "serve", reader=engine, version=str(Version(1, version)))
        return (self.ask(engine, "admit", reader=engine, count=count) or {"tickets": []}).get(
            "tickets", []
        )

    def put(self, engine: str, ticket: int, *versions: int, length: int = 3) -> dict[int, str]:
        codes = [Version(1, number).encode() for number in versions]
        row = {
            "ticket": ticket,
            "episodes": b"\1\1",
            "lengths": pack_lengths([length, 2]),
            "versions": codes,
        }
        put = {"shard": {"name": f"s{next(self.keys)}"}, "rows": [row], "fields": list(GENERATED)}
        return self.ask(engine, "put", **put)["refused"]

    def claim(self, budget: int = BUDGET, boundary: int = 0) -> dict[str, Any] | None:
        dealt = {"ranks": 1, "max_tokens": BUDGET}
        boundary = boundary or self.plan.prompts_per_step
        found = self.ask("actor", "claim", task="actor", budget=budget, boundary=boundary, **dealt)
        return None if found is None or found.get("finished") else found

    def train(self, step: int, *claims: dict[str, Any]) -> list[int]:
        """The staleness of each prompt group of the step."""
        self.publish(step + 1)
        return self.ask("actor", "trained", step=step, leases=[claim["lease"] for claim in claims])[
            "staleness"
        ]

    def die(self, group: str) -> None:
        now = self.incarnations.get(group, 1)
        self.ask("supervisor", "down", group=group, incarnation=now)
        self.incarnations[group] = now + 1


def test_at_staleness_0_a_step_has_its_tickets_whatever_is_ready_first():
    it = Asker(2, 0, 2)
    assert it.admit("rollout", 0) == [0, 1]
    it.put("rollout", 1, 0)
    assert it.claim() is None
    it.put("rollout", 0, 0)
    claim = it.claim()
    assert (claim["tickets"], claim["step"], claim["place"]) == ([0, 1], 0, 0) and it.train(
        0, claim
    ) == [0, 0]


def test_a_step_goes_on_without_a_straggler_until_its_last_step_has_come():
    it = Asker(2, 2, 4)
    assert it.admit("rollout", 0) == [0, 1, 2, 3, 4, 5]
    for ticket in (5, 3, 1):
        it.put("rollout", ticket, 0)
    first = it.claim()
    assert first["tickets"] == [1, 3], "those with the nearest last step, lowest tickets first"
    assert it.train(0, first) == [0, 0]
    it.put("rollout", 4, 0)
    second = it.claim()
    assert second["tickets"] == [4, 5] and it.train(1, second) == [1, 1]
    assert it.admit("rollout", 2, 2) == [6, 7]
    it.put("rollout", 6, 2), it.put("rollout", 7, 2)
    assert it.claim() is None, "tickets 0 and 2 may not come later"
    waiting = awaited(it.state, "actor", BUDGET, 2)
    assert waiting == ("rollout", "stragglers of rollout")
    it.put("rollout", 2, 0)
    assert it.claim() is None
    it.put("rollout", 0, 0)
    third = it.claim()
    assert third["tickets"] == [0, 2] and it.train(2, third) == [2, 2]
    last = it.claim()
    assert last["tickets"] == [6, 7] and it.train(3, last) == [1, 1]
    assert contents(it.service.replayed()) == contents(it.state)


def test_room_is_counted_for_steps_that_what_is_left_could_fill():
    it = Asker(2, 1_000_000, 2_000_000)
    assert it.admit("rollout", 0, 7) == list(range(7))
    for ticket in (5, 3, 6):
        it.put("rollout", ticket, 0)
    assert FreePositions(it.state).free == [2, 4, 6, 8, 3] and it.claim()["tickets"] == [3, 5]


def test_rows_of_later_weights_may_wait_longer():
    """By the versions of their tokens, not by their tickets."""
    it = Asker(1, 2, 4)
    assert it.admit("rollout", 0, 2) == [0, 1]
    it.put("rollout", 0, 0)
    assert it.train(0, it.claim()) == [0]
    it.put("rollout", 1, 1)
    assert it.admit("old", 0) == [2]
    it.put("old", 2, 0)
    claim = it.claim()
    assert claim["tickets"] == [2] and it.train(1, claim) == [1]


def test_a_ticket_that_is_given_again_goes_to_no_engine_too_old_for_its_place():
    """Two of the same last step would be one too many: others have taken the places that they
    had."""
    it = Asker(1, 2, 6)
    assert it.admit("slow", 0, 1) == [0]
    assert it.admit("mortal", 0, 1) == [1] and it.admit("rollout", 0, 1) == [2]
    it.put("rollout", 2, 0)
    assert it.train(0, it.claim()) == [0]
    assert it.admit("rollout", 1, 1) == [3]
    it.put("rollout", 3, 1)
    it.die("mortal")
    assert it.train(1, it.claim()) == [0]
    assert it.admit("slow", 0) == [], "both would have to be trained in step 2"
    assert "too old for ticket 1" in explain_wait(it.state, Version(1, 0))[0]
    assert it.admit("rollout", 2, 1) == [1]
    it.put("rollout", 1, 2)
    assert it.claim() is None, "ticket 0 is due"
    it.put("slow", 0, 0)
    assert it.train(2, it.claim()) == [2]


def test_rows_older_than_was_promised_are_refused():
    it = Asker(1, 2, 6)
    assert it.admit("rollout", 0, 1) == [0]
    it.put("rollout", 0, 0)
    it.train(0, it.claim())
    assert it.admit("rollout", 1, 1) == [1]
    assert it.put("rollout", 1, 0) == {1: "stale_version"}


def test_mini_batches_keep_their_places_when_rows_are_lost():
    it = Asker(4, 1, 2)
    assert it.admit("rollout", 0, 8) == list(range(8))
    for ticket in range(6):
        it.put("rollout", ticket, 0)
    claims = [it.claim(boundary=2) for _ in range(3)]
    assert [(claim["step"], claim["place"]) for claim in claims] == [(0, 0), (0, 2), (1, 4)]
    it.ask("actor", "quarantine", lease=claims[0]["lease"], tickets=[1], reason="bad")
    it.put("rollout", 6, 0)
    again = it.claim(boundary=2)
    assert (again["tickets"], again["step"], again["place"]) == ([6], 0, 1)
    assert it.train(0, claims[0], claims[1], again) == [0, 0, 0, 0]
    assert it.state.tickets_of(0) == [0, 6, 2, 3]


def test_after_a_resume_sets_are_chosen_anew_from_what_survives():
    it = Asker(2, 2, 4)
    it.admit("rollout", 0)
    for ticket in (1, 3, 4, 5):
        it.put("rollout", ticket, 0)
    it.train(0, it.claim())
    it.train(1, it.claim())
    it.die("actor")
    it.ask("actor", "resume", step=1)
    it.ask("actor", "publish", version=str(Version(2, 1)), digest="d")
    it.put("rollout", 0, 0)
    assert it.state.tickets_of(0) == [1, 3] and it.state.tickets_of(1) == []
    assert it.claim()["tickets"] == [0, 4]
    assert contents(it.service.replayed()) == contents(it.state)


# -- a whole run on a clock of its own -------------------------------------------------------------


class Simulation(Asker):
    """Engines that serve versions as late as they like, an actor, and groups that take `lengths` of
    time each."""

    def __init__(
        self, prompts: int, staleness: int, steps: int, seed: int, train_s: float, windows: int = 1
    ) -> None:
        super().__init__(prompts, staleness, steps)
        self.chance, self.train_s, self.windows = random.Random(seed), train_s, windows
        self.lengths = [
            max(1, round(40 * self.chance.lognormvariate(0.0, 1.2))) for _ in range(prompts * steps)
        ]
        self.events: list[tuple[float, int, str, Any]] = []
        self.now, self.step, self.serves = 0.0, 0, {}
        self.claims: list[dict[str, Any]] = []
        self.trains = False
        self.sets: list[list[int]] = []

    def later(self, seconds: float, what: str, about: Any = None) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.keys), what, about))

    def run(self, engines: int, slots: int, deaths: float = 0.0) -> None:
        for number in range(engines):
            self.serves[f"rollout-{number}"] = 0
        self.free = dict.fromkeys(self.serves, slots)
        while self.step < self.plan.steps:
            self.go_on()
            assert self.events, f"nothing goes on at step {self.step}: {contents(self.state)}"
            self.now, _, what, about = heapq.heappop(self.events)
            getattr(self, what)(about)
            if deaths and self.chance.random() < deaths:
                self.end(self.chance.choice(list(self.serves)), slots)

    def go_on(self) -> None:
        for engine in self.serves:
            if self.free[engine]:
                for ticket in self.admit(engine, self.serves[engine], self.free[engine]):
                    self.free[engine] -= 1
                    about = (engine, self.incarnations.get(engine, 1), ticket, self.serves[engine])
                    self.later(self.lengths[ticket] / 40, "generated", about)
        budget = 2 * max(self.lengths) * max(1, self.plan.prompts_per_step // self.windows)
        if not self.trains and (claim := self.claim(budget if self.windows > 1 else BUDGET)):
            self.claims.append(claim)
            self.trains = True
            self.later(self.train_s * len(claim["tickets"]) / self.plan.prompts_per_step, "trained")
        assert min(FreePositions(self.state).free) >= 0, "a group left has no place in time"

    def generated(self, about: tuple[str, int, int, int]) -> None:
        engine, incarnation, ticket, began = about
        if incarnation != self.incarnations.get(engine, 1):
            return
        self.free[engine] += 1
        versions = {began, self.serves[engine]}
        assert self.put(engine, ticket, *versions, length=self.lengths[ticket]) == {}

    def trained(self, _: None) -> None:
        self.trains = False
        if sum(len(claim["tickets"]) for claim in self.claims) < self.plan.prompts_per_step:
            return
        self.sets.append([ticket for claim in self.claims for ticket in claim["tickets"]])
        assert {claim["step"] for claim in self.claims} == {self.step}
        assert max(self.train(self.step, *self.claims)) <= self.plan.max_staleness
        self.step, self.claims = self.step + 1, []
        for engine in self.serves:
            self.later(
                self.chance.choice([0.0, 0.1, 2 * self.train_s]), "swap", (engine, self.step)
            )

    def swap(self, about: tuple[str, int]) -> None:
        engine, version = about
        self.serves[engine] = max(self.serves[engine], version)

    def end(self, engine: str, slots: int) -> None:
        """Its process dies; the next one may take a while to have the newest version."""
        self.die(engine)
        self.free[engine] = slots
        self.serves[engine] = self.chance.randint(self.serves[engine], self.step)


@settings(
    max_examples=effort(25, 2000),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
)
@given(
    prompts=st.integers(1, 8),
    staleness=st.integers(2, 4),
    engines=st.integers(1, 3),
    slots=st.integers(1, 6),
    windows=st.sampled_from([1, 4]),
    pace=st.sampled_from([0.2, 1.0, 4.0]),
    deaths=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 1 << 30),
)
def test_under_heavy_tails_the_bound_holds_and_every_group_is_trained_once(
    prompts, staleness, engines, slots, windows, pace, deaths, seed
):
    it = Simulation(prompts, staleness, 12, seed, pace * prompts / (engines * slots), windows)
    it.run(engines, slots, deaths)
    trained = [ticket for found in it.sets for ticket in found]
    assert sorted(trained) == list(range(12 * prompts))
    assert contents(it.service.replayed()) == contents(it.state)
