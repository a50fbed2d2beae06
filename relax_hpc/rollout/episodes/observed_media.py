"""Media that environments show: counted, placed and stored as those of prompts are."""

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
    """Media of messages to the policy in one rollout process; for one event loop."""

    def __init__(self, media: PromptMedia, rules: MediaRules, tokenizer: Tokenizer) -> None:
        self._media, self._rules = media, rules
        self._encode = functools.partial(tokenizer.encode, special=False)

    async def close(self) -> None:
        """End the process that looks into what is shown."""
        await asyncio.to_thread(self._rules.pool.close)

    async def placed(
        self, ticket: int | None, ids: list[int], parts: Sequence[MediaPart]
    ) -> tuple[list[int], tuple[PromptMedium, ...]]:
        """``ids``, which have a placeholder for each of ``parts``, with as many as these have
        tokens, and the media with their places. They are stored as those of the prompt of
        ``ticket``; of an evaluation's where that is None.

        BadMedium, BadMedia: one of them is of no use.
        """
        sources: dict[Kind, list[Any]] = defaultdict(list)
        for part in parts:
            sources[Kind(part.kind)].append(
                part.source if isinstance(part.source, bytes) else str(part.source)
            )
        expanded, media = await asyncio.to_thread(
            self._rules.expand_placeholders, ids, sources, self._encode
        )
        if ticket is None:
            return expanded, await self._media.store_for_evaluation(media)
        return expanded, await self._media.store_for_ticket(media, ticket)
