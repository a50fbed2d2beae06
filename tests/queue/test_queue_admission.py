"""The staleness bound in every order of the acts of two engines and an actor, for small runs.

A node of the exploration is a state of the queue and of its users. Each act other than a death
advances the run, so each path ends. A node without a possible act must be a finished run.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import pytest

from relax_hpc.base.versions import Version
from relax_hpc.config.schema import GroupConfig
from relax_hpc.queue.controller.handlers import tickets as handlers
from relax_hpc.queue.controller.planning import admission
from relax_hpc.queue.controller.planning.admission import admissible
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.lengths import pack_lengths
from relax_hpc.queue.plan import GENERATED, Plan
from tests.effort import effort
from tests.helpers.queue_helpers import small
from tests.helpers.queue_in_memory import InMemory

ENGINES = ("left", "right")
NOTHING = Version(0, 0)


@dataclass(frozen=True, order=True)
class Engine:
    incarnation: int = 1
    serving: Version = NOTHING
    flight: tuple[tuple[int, Version], ...] = ()
    """Tickets in generation, with the version that began each."""


@dataclass(frozen=True)
class Node:
    """A state of the exploration. Equal nodes are visited once."""

    key: tuple
    engines: tuple[Engine, Engine] = field(compare=False)
    actor: int
    deaths: int
    image: bytes = field(compare=False)


class Small:
    """Two engines and an actor at one queue; an actor's step needs nothing but generated rows."""

    def __init__(self, plan: Plan, node: Node | None = None) -> None:
        self.plan, self.service, self.keys = plan, InMemory(plan), 0
        self.engines, self.actor, self.deaths = {name: Engine() for name in ENGINES}, 1, 0
        if node:
            self.service.state = QueueState.load(
                plan, msgpack.unpackb(node.image, strict_map_key=False)
            )
            self.engines = dict(zip(ENGINES, node.engines, strict=True))
            self.actor, self.deaths = node.actor, node.deaths
        else:
            self.resume(0)

    def node(self) -> Node:
        """The current node. Two nodes are equal if only the order of the engines differs."""
        state = self.service.state
        names = sorted(ENGINES, key=lambda name: self.engines[name])
        groups = tuple(
            (
                ticket,
                group.owner and (names.index(group.owner[0]), group.owner[1]),
                tuple(sorted(group.versions)),
                (state.tasks["actor"].statuses[ticket], group.last_step, group.position),
            )
            for ticket, group in sorted(state.groups.items())
        )
        queue = (
            groups,
            tuple(state.lineage.starts),
            tuple(state.tickets.reissued),
            state.progress.trained_steps,
            state.weights.newest,
        )
        image = msgpack.packb(state.dump() | {"admissions": {}, "puts": {}})
        engines = (self.engines[ENGINES[0]], self.engines[ENGINES[1]])
        return Node((queue, *sorted(engines)), engines, self.actor, self.deaths, image)

    def ask(self, group: str, incarnation: int, op: str, /, **args: Any) -> Any:
        self.keys += 1
        return self.service.ask(group, incarnation, f"{self.deaths}-{self.keys}", op, **args)

    # -- what an engine does -----------------------------------------------------------------------

    def pull(self, name: str) -> bool:
        engine = self.engines[name]
        news = self.ask(name, engine.incarnation, "next_version", after=str(engine.serving))
        if news is None or "version" not in news:
            return False
        self.ask(name, engine.incarnation, "serve", reader=name, version=news["version"])
        self.engines[name] = replace(engine, serving=Version.parse(news["version"]))
        return True

    def admit(self, name: str) -> bool:
        engine, state = self.engines[name], self.service.state
        answer = self.ask(name, engine.incarnation, "admit", reader=name, count=1)
        if answer is None or "finished" in answer:
            self.check_nothing_withheld(engine)
            return False
        (ticket,) = answer["tickets"]
        assert engine.serving in state.lineage
        assert engine.serving.number >= self.plan.step_of(ticket) - self.plan.max_staleness
        self.engines[name] = replace(engine, flight=(*engine.flight, (ticket, engine.serving)))
        return True

    def check_nothing_withheld(self, engine: Engine) -> None:
        """Check that the engine may start no other ticket."""
        state = self.service.state
        if engine.serving in state.lineage:
            reissued = [
                ticket
                for ticket in state.tickets.reissued.lowest(9)
                if admission._still_trainable(state, engine.serving, [ticket])
            ]
            step = self.plan.step_of(min([state.tickets.next, *reissued]))
            lags = state.progress.trained_steps - engine.serving.number > self.plan.publish_lag
            assert (
                lags
                or step >= self.plan.steps
                or engine.serving.number < step - self.plan.max_staleness
            )

    def put(self, name: str) -> bool:
        engine = self.engines[name]
        if not engine.flight:
            return False
        (ticket, began), *later = engine.flight
        codes = sorted({began.encode(), engine.serving.encode()})
        rows = [
            {
                "ticket": ticket,
                "episodes": self.plan.undeclared,
                "lengths": pack_lengths([3, 3]),
                "versions": codes,
            }
        ]
        shard = {"name": f"{name}-{engine.incarnation}-{ticket}-{self.service.state.shards.next}"}
        put = {"shard": shard, "rows": rows, "fields": list(GENERATED)}
        refused = self.ask(name, engine.incarnation, "put", **put)["refused"]
        alive = all(version in self.service.state.lineage for version in (began, engine.serving))
        assert refused == ({} if alive else {ticket: "rolled_back"})
        self.engines[name] = replace(engine, flight=tuple(later))
        return True

    def kill(self, name: str) -> None:
        self.deaths += 1
        self.ask("supervisor", 1, "down", group=name, incarnation=self.engines[name].incarnation)
        self.engines[name] = Engine(self.engines[name].incarnation + 1)

    # -- what the actor does -----------------------------------------------------------------------

    def train(self) -> bool:
        """A whole step, with its checkpoint."""
        state, step = self.service.state, self.service.state.progress.trained_steps
        if step == self.plan.steps:
            return False
        window = {"task": "actor", "budget": 1 << 20, "boundary": self.plan.prompts_per_step}
        claim = self.ask("actor", self.actor, "claim", **window)
        if claim is None:
            return False
        assert claim["tickets"] == list(state.tickets_of(step))
        versions = list[Version]()
        for ticket in claim["tickets"]:
            versions += map(Version.decode, state.groups[ticket].versions)
        assert all(version in state.lineage for version in versions)
        assert min(version.number for version in versions) >= step - self.plan.max_staleness
        self.ask(
            "actor", self.actor, "publish", version=str(Version(self.actor, step + 1)), digest="d"
        )
        self.ask("actor", self.actor, "trained", step=step, leases=[claim["lease"]])
        self.ask(
            "actor",
            self.actor,
            "checkpoint",
            step=step + 1,
            name=f"{self.actor}-{step}",
            digest="d",
        )
        return True

    def kill_actor(self, older: int) -> None:
        self.deaths, self.actor = self.deaths + 1, self.actor + 1
        points = [0, *(point["step"] for point in self.service.state.progress.checkpoints)]
        self.resume(points[max(0, len(points) - 1 - older)])

    def resume(self, step: int) -> None:
        self.ask("actor", self.actor, "resume", step=step)
        self.ask("actor", self.actor, "publish", version=str(Version(self.actor, step)), digest="d")

    # -- all of it ---------------------------------------------------------------------------------

    def acts(self) -> list[tuple]:
        return [*itertools.product(("pull", "admit", "put"), ENGINES), ("train",)]

    def faults(self) -> list[tuple]:
        return [("kill", name) for name in ENGINES] + [("kill_actor", older) for older in (0, 1)]

    def do(self, act: tuple) -> bool:
        return getattr(self, act[0])(*act[1:]) is not False


