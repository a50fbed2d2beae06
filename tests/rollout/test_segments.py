"""Logs of segments alone: whatever dies in whatever order, what is read was appended, and every
token counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relax_hpc.base.fields import FIELDS, FieldSpec
from relax_hpc.data.prompts import Prompt
from relax_hpc.queue.client.segments import START, UNFINISHED, join_segment, summarize_logs
from relax_hpc.queue.controller.state.segments import Log, Segments
from relax_hpc.queue.row_schema import Row
from relax_hpc.rollout.attempt import Attempt, read_logged_episode
from relax_hpc.rollout.engines.engine import Episode, EpisodeRow, Generation
from tests.effort import effort

EPISODES, TICKETS, BUDGET = 2, 3, 99
PROMPT = Prompt("p", (7, 8, 9), "text", "answer")
tickets, few = st.integers(0, TICKETS - 1), st.integers(0, 4)


class LogMachine(RuleBasedStateMachine):
    """A rollout that draws, appends and dies; a queue that keeps logs; what both know must
    agree."""

    def __init__(self) -> None:
        super().__init__()
        self.logs, self.files = Segments(), {}
        self.numbers = [0] * TICKETS
        self.known: dict[int, list[Generation]] = {}
        """By holder of a log, what must be in it."""
        self.unanswered: set[tuple[int, int]] = set()
        """Episodes of which the log may have more than their attempts know."""
        self.drawn = 0
        self.work = [self.begin(ticket) for ticket in range(TICKETS)]

    def begin(self, ticket: int) -> Attempt:
        """Go on with what there is."""
        self.unanswered = {(other, k) for other, k in self.unanswered if other != ticket}
        made = self.read(ticket) if ticket in self.logs.logs else {}
        return Attempt(ticket, self.numbers[ticket], PROMPT, EPISODES, made)

    def read(self, holder: int) -> dict[int, Generation]:
        found: dict[int, Row] = {}
        for number in self.logs.logs[holder].shards:
            for k, segment in self.files[number].items():
                found[k] = join_segment(found[k], segment) if k in found else segment
        return {k: read_logged_episode([row], PROMPT) for k, row in found.items()}

    def store(self, segments: Sequence[Row], number: int) -> tuple[int, Any]:
        """Write a shard; its number, and what the queue is told."""
        self.files[len(self.files)] = {one["episode"]: one for one in segments}
        (growth,) = summarize_logs(segments, {segments[0]["ticket"]: number})
        return len(self.files) - 1, (
            growth["ticket"],
            growth["attempt"],
            growth["segments"],
            growth["versions"],
        )

    @rule(
        ticket=tickets,
        k=st.integers(0, EPISODES - 1),
        tokens=few,
        version=st.integers(0, 3),
        ends=st.booleans(),
    )
    def draw(self, ticket: int, k: int, tokens: int, version: int, ends: bool) -> None:
        """Version 0: an observation, which nobody has sampled."""
        draft = self.work[ticket].drafts[k]
        if draft.ended:
            return
        made = list(range(self.drawn, self.drawn + tokens))
        self.drawn += tokens
        draft.add(made, [-float(token % 5) for token in made], [version] * tokens)
        if ends and draft.token_ids:
            draft.ended = Generation(*vars_of(draft.snapshot()), "stop")

    @rule(ticket=tickets, unfinished_too=st.booleans(), answered=st.booleans())
    def append(self, ticket: int, unfinished_too: bool, answered: bool) -> None:
        attempt = self.work[ticket]
        if not (segments := attempt.new_segments(unfinished_too, BUDGET)):
            return
        number, growth = self.store(segments, attempt.number)
        log = self.logs.logs.get(ticket, Log(ticket, attempt.number))
        assert log.fits(growth[2])
        for k, row, start, *_ in growth[2]:
            assert (ticket, k) in self.unanswered or log.lengths.get((k, row), 0) == start, (
                "nothing twice"
            )
        (self.unanswered.difference_update if answered else self.unanswered.update)(
            (ticket, k) for k, *_ in growth[2]
        )
        self.logs.append(number, growth, False)
        if answered:
            attempt.note_appended(segments, False)
        self.known[ticket] = self.read(ticket)
        for k, draft in enumerate(attempt.drafts):
            made = self.known[ticket].get(k)
            whole = draft.snapshot()
            if made and (unfinished_too or made.finish_reason != UNFINISHED):
                assert (
                    vars_of(made)[0] == whole.token_ids
                    and made.finish_reason == whole.finish_reason
                )
                assert (
                    vars_of(made)[1] == whole.logprobs
                    and (made.token_versions == whole.token_versions).all()
                )

    @rule(ticket=tickets)
    def kill(self, ticket: int) -> None:
        """Whoever comes next has all that was appended, and nothing else."""
        self.work[ticket] = again = self.begin(ticket)
        kept = self.known.get(ticket, {})
        assert again.tokens == sum(np.count_nonzero(made.token_versions) for made in kept.values())
        assert not again.new_segments(True, BUDGET), "what the queue has is not appended again"

    @rule(ticket=tickets)
    def fail(self, ticket: int) -> None:
        """Of its next attempt there is nothing, or a spare."""
        if ticket in self.logs.logs:
            self.logs.lose(ticket, "failed")
        self.numbers[ticket] += 1
        if spares := self.logs.spares:
            self.logs.logs[ticket] = self.logs.logs.pop(spares[0])
            self.known[ticket] = self.known.pop(spares[0])
        else:
            self.known.pop(ticket, None)
        self.work[ticket] = self.begin(ticket)

    @rule(ticket=tickets)
    def put(self, ticket: int) -> None:
        if ticket in self.logs.logs:
            self.logs.use(ticket)
        self.known.pop(ticket, None)
        self.numbers[ticket] += 1
        self.work[ticket] = self.begin(ticket)

    @rule(ticket=tickets, refused=st.booleans())
    def spare(self, ticket: int, refused: bool) -> None:
        attempt = Attempt(ticket, 1000 + self.drawn, PROMPT, EPISODES)
        for draft in attempt.drafts:
            draft.ended = Generation([self.drawn], [-1.0], np.array([1], np.int32), "length")
            self.drawn += 1
        number, growth = self.store(attempt.new_segments(False, BUDGET), attempt.number)
        if refused:
            self.logs.refuse(growth, "no_room")
        else:
            holder = self.logs.append(number, growth, True)
            self.known[holder] = self.read(holder)

    @rule(version=st.integers(1, 3))
    def roll_back(self, version: int) -> None:
        for holder in [h for h in self.logs.logs if version in self.logs.versions(h)]:
            self.logs.lose(holder, "rolled_back")
            del self.known[holder]
            if holder >= 0:
                self.work[holder] = self.begin(holder)

    @precondition(lambda self: self.logs.logs)
    @rule()
    def restart(self) -> None:
        before, self.logs = self.logs, Segments()
        self.logs.load(msgpack.unpackb(msgpack.packb(before.dump()), strict_map_key=False))
        assert self.logs == before

    @invariant()
    def every_token_is_in_one_place(self) -> None:
        logs = self.logs
        assert logs.appended == logs.used + logs.held + logs.lost.total()
        assert logs.held == sum(
            len(made.token_ids) for log in self.known.values() for made in log.values()
        )


def vars_of(made: Generation) -> tuple[list[int], list[float], np.ndarray]:
    return made.token_ids, made.logprobs, made.token_versions


TestLogs = LogMachine.TestCase
TestLogs.settings = settings(max_examples=effort(25, 400), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("segments", "fits"),
    [
        ([[0, 0, 3, 1, 0]], True),
        ([[0, 0, 0, 3, 0]], True),
        ([[0, 0, 1, 5, 1]], True),
        ([[0, 0, 4, 1, 0]], False),
        ([[0, 0, 0, 2, 0]], False),
        ([[1, 0, 2, 1, 0]], False),
        ([[1, 0, 0, 2, 1]], True),
        ([[1, 1, 0, 2, 1]], False),
        ([[0, 1, 0, 2, 1]], True),
        ([[0, 1, 1, 2, 1]], False),
    ],
)
def test_a_segment_goes_on_where_its_row_ends(segments, fits):
    """An episode may go on in another row, unless it has ended."""
    log = Log(0, 0)
    assert log.grow(1, (0, 0, [[0, 0, 0, 3, 0], [1, 0, 0, 2, 1]], [5])) == 5
    assert log.fits(segments) == fits


def test_a_segment_holds_what_is_new_and_the_first_the_prompt():
    attempt = Attempt(4, 2, PROMPT, 1)
    attempt.drafts[0].add([1, 2], [-1.0, -2.0], [5, 5])
    (first,) = attempt.new_segments(True, BUDGET)
    attempt.note_appended([first], False)
    attempt.drafts[0].add([3], [0.0], [0])
    (second,) = attempt.new_segments(True, BUDGET)
    assert first["token_ids"].tolist() == [7, 8, 9, 1, 2] and (
        first["prompt_len"],
        first[START],
    ) == (3, 0)
    assert second["token_ids"].tolist() == [3] and (second["prompt_len"], second[START]) == (0, 2)
    assert (
        second["loss_mask"].tolist() == [0]
        and summarize_logs([second], {4: 2})[0]["versions"] == []
    )
    assert join_segment(first, second)["token_ids"].tolist() == [7, 8, 9, 1, 2, 3]
    attempt.drafts[0].add([4], [-1.0], [5])
    (both,) = attempt.new_segments(True, BUDGET)
    again = join_segment(join_segment(first, second), both)
    assert again["token_ids"].tolist() == [7, 8, 9, 1, 2, 3, 4], (
        "the answer to the second one was lost"
    )
    assert attempt.new_segments(False, BUDGET) == []
    attempt.note_appended([second], True)
    attempt.drafts[0].add([4], [-1.0], [5])
    assert attempt.new_segments(True, BUDGET) == [], "the queue wants no more"


def test_an_episode_of_several_rows_is_appended_when_it_has_ended_and_comes_back():
    attempt = Attempt(4, 0, PROMPT, 2)
    rows = [
        EpisodeRow(
            (7, 8, 9), Generation([1, 2], [-1.0, 0.0], np.array([5, 0], np.int32), "length")
        ),
        EpisodeRow((7, 3), Generation([4], [-2.0], np.array([6], np.int32), "stop")),
    ]
    attempt.drafts[1].ended = Episode(rows)
    segments = attempt.new_segments(True, 1)
    assert attempt.tokens == 2, "those that were sampled"
    (growth,) = summarize_logs(segments, {4: 0})
    assert growth["segments"] == [[1, 0, 0, 2, 1], [1, 1, 0, 1, 1]] and growth["versions"] == [5, 6]
    attempt.note_appended(segments, False)
    assert attempt.new_segments(True, 1) == []
    again = Attempt(4, 0, PROMPT, 2, {1: read_logged_episode(segments, PROMPT)})
    assert (
        again.request(1, None, 9) is None and again.new_segments(True, 1) == [] and not again.whole
    )
    for found, row in zip(again.drafts[1].ended.rows, rows, strict=True):
        assert (tuple(found.prompt), vars_of(found.generation)[:2]) == (
            row.prompt,
            vars_of(row.generation)[:2],
        )
        assert found.generation.token_versions.tolist() == row.generation.token_versions.tolist()
    assert read_logged_episode(segments, Prompt("p", (7, 8), "text", "answer")) is None


def test_what_an_engine_gives_beside_the_tokens_is_in_the_log(monkeypatch):
    """Where it comes with the whole response alone, nothing is appended before; else token by
    token."""
    monkeypatch.setitem(
        FIELDS,
        "routes",
        FieldSpec("routes", "token", "uint8", "", by="rollout", tail=(2,), optional=True),
    )
    attempt, routes = Attempt(4, 0, PROMPT, 1), np.array([[1, 2], [3, 4]], np.uint8)
    attempt.drafts[0].add([1], [-1.0], [5])
    assert attempt.new_segments(True, BUDGET) == []
    attempt.drafts[0].extras["routes"] = [routes[0]]
    (part,) = attempt.new_segments(True, BUDGET)
    again = Attempt(4, 0, PROMPT, 1, {0: read_logged_episode([part], PROMPT)})
    again.drafts[0].add([2], [-2.0], [5], {"routes": routes[1:]})
    (rest,) = again.new_segments(True, BUDGET)
    whole = read_logged_episode([join_segment(part, rest)], PROMPT)
    assert whole.extras["routes"].tolist() == routes.tolist() and rest["routes"].tolist() == [
        [3, 4]
    ]
    attempt.drafts[0].ended = Generation(
        [1, 2], [-1.0, -2.0], np.array([5, 5], np.int32), "stop", {"routes": routes}
    )
    found = read_logged_episode(attempt.new_segments(True, BUDGET), PROMPT)
    assert found.extras["routes"].tolist() == routes.tolist() and found.finish_reason == "stop"
