"""Environments that show media, and episodes of a multimodal engine against them."""

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
from tests.helpers.turns_helpers import InProcessEnvironments

ENDS = tuple(range(10, 40))
"""Tokens that end a turn, so many that the engine soon generates one."""


class Showing(Environment):
    """Shows an image, a film with a text, and two images."""

    media_by_turn = (
        (("image", png(64, 96)),),
        (film(1),),
        (("image", png(32, 32, 1)), ("image", png(32, 64, 2))),
    )

    def step(self, response: Response) -> Step:
        if response.turn == len(self.media_by_turn):
            return Step(done=True)
        media = tuple(
            MediaPart(str(kind), content) for kind, content in self.media_by_turn[response.turn]
        )
        return Step((Observation("so" if response.turn == 1 else "", media),))


class Torn(Environment):
    """Shows half of an image."""

    def step(self, response: Response) -> Step:
        return Step((Observation(media=(MediaPart("image", png()[:200]),)),))


def play_with_media(
    seeing: MediaEngine, folder: Path, kind: type[Environment]
) -> tuple[Prompt, Episode | BadAnswer]:
    """A prompt with an image, and an episode that begins with it."""
    registered: Future[bool] = Future()
    registered.set_result(True)
    tickets = SimpleNamespace(register_media=lambda *_: registered)
    client: Any = SimpleNamespace(config=Config(), media=seeing.store, tickets=tickets)
    model, template = seeing.models[0], seeing.asked(png(seed=5))
    tokenizer, media = load_tokenizer(model), PromptMedia(client, model, folder / "evaluations")
    rules = MediaRules.from_config(DataConfig(), model, folder)
    assert rules
    bridge = TurnTokenizer(tokenizer, None, dict(rules.placeholders))
    observed = ObservedMedia(media, rules, tokenizer)
    stage = EnvironmentBackend(
        InProcessEnvironments(kind),
        TurnRules(bridge, tokenizer, EnvironmentConfig(turn_tokens=30), observed),
    )
    prompt = Prompt("p", template.prompt_ids, "look", "a", media=template.media)
    request = replace(template, sampling=replace(SAMPLING, stop_token_ids=ENDS), budget=400)
    beginning = EpisodeStart(prompt, request, seeing.engine.generate, ticket=7)

    async def play() -> Episode | BadAnswer:
        try:
            player = Player(stage, 1, 60.0, lambda fault: None)
            return await player.play(History(), beginning)
        finally:
            await media.close()

    return prompt, seeing.runner.run(play())
