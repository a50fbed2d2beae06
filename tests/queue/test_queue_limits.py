"""Bounds of what the queue holds: whatever they are, a run goes on, and who waits for them is seen
to."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.base.versions import Version
from relax_hpc.queue.controller.planning.admission import format_amounts
from relax_hpc.queue.plan import Plan
from tests.effort import effort
from tests.helpers.checked_queue import BYTES, GROUPS
from tests.helpers.queue_helpers import GIVES, Roles, in_thread, learned, make_run, rows_of, small
from tests.helpers.queue_world import World


@settings(max_examples=effort(10, 100), deadline=None)
@given(
    max_rows=st.integers(1, 24),
    max_bytes=st.integers(1, 12 * BYTES),
    staleness=st.integers(0, 4),
    groups=st.integers(1, 3),
    save_every=st.integers(1, 4),
    deaths=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(sorted(GROUPS))), max_size=3),
)
def test_a_run_ends_whatever_the_bounds(max_rows, max_bytes, staleness, groups, save_every, deaths):
    plan = replace(
        Plan.from_config(small(groups, 2, 4, staleness)), max_rows=max_rows, max_bytes=max_bytes
    )
    it = World(plan, 1000, 1, save_every)
    for number in range(60):
        for role in GROUPS:
            if (number, role) in deaths:
                it.kill(role, True)
            it.act(role, number)
    it.go_to_the_end()


@pytest.mark.parametrize(("attempt", "rows", "first", "then"), [(0, 2, 4, 6), (1, 3, 3, 5)])
def test_rows_wait_for_room_and_take_it_when_a_step_was_trained(attempt, rows, first, then):
    """Of a prompt group in generation those are counted that it has at least."""
    plan = replace(Plan.from_config(small(2, 2, 6, 4)), max_rows=8)
    it = World(plan, 1000)
    it.shapes = itertools.repeat(attempt)
    for _ in range(60):
        it.act("actor", 0) if it.step < 0 else it.act("rollout", 2)
    assert it.service.state.tickets.next == first and set(map(sum, it.declared.values())) == {rows}
    while it.service.state.progress.trained_steps < 1:
        for role in ("actor_fwd", "reference", "advantages", "actor"):
            it.act(role, 0)
    for _ in range(9):
        it.act("rollout", 2)
    assert it.service.state.tickets.next == then
    it.go_to_the_end()


def test_bytes_count_while_their_rows_wait_for_training():
    it = World(Plan.from_config(small(2, 2, 3, 1, keep_steps=2)), 1000)
    held = []
    for number in range(300):
        for role in GROUPS:
            it.act(role, number)
        state = it.service.state
        lie = {
            n for ticket in state.tickets.untrained for n, _ in state.groups[ticket].parts
        } | state.segments.shards().keys()
        assert state.shards.untrained_bytes == sum(state.shards[n].bytes for n in lie)
        held.append(state.shards.untrained_bytes)
    assert max(held) > 0 and held[-1] == 0 and it.service.state.shards, (
        "trained rows are kept, and are no burden"
    )


@pytest.mark.parametrize(
    ("held", "allowed", "text"),
    [
        (10, 999, "10.0 of 999.0 bytes"),
        (512, 1024, "0.5 of 1.0 KiB"),
        (4 << 30, 4 << 30, "4.0 of 4.0 GiB"),
    ],
)
def test_amounts_are_told_in_the_unit_of_the_bound(held, allowed, text):
    assert format_amounts(held, allowed) == text


def test_status_says_why_nothing_is_generated(tmp_path):
    run, config = make_run(tmp_path / "run"), small(staleness=1, steps=9)
    config.queue.max_bytes = 1 << 10
    with in_thread(run, config) as hub, Roles(run, config) as roles:
        early = roles["rollout"].connection.submit("admit", reader="rollout/0", count=2)
        assert roles.waits("rollout: admit: serves no version of this lineage yet")
        version = roles.start()
        roles["rollout"].connection.call("serve", reader="rollout/0", version=str(version))
        tickets = early.result(timeout=60)["tickets"]
        roles["rollout"].put_generated(rows_of(tickets, version))
        assert hub.state.shards.untrained_bytes >= 1 << 10
        full = roles["rollout"].connection.submit("admit", reader="rollout/0", count=2)
        assert roles.waits(
            f"rollout: admit: the queue holds {format_amounts(hub.state.shards.untrained_bytes, 1 << 10)}"
        )
        roles.learn(version)
        roles.train(0)
        assert full.result(timeout=60)["tickets"] == [2, 3], (
            "there is room, and version 0 may begin step 1"
        )
        stale = roles["rollout"].connection.submit("admit", reader="rollout/0", count=2)
        roles["rollout"].put_generated(rows_of([2, 3], version))
        assert roles.waits("rollout: admit: waits for version 1, newest is 1")
        roles["rollout"].connection.call("serve", reader="rollout/0", version=str(Version(1, 1)))
        assert roles.waits("rollout: admit: the queue holds")
        for role, fields in GIVES.items():
            claim = roles[role].claim(role, 1 << 20)
            roles[role].put(learned(roles[role].rows(claim), version), fields, claim)
        roles.train(1)
        assert stale.result(timeout=60)["tickets"] == [4, 5]
