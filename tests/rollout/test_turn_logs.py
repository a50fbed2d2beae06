"""Episodes that resume from a log of their segments, and faults of environments and engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from relax_hpc.config.schema import EnvironmentConfig
from relax_hpc.environments.base import EnvironmentFault, Observation, Response, Step
from relax_hpc.queue.row_schema import Row
from relax_hpc.rollout.attempt import Attempt, read_logged_episode
from relax_hpc.rollout.engines.engine import BadAnswer, Episode
from relax_hpc.rollout.episodes.history import History
from relax_hpc.rollout.episodes.play import EngineRetry
from relax_hpc.rollout.episodes.player import EnvironmentBackend, Player
from relax_hpc.rollout.episodes.turn_tokens import TurnTokenizer
from relax_hpc.rollout.episodes.turns import TurnRules
from tests.helpers.turn_episodes import (
    BUDGET,
    PROMPT,
    TEMPLATE,
    TOKENIZER,
    AttemptLog,
    Contexts,
    Counting,
    Opening,
    equal_episodes,
    make_prompt,
    play_episode,
)
from tests.helpers.turn_episodes import template_process as template_process
from tests.helpers.turns_helpers import DeterministicEngine, InProcessEnvironments, player, start
from tests.rollout.virtual_clock import run_on_a_clock


def play_logged(
    kind: Any, unfinished_too: bool, **limits: int
) -> tuple[Episode, list[list[Row]], int]:
    """An episode, the rows of its log after each token, and the number of generated tokens."""
    attempt, log = Attempt(3, 0, make_prompt(), 1, in_turns=True), AttemptLog()
    logs = list[list[Row]]()

    def append_to_log() -> None:
        log.append(attempt, unfinished_too)
        logs.append(log.copy())

    class LoggingEngine(DeterministicEngine):
        async def __call__(self, request):
            append_to_log()
            return await super().__call__(request)

        def note_token(self) -> None:
            append_to_log()

    engine = LoggingEngine(TOKENIZER)
    beginning = start(TOKENIZER, engine, PROMPT, BUDGET)
    playing = player(kind, TOKENIZER, TEMPLATE, **limits)
    episode = asyncio.run(playing.play(attempt.drafts[0], beginning))
    append_to_log()
    return episode, logs, engine.drawn


@pytest.mark.parametrize("kind", [Counting, Opening, Contexts])
@pytest.mark.parametrize("unfinished_too", [True, False])
def test_an_episode_resumes_from_any_of_its_logs(kind, unfinished_too: bool) -> None:
    whole, logs, drawn = play_logged(kind, unfinished_too)
    assert len({str(log) for log in logs}) > (10 if unfinished_too else 3)
    for log in logs:
        logged = {0: read_logged_episode(log, make_prompt())} if log else {}
        attempt = Attempt(3, 1, make_prompt(), 1, logged, in_turns=True)
        assert attempt.new_segments(True, BUDGET) == [], "logged segments are not appended twice"
        history = attempt.drafts[0]
        if history.ended:
            assert equal_episodes(history.ended, whole)
            continue
        kept = attempt.tokens
        resumed, engine, faults = play_episode(kind, history)
        assert equal_episodes(resumed, whole) and not faults
        assert engine.drawn == drawn - kept, "logged tokens are not generated again"


class ChangingAnswers(Counting):
    """Answers differently in each episode, from the second turn on."""

    times = 0

    def reset(self, beginning):
        type(self).times += 1
        return super().reset(beginning)

    def step(self, response):
        step = super().step(response)
        changed = Observation(f"time {self.times}") if response.turn else step.observations[0]
        return Step((changed,), step.done, step.info, step.reward)


class ShorterEpisodes(Counting):
    """Is done one turn earlier in each episode."""

    times = 0

    def reset(self, beginning):
        type(self).times += 1
        self.turns = 4 - self.times
        return super().reset(beginning)


@pytest.mark.parametrize("kind", [ChangingAnswers, ShorterEpisodes])
def test_an_environment_that_differs_from_the_log_restarts_its_episode(kind) -> None:
    kind.times = 0
    _, logs, _ = play_logged(kind, True)
    log = logs[-2]
    attempt = Attempt(
        3, 1, make_prompt(), 1, {0: read_logged_episode(log, make_prompt())}, in_turns=True
    )
    episode, _, faults = play_episode(kind, attempt.drafts[0])
    assert [fault.reason for fault in faults] == ["environment_differs"]
    assert isinstance(episode, Episode) and episode.finish_reason == "env_done" and kind.times == 3
    assert attempt.whole and attempt.new_segments(True, BUDGET) == [], "the log has another episode"


class FailingEnvironment(Counting):
    """Fails at the second step of the first ``failures`` episodes."""

    times, failures = 0, 2

    def reset(self, beginning):
        type(self).times += 1
        return super().reset(beginning)

    def step(self, response):
        if response.turn == 1 and self.times <= self.failures:
            raise EnvironmentFault("environment_died", "killed")
        return super().step(response)


@pytest.mark.parametrize("failures", [0, 1, 2, 3])
def test_a_fault_restarts_the_episode_and_the_third_one_fails_the_prompt_group(
    failures: int,
) -> None:
    FailingEnvironment.times, FailingEnvironment.failures = 0, failures
    episode, _, faults = play_episode(FailingEnvironment, max_faults=2)
    assert [fault.reason for fault in faults] == ["environment_died"] * failures
    if failures < 3:
        assert isinstance(episode, Episode) and episode.finish_reason == "env_done"
    else:
        assert isinstance(episode, BadAnswer) and str(episode) == "environment_died: killed"


def test_generation_and_the_wait_for_an_environment_do_not_count_toward_the_deadline() -> None:
    class SlowEnvironment(Counting):
        async def step(self, response: Response) -> Step:
            await asyncio.sleep(2.0 if response.turn == 1 else 0.0)
            return super().step(response)

    class SlowEngine(DeterministicEngine):
        async def __call__(self, request):
            await asyncio.sleep(4.0)
            return await super().__call__(request)

    class FullEnvironments(InProcessEnvironments):
        async def open(self, beginning):
            await asyncio.sleep(4.0)
            return await super().open(beginning)

    async def play_with_limit(limit_s: float) -> Episode | BadAnswer:
        stage = EnvironmentBackend(
            FullEnvironments(SlowEnvironment),
            TurnRules(TurnTokenizer(TOKENIZER, TEMPLATE), TOKENIZER, EnvironmentConfig()),
        )
        playing = Player(stage, 0, limit_s, lambda fault: None)
        return await playing.play(
            History(), start(TOKENIZER, SlowEngine(TOKENIZER), PROMPT, BUDGET)
        )

    assert isinstance(run_on_a_clock(play_with_limit(3.0)), Episode)
    failure = run_on_a_clock(play_with_limit(1.0))
    assert isinstance(failure, BadAnswer) and failure.reason == "episode_timeout"


def test_a_failed_generation_is_retried_from_the_tokens_that_it_already_has() -> None:
    class FailingEngine(DeterministicEngine):
        failures = 0

        def note_token(self) -> None:
            if self.failures < 5 and self.drawn % 2:
                self.failures += 1
                raise EngineRetry

    whole, *_ = play_episode(Counting)
    engine = FailingEngine(TOKENIZER)
    beginning = start(TOKENIZER, engine, PROMPT, BUDGET)
    episode = asyncio.run(player(Counting, TOKENIZER, TEMPLATE).play(History(), beginning))
    assert engine.failures == 5 and equal_episodes(episode, whole)
    without_retries = replace(
        start(TOKENIZER, FailingEngine(TOKENIZER), PROMPT, BUDGET), asks_again=False
    )
    with pytest.raises(EngineRetry):
        asyncio.run(player(Counting, TOKENIZER, TEMPLATE).play(History(), without_retries))
