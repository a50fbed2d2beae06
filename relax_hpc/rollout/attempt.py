"""An attempt at a ticket while engines work on it: the tokens of each episode so far, and how many
of them the queue's log has."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping, Sequence

import numpy as np

from relax_hpc.base.fields import FIELDS, fields_by
from relax_hpc.data.generation import (
    Draft,
    Episode,
    EpisodeRow,
    GenerateRequest,
    Generation,
    Sampling,
)
from relax_hpc.data.prompts import Prompt
from relax_hpc.queue.client.segments import START, UNFINISHED
from relax_hpc.queue.row_schema import Row
from relax_hpc.rollout.engines.engine import BadAnswer, checked
from relax_hpc.rollout.episodes.history import OUTCOME, History, media_in
from relax_hpc.rollout.rows import draw_key, rows_of

EpisodeResult = Generation | Episode
"""An episode, or the only response of one; it may be unfinished."""


class Attempt:
    """The episodes of a prompt group."""

    def __init__(
        self,
        ticket: int,
        number: int,
        prompt: Prompt,
        episodes: int,
        logged: Mapping[int, EpisodeResult] | None = None,
        in_turns: bool = False,
    ) -> None:
        """Attempt ``number`` at ``ticket``. ``logged``: results in its log by episode.
        ``in_turns``: episodes are played against environments."""
        self.ticket, self.number, self.prompt = ticket, number, prompt
        logged = logged or {}
        self.drafts: list[Draft | History] = []
        for k in range(episodes):
            if in_turns:
                is_logged = k in logged
                draft = History.from_log(logged[k], prompt.token_ids) if is_logged else History()
                self.drafts.append(draft)
            else:
                self.drafts.append(Draft.from_response(logged[k]) if k in logged else Draft())
        self._logged = [_row_lengths(logged[k]) if k in logged else {} for k in range(episodes)]
        """For each episode: row number -> tokens after the prompt that the log has."""
        self._closed = {k for k, draft in enumerate(self.drafts) if draft.ended}
        """Episodes whose end the log has."""
        self._refused = False

    @property
    def tokens(self) -> int:
        """Sampled tokens of all episodes so far."""
        count = 0
        for draft in self.drafts:
            if draft.ended or isinstance(draft, History) or draft.token_versions:
                for row in _rows(draft.snapshot()):
                    count += int(np.count_nonzero(row.generation.token_versions))
        return count

    @property
    def whole(self) -> bool:
        """Whether all episodes have ended."""
        return all(draft.ended for draft in self.drafts)

    def request(self, k: int, sampling: Sampling, budget: int) -> GenerateRequest | None:
        """Request for the missing part of episode ``k``; None: it has ended.

        The request has a new draft, because an engine that has failed may still add to the one that
        it got."""
        draft = self.drafts[k]
        if draft.ended:
            return None
        key, media = draw_key(self.ticket, self.prompt), self.prompt.media
        if isinstance(draft, History):
            return GenerateRequest(self.prompt.token_ids, key, k, sampling, budget, media)
        new_draft = draft.fresh_copy() if draft.token_versions else Draft()
        self.drafts[k] = new_draft
        return GenerateRequest(
            self.prompt.token_ids, key, k, sampling, budget, media, draft=new_draft
        )

    def requests(
        self, sampling: Sampling, budget: int, except_episodes: Container[int] = ()
    ) -> list[GenerateRequest]:
        """Requests for the missing parts of all episodes, without ``except_episodes``."""
        requests = []
        for k in range(len(self.drafts)):
            request = None if k in except_episodes else self.request(k, sampling, budget)
            if request:
                requests.append(request)
        return requests

    def new_segments(self, unfinished_too: bool, budget: int) -> list[Row]:
        """The segments that the log does not have, without those that the queue would refuse.

        ``unfinished_too``: also segments of unfinished responses, unless the engine gives a
        declared field only with whole responses. Completed turns of an unfinished episode are
        always included.
        """
        if self._refused:
            return []
        segments = []
        for k in range(len(self.drafts)):
            segments += self._segments(k, unfinished_too, budget)
        return segments

    def _segments(self, k: int, unfinished_too: bool, budget: int) -> list[Row]:
        draft, logged = self.drafts[k], self._logged[k]
        if k in self._closed or (draft.ended and draft.ended.finish_reason == "abort"):
            return []
        starts = logged
        if isinstance(draft, History):
            if draft.may_differ_from_log and logged:
                # The log has a part of an earlier play, which has other tokens.
                return []
            if _token_fields():
                # The engine gives the fields of a turn's last token with the next turn, so that
                # token is logged again.
                starts = {row: max(0, tokens - 1) for row, tokens in logged.items()}
            episode = draft.suffix(starts, whole_turns=not unfinished_too)
        elif isinstance(draft.ended, Episode):
            episode, budget = draft.ended, sys.maxsize
        elif draft.ended or unfinished_too:
            start = logged.get(0, 0)
            prompt_ids = () if start else self.prompt.token_ids
            episode = Episode([EpisodeRow(prompt_ids, draft.suffix(start))])
        else:
            return []
        rows = rows_of(self.prompt, self.ticket, {k: episode})
        segments = []
        for row, episode_row in zip(rows, episode.rows, strict=True):
            generation, start = episode_row.generation, starts.get(row["row"], 0)
            end = start + len(generation.token_ids)
            is_new = generation.finish_reason != UNFINISHED or end > logged.get(row["row"], 0)
            if is_new and _is_loggable(generation, budget - start):
                segments.append(row | {START: start})
        return segments

    def note_appended(self, segments: Sequence[Row], refused: bool) -> None:
        """Record that the log has ``segments`` now. If the queue has ``refused`` them, it accepts
        no further segments of this attempt."""
        self._refused = refused
        if refused:
            return
        for segment in segments:
            end = segment[START] + len(segment["token_ids"]) - segment["prompt_len"]
            self._logged[segment["episode"]][segment["row"]] = end
            if segment["finish_reason"] != UNFINISHED:
                self._closed.add(segment["episode"])


def read_logged_episode(rows: Sequence[Row], prompt: Prompt) -> EpisodeResult | None:
    """The result in the logged ``rows`` of an episode. None: it belongs to another prompt than
    ``prompt``, because the prompt file has changed."""
    episode_rows = [_episode_row(row) for row in rows]
    environment = rows[-1].get("environment")
    # With an environment, rows may begin with other tokens than the prompt. They are compared when
    # the episode is played again.
    has_prompt = environment or tuple(episode_rows[0].prompt) == prompt.token_ids
    if rows[0]["prompt_id"] != prompt.prompt_id or not has_prompt:
        return None
    if len(episode_rows) == 1 and not environment:
        return episode_rows[0].generation
    outcome = None
    if environment and OUTCOME[0] in environment:
        outcome = {name: environment[name] for name in OUTCOME}
    return Episode(episode_rows, outcome)


def _rows(result: EpisodeResult) -> Sequence[EpisodeRow]:
    return result.rows if isinstance(result, Episode) else [EpisodeRow((), result)]


def _row_lengths(result: EpisodeResult) -> dict[int, int]:
    """Row number -> tokens after the prompt."""
    return {number: len(row.generation.token_ids) for number, row in enumerate(_rows(result))}


def _episode_row(row: Row) -> EpisodeRow:
    prompt_len = int(row["prompt_len"])
    extras = {name: row[name] for name in _token_fields() if name in row}
    generation = Generation(
        row["token_ids"][prompt_len:].tolist(),
        row["rollout_logprobs"][prompt_len:].tolist(),
        row["token_versions"][prompt_len:].copy(),
        row["finish_reason"],
        {name: values[prompt_len:] for name, values in extras.items()},
        {name: values[:prompt_len] for name, values in extras.items()},
    )
    prompt = row["token_ids"][:prompt_len].tolist()
    environment = row.get("environment")
    if not environment:
        return EpisodeRow(prompt, generation)
    return EpisodeRow(prompt, generation, media_in(row["spans"]), tuple(environment["turns"]))


def _token_fields() -> list[str]:
    """Declared per-token fields that engines give."""
    return [name for name in fields_by("rollout", optional=True) if FIELDS[name].kind == "token"]


def _is_loggable(generation: Generation, budget: int) -> bool:
    """Whether the queue accepts a ``generation`` as a segment."""
    if not generation.token_ids:
        return True
    lacks_fields = not generation.extras.keys() >= set(_token_fields())
    if generation.finish_reason == UNFINISHED and lacks_fields:
        return False
    try:
        checked(generation, budget)
    except BadAnswer:
        return False
    return True
