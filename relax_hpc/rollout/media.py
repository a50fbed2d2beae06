"""Media of prompts that are drawn: decoded once a prompt group, and stored where engines and
trainers read them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from relax_hpc.config.schema import MultimodalConfig
from relax_hpc.data.media import PromptMedium, read_placeholder_tokens
from relax_hpc.data.multimodal.bad_media import BadMedium, Reason
from relax_hpc.data.multimodal.pool import Loaded
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.prompts import Prompt
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.client.media_client import store_media
from relax_hpc.queue.storage.media import BadMedia, MediaStore
from relax_hpc.rollout.media_ahead import MediaAhead

Store = Callable[[Sequence[Loaded]], list[Path]]
UNUSABLE = (BadMedium, BadMedia)
"""Errors of media that nobody can use, each with its `reason`."""


class PromptMedia:
    """Media of a rollout process, decoded by processes of their own. Prompts without any come back
    as they are, at once. For one event loop."""

    def __init__(
        self,
        client: QueueClient | None,
        model: Path,
        evaluations: Path,
        settings: MultimodalConfig | None = None,
    ) -> None:
        """``client``: None where there are evaluations alone. ``model``: a Hugging Face directory.
        ``evaluations``: folder of the media of evaluations, which no row names: they stay as long
        as the run."""
        self._client, self._folder = client, evaluations
        settings = settings or MultimodalConfig()
        self._rules = rules = (
            Rules.from_model(model, settings) if read_placeholder_tokens(model) else None
        )
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
        """``prompt`` with its media in the queue's store, where they stay as long as rows of
        ``ticket`` name them.

        BadMedium, BadMedia: one of them cannot be used."""
        if prompt.fault:
            raise prompt.fault
        return (
            replace(prompt, media=await self.store_for_ticket(prompt.media, ticket))
            if prompt.media
            else prompt
        )

    async def of_evaluation(self, prompt: Prompt) -> Prompt:
        """``prompt`` of an evaluation with its media stored. BadMedium as `of_ticket`."""
        if prompt.fault:
            raise prompt.fault
        return (
            replace(prompt, media=await self.store_for_evaluation(prompt.media))
            if prompt.media
            else prompt
        )

    async def store_for_ticket(
        self, media: Sequence[PromptMedium], ticket: int
    ) -> tuple[PromptMedium, ...]:
        """``media`` in the queue's store, which keeps them as long as rows of ``ticket`` name them.
        BadMedium, BadMedia: one of them cannot be used."""
        client = self._client
        assert client, "there are evaluations alone"

        def store(loaded: Sequence[Loaded]) -> list[Path]:
            ids = store_media(
                client, ticket, [one.blob for one in loaded], [one.media_id for one in loaded]
            )
            paths = [client.media.folder / media_id for media_id in ids]
            for path, one in zip(paths, loaded, strict=True):
                # If another role owns the ticket by now, it refuses the rows; until then an engine
                # looks for them.
                if not path.exists():
                    client.media.put(one.blob, one.media_id)
            return paths

        return await self._stored(media, store)

    async def store_for_evaluation(self, media: Sequence[PromptMedium]) -> tuple[PromptMedium, ...]:
        """``media`` in the store of evaluations, for as long as the run. BadMedium."""

        def store(loaded: Sequence[Loaded]) -> list[Path]:
            folder = MediaStore(self._folder, durable=False)
            return [self._folder / folder.put(one.blob, one.media_id) for one in loaded]

        return await self._stored(media, store)

    async def _stored(
        self, media: Sequence[PromptMedium], store: Store
    ) -> tuple[PromptMedium, ...]:
        if not media:
            return ()
        loaded = await asyncio.gather(*map(self._loaded, media))
        paths = await asyncio.to_thread(store, loaded)
        return tuple(replace(medium, blob=path) for medium, path in zip(media, paths, strict=True))

    async def _loaded(self, medium: PromptMedium) -> Loaded:
        assert self._ahead and self._rules, "a prompt of a model that takes text alone has no media"
        found = await self._ahead.load(medium)
        if (tokens := self._rules.tokens(found.header)) != medium.tokens:
            raise BadMedium(
                Reason.SPANS, f"{medium.kind} of {tokens} tokens, its header said {medium.tokens}"
            )
        return found
