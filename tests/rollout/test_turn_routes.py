"""Routes of episodes of several turns: each token has the routes of the pass that first read it, also
after a resume from a log."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from relax_hpc.base.routes import NAME, RouteShape
from relax_hpc.rollout.attempt import Attempt, read_logged_episode
from relax_hpc.rollout.engines.engine import Episode, GenerateRequest, Generation
from relax_hpc.rollout.engines.sglang.stream import StreamedResponse
from relax_hpc.rollout.rows import group_rows
from tests.helpers.routes_helpers import declared_fixture  # noqa: F401
from tests.helpers.turn_episodes import (
    BUDGET,
    PROMPT,
    TEMPLATE,
    TOKENIZER,
    AttemptLog,
    Contexts,
    Counting,
    make_prompt,
)
from tests.helpers.turn_episodes import template_process as template_process
from tests.helpers.turns_helpers import DeterministicEngine, player, start

pytestmark = pytest.mark.usefixtures("declared")
SHAPE = RouteShape(layers=1, experts=200, chosen=2)
LATER = 50
"""Number of the last request before the attempt is resumed."""


class RoutingEngine(DeterministicEngine):
    """An engine like SGLang without a prefix cache: it reads all tokens of each request.

    The experts of each token are the number of the request that reads it, and that number plus 100.
    The engine reports the routes with each token, and those of all tokens when a turn ends.
    """

    def __init__(self, number: int = 0, note_routes: Callable[[], None] = lambda: None) -> None:
        super().__init__(TOKENIZER)
        self.number, self.note_routes = number, note_routes

    async def __call__(self, request: GenerateRequest) -> Generation:
        self.number += 1
        assert request.draft
        response = StreamedResponse(request, self.version, SHAPE)
        logged = len(request.draft.token_versions)
        drawn = (
            await super().__call__(replace(request, draft=request.draft.fresh_copy()))
        ).token_ids
        finish = {"type": "length" if len(drawn) == request.budget else "stop"}
        reported = 0
        for count, token in enumerate(drawn[logged:], start=logged + 1):
            read, last = len(request.prompt_ids) + count - 1, count == len(drawn)
            first = 0 if last else reported
            experts = np.array([self.number, self.number + 100], "<i4")
            routes = np.tile(experts, (read - first, 1, 1))
            reported = read
            meta = {
                "output_token_logprobs": [[-1.0, token, None]],
                "finish_reason": finish if last else None,
                "weight_version": str(self.version),
                NAME: base64.b64encode(routes.tobytes()).decode(),
            }
            response.add({"output_ids": [token], "meta_info": meta})
            self.note_routes()
        return response.answer.result()


def play_attempt(kind: type, attempt: Attempt, engine: DeterministicEngine) -> Episode:
    beginning = start(TOKENIZER, engine, PROMPT, BUDGET)
    episode = asyncio.run(player(kind, TOKENIZER, TEMPLATE).play(attempt.drafts[0], beginning))
    assert isinstance(episode, Episode), episode
    return episode


@pytest.mark.parametrize("unfinished_too", [True, False])
@pytest.mark.parametrize("kind", [Counting, Contexts])
def test_each_token_has_the_route_of_the_request_that_first_read_it(
    kind: type, unfinished_too: bool
) -> None:
    """The next turn's request reads the last token of a turn and the observation, and no request
    reads them again."""
    attempt = Attempt(3, 0, make_prompt(), 1, in_turns=True)
    log, logs = AttemptLog(repeated_tokens=1), []

    def note_routes() -> None:
        log.append(attempt, unfinished_too)
        logs.append(log.copy())

    engine = RoutingEngine(note_routes=note_routes)
    for row in group_rows(make_prompt(), 3, [play_attempt(kind, attempt, engine)], [0.0]):
        assert SHAPE.find_fault(row) == ""
        assert (np.flatnonzero(np.diff(request_numbers(row))) + 1).tolist() == turn_ends(row)
    assert len({str(log) for log in logs}) > 3
    for logged_rows in filter(None, logs):
        history = read_logged_episode(logged_rows, make_prompt())
        resumed = Attempt(3, 1, make_prompt(), 1, {0: history}, in_turns=True)
        kept = {row["row"]: request_numbers(row) for row in logged_rows}
        episode = play_attempt(kind, resumed, RoutingEngine(LATER))
        for row in group_rows(make_prompt(), 3, [episode], [0.0]):
            assert SHAPE.find_fault(row) == ""
            numbers, before = request_numbers(row), kept.get(row["row"], np.zeros(0, int))
            assert np.array_equal(numbers[: len(before)], before)
            assert (numbers[len(before) + 1 :] > LATER).all()


def request_numbers(row: dict) -> np.ndarray:
    """Number of the request that read each token, without the last token: [tokens - 1]."""
    return row[NAME][:-1, 0, 0, 0].astype(int)


def turn_ends(row: dict) -> list[int]:
    """Indices of the last tokens of all turns but the last."""
    return [row["prompt_len"] + end - 1 for end in row["environment"]["turns"][:-1]]
