"""An attempt at a ticket while engines are at it: what there is of each episode, and how much of
that the queue has."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping, Sequence
from itertools import chain

import numpy as np

from relax_hpc.base.fields import FIELDS, fields_by
from relax_hpc.data.prompts import Prompt
from relax_hpc.queue.client.segments import START, UNFINISHED
from relax_hpc.queue.row_schema import Row
from relax_hpc.rollout.engines.engine import (
    BadAnswer,
    Draft,
    Episode,
    EpisodeRow,
    GenerateRequest,
    Generation,
    Sampling,
    checked,
)
from relax_hpc.rollout.episodes.history import OUTCOME, History, media_in
from relax_hpc.rollout.samples import draw_key, rows_of

Made = Generation | Episode


class Attempt:
    """The episodes of a prompt group."""

    def __init__(
        self,
        ticket: int,
        number: int,
        prompt: Prompt,
        episodes: int,
        made: Mapping[int, Made] | None = None,
        in_turns: bool = False,
    ) -> None:
        """Attempt ``number`` at ``ticket``; ``made``: by episode, what its log has; ``in_turns``:
        they are played against environments."""
        self.ticket, self.number, self.prompt = ticket, number, prompt
        found = made or {}
        self.drafts: list[Draft | History]
        if in_turns:
            self.drafts = [
                History.from_log(found[k], prompt.token_ids) if k in found else History()
                for k in range(episodes)
            ]
        else:
            self.drafts = [
                Draft.from_response(found[k]) if k in found else Draft() for k in range(episodes)
            ]
        self._logged = [_lengths(found[k]) if k in found else {} for k in range(episodes)]
        """Tokens behind the prompt of each row of each episode that the log has, by the row's
        number."""
        self._closed = {k for k, draft in enumerate(self.drafts) if draft.ended}
        """Episodes whose end the log has."""
        self._refused = False

    @property
    def tokens(self) -> int:
        """Tokens of all episodes so far that were sampled."""
        begun = [
            draft
            for draft in self.drafts
            if draft.ended or isinstance(draft, History) or draft.token_versions
        ]
        rows = chain.from_iterable(_rows(draft.snapshot()) for draft in begun)
        return sum(int(np.count_nonzero(row.generation.token_versions)) for row in rows)

    @property
    def whole(self) -> bool:
        """Whether nothing is to be drawn any more."""
        return all(draft.ended for draft in self.drafts)

    def request(self, k: int, sampling: Sampling, budget: int) -> GenerateRequest | None:
        """Request for the rest of episode ``k``; None if it is whole. An engine that has failed may
        still add to the draft that it was given before."""
        draft = self.drafts[k]
        if draft.ended:
            return None
        key, media = draw_key(self.ticket, self.prompt), self.prompt.media
        if isinstance(draft, History):
            return GenerateRequest(self.prompt.token_ids, key, k, sampling, budget, media)
        self.drafts[k] = again = (
            Draft.from_response(draft.snapshot()) if draft.token_versions else Draft()
        )
        return GenerateRequest(self.prompt.token_ids, key, k, sampling, budget, media, draft=again)

    def requests(
        self, sampling: Sampling, budget: int, but: Container[int] = ()
    ) -> list[GenerateRequest]:
        """Requests for the rest of all episodes that are not whole, ``but`` for some."""
        asked = (self.request(k, sampling, budget) for k in range(len(self.drafts)) if k not in but)
        return [request for request in asked if request]

    def news(self, unfinished_too: bool, budget: int) -> list[Row]:
        """The segments that the log does not have; nothing that the queue would refuse. Unfinished
        ones not of an engine that gives a field which is declared with the whole response alone; of
        several turns, those that are over in any case."""
        if self._refused:
            return []
        return [
            row
            for k in range(len(self.drafts))
            for row in self._segments(k, unfinished_too, budget)
        ]

    def _segments(self, k: int, unfinished_too: bool, budget: int) -> list[Row]:
        draft, known = self.drafts[k], self._logged[k]
        if k in self._closed or (draft.ended and draft.ended.finish_reason == "abort"):
            return []
        starts = known
        if isinstance(draft, History):
            if draft.is_other and known:
                # Another episode than the one of which the log has a part.
                return []
            if _extras():
                # What the engine knows of the last token of a turn comes with the next.
                starts = {row: max(0, tokens - 1) for row, tokens in known.items()}
            made = draft.suffix(starts, whole_turns=not unfinished_too)
        elif isinstance(draft.ended, Episode):
            made, budget = draft.ended, sys.maxsize
        elif draft.ended or unfinished_too:
            start = known.get(0, 0)
            made = Episode(
                [EpisodeRow(() if start else self.prompt.token_ids, draft.suffix(start))]
            )
        else:
            return []
        return [
            row | {START: start}
            for row, one in zip(
                rows_of(self.prompt, self.ticket, {k: made}), made.rows, strict=True
            )
            for start in [starts.get(row["row"], 0)]
            if one.generation.finish_reason != UNFINISHED
            or start + len(one.generation.token_ids) > known.get(row["row"], 0)
            if _is_loggable(one.generation, budget - start)
        ]

    def appended(self, segments: Sequence[Row], refused: bool) -> None:
        """Note that the log has ``segments`` now, unless the queue ``refused``: it wants no more
        then."""
        self._refused = refused
        for one in segments if not refused else ():
            end = one[START] + len(one["token_ids"]) - one["prompt_len"]
            self._logged[one["episode"]][one["row"]] = end
            if one["finish_reason"] != UNFINISHED:
                self._closed.add(one["episode"])


def answer_of(rows: Sequence[Row], prompt: Prompt) -> Made | None:
    """Answer that the log of an episode has; None if it is not of this ``prompt``: its file has
    changed since."""
    found, told = [_row(row) for row in rows], rows[-1].get("environment")
    # Where others speak too, rows may begin otherwise; they are compared when they are played
    # again.
    is_its = told or tuple(found[0].prompt) == prompt.token_ids
    if rows[0]["prompt_id"] != prompt.prompt_id or not is_its:
        return None
    if len(found) == 1 and not told:
        return found[0].generation
    return Episode(
        found, {name: told[name] for name in OUTCOME} if told and OUTCOME[0] in told else None
    )


def _rows(made: Made) -> Sequence[EpisodeRow]:
    return made.rows if isinstance(made, Episode) else [EpisodeRow((), made)]


def _lengths(made: Made) -> dict[int, int]:
    """Tokens behind the prompt of each row, by its number."""
    return {number: len(row.generation.token_ids) for number, row in enumerate(_rows(made))}


def _row(row: Row) -> EpisodeRow:
    known = int(row["prompt_len"])
    tokens, logprobs = row["token_ids"][known:].tolist(), row["rollout_logprobs"][known:].tolist()
    extras = {name: row[name] for name in _extras() if name in row}
    made, before = (
        {name: value[part] for name, value in extras.items()}
        for part in (slice(known, None), slice(known))
    )
    generation = Generation(
        tokens, logprobs, row["token_versions"][known:].copy(), row["finish_reason"], made, before
    )
    prompt, told = row["token_ids"][:known].tolist(), row.get("environment")
    if not told:
        return EpisodeRow(prompt, generation)
    return EpisodeRow(prompt, generation, media_in(row["spans"]), tuple(told["turns"]))


def _extras() -> list[str]:
    return [name for name in fields_by("rollout", optional=True) if FIELDS[name].kind == "token"]


def _is_loggable(made: Generation, budget: int) -> bool:
    """Whether the log may have a part of a response, of which nothing is as good as all."""
    if not made.token_ids:
        return True
    if made.finish_reason == UNFINISHED and not made.extras.keys() >= set(_extras()):
        return False
    try:
        return checked(made, budget) is made
    except BadAnswer:
        return False
