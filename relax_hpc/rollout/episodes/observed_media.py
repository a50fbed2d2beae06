"""Media in observations of environments. They are counted, expanded and stored like media of
prompts."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from relax_hpc.data.media import MediaRules, PromptMedium
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.environments.base import MediaPart
from relax_hpc.rollout.media import PromptMedia


class ObservedMedia:
    """Media of observations in one rollout process; for one event loop."""

    def __init__(self, media: PromptMedia, rules: MediaRules, tokenizer: Tokenizer) -> None:
        self._media, self._rules = media, rules
        self._encode = functools.partial(tokenizer.encode, special=False)

    async def close(self) -> None:
        """End the process that reads the headers of media."""
        await asyncio.to_thread(self._rules.pool.close)

    async def expand(
        self, ticket: int | None, ids: list[int], media_parts: Sequence[MediaPart]
    ) -> tuple[list[int], tuple[PromptMedium, ...]]:
        """Token ``ids`` with as many placeholders for each of ``media_parts`` as the medium has
        tokens, and the media with their spans. ``ids`` has one placeholder for each. The media are
        stored like those of the prompt of ``ticket``; None: like those of evaluations.

        UnusableMedium, MediaMismatch: a medium cannot be used.
        """
        sources: dict[Kind, list[Any]] = defaultdict(list)
        for medium in media_parts:
            is_content = isinstance(medium.source, bytes)
            sources[Kind(medium.kind)].append(medium.source if is_content else str(medium.source))
        expanded, media = await asyncio.to_thread(
            self._rules.expand_placeholders, ids, sources, self._encode
        )
        if ticket is None:
            return expanded, await self._media.store_for_evaluation(media)
        return expanded, await self._media.store_for_ticket(media, ticket)
