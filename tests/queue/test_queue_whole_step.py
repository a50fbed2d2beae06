"""Windows of algorithms that look at whole steps: when they come, and what of a step comes
again."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from relax_hpc.algorithms import ReinforcePP
from relax_hpc.base.versions import Version
from relax_hpc.queue.lengths import pack_lengths
from relax_hpc.queue.plan import GENERATED, Plan
from tests.helpers.queue_helpers import small
from tests.helpers.queue_in_memory import InMemory, contents

VERSION = Version(1, 0)


class Queue:
    """Steps of three tickets of two samples, at staleness 1, and who asks for what."""

    def __init__(self) -> None:
        config = small(3, 2, steps=2, staleness=1)
        config.algorithm = ReinforcePP()
        del config.groups["actor_fwd"], config.groups["reference"]
        self.service, self.keys, self.shards = InMemory(Plan.from_config(config)), count(), count()
        self.ask("actor", "resume", step=0)
        self.ask("actor", "publish", version=str(VERSION), digest="d")
        self.ask("rollout", "serve", reader="r", version=str(VERSION))

    def ask(self, group: str, op: str, **args: Any) -> Any:
        return self.service.ask(group, 1, f"k{next(self.keys)}", op, **args)

    def admit(self, number: int) -> list[int]:
        return list(self.ask("rollout", "admit", reader="r", count=number)["tickets"])

    def put(
        self, group: str, tickets: list[int], fields: tuple[str, ...], lease: int = 0
    ) -> dict[int, str]:
        versions = [] if lease else [VERSION.encode()]
        lengths = b"" if lease else pack_lengths([4, 5])
        rows = [
            {"ticket": t, "episodes": b"\1\1", "lengths": lengths, "versions": versions}
            for t in tickets
        ]
        shard = {"name": f"s{next(self.shards)}"}
        return self.ask(group, "put", shard=shard, rows=rows, fields=list(fields), lease=lease)[
            "refused"
        ]

    def generate(self, *tickets: int) -> None:
        assert self.put("rollout", list(tickets), GENERATED) == {}

    def claim(self, task: str = "advantages", group: str = "hub", budget: int = 1 << 40) -> Any:
        return self.ask(group, "claim", task=task, budget=budget, boundary=3)

    def score(self, claim: dict[str, Any]) -> None:
        lacking = [ticket for ticket in claim["tickets"] if ticket not in claim["given"]]
        assert self.put("hub", lacking, ("advantages",), claim["lease"]) == {}


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_a_whole_step_comes_once_all_of_it_is_there(queue: Queue) -> None:
    queue.admit(6)
    for tickets in ((4,), (0, 2), (3, 5)):
        queue.generate(*tickets)
        assert queue.claim() is None, "step 0 lacks ticket 1"
    queue.generate(1)
    first = queue.claim()
    assert (first["tickets"], first["given"], first["step"]) == ([0, 1, 2], [], 0)
    second = queue.claim()
    assert (second["tickets"], second["step"]) == ([3, 4, 5], 1)
    queue.score(first)
    queue.score(second)
    assert queue.claim() is None


def test_a_ticket_that_is_made_again_brings_the_others_to_be_seen(queue: Queue) -> None:
    """Nothing that has its advantages gets others: the actor may hold it."""
    queue.admit(3)
    queue.generate(0, 1, 2)
    queue.score(queue.claim())
    actor = queue.claim("actor", "actor")
    queue.ask("actor", "quarantine", lease=actor["lease"], tickets=[1], reason="damaged_shard")
    assert queue.claim() is None and queue.admit(1) == [1]
    queue.generate(1)
    again = queue.claim()
    assert (again["tickets"], again["given"]) == ([0, 1, 2], [0, 2])
    assert {ticket for shard in again["shards"] for ticket in shard["tickets"]} == {0, 1, 2}
    # Given back, it comes as it was; the others stay done.
    queue.ask("hub", "release", lease=again["lease"])
    again = queue.claim()
    assert (again["tickets"], again["given"]) == ([0, 1, 2], [0, 2])
    queue.score(again)
    assert queue.claim() is None
    queue.ask("actor", "release", lease=actor["lease"])
    assert [queue.claim("actor", "actor")["tickets"] for _ in range(2)] == [[0, 2], [1]]
    assert contents(queue.service.replayed()) == contents(queue.service.state)


def test_a_ticket_that_is_lost_while_its_step_is_looked_at(queue: Queue) -> None:
    queue.admit(3)
    queue.generate(0, 1, 2)
    claim = queue.claim()
    queue.ask("hub", "quarantine", lease=claim["lease"], tickets=[2], reason="damaged_shard")
    refused = queue.put("hub", [0, 1, 2], ("advantages",), claim["lease"])
    assert set(refused) == {2}
    assert queue.claim() is None and queue.admit(1) == [2]
    queue.generate(2)
    again = queue.claim()
    assert (again["tickets"], again["given"]) == ([0, 1, 2], [0, 1])
