"""Plays episodes against environments. If an environment fails, the episode starts again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from relax_hpc.config.schema import Config
from relax_hpc.config.schema.environment import AGENT
from relax_hpc.data.generation import Episode, GenerateRequest, Generation
from relax_hpc.data.prompts import PromptRules
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.environments.base import Beginning, EnvironmentFault
from relax_hpc.environments.host import Environments
from relax_hpc.rewards.composed import BY_ROW, WEIGHTED
from relax_hpc.rollout.agents.agents import Agents
from relax_hpc.rollout.engines.engine import BadAnswer
from relax_hpc.rollout.episodes.history import History
from relax_hpc.rollout.episodes.observed_media import ObservedMedia
from relax_hpc.rollout.episodes.play import EpisodeTimer, run_with_timer
from relax_hpc.rollout.episodes.turn_tokens import TurnTokenizer
from relax_hpc.rollout.episodes.turns import (
    EnvironmentSession,
    EpisodeStart,
    EpisodeTurns,
    TurnRules,
)
from relax_hpc.rollout.media import PromptMedia
from relax_hpc.tasks import environment_name, train_reward


class ClosableSession(EnvironmentSession, Protocol):
    """A session that must be closed."""

    async def close(self) -> None: ...


class EnvironmentHost(Protocol):
    """Opens environments, as `relax_hpc.environments.host.Environments` does."""

    async def start(self) -> None: ...

    async def open(self, beginning: Beginning) -> ClosableSession: ...

    async def close(self) -> None: ...


class EpisodeBackend(Protocol):
    """The other side of episodes: environments, or agent programs."""

    async def start(self) -> None:
        """Return when episodes can be played. ConfigError: they never can."""

    async def play(self, history: History, start: EpisodeStart) -> Episode:
        """The episode that begins with ``history``. EnvironmentFault; BadAnswer, EngineRetry: as
        `EpisodeStart.draw_turn`."""

    def conclude(self, history: History, fault: EnvironmentFault) -> Episode | None:
        """The episode that ends with the last ``fault``; None: there is no usable episode, and its
        prompt group fails."""

    async def close(self) -> None:
        """End all processes that it has started."""


class Player:
    """Player of one process, for one event loop."""

    def __init__(
        self,
        backend: EpisodeBackend,
        max_faults: int,
        limit_s: float,
        note_fault: Callable[[EnvironmentFault], None],
        note_unrewarded: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """``limit_s``: time limit of an episode, without the time of responses. ``note_fault`` is
        called with each fault. An episode starts again after up to ``max_faults`` faults.
        ``note_unrewarded`` is called with the finish reason of each episode that gets reward 0
        because it ended before the environment gave a reward."""
        self._backend, self._max_faults, self._limit_s = backend, max_faults, limit_s
        self._note_fault, self._note_unrewarded = note_fault, note_unrewarded
        self.start, self.close = backend.start, backend.close

    async def play(self, history: History, start: EpisodeStart) -> Episode | BadAnswer:
        """The episode that begins with ``history``. EngineRetry: the engine has failed, and
        ``start`` does not ask it again."""
        timer = EpisodeTimer(self._limit_s)

        async def ask(request: GenerateRequest) -> Generation | BadAnswer:
            with timer.paused():
                return await start.ask(request)

        playing = self._play_with_restarts(history, replace(start, ask=ask, waiting=timer.paused))
        episode = await run_with_timer(playing, timer, self._limit_s)
        if isinstance(episode, Episode) and episode.outcome:
            has_reward = episode.outcome["reward"] is not None
            if not has_reward and episode.finish_reason != "env_done":
                self._note_unrewarded(episode.finish_reason)
        return episode

    async def _play_with_restarts(self, history: History, start: EpisodeStart) -> Episode:
        remaining = self._max_faults
        while True:
            try:
                return await self._backend.play(history, start)
            except EnvironmentFault as fault:
                self._note_fault(fault)
                if not remaining:
                    episode = self._backend.conclude(history, fault)
                    if episode:
                        return episode
                    raise BadAnswer(fault.reason, fault.detail, fault.origin) from fault
                history.restart()
                remaining -= 1


class EnvironmentBackend:
    """An `EpisodeBackend` of environments, which answer the policy turn by turn."""

    def __init__(self, host: EnvironmentHost, rules: TurnRules) -> None:
        self._host, self._rules = host, rules
        self.start = host.start

    async def close(self) -> None:
        """See `EpisodeBackend.close`."""
        await self._host.close()
        if self._rules.media:
            await self._rules.media.close()

    async def play(self, history: History, start: EpisodeStart) -> Episode:
        """See `EpisodeBackend.play`."""
        with start.waiting():
            session = await self._host.open(start.beginning)
        try:
            return await EpisodeTurns(self._rules, start, history).play(session)
        finally:
            await session.close()

    def conclude(self, history: History, fault: EnvironmentFault) -> Episode | None:
        """See `EpisodeBackend.conclude`. The fault of an environment says nothing about the
        policy."""
        return None


def make_player(
    config: Config,
    tokenizer: Tokenizer,
    media: PromptMedia,
    note_fault: Callable[[EnvironmentFault], None],
    count: Callable[[str, str], None] = lambda kind, reason: None,
) -> Player | None:
    """Player of a run's episodes; None: they are not played against environments. ``count``,
    ConfigError: as `make_backend`."""
    backend = make_backend(config, tokenizer, media, count)
    if not backend:
        return None
    limits = config.environment.max_faults, config.rollout.episode_timeout_s
    if _uses_environment_reward(config):
        return Player(backend, *limits, note_fault, functools.partial(count, "no_reward"))
    return Player(backend, *limits, note_fault)


def _uses_environment_reward(config: Config) -> bool:
    """Whether the environment's reward is trained on, alone or as a part of a composed reward."""
    reward, settings = train_reward(config), config.reward
    composed = {WEIGHTED: settings.weighted, BY_ROW: settings.by_row.rewards.values()}
    return "environment" in [reward, *composed.get(reward, ())]


def make_backend(
    config: Config,
    tokenizer: Tokenizer,
    media: PromptMedia,
    count: Callable[[str, str], None] = lambda kind, reason: None,
) -> EpisodeBackend | None:
    """Backend of a run's episodes; None: they are not played against environments. ``count`` is
    called with the kind and the reason of incidents that do not end an episode: a refused request
    of an agent program, an observation that was cut. ConfigError: the chat template does not
    exist."""
    kind = environment_name(config)
    if not kind:
        return None
    if kind == AGENT:
        return Agents(config, tokenizer, functools.partial(count, "agent_refused"))
    settings, prompt_rules = config.environment, PromptRules.from_config(config.data, tokenizer)
    media_rules = prompt_rules.media
    turn_tokenizer = TurnTokenizer(
        tokenizer,
        prompt_rules.template,
        dict(media_rules.placeholders) if media_rules else {},
        settings.max_observation_tokens,
        functools.partial(count, "observation", "cut"),
    )
    observed = ObservedMedia(media, media_rules, tokenizer) if media_rules else None
    rules = TurnRules(turn_tokenizer, tokenizer, settings, observed)
    return EnvironmentBackend(Environments(kind, settings), rules)
