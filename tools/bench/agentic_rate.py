"""Episodes with environments that respond instantly, compared with a bare client that replays the
same turns on the same SGLang server.

The model is tiny and random, so a turn ends after a random number of tokens, 64 on average. For
each turn, the client requests as many tokens after the same text of the environment.
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
"""Characters of a prompt. Each character is a token."""
_BUDGET = CONTEXT // 2
_ROOM = 1 << 17
"""Tokens of the server's cache, more than all episodes in progress have."""
_CLIENT_S = 600.0
_LEAST_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Turn:
    """A request to the engine."""

    added: tuple[int, ...]
    """Tokens since the previous turn: the prompt, or the response of the environment."""
    tokens: int
    """Number of generated tokens."""


@dataclass(frozen=True, slots=True)
class Round:
    """Cost of some episodes."""

    episodes: list[list[Turn]]
    seconds: float
    cpu_s: float
    """CPU seconds of this process."""
    cached: float
    """Share of the requests' tokens that was in the server's cache."""

    @property
    def rate(self) -> float:
        """Episodes per second."""
        return len(self.episodes) / self.seconds


class CacheCounter:
    """Counts tokens of requests and those that were in the server's cache."""

    def __init__(self) -> None:
        self._requested = self._cached = 0

    def add(self, requested: int, cached: int | None) -> None:
        """Add a request with ``requested`` tokens."""
        assert cached is not None, "the server does not report its cached tokens"
        self._requested += requested
        self._cached += cached

    async def play_round(
        self, play: Callable[[Any], Awaitable[list[Turn]]], items: Iterable[Any], concurrency: int
    ) -> Round:
        """Play all ``items``, at most ``concurrency`` at the same time."""
        remaining = iter(items)
        episodes: list[list[Turn]] = []

        async def play_remaining() -> None:
            for item in remaining:
                episodes.append(await play(item))

        started, cpu_started = perf_counter(), process_time()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(play_remaining())
        seconds, cpu_s = perf_counter() - started, process_time() - cpu_started
        return Round(episodes, seconds, cpu_s, self._cached / self._requested)


def settings() -> Config:
    """Settings of a run with `Instant` on a CPU."""
    config = Config(environment=EnvironmentConfig(kind="agentic_parts:Instant", max_turns=TURNS))
    config.rollout.max_new_tokens = _BUDGET
    config.rollout.engine.flags = {"max_total_tokens": _ROOM}
    return config


@contextlib.asynccontextmanager
async def started_engine(
    config: Config, model: Path, logs: Path
) -> AsyncIterator[tuple[SglangEngine, Player, Tokenizer]]:
    """Yield an engine, a player of episodes, and the tokenizer."""
    tokenizer, media = load_tokenizer(model), PromptMedia(None, model, logs)
    engine = SglangEngine(config, 0, model, Version(1, 0), logs)
    player = make_player(config, tokenizer, media, print)
    assert player
    await engine.start()
    try:
        await player.start()
        yield engine, player, tokenizer
    finally:
        await player.close()
        await engine.close()


async def play_episodes(
    engine: SglangEngine, player: Player, prompts: Iterable[Prompt], concurrency: int
) -> Round:
    """Play episodes with the loop of a rollout process."""
    counter = CacheCounter()

    async def play(prompt: Prompt) -> list[Turn]:
        turns: list[Turn] = []

        async def generate(request: GenerateRequest) -> Generation:
            context = request.context_ids
            previous = sum(len(turn.added) + turn.tokens for turn in turns)
            response = await engine.generate(request)
            counter.add(len(context), response.cached)
            total = len(request.prompt_ids) + len(response.token_ids)
            turns.append(Turn(context[previous:], total - len(context)))
            return response

        request = GenerateRequest(
            prompt.token_ids, prompt.prompt_id, 0, Sampling(1.0, 1.0, (), 0), _BUDGET
        )
        result = await player.play(History(), EpisodeStart(prompt, request, generate))
        if isinstance(result, Exception):
            raise result
        return turns

    return await counter.play_round(play, prompts, concurrency)


