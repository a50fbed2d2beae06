"""Routes of episodes of several turns: each token has those of the pass that first read it, from
any log too."""

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
from tests.helpers.turns_helpers import Drawing, player, start
from tests.rollout.test_turns import (
    BUDGET,
    PROMPT,
    TEMPLATE,
    TOKENIZER,
    Contexts,
    Counting,
    Log,
    prompt_of,
)
from tests.rollout.test_turns import template_process as template_process

pytestmark = pytest.mark.usefixtures("declared")
SHAPE = RouteShape(layers=1, experts=200, chosen=2)
LATER = 50


class Reading(Drawing):
    """SGLang that keeps no keys and values: all that it reads it reads by experts of this request,
    its number and that plus 100. It tells of them token by token, and when a turn has ended of all
    once more."""

    def __init__(self, number: int = 0, heard: Callable[[], None] = lambda: None) -> None:
        super().__init__(TOKENIZER)
        self.number, self.heard = number, heard

    async def __call__(self, request: GenerateRequest) -> Generation:
        self.number += 1
        assert request.draft
        response = StreamedResponse(request, self.version, SHAPE)
        known = len(request.draft.token_versions)
        drawn = (
            await super().__call__(replace(request, draft=request.draft.fresh_copy()))
        ).token_ids
        finish = {"type": "length" if len(drawn) == request.budget else "stop"}
        told = 0
        for count, token in enumerate(drawn[known:], start=known + 1):
            read, last = len(request.prompt_ids) + count - 1, count == len(drawn)
            news = np.tile(
                np.array([self.number, self.number + 100], "<i4"),
                (read - (0 if last else told), 1, 1),
            )
            told = read
            meta = {
                "output_token_logprobs": [[-1.0, token, None]],
                "finish_reason": finish if last else None,
                "weight_version": str(self.version),
                NAME: base64.b64encode(news.tobytes()).decode(),
            }
            response.add({"output_ids": [token], "meta_info": meta})
            self.heard()
        return response.answer.result()


def played(kind: type, attempt: Attempt, engine: Drawing) -> Episode:
    begun = start(TOKENIZER, engine, PROMPT, BUDGET)
    made = asyncio.run(player(kind, TOKENIZER, TEMPLATE).play(attempt.drafts[0], begun))
    assert isinstance(made, Episode), made
    return made


@pytest.mark.parametrize("unfinished_too", [True, False])
@pytest.mark.parametrize("kind", [Counting, Contexts])
def test_each_token_has_the_route_of_who_first_read_it(kind: type, unfinished_too: bool) -> None:
    """The last token of a turn and what is said to it are read with the next turn, and never once
    more."""
    attempt, log, logs = Attempt(3, 0, prompt_of(), 1, in_turns=True), Log(again=1), []

    def heard() -> None:
        log.append(attempt, unfinished_too)
        logs.append(log.copy())

    for row in group_rows(prompt_of(), 3, [played(kind, attempt, Reading(heard=heard))], [0.0]):
        assert SHAPE.find_fault(row) == ""
        assert (np.flatnonzero(np.diff(numbers(row))) + 1).tolist() == ends(row)
    assert len({str(log) for log in logs}) > 3
    for found in filter(None, logs):
        again = Attempt(
            3, 1, prompt_of(), 1, {0: read_logged_episode(found, prompt_of())}, in_turns=True
        )
        kept = {row["row"]: numbers(row) for row in found}
        for row in group_rows(prompt_of(), 3, [played(kind, again, Reading(LATER))], [0.0]):
            assert SHAPE.find_fault(row) == ""
            mine, before = numbers(row), kept.get(row["row"], np.zeros(0, int))
            assert (
                np.array_equal(mine[: len(before)], before)
                and (mine[len(before) + 1 :] > LATER).all()
            )


def numbers(row: dict) -> np.ndarray:
    """Of all tokens but the last, by which request each was read."""
    return row[NAME][:-1, 0, 0, 0].astype(int)


def ends(row: dict) -> list[int]:
    """Places of the last tokens of all turns but the last."""
    return [row["prompt_len"] + end - 1 for end in row["environment"]["turns"][:-1]]
