"""Prompt groups while an engine is at them: what there is of each sample, what is still to be drawn, what to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from relax_hpc.data.prompts import Prompt
from relax_hpc.engines.engine import Draft, EngineFault, GenerateRequest, Generation, check_generation
from relax_hpc.rollout.samples import requests_for, unscored_row
from relax_hpc.transfer_queue.client.partials import PARTIAL, Leftover
from relax_hpc.transfer_queue.row_schema import Row

Work = list[tuple[int, int]]
"""(ticket, attempt) of prompt groups to generate."""


class Unfinished:
    """The groups of one request. Samples are numbered as in the request: group by group."""

    def __init__(
        self,
        work: Work,
        prompts: Sequence[Prompt],
        samples: int,
        kept: Mapping[int, Leftover],
        drawn: Mapping[int, Sequence[Draft]],
    ) -> None:
        """By ticket, what the queue has ``kept``; or else all that was ``drawn`` of the same attempts."""
        self.work, self.prompts, self.samples = work, prompts, samples
        self.drafts: list[Draft] = []
        self._kept: list[tuple[int, str]] = []
        """Of each sample, what the queue has."""
        for (ticket, attempt), prompt in zip(work, prompts, strict=True):
            known = kept.get(ticket)
            rows = known.rows if known and known.is_part_of(ticket, attempt) else {}
            drafts = [_draft(rows.get(k), prompt) for k in range(samples)]
            self._kept += [_extent(draft.so_far()) for draft in drafts]
            self.drafts += drafts if rows else drawn.get(ticket, drafts)
        self._refused: set[int] = set()

    def requests(self) -> list[GenerateRequest]:
        """Those of the samples that are not finished. An engine that has failed may still add to its old drafts."""
        self.drafts = [Draft.of(draft.so_far()) for draft in self.drafts]
        groups = zip(self.prompts, self.work, strict=True)
        requests = [request for prompt, (ticket, _) in groups for request in requests_for(prompt, ticket, self.samples)]
        return [
            GenerateRequest(request.prompt_ids, request.prompt_id, request.sample, draft)
            for request, draft in zip(requests, self.drafts, strict=True)
            if not draft.ended
        ]

    def complete(
        self, requests: Sequence[GenerateRequest], answers: Sequence[Generation | EngineFault]
    ) -> list[Generation | EngineFault]:
        """One answer a sample: the engine's ``answers`` to ``requests``, and what was finished before."""
        answered = {id(request.draft): answer for request, answer in zip(requests, answers, strict=True)}
        return [answered.get(id(draft)) or draft.so_far() for draft in self.drafts]

    def news(self, unfinished_too: bool, max_new_tokens: int) -> dict[int, Generation]:
        """By sample, what there is now and the queue does not have; nothing that it would refuse."""
        found: dict[int, Generation] = {}
        for number, draft in enumerate(self.drafts):
            made = draft.so_far()
            known = _extent(made) == self._kept[number]
            wanted = (unfinished_too or made.finish_reason != PARTIAL) and self._ticket(number)[0] not in self._refused
            if wanted and not known and made.token_ids and check_generation(made, max_new_tokens) is made:
                found[number] = made
        return found

    def rows(self, made: Mapping[int, Generation]) -> list[Row]:
        """The rows of some samples, without rewards."""
        return [
            unscored_row(
                self.prompts[number // self.samples], self._ticket(number)[0], number % self.samples, generation
            )
            for number, generation in made.items()
        ]

    def tokens(self) -> int:
        """Of all responses so far."""
        return sum(len(draft.so_far().token_ids) for draft in self.drafts)

    def reused(self, numbers: Sequence[int] | None = None) -> dict[int, int]:
        """By ticket, how many tokens of these samples (None: all) the queue has, if any."""
        found: dict[int, int] = {}
        for number in range(len(self.drafts)) if numbers is None else numbers:
            if tokens := self._kept[number][0]:
                ticket = self._ticket(number)[0]
                found[ticket] = found.get(ticket, 0) + tokens
        return found

    def kept(self, made: Mapping[int, Generation], refused: Mapping[int, str]) -> None:
        """The queue has these samples now, but for those of tickets that it ``refused``: it wants no more of them."""
        self._refused.update(refused)
        for number, generation in made.items():
            if self._ticket(number)[0] not in self._refused:
                self._kept[number] = _extent(generation)

    def _ticket(self, number: int) -> tuple[int, int]:
        return self.work[number // self.samples]


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