async def replay_episodes(
    engine: SglangEngine, episodes: Iterable[list[Turn]], concurrency: int
) -> Round:
    """Request as many tokens after the same text, turn by turn, with a minimal client."""
    counter, headers = CacheCounter(), {"Authorization": f"Bearer {engine.server.key}"}

    async def play(turns: list[Turn]) -> list[Turn]:
        history: list[int] = []
        for turn in turns:
            history += turn.added
            sampling = {"max_new_tokens": turn.tokens, "ignore_eos": True, "temperature": 1.0}
            body = {"input_ids": history, "sampling_params": sampling, "return_logprob": True}
            async with session.post("/generate", json=body) as reply:
                response = await reply.json()
            counter.add(len(history), response["meta_info"]["cached_tokens"])
            history += response["output_ids"]
        return turns

    timeout = aiohttp.ClientTimeout(_CLIENT_S)
    async with aiohttp.ClientSession(
        engine.server.url, headers=headers, timeout=timeout
    ) as session:
        return await counter.play_round(play, episodes, concurrency)


def prompts(tokenizer: Tokenizer, count: int, seed: int) -> list[Prompt]:
    """Prompts without a common prefix."""
    generator = random.Random(seed)
    texts = ["".join(generator.choices(CHARACTERS, k=PROMPT)) for _ in range(count)]
    return [
        Prompt(f"{seed}-{number}", tuple(tokenizer.encode(text)), text, "")
        for number, text in enumerate(texts)
    ]


async def _play_rounds(
    folder: Path, rounds: int, episodes: int, concurrency: int
) -> list[tuple[Round, Round]]:
    """Rounds of a rollout process, each with that of the bare client.

    A short first round is not returned.
    """
    config = settings()
    pairs = []
    async with started_engine(config, make_model(folder / "model"), folder) as (
        engine,
        player,
        tokenizer,
    ):
        for number in range(-1, rounds):
            count = concurrency if number < 0 else episodes
            texts = prompts(tokenizer, count, number)
            ours = await play_episodes(engine, player, texts, concurrency)
            bare = await replay_episodes(engine, ours.episodes, concurrency)
            pairs.append((ours, bare))
    return pairs[1:]


def measure(folder: Path, rounds: int, episodes: int, concurrency: int) -> Iterator[Figure]:
    """Episodes per second, and tokens from the cache, compared with the bare client."""
    pairs = asyncio.run(_play_rounds(folder, rounds, episodes, concurrency))
    rates = [ours.rate / bare.rate for ours, bare in pairs]
    yield _share_of_client("episodes a second", rates)
    yield _share_of_client(
        "tokens from the cache", [ours.cached / bare.cached for ours, bare in pairs]
    )
    yield _figure("episodes", "1/s", [ours.rate for ours, _ in pairs])
    cached = [100 * ours.cached for ours, _ in pairs]
    yield _figure("tokens of requests from the cache", "%", cached)
    yield _cpu_figure("rollout", [ours for ours, _ in pairs])
    yield _cpu_figure("client", [bare for _, bare in pairs])


def _share_of_client(name: str, shares: list[float]) -> Figure:
    share = median(shares)
    target = f">= {_LEAST_SHARE}"
    label = f"{name}, of a bare client's"
    return Figure(label, share, "x", target, share >= _LEAST_SHARE, shares)


def _cpu_figure(process: str, rounds: list[Round]) -> Figure:
    milliseconds = [1e3 * played.cpu_s / len(played.episodes) for played in rounds]
    label = f"CPU of the {process} process, an episode of {TURNS} turns"
    return _figure(label, "ms", milliseconds)


def _figure(name: str, unit: str, rounds: list[float]) -> Figure:
    return Figure(name, median(rounds), unit, rounds=rounds)
