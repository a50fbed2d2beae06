"""Collections by ticket, remembered answers, events and waiting requests, each against the plainest
thing alike."""

from __future__ import annotations

import ast
import json
import re
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc import queue
from relax_hpc.queue.controller.messages import Request
from relax_hpc.queue.controller.registry import APPLIERS, HANDLERS, Registry
from relax_hpc.queue.controller.state.events import EventBatch, expand, to_lines
from relax_hpc.queue.controller.state.reply_cache import REMEMBERED, ReplyCache
from relax_hpc.queue.controller.state.ticket_map import AgedTickets, TicketMap, TicketSet
from relax_hpc.queue.controller.topics import ALL
from relax_hpc.queue.controller.waiting import WaitingRequests
from relax_hpc.queue.records import Event

PACKAGE = Path(queue.__file__).parent
tickets = st.integers(0, 40)
runs = st.tuples(tickets, st.integers(0, 8)).map(lambda run: list(range(run[0], run[0] + run[1])))
several = runs | st.lists(tickets, max_size=8, unique=True)
marks = st.integers(0, 3)
changes = st.lists(
    st.tuples(st.just("set"), tickets, marks)
    | st.tuples(st.just("change"), several, st.tuples(marks, marks))
    | st.tuples(st.just("forget"), tickets, st.none()),
    max_size=20,
)


@given(changes=changes, value=st.integers(1, 3), start=tickets, length=st.none() | tickets)
def test_a_ticket_map_is_a_dictionary_with_zeros(changes, value, start, length):
    found, model = TicketMap(), {}
    for what, at, mark in changes:
        if what == "set":
            found[at] = model[at] = mark
        elif what == "change":
            found.change(at, *mark)
            model.update({ticket: mark[1] for ticket in at if model.get(ticket, 0) == mark[0]})
        else:
            found.forget(at)
            model = {ticket: mark for ticket, mark in model.items() if ticket >= at}
    assert [found[ticket] for ticket in range(60)] == [model.get(ticket, 0) for ticket in range(60)]
    end = None if length is None else start + length
    there = [
        t for t, mark in model.items() if mark == value and t >= start and (end is None or t < end)
    ]
    assert found.find(value, start, end) == min(there, default=-1)
    assert TicketMap(*found.dump()) == found and found[found.end] == 0


@given(
    changes=st.lists(st.tuples(st.booleans(), tickets), max_size=30),
    count=st.integers(0, 9),
    end=tickets,
)
def test_a_ticket_set_gives_the_lowest_first(changes, count, end):
    found, model = TicketSet(), set()
    for add, ticket in changes:
        (found.add if add else found.discard)(ticket)
        (model.add if add else model.discard)(ticket)
        assert len(found) == len(model) and (ticket in found) == add
    assert list(found) == sorted(model) and found == TicketSet(model)
    assert found.lowest(count, end) == [ticket for ticket in sorted(model) if ticket < end][:count]


def test_the_first_at_a_place_is_there_longest():
    place = AgedTickets([5])
    since = time.monotonic()
    place.add([3, 4])
    assert list(place) == [5, 3, 4] and place.oldest_s() >= 0.0
    place.discard([5, 9])
    assert list(place) == [3, 4] and place.oldest_s() <= time.monotonic() - since
    assert place == AgedTickets([4, 3]) and AgedTickets().oldest_s() == 0.0


texts = st.text(max_size=6)


@given(
    episodes=st.lists(st.integers(1, 3), max_size=3).map(bytes),
    numbers=several,
    words=st.tuples(texts, texts, texts),
    note=st.builds(Event, texts, texts, st.integers(0, 9), texts, texts),
)
def test_lines_of_events_are_json(episodes, numbers, words, note):
    told = [EventBatch(words[0], numbers, episodes, 4, *words[1:]), note]
    events = list(expand(told))
    assert [json.loads(line) for line in to_lines(told).decode().splitlines()] == [
        asdict(event) for event in events
    ]
    assert len(events) == len(numbers) * max(1, sum(episodes)) + 1


def test_a_busy_client_does_not_push_out_the_answers_of_another():
    answers = ReplyCache()
    answers.remember("slow#1", ("rollout", 1), "first")
    for number in range(3 * REMEMBERED):
        answers.remember(f"busy#{number}", ("rollout-2", 1), number)
    assert answers.recall("slow#1") == "first" and answers.recall("busy#1") is None
    assert answers.recall(f"busy#{3 * REMEMBERED - 1}") == 3 * REMEMBERED - 1
    answers.forget("rollout-2", 2)
    assert list(answers.clients) == ["slow"]


def request(
    topic: str, number: int, deadline: float = 1e12, common: bool = False, **args: int
) -> Request:
    made = Request(0, number, f"c#{number}", ("g", number), "claim", args, 0.0, deadline)
    made.topic, made.common = topic, common
    return made


def waiting_for(*requests: Request) -> WaitingRequests:
    waiting = WaitingRequests()
    for one in requests:
        waiting.add(one)
    return waiting


def test_only_what_waits_for_it_is_woken_first_come_first_served():
    waiting, tried = (
        waiting_for(
            *(request("rows", number, budget=number) for number in (2, 1, 3)), request("other", 4)
        ),
        [],
    )
    waiting.wake({"rows"}, lambda one: tried.append(one.id) or one.id != 1)
    assert tried == [2, 1, 3] and sorted(one.id for one in waiting) == [1, 4]
    waiting.wake({ALL}, lambda one: True)
    assert list(waiting) == []


def test_what_cannot_succeed_is_not_tried_again():
    alike = [request("rows", number, budget=7) for number in (1, 2)]
    tried = []
    waiting_for(*alike, request("rows", 3, budget=8)).wake(
        {"rows"}, lambda one: tried.append(one.id)
    )
    assert tried == [1, 3]
    tried.clear()
    every = [request("rows", number, common=True, budget=number) for number in (1, 2)]
    waiting_for(*every).wake({"rows"}, lambda one: tried.append(one.id))
    assert tried == [1]


def test_a_change_made_by_an_answer_wakes_others():
    waiting, woken = waiting_for(request("a", 1), request("b", 2)), {"a"}
    waiting.wake(woken, lambda one: woken.add("b") or True)
    assert list(waiting) == [] and woken == set()


def test_deadlines_end_waits_in_their_order():
    waiting = waiting_for(
        request("a", 1, 3.0), request("b", 2, 1.0), request("a", 3), request("a", 4, 2.0)
    )
    assert waiting.next_deadline() == 1.0
    waiting.drop(("g", 2))
    assert waiting.next_deadline() == 2.0
    assert [one.id for one in waiting.take_overdue()] == [4, 1]
    assert [one.id for one in waiting] == [3] and waiting.next_deadline() == 1e12


def texts_in(folder: str) -> set[str]:
    """All constant texts of the code there."""
    nodes = [
        node
        for path in (PACKAGE / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
    ]
    return {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_each_record_that_is_written_is_applied_and_each_request_that_is_answered_is_sent():
    code = "".join(path.read_text() for path in (PACKAGE / "controller").rglob("*.py"))
    assert set(re.findall(r"\.record\(\s*op=\"(\w+)\"", code)) == APPLIERS.keys()
    assert HANDLERS.keys() <= texts_in("client") | texts_in("../supervise") | texts_in("../observe")


def test_an_operation_has_one_function():
    registry = Registry()
    registry.add("claim")(len)
    with pytest.raises(ValueError, match="'claim' is registered twice: builtins and builtins"):
        registry.add("claim")(max)
