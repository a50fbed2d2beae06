"""Media of prompts that are generated: decoded once for each prompt group, and stored where engines
and trainers read them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from relax_hpc.config.schema import MultimodalConfig
from relax_hpc.data.media import PromptMedium, read_placeholder_tokens
from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.pool import Loaded
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.prompts import Prompt
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.client.media_client import store_media
from relax_hpc.queue.storage.media import MediaMismatch, MediaStore
from relax_hpc.rollout.media_ahead import MediaAhead

Store = Callable[[Sequence[Loaded]], list[Path]]
UNUSABLE = (UnusableMedium, MediaMismatch)
"""Errors of media that cannot be used, each with its `reason`."""


class PromptMedia:
    """Media of a rollout process, decoded by worker processes. Prompts without media are returned
    unchanged and immediately. For one event loop."""

    def __init__(
        self,
        client: QueueClient | None,
        model: Path,
        evaluations: Path,
        settings: MultimodalConfig | None = None,
    ) -> None:
        """``client``: None if there are only evaluations. ``model``: a Hugging Face directory.
        ``evaluations``: folder of the media of evaluations. No row names them, so they are kept as
        long as the run."""
        self._client, self._folder = client, evaluations
        settings = settings or MultimodalConfig()
        self._rules = rules = (
            Rules.from_model(model, settings) if read_placeholder_tokens(model) else None
        )
        self._ahead = MediaAhead(rules, settings, self._store_ahead) if rules else None

    async def close(self) -> None:
        """End the worker processes."""
        if self._ahead:
            await self._ahead.close()

    def expect(self, prompts: Iterable[Prompt]) -> None:
        """Start to decode the media of ``prompts``, which will be generated soon, in this order."""
        if self._ahead:
            media: list[PromptMedium] = []
            for prompt in prompts:
                media += prompt.media
            self._ahead.expect(media)

    @property
    def looks_ahead(self) -> bool:
        """Whether a call of `expect` has an effect."""
        return bool(self._ahead and self._ahead.max_bytes)

    def _store_ahead(self, loaded: Loaded) -> None:
        """Store a medium that no ticket names yet. If none names it later, the store removes it
        after a grace period."""
        if self._client:
            self._client.media.put(loaded.blob, loaded.media_id)

    async def store_prompt_for_ticket(self, prompt: Prompt, ticket: int) -> Prompt:
        """``prompt`` with its media in the queue's store, which keeps them as long as rows of
        ``ticket`` name them.

        UnusableMedium, MediaMismatch: a medium cannot be used."""
        if prompt.media_error:
            raise prompt.media_error
        if not prompt.media:
            return prompt
        return replace(prompt, media=await self.store_for_ticket(prompt.media, ticket))

    async def store_prompt_for_evaluation(self, prompt: Prompt) -> Prompt:
        """``prompt`` of an evaluation with its media stored. UnusableMedium as in
        `store_prompt_for_ticket`."""
        if prompt.media_error:
            raise prompt.media_error
        if not prompt.media:
            return prompt
        return replace(prompt, media=await self.store_for_evaluation(prompt.media))

    async def store_for_ticket(
        self, media: Sequence[PromptMedium], ticket: int
    ) -> tuple[PromptMedium, ...]:
        """``media`` in the queue's store, which keeps them as long as rows of ``ticket`` name them.
        UnusableMedium, MediaMismatch: a medium cannot be used."""
        client = self._client
        assert client, "tickets need a client"

        def store(media: Sequence[Loaded]) -> list[Path]:
            blobs = [medium.blob for medium in media]
            ids = store_media(client, ticket, blobs, [medium.media_id for medium in media])
            paths = [client.media.folder / media_id for media_id in ids]
            for path, medium in zip(paths, media, strict=True):
                # If another role owns the ticket by now, the queue has not stored the media and
                # will refuse the rows. An engine still reads the media until then.
                if not path.exists():
                    client.media.put(medium.blob, medium.media_id)
            return paths

        return await self._load_and_store(media, store)

    async def store_for_evaluation(self, media: Sequence[PromptMedium]) -> tuple[PromptMedium, ...]:
        """``media`` in the store of evaluations, which keeps them as long as the run.
        UnusableMedium."""

        def store(media: Sequence[Loaded]) -> list[Path]:
            folder = MediaStore(self._folder, durable=False)
            return [self._folder / folder.put(medium.blob, medium.media_id) for medium in media]

        return await self._load_and_store(media, store)

    async def _load_and_store(
        self, media: Sequence[PromptMedium], store: Store
    ) -> tuple[PromptMedium, ...]:
        if not media:
            return ()
        loaded = await asyncio.gather(*map(self._load, media))
        paths = await asyncio.to_thread(store, loaded)
        return tuple(replace(medium, blob=path) for medium, path in zip(media, paths, strict=True))

    async def _load(self, medium: PromptMedium) -> Loaded:
        assert self._ahead and self._rules, "the prompts of a model for text only have no media"
        loaded = await self._ahead.load(medium)
        tokens = self._rules.tokens(loaded.header)
        if tokens != medium.tokens:
            raise UnusableMedium(
                Reason.SPANS,
                f"{medium.kind} of {tokens} tokens, its header announced {medium.tokens}",
            )
        return loaded
