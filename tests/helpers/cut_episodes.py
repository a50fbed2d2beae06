"""Sorting digits in episodes of several rows, which teach what one row would."""

from __future__ import annotations

from typing import Any

import numpy as np

from relax_hpc.examples.tasks.sort_digits import SortDigits
from relax_hpc.rollout.engines.engine import Episode, EpisodeRow, GenerateRequest, Generation


class CutSortDigits(SortDigits):
    """Of a response, a second sample of its prompt is trained on in two rows, a third one in three:
    each has what came before it in the place of an observation, whose tokens nobody sampled."""

    async def episode(self, request: GenerateRequest, ask: Any) -> Generation | Episode:
        made = await ask(request)
        count = min(1 + request.sample % 3, len(made.token_ids))
        ends = [(number + 1) * len(made.token_ids) // count for number in range(count)]
        starts = [0, *ends]
        rows = [part(made, start, end) for start, end in zip(starts, ends, strict=False)]
        return (
            made if count == 1 else Episode([EpisodeRow(request.prompt_ids, row) for row in rows])
        )


def part(made: Generation, start: int, end: int) -> Generation:
    """``made`` up to ``end``, as if it had been sampled from ``start`` on."""
    drawn = np.arange(end) >= start
    logprobs = (np.array(made.logprobs[:end]) * drawn).tolist()
    reason = made.finish_reason if end == len(made.token_ids) else "length"
    return Generation(
        made.token_ids[:end], logprobs, (made.token_versions[:end] * drawn).astype(np.int32), reason
    )
