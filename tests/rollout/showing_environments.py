"""Environments that show media, and episodes of an engine that sees against them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from relax_hpc.config.schema import Config, DataConfig, EnvironmentConfig
from relax_hpc.data.media import MediaRules
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.environments.base import Environment, MediaPart, Observation, Response, Step
from relax_hpc.rollout.engines.engine import BadAnswer, Episode
from relax_hpc.rollout.episodes.history import History
from relax_hpc.rollout.episodes.observed_media import ObservedMedia
from relax_hpc.rollout.episodes.player import EnvironmentBackend, Player
from relax_hpc.rollout.episodes.turn_tokens import TurnTokenizer
from relax_hpc.rollout.episodes.turns import EpisodeStart, TurnRules
from relax_hpc.rollout.media import PromptMedia
from tests.helpers.media_engine import SAMPLING, MediaEngine, film
from tests.helpers.media_prompts import png
from tests.helpers.turns_helpers import Inside

ENDS = tuple(range(10, 40))
"""Tokens that end a turn, of which one comes soon."""


class Showing(Environment):
    """Shows an image, a film with a text, and two images."""

    shown = ((png(64, 96),), (film(1),), (png(32, 32, 1), png(32, 64, 2)))

    def step(self, response: Response) -> Step:
        if response.turn == len(self.shown):
            return Step(done=True)
        named = [
            one if isinstance(one, tuple) else ("image", one) for one in self.shown[response.turn]
        ]
        media = tuple(MediaPart(str(kind), content) for kind, content in named)
        return Step((Observation("so" if response.turn == 1 else "", media),))


class Torn(Environment):
    """Shows half of an image."""

    def step(self, response: Response) -> Step:
        return Step((Observation(media=(MediaPart("image", png()[:200]),)),))


def shown(
    seeing: MediaEngine, folder: Path, kind: type[Environment]
) -> tuple[Prompt, Episode | BadAnswer]:
    """A prompt with an image, and an episode that begins with it."""
    named: Future[bool] = Future()
    named.set_result(True)
    tickets = SimpleNamespace(register_media=lambda *_: named)
    client: Any = SimpleNamespace(config=Config(), media=seeing.store, tickets=tickets)
    model, asked = seeing.models[0], seeing.asked(png(seed=5))
    tokenizer, media = load_tokenizer(model), PromptMedia(client, model, folder / "evaluations")
    how = MediaRules.from_config(DataConfig(), model, folder)
    assert how
    bridge, observed = (
        TurnTokenizer(tokenizer, None, dict(how.placeholders)),
        ObservedMedia(media, how, tokenizer),
    )
    stage = EnvironmentBackend(
        Inside(kind), TurnRules(bridge, tokenizer, EnvironmentConfig(turn_tokens=30), observed)
    )
    prompt = Prompt("p", asked.prompt_ids, "look", "a", media=asked.media)
    request = replace(asked, sampling=replace(SAMPLING, stop_token_ids=ENDS), budget=400)

    async def played() -> Episode | BadAnswer:
        try:
            player = Player(stage, 1, 60.0, lambda fault: None)
            return await player.play(
                History(), EpisodeStart(prompt, request, seeing.engine.generate, ticket=7)
            )
        finally:
            await media.close()

    return prompt, seeing.runner.run(played())
