"""Environments of several turns, and episodes that a deterministic engine plays against them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from relax_hpc.data.prompts import Prompt
from relax_hpc.environments.base import (
    Context,
    Environment,
    EnvironmentFault,
    MediaPart,
    Observation,
    Response,
    Step,
)
from relax_hpc.queue.client.segments import START, join_segment
from relax_hpc.queue.row_schema import Row
from relax_hpc.rollout.attempt import Attempt
from relax_hpc.rollout.engines.engine import Episode, Generation
from relax_hpc.rollout.episodes.history import History
from tests.helpers.turns_helpers import (
    DeterministicEngine,
    backend,
    player,
    start,
    template,
    wrap_tokenizer,
)

TOKENIZER, TEMPLATE = wrap_tokenizer(backend()), template()
PROMPT = "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
BUDGET = 400
"""Tokens that an episode may have behind the prompt."""


@pytest.fixture(scope="module", autouse=True)
def template_process() -> Iterator[None]:
    """End the process that renders templates when the tests of a module have ended."""
    yield
    TEMPLATE.close()


class Counting(Environment):
    """Answers with the length of each response, and is done after ``turns`` turns."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def reset(self, beginning):
        self.seed = beginning.seed
        return ()

    def step(self, response: Response) -> Step:
        over = response.turn + 1 >= self.turns
        observation = Observation(f"{len(response.text)} of {self.seed}")
        return Step((observation,), over, {"turns": response.turn + 1}, float(over))


class Opening(Counting):
    """Sends a message before the policy's first turn."""

    def reset(self, beginning):
        super().reset(beginning)
        return (Observation("look", role="user"),)


class Contexts(Environment):
    """Changes the context after each turn: a sub-agent, a branch of the sub-agent's first turn, the
    first history compacted, another context, and the first history again."""

    contexts = (
        Context("agent"),
        Context("branch", 1),
        Context("", 0),
        Context("short"),
        Context(""),
    )

    def step(self, response: Response) -> Step:
        messages = (Observation(f"<{response.turn}>", role="user"), Observation(response.text))
        done = response.turn == len(self.contexts)
        context = None if done else self.contexts[response.turn]
        return Step(messages, done, reward=0.5, context=context)


class ListedContexts(Environment):
    """Answers each turn in the next context of a list, and is done after the last one."""

    def __init__(
        self, *contexts: Context | None, text: str = "more", pictured: Sequence[int] = ()
    ) -> None:
        """``pictured``: turns after which it shows a picture, too."""
        self.contexts, self.text, self.pictured = contexts, text, pictured
        self.responses: list[Response] = []

    def step(self, response: Response) -> Step:
        self.responses.append(response)
        done = response.turn == len(self.contexts)
        media = (MediaPart("image", b"GIF8"),) if response.turn in self.pictured else ()
        observation = Observation(f"{self.text} {response.turn}", media=media)
        return Step((observation,), done, context=None if done else self.contexts[response.turn])


def play_episode(
    kind: Any,
    history: History | None = None,
    text: str = PROMPT,
    budget: int = BUDGET,
    **limits: int,
) -> Any:
    """An episode, the engine that generated it, and the faults of its environment."""
    engine, faults = DeterministicEngine(TOKENIZER), list[EnvironmentFault]()
    playing = player(kind, TOKENIZER, TEMPLATE, faults.append, **limits)
    beginning = start(TOKENIZER, engine, text, budget)
    episode = asyncio.run(playing.play(history or History(), beginning))
    return episode, engine, faults


def decode_all(prompt: Sequence[int], generation: Generation) -> str:
    """Text of the prompt and the generation, with special tokens."""
    ids = [*prompt, *generation.token_ids]
    return TOKENIZER._backend.decode(ids, skip_special_tokens=False)


def equal_episodes(first: Episode, second: Episode) -> bool:
    """Whether both episodes have the same tokens and outcome. Log-probabilities must be equal."""
    assert [row.turns for row in first.rows] == [row.turns for row in second.rows]
    pairs = [(a.generation, b.generation) for a, b in zip(first.rows, second.rows, strict=True)]
    for a, b in pairs:
        assert a.logprobs == b.logprobs and (a.token_versions == b.token_versions).all()
    return first.outcome == second.outcome and all(a.token_ids == b.token_ids for a, b in pairs)


def make_prompt() -> Prompt:
    return Prompt("p", start(TOKENIZER, None, PROMPT).request.prompt_ids, "go", "answer")


class AttemptLog:
    """Rows that the queue would have of an attempt, joined from its segments."""

    def __init__(self, repeated_tokens: int = 0) -> None:
        """``repeated_tokens``: tokens at the end of a row that the next segment repeats."""
        self.rows, self.repeated_tokens = dict[int, Row](), repeated_tokens

    def append(self, attempt: Attempt, unfinished_too: bool) -> None:
        segments = attempt.new_segments(unfinished_too, BUDGET)
        for segment in segments:
            number = segment["row"]
            row = self.rows.get(number)
            end = len(row["token_ids"]) - row["prompt_len"] if row else 0
            assert segment[START] == max(0, end - self.repeated_tokens), "no token comes twice"
            self.rows[number] = join_segment(row, segment) if row else segment
        attempt.note_appended(segments, False)

    def copy(self) -> list[Row]:
        return [dict(row) for _, row in sorted(self.rows.items())]
