"""Long answers are trained as often as they are generated: the lengths of both follow one
distribution.

A run in simulated time: engines take tickets as the queue admits them, an answer takes as long as
it has tokens, and the actor trains a step as soon as the queue gives it all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np
import pytest

from relax_hpc.base.versions import Version
from relax_hpc.config.schema import GroupConfig
from relax_hpc.queue.lengths import pack_lengths
from relax_hpc.queue.plan import GENERATED, Plan
from tests.helpers.queue_helpers import BUDGET, small
from tests.helpers.queue_in_memory import InMemory

GROUPS, STEPS, SLOTS = 16, 40, 12
"""Prompt groups a step, steps, answers that an engine works on at a time."""
ENGINES = ("left", "right")
TRAINING = 1500.0
"""Time of a training step, in tokens by which an answer grows meanwhile."""
SIGNIFICANCE = 1e-2


def lengths_of(seed: int, answers: int = GROUPS * STEPS) -> list[int]:
    """Tokens of the answer to every ticket, log-normal: one in a hundred has ten times the
    median."""
    return np.ceil(np.random.default_rng(seed).lognormal(6.0, 1.0, answers)).astype(int).tolist()


def distance(some: Sequence[int], others: Sequence[int]) -> float:
    """The two-sample Kolmogorov-Smirnov statistic: the largest gap between the two empirical
    distributions."""
    at = np.union1d(some, others)
    shares = [
        np.searchsorted(np.sort(sample), at, side="right") / len(sample)
        for sample in (some, others)
    ]
    return float(np.abs(shares[0] - shares[1]).max())


def alike(some: Sequence[int], others: Sequence[int]) -> bool:
    """Whether both may be of one distribution, by the asymptotic critical value (Smirnov 1948) at
    `SIGNIFICANCE`."""
    sizes = (len(some) + len(others)) / (len(some) * len(others))
    return distance(some, others) < math.sqrt(-math.log(SIGNIFICANCE / 2) / 2 * sizes)


class Simulation:
    """Two engines and an actor; `generated` and `trained` are tickets, in the order in which that
    began or was done."""

    def __init__(self, staleness: int, seed: int) -> None:
        config = small(GROUPS, 2, STEPS, staleness)
        config.groups = {name: GroupConfig(roles=["rollout"]) for name in ENGINES}
        config.groups["actor"] = GroupConfig(roles=["actor"])
        self.service, self.lengths, self.keys = (
            InMemory(Plan.from_config(config)),
            lengths_of(seed),
            count(),
        )
        self.incarnations = dict.fromkeys((*ENGINES, "actor"), 1)
        self.flight: dict[str, set[int]] = {name: set() for name in ENGINES}
        self.generated: list[int] = []
        self.trained: list[int] = []
        self.now, self.newest, self.training = 0.0, Version(1, 0), False
        self.ahead: list[tuple[float, int, Callable[[], None]]] = []
        """What comes: (when, number, what)."""
        self.ask("actor", "resume", step=0)
        self.publish(0)

    def ask(self, group: str, op: str, **args: Any) -> Any:
        return self.service.ask(group, self.incarnations[group], f"k{next(self.keys)}", op, **args)

    def after(self, time: float, act: Callable[[], None]) -> None:
        heappush(self.ahead, (self.now + time, next(self.keys), act))

    def until(self, steps: int) -> None:
        """Go on until so many steps are trained."""
        while self.service.state.progress.trained_steps < steps:
            self.now, _, act = heappop(self.ahead)
            act()

    # -- engines -----------------------------------------------------------------------------------

    def serve(self, name: str) -> None:
        self.ask(name, "serve", reader=name, version=str(self.newest))
        self.fill()

    def fill(self) -> None:
        """Every engine begins as many answers as it may and can."""
        for name, flight in self.flight.items():
            answer = (
                self.ask(name, "admit", reader=name, count=SLOTS - len(flight))
                if len(flight) < SLOTS
                else None
            )
            for ticket in (answer or {}).get("tickets", []):
                flight.add(ticket)
                self.generated.append(ticket)
                self.after(self.lengths[ticket], self.end_of(name, ticket))

    def end_of(self, name: str, ticket: int) -> Callable[[], None]:
        began, incarnation = self.newest, self.incarnations[name]
        return lambda: (
            self.put(name, ticket, began) if self.incarnations[name] == incarnation else None
        )

    def put(self, name: str, ticket: int, began: Version) -> None:
        """The answer is there; weights may have changed under way."""
        self.flight[name].discard(ticket)
        codes = sorted({began.encode(), self.newest.encode()})
        row = {
            "ticket": ticket,
            "episodes": b"\1\1",
            "lengths": pack_lengths([self.lengths[ticket]] * 2),
            "versions": codes,
        }
        put = {
            "shard": {"name": f"{name}-{next(self.keys)}"},
            "rows": [row],
            "fields": list(GENERATED),
        }
        assert self.ask(name, "put", **put) == {"refused": {}}
        self.fill()
        self.claim()

    def kill(self, name: str) -> None:
        """What it was at is begun again by another one; a fresh one takes its place."""
        self.service.ask(
            "supervisor",
            1,
            f"k{next(self.keys)}",
            "down",
            group=name,
            incarnation=self.incarnations[name],
        )
        self.incarnations[name], self.flight[name] = self.incarnations[name] + 1, set()
        self.serve(name)

    # -- actor -------------------------------------------------------------------------------------

    def claim(self) -> None:
        window = {
            "task": "actor",
            "budget": BUDGET,
            "boundary": GROUPS,
            "ranks": 2,
            "max_tokens": 4096,
        }
        if (
            not self.training
            and (claim := self.ask("actor", "claim", **window))
            and "tickets" in claim
        ):
            self.training = True
            self.after(TRAINING, lambda: self.end_step(claim))

    def end_step(self, claim: dict[str, Any]) -> None:
        step = claim["step"] + 1
        self.trained += claim["tickets"]
        self.publish(step)
        self.ask("actor", "trained", step=step - 1, leases=[claim["lease"]])
        self.ask("actor", "checkpoint", step=step, name=f"c{step}", digest="d")
        self.training = False
        self.claim()

    def publish(self, number: int) -> None:
        self.newest = Version(1, number)
        self.ask("actor", "publish", version=str(self.newest), digest="d")
        for name in ENGINES:
            self.serve(name)


def first_come_first_trained(lengths: Sequence[int], begun: int) -> tuple[list[int], list[int]]:
    """Of every ``begun`` answers the first to end make a step, and the rest is dropped: lengths
    trained, generated."""
    starts = range(0, len(lengths) - begun + 1, begun)
    trained = [
        tokens for start in starts for tokens in sorted(lengths[start : start + begun])[:GROUPS]
    ]
    return trained, list(lengths[: len(starts) * begun])


@pytest.mark.parametrize("deaths", [0, 12])
@pytest.mark.parametrize("staleness", range(5))
def test_trained_lengths_are_those_that_were_generated(staleness: int, deaths: int) -> None:
    it = Simulation(staleness, seed=staleness)
    for number in range(deaths):
        it.after(700.0 + 2900.0 * number, lambda name=ENGINES[number % 2]: it.kill(name))
    it.until(STEPS // 2)
    assert staleness or it.trained == list(range(GROUPS * STEPS // 2)), (
        "each ticket in its step, however long it took"
    )
    assert alike(
        [it.lengths[ticket] for ticket in it.trained], it.lengths[: GROUPS * STEPS // 2]
    ), "the same tickets"
    assert len(it.generated) > len(it.trained) or not staleness, "more is under way"
    assert alike(
        [it.lengths[ticket] for ticket in it.trained],
        [it.lengths[ticket] for ticket in it.generated],
    )
    it.until(STEPS)
    assert sorted(it.trained) == list(range(GROUPS * STEPS)) and not it.service.state.counts.dropped
    assert (it.trained == sorted(it.trained)) == (staleness == 0), (
        "above, nobody waits for a long one before its time"
    )
    assert alike([it.lengths[ticket] for ticket in it.trained], lengths_of(seed=99, answers=5000))
    assert len(it.generated) == len(it.trained) or deaths


@pytest.mark.parametrize("staleness", range(5))
def test_the_check_fails_for_a_policy_that_trains_what_ends_first(staleness: int) -> None:
    trained, generated = first_come_first_trained(lengths_of(staleness), begun=SLOTS * len(ENGINES))
    assert not alike(trained, generated)
    assert not alike(trained, lengths_of(seed=99, answers=5000))
