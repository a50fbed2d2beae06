"""A prompt group while engines are at it: what there is of each sample, what is still to be drawn, what to keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from relax_hpc.data.prompts import Prompt
from relax_hpc.engines.engine import BadAnswer, Draft, GenerateRequest, Generation, Sampling, checked
from relax_hpc.rollout.samples import draw_key, rows_of
from relax_hpc.transfer_queue.client.partials import PARTIAL, Leftover
from relax_hpc.transfer_queue.row_schema import Row


class PartialGroup:
    """The samples of one attempt at a ticket."""

    def __init__(
        self,
        ticket: int,
        attempt: int,
        prompt: Prompt,
        samples: int,
        kept: Leftover | None = None,
        drawn: Sequence[Draft] = (),
    ) -> None:
        """What the queue has ``kept`` of this attempt; or else all that was ``drawn`` of it."""
        self.ticket, self.attempt, self.prompt = ticket, attempt, prompt
        rows = kept.rows if kept and kept.is_part_of(ticket, attempt) else {}
        drafts = [_draft(rows.get(k), prompt) for k in range(samples)]
        self._kept = [_extent(draft.so_far()) for draft in drafts]
        """Of each sample, what the queue has."""
        self.drafts = drafts if rows else list(drawn) or drafts
        self._refused = False

    def request(self, k: int, sampling: Sampling, budget: int) -> GenerateRequest | None:
        """What is to be drawn of a sample; None if it is whole. An engine that has failed may still add to the draft
        that it was given before."""
        draft = self.drafts[k]
        if draft.ended:
            return None
        self.drafts[k] = draft = Draft.of(draft.so_far())
        key = draw_key(self.ticket, self.prompt)
        return GenerateRequest(self.prompt.token_ids, key, k, sampling, budget, draft=draft)

    def news(self, unfinished_too: bool, budget: int) -> dict[int, Generation]:
        """By sample, what there is now and the queue does not have; nothing that it would refuse."""
        if self._refused:
            return {}
        made = {k: draft.so_far() for k, draft in enumerate(self.drafts)}
        return {
            k: found
            for k, found in made.items()
            if (unfinished_too or found.finish_reason != PARTIAL) and _extent(found) != self._kept[k]
            if found.token_ids and _is_sound(found, budget)
        }

    def rows(self, made: Mapping[int, Generation]) -> list[Row]:
        """The rows of some samples, without rewards."""
        return rows_of(self.prompt, self.ticket, made)

    def tokens(self) -> int:
        """Of all responses so far."""
        return sum(len(draft.so_far().token_ids) for draft in self.drafts)

    def reused(self, samples: Iterable[int] | None = None) -> int:
        """Tokens of these samples (None: all) that the queue has."""
        return sum(self._kept[k][0] for k in (range(len(self.drafts)) if samples is None else samples))

    def was_kept(self, made: Mapping[int, Generation], refused: bool) -> None:
        """The queue has these samples now, unless it ``refused``: it wants no more of this group then."""
        self._refused = refused
        if not refused:
            for k, generation in made.items():
                self._kept[k] = _extent(generation)


def _is_sound(made: Generation, budget: int) -> bool:
    try:
        return checked(made, budget) is made
    except BadAnswer:
        return False


def _extent(made: Generation) -> tuple[int, str]:
    return len(made.token_ids), made.finish_reason


def _draft(row: Row | None, prompt: Prompt) -> Draft:
    """What of a kept ``row`` can be used: nothing if the prompt has changed since."""
    if row is None:
        return Draft()
    known = int(row["prompt_len"])
    if row["prompt_id"] != prompt.prompt_id or tuple(row["token_ids"][:known].tolist()) != tuple(prompt.token_ids):
        return Draft()
    tokens, logprobs = row["token_ids"][known:].tolist(), row["rollout_logprobs"][known:].tolist()
    versions = np.array(row["token_versions"][known:], np.int32)
    return Draft.of(Generation(tokens, logprobs, versions, row["finish_reason"]))
