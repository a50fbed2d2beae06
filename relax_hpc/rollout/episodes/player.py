"""Plays episodes against environments, each of which is begun again where its environment has
failed it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from relax_hpc.config.schema import Config
from relax_hpc.config.schema.environment import AGENT
from relax_hpc.data.prompts import PromptRules
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.environments.base import Beginning, EnvironmentFault
from relax_hpc.environments.host import Environments
from relax_hpc.rewards.composed import BY_ROW, WEIGHTED
from relax_hpc.rollout.agents.agents import Agents
from relax_hpc.rollout.engines.engine import BadAnswer, Episode, GenerateRequest, Generation
from relax_hpc.rollout.episodes.history import History
from relax_hpc.rollout.episodes.observed_media import ObservedMedia
from relax_hpc.rollout.episodes.play import OwnTime, in_time
from relax_hpc.rollout.episodes.turn_tokens import Bridge
from relax_hpc.rollout.episodes.turns import Rules, Session, Start, Turns
from relax_hpc.rollout.media import PromptMedia
from relax_hpc.tasks import environment_of, train_reward


class OpenSession(Session, Protocol):
    """A session that is to be closed."""

    async def close(self) -> None: ...


class Host(Protocol):
    """Opens environments, as `relax_hpc.environments.host.Environments` does."""

    async def start(self) -> None: ...

    async def open(self, beginning: Beginning) -> OpenSession: ...

    async def close(self) -> None: ...


class Stage(Protocol):
    """Stage that episodes are played on: environments, or programs that know nothing of us."""

    async def start(self) -> None:
        """Return when episodes can be played. ConfigError: they never can."""

    async def play(self, history: History, start: Start) -> Episode:
        """The episode that ``history`` is the beginning of. EnvironmentFault; BadAnswer, Repeat: as
        `Start.drawn`."""

    def conclude(self, history: History, fault: EnvironmentFault) -> Episode | None:
        """The episode that ``history`` is after the last ``fault``; None: it is none, and its
        prompt group fails."""

    async def close(self) -> None:
        """End all that was started for it."""


class Player:
    """Player of one process, for one event loop."""

    def __init__(
        self,
        stage: Stage,
        max_faults: int,
        limit_s: float,
        note: Callable[[EnvironmentFault], None],
        note_unrewarded: Callable[[str], None] = lambda ended: None,
    ) -> None:
        """``limit_s``: seconds for an episode, without what its responses take. ``note`` is called
        with each fault, also with those after which an episode starts again, up to ``max_faults``
        times; ``note_unrewarded`` with the end of each episode that has 0 because it ended before
        there was a reward."""
        self._stage, self._max_faults, self._limit_s, self._note = stage, max_faults, limit_s, note
        self._note_unrewarded = note_unrewarded
        self.start, self.close = stage.start, stage.close

    async def play(self, history: History, start: Start) -> Episode | BadAnswer:
        """The episode that ``history`` is the beginning of. Repeat: the engine failed, and is not
        asked again."""
        own = OwnTime(self._limit_s)

        async def ask(request: GenerateRequest) -> Generation | BadAnswer:
            with own.stands():
                return await start.ask(request)

        made = await in_time(
            self._played(history, replace(start, ask=ask, waiting=own.stands)), own, self._limit_s
        )
        assert not isinstance(made, Generation)
        outcome = made.outcome if isinstance(made, Episode) else None
        if outcome and outcome["reward"] is None and made.finish_reason != "env_done":
            self._note_unrewarded(made.finish_reason)
        return made

    async def _played(self, history: History, start: Start) -> Episode:
        left = self._max_faults
        while True:
            try:
                return await self._stage.play(history, start)
            except EnvironmentFault as fault:
                self._note(fault)
                if not left:
                    if episode := self._stage.conclude(history, fault):
                        return episode
                    raise BadAnswer(fault.reason, fault.detail, fault.origin) from fault
                history.restart()
                left -= 1


class OnEnvironments:
    """Environments, each of which answers the policy turn by turn: a `Stage`."""

    def __init__(self, host: Host, rules: Rules) -> None:
        self._host, self._rules = host, rules
        self.start = host.start

    async def close(self) -> None:
        """See `Stage.close`."""
        await self._host.close()
        if self._rules.media:
            await self._rules.media.close()

    async def play(self, history: History, start: Start) -> Episode:
        """See `Stage.play`."""
        with start.waiting():
            session = await self._host.open(start.beginning)
        try:
            return await Turns(self._rules, start, history).through(session)
        finally:
            await session.close()

    def conclude(self, history: History, fault: EnvironmentFault) -> Episode | None:
        """See `Stage.conclude`: an environment that has failed its episode says nothing of the
        policy."""
        return None


def player_of(
    config: Config,
    tokenizer: Tokenizer,
    media: PromptMedia,
    note: Callable[[EnvironmentFault], None],
    count: Callable[[str, str], None] = lambda what, reason: None,
) -> Player | None:
    """Player of a run's episodes; None: they are played against no environment. ``count``,
    ConfigError: as `stage_of`."""
    stage = stage_of(config, tokenizer, media, count)
    if not stage:
        return None
    limits = config.environment.max_faults, config.rollout.episode_timeout_s
    if _rewarded_by_environment(config):
        return Player(stage, *limits, note, functools.partial(count, "no_reward"))
    return Player(stage, *limits, note)


def _rewarded_by_environment(config: Config) -> bool:
    """Whether an environment's own reward is learned from, alone or as a part."""
    reward, settings = train_reward(config), config.reward
    composed = {WEIGHTED: settings.weighted, BY_ROW: settings.by_row.rewards.values()}
    return "environment" in [reward, *composed.get(reward, ())]


def stage_of(
    config: Config,
    tokenizer: Tokenizer,
    media: PromptMedia,
    count: Callable[[str, str], None] = lambda what, reason: None,
) -> Stage | None:
    """Stage of a run's episodes; None: there is none. ``count`` is told what went wrong and was
    mended, and why: a request of an agent program that was refused, an observation that was cut.
    ConfigError: there is no such template for chats."""
    if not (kind := environment_of(config)):
        return None
    if kind == AGENT:
        return Agents(config, tokenizer, functools.partial(count, "agent_refused"))
    settings, how = config.environment, PromptRules.from_config(config.data, tokenizer)
    places = dict(how.media.placeholders) if how.media else {}
    cut = functools.partial(count, "observation", "cut")
    bridge = Bridge(tokenizer, how.template, places, settings.max_observation_tokens, cut)
    observed = ObservedMedia(media, how.media, tokenizer) if how.media else None
    return OnEnvironments(
        Environments(kind, settings), Rules(bridge, tokenizer, settings, observed)
    )
