"""Who waits is told, with the answer, for whom it was: the role whose output the lowest ticket
lacked at the time."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.base.errors import DeadlineError, RefusedError
from relax_hpc.base.versions import Version
from relax_hpc.queue.client.status import StatusRequests
from relax_hpc.queue.controller.planning.windows import producer_of
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.controller.state.task_queues import WAITING
from relax_hpc.queue.controller.state.ticket_map import TicketMap
from relax_hpc.queue.plan import Plan
from tests.helpers.checked_queue import GROUPS
from tests.helpers.queue_helpers import (
    BUDGET,
    GIVES,
    Roles,
    in_thread,
    learned,
    make_run,
    rows_of,
    small,
)
from tests.helpers.queue_world import World

ORDER = (("actor_fwd", "old_logprobs"), ("reference", "ref_logprobs"), ("advantages", "advantages"))


def test_a_claim_was_for_one_role_after_the_other(tmp_path) -> None:
    config = small()
    run = make_run(tmp_path / "run")
    with in_thread(run, config), Roles(run, config) as roles:
        version, since = roles.start(), time.monotonic()
        work = roles["actor"].submit_claim("actor", BUDGET)
        seen = [waiting(roles, "actor")]
        tickets = roles.generate(version)
        for role, fields in GIVES.items():
            seen.append(waiting(roles, "actor"))
            claim = roles[role].claim(role, BUDGET)
            roles[role].put(learned(rows_of(tickets, version), version), fields, claim)
        claim, passed = work.result(timeout=60), time.monotonic() - since
    peers = ["rollout", *GIVES]
    assert seen == [[f"actor: claim: waits for rows of {peer}"] for peer in peers]
    assert [(peer, why) for peer, why, _ in claim.waited] == [
        (peer, f"rows of {peer}") for peer in peers
    ]
    assert (
        all(seconds > 0 for *_, seconds in claim.waited)
        and sum(s for *_, s in claim.waited) <= passed
    )


def waiting(roles: Roles, who: str) -> list[str]:
    """Asked by ``who`` waits itself: what comes by one connection is seen to in its order."""
    return roles[who].connection.call("status")["waiting"]


def test_what_need_not_wait_was_for_nobody(tmp_path) -> None:
    config = small()
    run = make_run(tmp_path / "run")
    with in_thread(run, config), Roles(run, config) as roles:
        roles.generate(roles.start())
        assert not roles["actor_fwd"].claim("actor_fwd", BUDGET).waited


def test_a_ticket_was_waited_for_in_the_same_way(tmp_path) -> None:
    """All requests that wait for the same are told, whichever was tried."""
    config = small()
    run = make_run(tmp_path / "run")
    with in_thread(run, config), Roles(run, config) as roles:
        version = roles.start()
        assert roles.admit(version) == [0, 1]
        asked = [
            roles["rollout"].connection.submit("admit", reader="rollout/0", count=1)
            for _ in range(2)
        ]
        assert len(waiting(roles, "rollout")) == 2
        newer = Version(1, 1)
        roles["actor"].connection.call("publish", version=str(newer), digest="d")
        roles["rollout"].connection.call("serve", reader="rollout/0", version=str(newer))
        for future in asked:
            ((peer, why, seconds),) = future.result(timeout=60)["waited"]
            assert (peer, why) == ("actor", "tickets: a newer version") and seconds > 0


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 3), st.lists(st.sampled_from(sorted(GROUPS)), max_size=40), st.integers(0, 30)
)
def test_it_is_the_lowest_ticket_that_lacks_something(staleness, roles, dies) -> None:
    it = World(Plan.from_config(small(2, 2, 4, staleness)), 1000)
    for number, role in enumerate(roles):
        if number == dies:
            it.kill(role, True)
        it.act(role, number)
        lowest = it.service.state.tasks["actor"].lowest_waiting()
        assert producer_of(it.service.state, "actor", lowest) == slowly(it.service.state)


def slowly(state: QueueState) -> str:
    """The same, ticket by ticket and field by field."""
    queue = state.tasks["actor"]
    ticket = queue.position
    while queue.statuses[ticket] != WAITING:
        ticket += 1
    group = state.groups.get(ticket)
    fields = {field for _, part in group.parts for field in part} if group else set()
    if "token_ids" not in fields:
        return "rollout"
    return next(role for role, field in ORDER if field not in fields)


@given(st.integers(0, 9), st.lists(st.integers(0, 3), max_size=9), st.integers(0, 25))
def test_the_lowest_unset_ticket(base, values, start) -> None:
    marks = TicketMap(base, bytes(values))
    found = marks.lowest_unset(start)
    assert (
        found >= start and not marks[found] and all(marks[ticket] for ticket in range(start, found))
    )


def test_the_end_of_a_run_is_awaited_longer_than_a_request_may_wait() -> None:
    """The service, the gateway and the judge wait for it for as long as the run takes."""
    asked: list[Future] = []

    def submit(op: str) -> Future:
        assert op == "over"
        asked.append(Future())
        return asked[-1]

    finished = StatusRequests(submit).run_finished()
    for _ in range(3):
        asked[-1].set_exception(DeadlineError("over: nothing came for 600.0 s"))
        assert not finished.done()
    asked[-1].set_result({})
    assert finished.result(0) is None and len(asked) == 4
    failed = StatusRequests(submit).run_finished()
    asked[-1].set_exception(RefusedError("no"))
    with pytest.raises(RefusedError):
        failed.result(0)
