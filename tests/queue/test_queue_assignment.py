"""Who trains which rows is decided once, journaled, and the same for everybody who asks, whatever
ends in between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.versions import Version
from relax_hpc.config.schema import GroupConfig
from relax_hpc.queue.controller.handlers import claims
from relax_hpc.queue.controller.planning.claims import assign_rows
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.lengths import is_packed, pack_lengths, unpack_lengths
from relax_hpc.queue.plan import GENERATED, Plan
from relax_hpc.queue.samplers import GroupSize, assign_groups, schedule
from tests.helpers.queue_helpers import BUDGET, Roles, in_thread, make_run, rows_of, small
from tests.helpers.queue_in_memory import InMemory, contents, refused_kind

V0 = Version(1, 0)
LENGTHS = {0: [40, 7], 1: [9, 9], 2: [300, 2], 3: [70_000, 5]}
MEDIA = [9, 9, 9]
"""Tokens that stand for media in each row of ticket 1, and in both: it is the same medium."""
DEALT = {"ranks": 2, "max_tokens": 64, "batch": 1}
WINDOW = {"task": "actor", "budget": BUDGET, "boundary": 4, **DEALT}


def service_with(tickets: list[int], saved: bool = True) -> InMemory:
    """A service whose actor needs nothing but generated rows; ``tickets`` came in this order, each
    in its shard."""
    config = small(4, 2)
    config.groups = {name: GroupConfig(roles=[name]) for name in ("rollout", "actor")}
    service = InMemory(Plan.from_config(config))
    service.ask("actor", 1, "resume", "resume", step=0)
    service.ask("actor", 1, "publish", "publish", version=str(V0), digest="d")
    service.ask("rollout", 1, "serve", "serve", reader="r", version=str(V0))
    service.ask("rollout", 1, "admit", "admit", reader="r", count=4)
    for ticket in tickets:
        row = {
            "ticket": ticket,
            "episodes": b"\1\1",
            "lengths": pack_lengths(LENGTHS[ticket]),
            "versions": [V0.encode()],
        }
        put = {
            "shard": {"name": f"s{ticket}"},
            "rows": [row],
            "fields": list(GENERATED),
            "saved": saved,
        }
        assert service.ask("rollout", 1, f"put{ticket}", "put", **put) == {"refused": {}}
    return service


def expected() -> list[list[list[int]]]:
    sizes = [tokens for ticket in range(4) for tokens in LENGTHS[ticket]]
    return schedule(dict(enumerate(sizes)), 2, 64, batch=1)


@given(sizes=st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 70_000), min_size=1, max_size=9))
def test_lengths_come_back_as_they_were_packed(sizes):
    data = pack_lengths(sizes)
    assert unpack_lengths(data, len(sizes)) == tuple(sizes)
    assert len(data) == (2 if max(sizes) < 65536 else 4) * len(sizes)
    assert is_packed(data, len(sizes)) and not is_packed(data + b"x", len(sizes))


@given(
    lengths=st.lists(st.lists(st.integers(1, 90), min_size=2, max_size=2), min_size=2, max_size=9),
    ranks=st.integers(1, 3),
)
def test_what_is_compared_is_in_one_micro_batch_in_its_order(lengths, ranks):
    groups = {
        ticket: SimpleNamespace(size=GroupSize(rows, [0, 0], 0))
        for ticket, rows in enumerate(lengths)
    }
    state = SimpleNamespace(groups=groups, plan=SimpleNamespace(compares=True))
    found = assign_rows(state, range(len(lengths)), ranks, 64, batch=1)
    rows = [row for rank in found for part in rank for row in part]
    assert sorted(rows) == list(range(2 * len(lengths)))
    for part in (part for rank in found for part in rank):
        assert [row % 2 for row in part] == [0, 1] * (len(part) // 2) and part[::2] == [
            row - 1 for row in part[1::2]
        ]
        assert sum(lengths[row // 2][row % 2] for row in part) <= 64 or len(part) == 2
    assert len({len(rank) for rank in found}) == 1


@pytest.mark.parametrize("arrival", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_an_assignment_is_that_of_the_samplers_whatever_came_first(arrival):
    claim = service_with(arrival).ask("actor", 1, "c", "claim", **WINDOW)
    assert claim["tickets"] == [0, 1, 2, 3] and claim["assignment"] == expected()


def after_journal(service: InMemory) -> QueueState:
    return service.replayed()


def after_snapshot(service: InMemory) -> QueueState:
    image = msgpack.unpackb(msgpack.packb(service.state.dump()), strict_map_key=False)
    return QueueState.load(service.plan, image)


@pytest.mark.parametrize("restarted", [after_journal, after_snapshot])
def test_who_asks_again_after_a_restart_gets_the_same_rows(restarted, monkeypatch):
    service = service_with([0, 1, 2, 3])
    claim = service.ask("actor", 1, "c", "claim", **WINDOW)
    service.state = restarted(service)
    monkeypatch.setattr(claims, "assign_rows", lambda *_: pytest.fail("decided twice"))
    assert service.ask("actor", 1, "c", "claim", **WINDOW) == claim
    assert contents(service.replayed()) == contents(service.state)


@pytest.mark.parametrize("restarted", [after_journal, after_snapshot])
def test_media_of_rows_count_twice_and_may_be_bounded(restarted):
    service, named = service_with([]), ["a" * 64]
    service.ask("rollout", 1, "m", "media", ticket=1, ids=named)
    for ticket, about in LENGTHS.items():
        row = {
            "ticket": ticket,
            "episodes": b"\1\1",
            "lengths": pack_lengths(about),
            "versions": [V0.encode()],
        }
        put = {"shard": {"name": f"s{ticket}"}, "rows": [row], "fields": list(GENERATED)}
        extras = (
            [{"ticket": 1, "media": named, "tokens": pack_lengths(MEDIA)}] if ticket == 1 else []
        )
        assert service.ask("rollout", 1, f"put{ticket}", "put", **put, extras=extras) == {
            "refused": {}
        }
    service.state = restarted(service)
    claim = service.ask("actor", 1, "c", "claim", **WINDOW, max_media=8)
    sizes = [
        GroupSize(rows, [9, 9] if ticket == 1 else [0, 0], 9 * (ticket == 1))
        for ticket, rows in LENGTHS.items()
    ]
    assert claim["assignment"] == assign_groups(sizes, 2, 64, 8, batch=1) != expected()
    assert refused_kind(service, "actor", 1, "d", "claim", **WINDOW, max_media=-1) == "refused"


@pytest.mark.parametrize("restarted", [after_journal, after_snapshot])
def test_a_window_that_is_given_back_is_dealt_as_before(restarted):
    service = service_with([0, 1, 2, 3])
    claim = service.ask("actor", 1, "c", "claim", **WINDOW)
    service.ask("supervisor", 1, "d", "down", group="actor", incarnation=1)
    service.state = restarted(service)
    again = service.ask("actor", 2, "c", "claim", **WINDOW)
    assert again == {**claim, "lease": claim["lease"] + 1}


@pytest.mark.parametrize("restarted", [after_journal, after_snapshot])
def test_a_window_that_shrinks_keeps_every_other_row_with_its_rank(restarted):
    """The maker of all rows but those of ticket 1 dies before they are on disk."""
    service = service_with([0, 1, 2, 3], saved=False)
    claim = service.ask("actor", 1, "c", "claim", **WINDOW)
    service.ask("rollout", 1, "saved", "saved", names=["s1"])
    service.ask("supervisor", 1, "d", "down", group="rollout", incarnation=1)
    service.state = restarted(service)
    left = service.ask("actor", 1, "c", "claim", **WINDOW)
    assert left["tickets"] == [1] and left["lease"] == claim["lease"]
    kept = [
        [row - 2 for part in rank for row in part if row in (2, 3)] for rank in claim["assignment"]
    ]
    assert [[row for part in rank for row in part] for rank in left["assignment"]] == kept
    assert len({len(rank) for rank in left["assignment"]}) == 1


@pytest.mark.parametrize("restarted", [after_journal, after_snapshot])
def test_windows_come_in_order_however_they_were_given_back(restarted):
    service = service_with([0, 1, 2, 3])
    window = {**WINDOW, "budget": 1}
    leases = [
        service.ask("actor", 1, f"c{number}", "claim", **window)["lease"] for number in range(3)
    ]
    for lease in (leases[1], leases[2], leases[0]):
        service.ask("actor", 1, f"r{lease}", "release", lease=lease)
    service.state = restarted(service)
    again = [
        service.ask("actor", 1, f"again{number}", "claim", **window)["tickets"]
        for number in range(4)
    ]
    assert again == [[0], [1], [2], [3]]


@pytest.mark.parametrize("restarted", [after_journal, after_snapshot])
def test_a_window_behind_the_boundary_waits_for_those_before_it(restarted):
    """It was claimed ahead, and both are given back; the rows of the first one were lost with their
    maker."""
    service = service_with([0, 1, 2, 3], saved=False)
    window = {**WINDOW, "boundary": 2}
    leases = [service.ask("actor", 1, key, "claim", **window)["lease"] for key in ("c1", "c2")]
    service.ask("rollout", 1, "saved", "saved", names=["s2", "s3"])
    service.ask("supervisor", 1, "d", "down", group="rollout", incarnation=1)
    for lease in leases:
        service.ask("actor", 1, f"r{lease}", "release", lease=lease)
    service.state = restarted(service)
    assert service.ask("actor", 1, "c3", "claim", **window) is None, "it waits"


@pytest.mark.parametrize(
    "assignment", [{"ranks": -1}, {"ranks": 2}, {"ranks": 10**9, "max_tokens": 1}, {"ranks": "2"}]
)
def test_an_impossible_deal_is_refused(assignment: dict[str, Any]):
    window = {"task": "actor", "budget": BUDGET, "boundary": 4}
    assert (
        refused_kind(service_with([0]), "actor", 1, "c", "claim", **window, **assignment)
        == "refused"
    )


@pytest.mark.parametrize("lengths", [b"", b"\5\0", b"\5\0\5\0x", [5, 5], 5, None, "\5\0\5\0"])
def test_lengths_that_are_not_those_of_the_samples_are_refused(lengths):
    service = service_with([0])
    row = {"ticket": 1, "episodes": b"\1\1", "lengths": lengths, "versions": [V0.encode()]}
    put = {"shard": {"name": "s"}, "rows": [row], "fields": list(GENERATED)}
    assert refused_kind(service, "rollout", 1, "p", "put", **put) == "refused"


def test_a_client_gets_the_rows_that_it_was_assigned(tmp_path):
    """Through sockets, with a new controller between the claim and the same claim of another
    actor."""
    run, config = make_run(tmp_path / "run"), small()
    with Roles(run, config) as roles:
        with in_thread(run, config):
            version = roles.start()
            tickets = roles.admit(version)
            rows = [
                row
                for n, ticket in enumerate(tickets)
                for row in rows_of([ticket], version, length=9 - 4 * n)
            ]
            assert roles["rollout"].put_generated(rows[::-1]) == {}
            roles["rollout"].settle()
            roles.learn(version)
            claim = roles["actor"].claim("actor", BUDGET, ranks=2, max_tokens=10)
            read = roles["actor"].rows(claim)
        assert [len(row["token_ids"]) for row in read] == [9, 9, 5, 5]
        assert sorted(
            len(read[row]["token_ids"]) for part in claim.assignment[0] for row in part
        ) == [5, 9]
        with in_thread(run, config), Roles(run, config, incarnation=2) as successors:
            again = successors["actor"].claim("actor", BUDGET, ranks=2, max_tokens=10)
            assert (again.tickets, again.assignment) == (claim.tickets, claim.assignment)
