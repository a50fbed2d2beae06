"""An episode of which all turns are known, played again against its environment: it is to say the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from relax_hpc.config.schema import Config
from relax_hpc.data.prompts import Prompt, Tokenizer
from relax_hpc.engines.engine import Episode, GenerateRequest, Generation
from relax_hpc.errors import ConfigError
from relax_hpc.rollout.history import History, OpenRow
from relax_hpc.rollout.media import PromptMedia
from relax_hpc.rollout.player import stage_of
from relax_hpc.rollout.tape import Differs
from relax_hpc.rollout.turns import Start


async def replay(
    config: Config, tokenizer: Tokenizer, prompt: Prompt, request: GenerateRequest, rows: Sequence[OpenRow], media: Path
) -> Episode:
    """The episode as it is now; ``rows``: as it was, ``request``: of its first turn, ``media``: folder for a while.

    EnvironmentFault: its environment fails, or says something else (`Differs`). ConfigError: episodes of the run are
    played against none.
    """

    async def ask(asked: GenerateRequest) -> Generation:
        place = len(asked.so_far) - len(asked.prompt_ids)
        raise Differs(len(rows) - 1, f"one more turn, {place} tokens behind the prompt,")

    stored = PromptMedia(None, tokenizer.directory, media, config.data.multimodal)
    stage = stage_of(config, tokenizer, stored)
    if stage is None:
        raise ConfigError("--replay: episodes of this run are played against no environment (environment.kind)")
    try:
        await stage.start()
        prompt = await stored.of_evaluation(prompt)
        start = Start(prompt, replace(request, media=prompt.media), ask)
        return await stage.play(History(list(rows)), start)
    finally:
        await stage.close()
        await stored.close()
