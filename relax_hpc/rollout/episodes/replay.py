"""A recorded episode played again against its environment, which should answer the same."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.config.schema.environment import AGENT
from relax_hpc.data.generation import Episode, GenerateRequest, Generation
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.rollout.agents.gateway.serving import gateway
from relax_hpc.rollout.episodes.history import History, OpenRow
from relax_hpc.rollout.episodes.player import EpisodeBackend, make_backend
from relax_hpc.rollout.episodes.recorded_episode import ReplayMismatch
from relax_hpc.rollout.episodes.turns import EpisodeStart
from relax_hpc.rollout.media import PromptMedia
from relax_hpc.tasks import environment_name

_SHOWN_CHARS = 40
"""Characters before a difference that its message shows."""


async def replay(
    config: Config,
    tokenizer: Tokenizer,
    prompt: Prompt,
    request: GenerateRequest,
    rows: Sequence[OpenRow],
    folder: Path,
) -> Episode:
    """The episode as it is played now. ``rows``: the recorded rows. ``request``: the request of the
    first turn. ``folder``: an empty folder for temporary files.

    EnvironmentFault: its environment fails, or answers differently (`ReplayMismatch`). ConfigError:
    episodes of the run are not played against environments.
    """

    async def ask(request: GenerateRequest) -> Generation:
        context = tokenizer.decode(list(request.context_ids))[-_SHOWN_CHARS:]
        raise ReplayMismatch(
            len(rows) - 1, f"the policy speak where it did not, after {context!r},"
        )

    media = PromptMedia(None, tokenizer.directory, folder / "media", config.data.multimodal)
    try:
        async with _open_backend(config, tokenizer, media, RunDir(folder / "run")) as backend:
            prompt = await media.store_prompt_for_evaluation(prompt)
            start = EpisodeStart(prompt, replace(request, media=prompt.media), ask)
            return await backend.play(History(list(rows)), start)
    finally:
        await media.close()


@contextlib.asynccontextmanager
async def _open_backend(
    config: Config, tokenizer: Tokenizer, media: PromptMedia, run: RunDir
) -> AsyncIterator[EpisodeBackend]:
    """Backend of a run's episodes. Agent programs get the endpoint of another ``run``."""
    async with contextlib.AsyncExitStack() as opened:
        if environment_name(config) == AGENT:
            run.create()
            run.rendezvous("hub").mkdir(parents=True)
            await opened.enter_async_context(gateway(run))
            config = replace(config, run_dir=str(run.root))
        backend = make_backend(config, tokenizer, media)
        if backend is None:
            raise ConfigError(
                "--replay: episodes of this run are played against no environment "
                "(environment.kind)"
            )
        opened.push_async_callback(backend.close)
        await backend.start()
        yield backend
