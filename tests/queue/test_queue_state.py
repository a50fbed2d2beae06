"""The queue's rules hold whatever dies in whatever order: the real request handlers under random
faults."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from relax_hpc.base.versions import Version
from relax_hpc.queue.controller.planning.admission import admissible
from relax_hpc.queue.controller.planning.claims import claimable
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.lengths import pack_lengths
from relax_hpc.queue.plan import GENERATED, Plan
from tests.helpers.checked_queue import GROUPS
from tests.helpers.queue_helpers import GIVES, small
from tests.helpers.queue_in_memory import contents, refused_kind
from tests.helpers.queue_world import World
from tests.queue.queue_machine import WorldMachine, searched


class QueueMachine(WorldMachine):
    """Roles act and die in any order; then, without faults, the run must reach its end."""

    @initialize(
        staleness=st.integers(0, 4),
        shape=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
        budget=st.sampled_from([1, 14, 30, 1000]),
        eval_every=st.sampled_from([0, 2]),
        keep=st.integers(0, 2),
        save_every=st.integers(1, 3),
        max_rows=st.sampled_from([1, 3, 4, 9, 1000]),
        max_bytes=st.sampled_from([1, 250, 900, 10**6]),
        slow_disk=st.booleans(),
        settles=st.booleans(),
    )
    def start(
        self,
        staleness,
        shape,
        budget,
        eval_every,
        keep,
        save_every,
        max_rows,
        max_bytes,
        slow_disk,
        settles,
    ):
        groups, minis = shape
        config = small(groups, 2, 4, staleness, eval_every=eval_every, keep_steps=keep)
        plan = replace(Plan.from_config(config), max_rows=max_rows, max_bytes=max_bytes)
        self.world = World(plan, budget, minis, save_every, slow_disk, settles)

    @rule(role=st.sampled_from(sorted(GROUPS)), choice=st.integers(0, 20), times=st.integers(1, 6))
    def act(self, role, choice, times):
        for _ in range(times):
            self.world.act(role, choice)

    @rule(rounds=st.integers(1, 8))
    def all_act(self, rounds):
        for _, role in itertools.product(range(rounds), GROUPS):
            self.world.act(role)

    @rule(role=st.sampled_from(sorted(GROUPS)), noticed=st.booleans())
    def kill(self, role, noticed):
        self.world.kill(role, noticed)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = searched(15, 200)


def world(staleness: int = 0, groups: int = 2, steps: int = 4, **more: int) -> World:
    return World(Plan.from_config(small(groups, 2, steps, staleness, **more)), 1000)


def until_trained(it: World, steps: int) -> None:
    for _ in range(300):
        if it.service.state.progress.trained_steps == steps:
            return
        for role in GROUPS:
            if role != "actor" or it.service.state.progress.trained_steps < steps:
                it.act(role)
    raise AssertionError("does not get there")


@pytest.mark.parametrize("seed", range(12))
def test_long_random_runs_finish(seed):
    chance = random.Random(seed)
    config = small(
        chance.choice([1, 2, 4]),
        2,
        6,
        seed % 4,
        eval_every=chance.choice([0, 3]),
        keep_steps=seed % 3,
    )
    bounds = {"max_rows": chance.choice([2, 7, 1000]), "max_bytes": chance.choice([1, 700, 10**6])}
    plan = replace(Plan.from_config(config), **bounds)
    slow_disk, settles = chance.random() < 0.5, chance.random() < 0.5
    it = World(plan, chance.choice([1, 20, 1000]), 1, chance.choice([1, 2]), slow_disk, settles)
    for _ in range(400):
        role = chance.choice(sorted(GROUPS))
        if chance.random() < 0.03:
            it.kill(role, chance.random() < 0.5)
            it.older = chance.choice([0, 0, 1, 2])
        it.act(role, chance.randrange(20))
    it.go_to_the_end()


def test_resume_twice_to_ever_older_steps():
    it = world(staleness=2, steps=5)
    until_trained(it, 4)
    for older in (1, 2):
        it.kill("actor", True)
        it.older = older
        it.act("actor")
        step = it.step
        assert not it.alive(Version(1, step + 1)) and it.alive(
            Version(it.incarnations["actor"], step)
        )
        assert admissible(it.service.state, Version(1, 4), 9) == []
    assert it.service.state.counts.dropped["rolled_back"] > 0
    it.go_to_the_end()


def test_resume_behind_retired_rows_generates_them_again():
    it = world(steps=5, keep_steps=0)
    until_trained(it, 4)
    it.act("actor")
    assert all(ticket >= 6 for ticket in it.service.state.groups)
    it.kill("actor", True)
    it.older = 9
    it.go_to_the_end()
    assert it.service.state.counts.dropped["retired"] >= 12


def test_scores_of_rolled_back_weights_are_made_again():
    """Rows made by version 0 survive a resume at 0, but not the log-probs that version 1 gave
    them."""
    it = world(staleness=2, steps=3)
    it.act("actor")
    it.swap(0)
    for _ in range(6):
        it.admit(0)
        it.finish(0)
    it.budget = 1
    for _, role in itertools.product(range(60), GROUPS):
        state = it.service.state
        scored = sum(group.old_version > 0 for group in state.groups.values())
        if role != "rollout" and (
            role != "actor_fwd" or scored < 2 * state.progress.trained_steps + 2
        ):
            it.act(role, 1)
    assert it.service.state.progress.trained_steps == 3
    scored = {group.old_version for group in it.service.state.groups.values()}
    assert len(scored) > 1
    it.kill("actor", True)
    it.older = 9
    it.act("actor")
    for group in it.service.state.groups.values():
        assert group.old_version in (0, Version(1, 0).encode())
        assert group.has(it.service.state.scored) == bool(group.old_version)
    it.go_to_the_end()


def test_scores_that_come_in_late_from_rolled_back_weights_are_refused():
    it = world(staleness=2, steps=3)
    until_trained(it, 1)
    for role, choice in itertools.product(["rollout", "actor_fwd"] * 4, range(4)):
        if role == "rollout" or it.scored is None or it.scoring.number < 1:
            it.act(role, choice)
    assert it.scored and it.scoring.number == 1
    claim = it.scored
    it.kill("actor", True)
    it.older = 9
    it.act("actor")
    rows = {
        t: {"made_by": [Version(1, 1).encode()], "episodes": it.declared[t]}
        for t in claim["tickets"]
    }
    refused = it.put("actor_fwd", rows, GIVES["actor_fwd"], claim["lease"])
    assert set(refused) == set(claim["tickets"]) and set(refused.values()) <= {
        "rolled_back",
        "lease_lost",
    }
    assert claim["lease"] not in it.service.state.leases
    it.scored = None
    it.go_to_the_end()


def lengths_of(ticket: int) -> list[int]:
    """Of an episode of one row, and of one of 1 to 3."""
    return [3 + (5 * ticket) % 7, *(1 + (ticket + row) % 3 for row in range(1 + ticket % 3))]


def generated(plan: Plan, order: list[int], budget: int, boundary: int) -> list[tuple[int, ...]]:
    """Windows of the reference when prompt groups of various lengths arrive in ``order``."""
    state, windows = QueueState(plan), []
    state.apply({"op": "resume", "task": "actor", "incarnation": 1, "step": 0})
    tickets = sorted(order)
    state.apply(
        {
            "op": "admit",
            "owner": ["rollout", 1],
            "key": "k",
            "tickets": tickets,
            "version": "i000001-v000000",
        }
    )
    for ticket in order:
        row = [
            ticket,
            pack_lengths(lengths_of(ticket)),
            [Version(1, 0).encode()],
            bytes([1, 1 + ticket % 3]),
        ]
        put = {
            "key": f"p{ticket}",
            "shard": {"name": f"s{ticket}"},
            "rows": [row],
            "refused": {},
            "lease": 0,
        }
        put |= {"owner": ["rollout", 1], "saved": True}
        state.apply({"op": "put", "fields": list(GENERATED), **put})
        windows += claim_all(state, budget, boundary)
    state.apply({"op": "down", "group": "reference", "incarnation": 1})
    assert claim_all(state, budget, boundary) == windows, (
        "windows of a dead owner come back as they were"
    )
    return windows


def claim_all(state: QueueState, budget: int, boundary: int) -> list[tuple[int, ...]]:
    windows = []
    while window := claimable(state, "reference", budget, boundary):
        windows.append(window)
        claim = {
            "task": "reference",
            "owner": ["reference", 1],
            "key": f"c{state.leases.next}",
            "assignment": [],
        }
        state.apply({"op": "claim", "number": state.leases.next, "tickets": list(window), **claim})
    return windows


@pytest.mark.parametrize("boundary", [2, 4, 8])
@pytest.mark.parametrize("budget", [1, 30, 55, 1000])
def test_windows_in_order_do_not_depend_on_arrival(budget, boundary):
    plan = Plan.from_config(small(8, 2, 1))
    expected = generated(plan, list(range(8)), budget, boundary)
    assert [ticket for window in expected for ticket in window] == list(range(8))
    for seed in range(8):
        order = random.Random(seed).sample(range(8), 8)
        assert generated(plan, order, budget, boundary) == expected
    for window in expected:
        assert window[0] // boundary == window[-1] // boundary
        rows = [tokens for ticket in window for tokens in lengths_of(ticket)]
        assert len(window) == 1 or sum(rows) <= budget


def test_a_window_that_is_full_waits_for_no_other_group():
    plan = Plan.from_config(small(8, 2, 1))
    rows = lengths_of(0)
    least = sum(rows) + 1
    assert generated(plan, [0], least, 8) == [(0,)], "any other one has two rows at least"
    assert generated(plan, [0], least + 1, 8) == []


def test_an_older_incarnation_can_change_nothing():
    it = world()
    until_trained(it, 1)
    it.kill("actor", False)
    it.act("actor")
    before = contents(it.service.replayed())
    requests = {
        "put": {"shard": {"name": "s"}, "rows": [], "fields": ["ref_logprobs"], "lease": 1},
        "claim": {"task": "actor", "budget": 9, "boundary": 2},
        "release": {"lease": 1},
        "publish": {"version": "i000001-v000002", "digest": "d"},
        "trained": {"step": 1, "leases": []},
        "checkpoint": {"step": 1, "name": "n", "digest": "d"},
        "resume": {"step": 1},
    }
    for op, args in requests.items():
        assert refused_kind(it.service, "actor", 1, f"z-{op}", op, **args) == "fenced", op
    assert contents(it.service.state) == before


def test_whoever_was_seen_to_end_is_fenced_before_its_successor_comes():
    it = world()
    it.act("actor")
    it.act("rollout")
    it.kill("rollout", True)
    assert (
        refused_kind(
            it.service, "rollout", 1, "late", "serve", reader="rollout", version="i000001-v000000"
        )
        == "fenced"
    )
    assert it.service.state.weights.readers == {}
    it.go_to_the_end()


def test_a_step_is_trained_on_exactly_its_tickets():
    it = world()
    for _, role in itertools.product(range(40), GROUPS):
        if role != "actor" or len(it.held) < 2:
            it.act(role)
    for step, leases in ((0, []), (1, it.leases), (0, [99])):
        assert (
            refused_kind(
                it.service, "actor", 1, f"t{step}{leases}", "trained", step=step, leases=leases
            )
            == "refused"
        )
    it.go_to_the_end()


def test_incomplete_prompt_groups_are_dropped_and_offered_again():
    it = world()
    it.act("actor")
    it.swap(0)
    it.admit(0)
    row = {
        "ticket": 0,
        "episodes": b"\1",
        "lengths": pack_lengths([5]),
        "versions": [Version(1, 0).encode()],
    }
    put = {"shard": {"name": "half"}, "rows": [row], "fields": list(GENERATED)}
    assert it.service.ask("rollout", 1, "half", "put", **put) == {"refused": {0: "incomplete"}}
    assert it.service.state.counts.dropped == {"incomplete": 2}
    it.service.state.shards.garbage.clear()
    it.flight.clear()
    it.go_to_the_end()


def test_a_put_asked_again_keeps_its_shard():
    it = world()
    it.act("actor")
    it.swap(0)
    it.admit(1)
    it.finish(0)
    assert it.service.state.shards.garbage == [] and len(it.service.state.shards.by_number) == 1


def test_the_shards_of_a_claim_stay_until_it_is_given_back():
    """The actor resumes between the reference's claim and its reading: the rows are dropped, their
    files are not."""
    it = world(staleness=1)
    until_trained(it, 1)
    for role, choice in itertools.product(["rollout", "reference"] * 4, range(4)):
        if role == "rollout" or it.reference is None or it.reference["step"] == 1:
            it.act(role, choice)
    claim = it.reference = it.reference or it.claim("reference")
    it.kill("actor", True)
    it.older = 9
    it.act("actor")
    lease = it.service.state.leases[claim["lease"]]
    assert len(lease.tickets) < len(claim["tickets"])
    assert set(it.rows(claim)) == set(claim["tickets"])
    names = {shard["name"] for shard in claim["shards"]}
    assert not names & set(it.service.state.shards.garbage)
    it.ask("reference", "release", lease=claim["lease"])
    assert names & set(it.service.state.shards.garbage)
    it.reference = None
    it.go_to_the_end()


def test_a_claim_asked_again_after_its_rows_were_dropped_waits_for_others():
    it = world()
    until_trained(it, 1)
    for _ in range(8):
        it.act("rollout")
    window = {"task": "reference", "budget": 1000, "boundary": 2}
    claim = it.service.ask("reference", 1, "same", "claim", **window)
    assert claim["tickets"] == [2, 3]
    it.kill("actor", True)
    it.older = 9
    it.act("actor")
    assert it.service.ask("reference", 1, "same", "claim", **window) is None
    assert not it.service.state.leases
    it.go_to_the_end()