def plan_of(groups: int, steps: int, staleness: int) -> Plan:
    config = small(groups, 2, steps, staleness, keep_steps=1)
    config.groups = {name: GroupConfig(roles=["rollout"]) for name in ENGINES} | {
        "actor": GroupConfig(roles=["actor"])
    }
    return Plan.from_config(config)


def explore(plan: Plan, deaths: int) -> int:
    """Visit every node that can be reached with at most ``deaths`` deaths, and count them."""
    first = Small(plan).node()
    visited, ahead = {first}, [first]
    while ahead:
        node = ahead.pop()
        it, moved = Small(plan, node), False
        faults = it.faults() if node.deaths < deaths else []
        for act in it.acts() + faults:
            if it.do(act):
                moved = moved or act not in faults
                after = it.node()
                if after not in visited:
                    visited.add(after)
                    ahead.append(after)
                it = Small(plan, node)
        assert moved or it.service.state.progress.finished(), node
    return len(visited)


CASES = [(1, 2, 0, 2), (3, 1, 0, 1), (1, 3, 0, 1), (1, 3, 1, 1), (1, 3, 2, 0), (1, 2, 2, 1)]
"""Prompt groups per step, steps, staleness, deaths."""


@pytest.mark.parametrize(("groups", "steps", "staleness", "deaths"), CASES)
def test_no_order_of_events_breaks_the_bound_or_stops_the_run(groups, steps, staleness, deaths):
    assert explore(plan_of(groups, steps, staleness), deaths) > 300


def test_no_order_of_events_stops_a_run_whose_engines_may_not_lag():
    """An engine that lags behind the newest version by more than publish_lag gets no ticket, and
    all runs still end.

    The runs have three steps without a death, or two steps with one death. `env/test.sh --all` runs
    three steps with one death, which have ten times as many states.
    """
    plan = replace(plan_of(1, 3, 2), publish_lag=0)
    assert explore(plan, effort(0, 1)) > 300
    assert explore(replace(plan_of(1, 2, 2), publish_lag=0), 1) > 300
    state = Small(plan).service.state
    state.progress.trained["actor"] = 2
    assert admission.admissible(state, Version(1, 2), 1) and not admission.admissible(
        state, Version(1, 1), 1
    )
    assert admission.explain_wait(state, Version(1, 1))[0] == (
        "serves i000001-v000001, 1 behind the newest, allowed weights.publish_lag=0"
    )


def test_the_exploration_fails_if_the_bound_is_too_loose(monkeypatch):
    """The bound is one version too loose, which the exploration must find."""
    plan = plan_of(1, 3, 0)
    monkeypatch.setattr(
        handlers, "admissible", lambda state, *args: admissible(loose(state), *args)
    )
    with pytest.raises(AssertionError):
        explore(plan, 0)


def loose(state: QueueState) -> QueueState:
    copy = QueueState(replace(state.plan, max_staleness=1))
    vars(copy).update({name: value for name, value in vars(state).items() if name != "plan"})
    return copy
