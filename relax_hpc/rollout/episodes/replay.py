"""An episode of which all turns are known, played again against its environment: it is to say the
same."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.config.schema.environment import AGENT
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.rollout.agents.gateway.serving import gateway
from relax_hpc.rollout.engines.engine import Episode, GenerateRequest, Generation
from relax_hpc.rollout.episodes.history import History, OpenRow
from relax_hpc.rollout.episodes.player import Stage, stage_of
from relax_hpc.rollout.episodes.recorded_episode import Differs
from relax_hpc.rollout.episodes.turns import Start
from relax_hpc.rollout.media import PromptMedia
from relax_hpc.tasks import environment_of

_SHOWN = 40
"""Characters that are shown of what was there before."""


async def replay(
    config: Config,
    tokenizer: Tokenizer,
    prompt: Prompt,
    request: GenerateRequest,
    rows: Sequence[OpenRow],
    folder: Path,
) -> Episode:
    """The episode as it is now; ``rows``: as it was, ``request``: of its first turn, ``folder``:
    empty, for a while.

    EnvironmentFault: its environment fails, or says something else (`Differs`). ConfigError:
    episodes of the run are played against none.
    """

    async def ask(asked: GenerateRequest) -> Generation:
        before = tokenizer.decode(list(asked.context_ids))[-_SHOWN:]
        raise Differs(len(rows) - 1, f"the policy speak where it did not, after {before!r},")

    media = PromptMedia(None, tokenizer.directory, folder / "media", config.data.multimodal)
    try:
        async with _stage(config, tokenizer, media, RunDir(folder / "run")) as stage:
            prompt = await media.of_evaluation(prompt)
            return await stage.play(
                History(list(rows)), Start(prompt, replace(request, media=prompt.media), ask)
            )
    finally:
        await media.close()


@contextlib.asynccontextmanager
async def _stage(
    config: Config, tokenizer: Tokenizer, media: PromptMedia, run: RunDir
) -> AsyncIterator[Stage]:
    """Stage of a run's episodes; the endpoint of programs is that of another ``run``."""
    async with contextlib.AsyncExitStack() as opened:
        if environment_of(config) == AGENT:
            run.create()
            run.rendezvous("hub").mkdir(parents=True)
            await opened.enter_async_context(gateway(run))
            config = replace(config, run_dir=str(run.root))
        stage = stage_of(config, tokenizer, media)
        if stage is None:
            raise ConfigError(
                "--replay: episodes of this run are played against no environment "
                "(environment.kind)"
            )
        opened.push_async_callback(stage.close)
        await stage.start()
        yield stage
