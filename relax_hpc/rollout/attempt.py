"""An attempt at a ticket while engines are at it: what there is of each episode, and how much of that the queue has."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import numpy as np

from relax_hpc.data.prompts import Prompt
from relax_hpc.engines.engine import (
    BadAnswer,
    Draft,
    Episode,
    EpisodeRow,
    GenerateRequest,
    Generation,
    Sampling,
    checked,
)
from relax_hpc.fields import FIELDS, fields_by
from relax_hpc.rollout.samples import draw_key, rows_of
from relax_hpc.transfer_queue.client.segments import START, UNFINISHED
from relax_hpc.transfer_queue.row_schema import Row

Made = Generation | Episode


class Attempt:
    """The episodes of a prompt group."""

    def __init__(
        self, ticket: int, number: int, prompt: Prompt, episodes: int, made: Mapping[int, Made] | None = None
    ) -> None:
        """Attempt ``number`` at ``ticket``; ``made``: by episode, what its log has."""
        self.ticket, self.number, self.prompt = ticket, number, prompt
        self.drafts = [Draft.of(made[k]) if made and k in made else Draft() for k in range(episodes)]
        self._logged = [(len(draft.token_versions), draft.ended is not None) for draft in self.drafts]
        """Tokens of each episode's first row that the log has, and whether it has the episode's end."""
        self._refused = False

    @property
    def tokens(self) -> int:
        """Tokens of all episodes so far that were sampled."""
        made = [draft.so_far() for draft in self.drafts if draft.ended or draft.token_versions]
        rows = [row.made for one in made if isinstance(one, Episode) for row in one.rows]
        rows += [one for one in made if isinstance(one, Generation)]
        return sum(int(np.count_nonzero(row.token_versions)) for row in rows)

    @property
    def whole(self) -> bool:
        """Whether nothing is to be drawn any more."""
        return all(draft.ended for draft in self.drafts)

    def request(self, k: int, sampling: Sampling, budget: int) -> GenerateRequest | None:
        """Request for the rest of episode ``k``; None if it is whole. An engine that has failed may still add to the
        draft that it was given before."""
        draft = self.drafts[k]
        if draft.ended:
            return None
        self.drafts[k] = draft = Draft.of(draft.so_far()) if draft.token_versions else Draft()
        key = draw_key(self.ticket, self.prompt)
        return GenerateRequest(self.prompt.token_ids, key, k, sampling, budget, self.prompt.media, draft=draft)

    def requests(self, sampling: Sampling, budget: int, but: Container[int] = ()) -> list[GenerateRequest]:
        """Requests for the rest of all episodes that are not whole, ``but`` for some."""
        asked = (self.request(k, sampling, budget) for k in range(len(self.drafts)) if k not in but)
        return [request for request in asked if request]

    def news(self, unfinished_too: bool, budget: int) -> list[Row]:
        """The segments that the log does not have; nothing that the queue would refuse. Unfinished ones not of an
        engine that gives a field which is declared with the whole response alone."""
        if self._refused:
            return []
        return [row for k in range(len(self.drafts)) for row in self._segments(k, unfinished_too, budget)]

    def _segments(self, k: int, unfinished_too: bool, budget: int) -> list[Row]:
        start, ended = self._logged[k]
        whole = self.drafts[k].ended
        if ended or (whole and whole.finish_reason == "abort"):
            return []
        made = whole if isinstance(whole, Episode) else self.drafts[k].since(start)
        if isinstance(made, Generation):
            known = made.extras.keys() >= set(_extras())
            if made.finish_reason == UNFINISHED and not (unfinished_too and made.token_ids and known):
                return []
            if made.token_ids and not _is_sound(made, budget - start):
                return []
        prompt = replace(self.prompt, token_ids=(), media=()) if start else self.prompt
        return [row | {START: start} for row in rows_of(prompt, self.ticket, {k: made})]

    def appended(self, segments: Sequence[Row], refused: bool) -> None:
        """Note that the log has ``segments`` now, unless the queue ``refused``: it wants no more then."""
        self._refused = refused
        for one in segments if not refused else ():
            tokens = one[START] + len(one["token_ids"]) - one["prompt_len"]
            self._logged[one["episode"]] = tokens, one["finish_reason"] != UNFINISHED


def answer_of(rows: Sequence[Row], prompt: Prompt) -> Made | None:
    """Answer that the log of an episode has; None if it is not of this ``prompt``: its file has changed since."""
    found = [EpisodeRow(row["token_ids"][: row["prompt_len"]].tolist(), _generation(row)) for row in rows]
    if rows[0]["prompt_id"] != prompt.prompt_id or tuple(found[0].prompt) != tuple(prompt.token_ids):
        return None
    return Episode(found) if len(found) > 1 else found[0].made


def _generation(row: Row) -> Generation:
    known = int(row["prompt_len"])
    tokens, logprobs = row["token_ids"][known:].tolist(), row["rollout_logprobs"][known:].tolist()
    extras = {name: row[name] for name in _extras() if name in row}
    made, before = (
        {name: value[part] for name, value in extras.items()} for part in (slice(known, None), slice(known))
    )
    return Generation(tokens, logprobs, row["token_versions"][known:].copy(), row["finish_reason"], made, before)


def _extras() -> list[str]:
    return [name for name in fields_by("rollout", optional=True) if FIELDS[name].kind == "token"]


def _is_sound(made: Generation, budget: int) -> bool:
    try:
        return checked(made, budget) is made
    except BadAnswer:
        return False
