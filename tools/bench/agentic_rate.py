"""Episodes against instant environments, and a bare client that replays the same turns on the same
SGLang server.

The model is tiny and random, so that a turn ends by chance, after 64 tokens in the mean. The client
asks for as many tokens after the same words of the environment, turn by turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import aiohttp
from agentic_parts import CONTEXT, TURNS, make_model
from figures import Figure

from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config, EnvironmentConfig
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.rollout.engines.engine import GenerateRequest, Generation, Sampling
from relax_hpc.rollout.engines.sglang.engine import SglangEngine
from relax_hpc.rollout.episodes.history import History
from relax_hpc.rollout.episodes.player import Player, make_player
from relax_hpc.rollout.episodes.turns import EpisodeStart
from relax_hpc.rollout.media import PromptMedia
from relax_hpc.training.models.tiny_tokenizer import CHARACTERS

PROMPT = 96
"""Characters of a prompt, each a token."""
_BUDGET = CONTEXT // 2
_ROOM = 1 << 17
"""Tokens of the server's cache: more than the episodes that are under way have."""
_CLIENT_S = 600.0
_LEAST = 0.9


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn as the engine was asked for it."""

    heard: tuple[int, ...]
    """Tokens since the turn before: the prompt, or what the environment has said."""
    tokens: int
    """Tokens that were drawn."""


@dataclass(frozen=True, slots=True)
class Round:
    """What some episodes took."""

    episodes: list[list[Turn]]
    seconds: float
    cpu_s: float
    """CPU seconds of this process."""
    cached: float
    """Share of the tokens of requests that the server had in its cache."""

    @property
    def rate(self) -> float:
        """Episodes a second."""
        return len(self.episodes) / self.seconds


class Tally:
    """Counts what a server had in its cache, and takes the time."""

    def __init__(self) -> None:
        self._asked = self._cached = 0

    def add(self, asked: int, cached: int | None) -> None:
        """Add a request of so many tokens."""
        assert cached is not None, "the server does not say what it had in its cache"
        self._asked, self._cached = self._asked + asked, self._cached + cached

    async def round(
        self, play: Callable[[Any], Awaitable[list[Turn]]], items: Iterable[Any], at_once: int
    ) -> Round:
        """Have all ``items`` played, so many at a time."""
        left, found = iter(items), list[list[Turn]]()

        async def go_on() -> None:
            for item in left:
                found.append(await play(item))

        begun, spent = perf_counter(), process_time()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(go_on())
        return Round(
            found, perf_counter() - begun, process_time() - spent, self._cached / self._asked
        )


def settings() -> Config:
    """Of a run against `Instant`, on a CPU."""
    config = Config(environment=EnvironmentConfig(kind="agentic_parts:Instant", max_turns=TURNS))
    config.rollout.max_new_tokens = _BUDGET
    config.rollout.engine.flags = {"max_total_tokens": _ROOM}
    return config


@contextlib.asynccontextmanager
async def served(
    config: Config, model: Path, logs: Path
) -> AsyncIterator[tuple[SglangEngine, Player, Tokenizer]]:
    """An engine with its client, and who plays episodes on it."""
    tokenizer, media = load_tokenizer(model), PromptMedia(None, model, logs)
    engine, player = (
        SglangEngine(config, 0, model, Version(1, 0), logs),
        make_player(config, tokenizer, media, print),
    )
    assert player
    await engine.start()
    try:
        await player.start()
        yield engine, player, tokenizer
    finally:
        await player.close()
        await engine.close()


async def played(
    engine: SglangEngine, player: Player, prompts: Iterable[Prompt], at_once: int
) -> Round:
    """Episodes by the loop of a rollout process, so many ``at_once``."""
    tally = Tally()

    async def play(prompt: Prompt) -> list[Turn]:
        turns: list[Turn] = []

        async def ask(request: GenerateRequest) -> Generation:
            before = request.context_ids
            known = sum(len(turn.heard) + turn.tokens for turn in turns)
            made = await engine.generate(request)
            tally.add(len(before), made.cached)
            turns.append(
                Turn(before[known:], len(request.prompt_ids) + len(made.token_ids) - len(before))
            )
            return made

        request = GenerateRequest(
            prompt.token_ids, prompt.prompt_id, 0, Sampling(1.0, 1.0, (), 0), _BUDGET
        )
        made = await player.play(History(), EpisodeStart(prompt, request, ask))
        if isinstance(made, Exception):
            raise made
        return turns

    return await tally.round(play, prompts, at_once)


async def replayed(engine: SglangEngine, episodes: Iterable[list[Turn]], at_once: int) -> Round:
    """As many tokens after the same words, turn by turn, by the least that a client can be."""
    tally, headers = Tally(), {"Authorization": f"Bearer {engine.server.key}"}

    async def play(turns: list[Turn]) -> list[Turn]:
        history: list[int] = []
        for turn in turns:
            history += turn.heard
            sampling = {"max_new_tokens": turn.tokens, "ignore_eos": True, "temperature": 1.0}
            body = {"input_ids": history, "sampling_params": sampling, "return_logprob": True}
            async with session.post("/generate", json=body) as reply:
                answer = await reply.json()
            tally.add(len(history), answer["meta_info"]["cached_tokens"])
            history += answer["output_ids"]
        return turns

    timeout = aiohttp.ClientTimeout(_CLIENT_S)
    async with aiohttp.ClientSession(
        engine.server.url, headers=headers, timeout=timeout
    ) as session:
        return await tally.round(play, episodes, at_once)


def prompts(tokenizer: Tokenizer, count: int, seed: int) -> list[Prompt]:
    """Prompts without a common beginning."""
    drawn = random.Random(seed)
    texts = ("".join(drawn.choices(CHARACTERS, k=PROMPT)) for _ in range(count))
    return [
        Prompt(f"{seed}-{n}", tuple(tokenizer.encode(text)), text, "")
        for n, text in enumerate(texts)
    ]


async def _rounds(
    folder: Path, rounds: int, episodes: int, at_once: int
) -> list[tuple[Round, Round]]:
    config, found = settings(), []
    async with served(config, make_model(folder / "model"), folder) as (engine, player, tokenizer):
        for number in range(-1, rounds):
            count = at_once if number < 0 else episodes
            ours = await played(engine, player, prompts(tokenizer, count, number), at_once)
            bare = await replayed(engine, ours.episodes, at_once)
            found.append((ours, bare))
    return found[1:]


def measure(folder: Path, rounds: int, episodes: int, at_once: int) -> Iterator[Figure]:
    """Episodes a second, and tokens from the cache, against the bare client."""
    found = asyncio.run(_rounds(folder, rounds, episodes, at_once))
    for name, what in (("episodes a second", "rate"), ("tokens from the cache", "cached")):
        shares = [getattr(ours, what) / getattr(bare, what) for ours, bare in found]
        enough = median(shares) >= _LEAST
        yield Figure(
            f"{name}, of a bare client's", median(shares), "x", f">= {_LEAST}", enough, shares
        )
    yield _figure("episodes", "1/s", [ours.rate for ours, _ in found])
    yield _figure(
        "tokens of requests from the cache", "%", [100 * ours.cached for ours, _ in found]
    )
    for who, some in (
        ("rollout", [ours for ours, _ in found]),
        ("client", [bare for _, bare in found]),
    ):
        spent = [1e3 * one.cpu_s / len(one.episodes) for one in some]
        yield _figure(f"CPU of the {who} process, an episode of {TURNS} turns", "ms", spent)


def _figure(name: str, unit: str, rounds: list[float]) -> Figure:
    return Figure(name, median(rounds), unit, rounds=rounds)
