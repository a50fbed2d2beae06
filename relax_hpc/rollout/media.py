"""Media of prompts that are drawn: decoded once a prompt group, and stored where engines and trainers read them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from relax_hpc.config.schema import MultimodalConfig
from relax_hpc.data.media import PromptMedium, places_of
from relax_hpc.data.prompts import Prompt
from relax_hpc.multimodal.bad import BadMedium, Reason
from relax_hpc.multimodal.pool import Loaded
from relax_hpc.multimodal.rules import Rules
from relax_hpc.rollout.media_ahead import MediaAhead
from relax_hpc.transfer_queue.client import QueueClient
from relax_hpc.transfer_queue.client.media_client import store_media
from relax_hpc.transfer_queue.storage.media import BadMedia, MediaStore

Store = Callable[[Sequence[Loaded]], list[Path]]
UNUSABLE = (BadMedium, BadMedia)
"""Errors of media that nobody can use, each with its `reason`."""


class PromptMedia:
    """Media of a rollout process, decoded by processes of their own. Prompts without any come back as they are, at
    once. For one event loop."""

    def __init__(
        self, client: QueueClient | None, model: Path, evaluations: Path, settings: MultimodalConfig | None = None
    ) -> None:
        """``client``: None where there are evaluations alone. ``model``: a Hugging Face directory. ``evaluations``:
        folder of the media of evaluations, which no row names: they stay as long as the run."""
        self._client, self._folder = client, evaluations
        settings = settings or MultimodalConfig()
        self._rules = rules = Rules.of(model, settings) if places_of(model) else None
        self._ahead = MediaAhead(rules, settings, self._store_ahead) if rules else None

    async def close(self) -> None:
        """End its processes."""
        if self._ahead:
            await self._ahead.close()

    def expect(self, prompts: Iterable[Prompt]) -> None:
        """Begin with the media of ``prompts``, which will be drawn soon, in this order."""
        if self._ahead:
            self._ahead.expect(medium for prompt in prompts for medium in prompt.media)

    @property
    def looks_ahead(self) -> bool:
        """Whether it is of use to say what is expected."""
        return bool(self._ahead and self._ahead.most_bytes)

    def _store_ahead(self, loaded: Loaded) -> None:
        """Store what no ticket names yet; named by none, it goes when its grace is over."""
        if self._client:
            self._client.media.put(loaded.blob, loaded.media_id)

    async def of_ticket(self, prompt: Prompt, ticket: int) -> Prompt:
        """``prompt`` with its media in the queue's store, where they stay as long as rows of ``ticket`` name them.

        BadMedium, BadMedia: one of them is of no use."""
        client = self._client
        assert client, "there are evaluations alone"

        def store(media: Sequence[Loaded]) -> list[Path]:
            ids = store_media(client, ticket, [one.blob for one in media], [one.media_id for one in media])
            paths = [client.media.folder / one for one in ids]
            for path, one in zip(paths, media, strict=True):
                # The ticket is another's by now, who refuses the rows; until then an engine looks for them.
                if not path.exists():
                    client.media.put(one.blob, one.media_id)
            return paths

        return await self._stored(prompt, store)

    async def of_evaluation(self, prompt: Prompt) -> Prompt:
        """``prompt`` of an evaluation with its media stored. BadMedium as `of_ticket`."""

        def store(media: Sequence[Loaded]) -> list[Path]:
            own = MediaStore(self._folder, durable=False)
            return [self._folder / own.put(one.blob, one.media_id) for one in media]

        return await self._stored(prompt, store)

    async def _stored(self, prompt: Prompt, store: Store) -> Prompt:
        if prompt.fault:
            raise prompt.fault
        if not prompt.media:
            return prompt
        loaded = await asyncio.gather(*map(self._loaded, prompt.media))
        paths = await asyncio.to_thread(store, loaded)
        stored = (replace(medium, blob=path) for medium, path in zip(prompt.media, paths, strict=True))
        return replace(prompt, media=tuple(stored))

    async def _loaded(self, medium: PromptMedium) -> Loaded:
        assert self._ahead and self._rules, "a prompt of a model that takes text alone has no media"
        found = await self._ahead.load(medium)
        if (tokens := self._rules.tokens(found.header)) != medium.tokens:
            raise BadMedium(Reason.SPANS, f"{medium.kind} of {tokens} tokens, its header said {medium.tokens}")
        return found
