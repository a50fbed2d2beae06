"""An episode of several turns while it is played: its rows, which grow turn by turn, and the
outcome that its environment reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from relax_hpc.data.generation import Draft, Episode, EpisodeRow, FinishReason, Generation
from relax_hpc.data.media import PromptMedium
from relax_hpc.data.multimodal.medium import Kind

OUTCOME = ("info", "reward", "row")
"""Keys of `Episode.outcome`."""
PROMPT_ROLE, POLICY_ROLE = "user", "assistant"


@dataclass(slots=True, eq=False)
class OpenRow:
    """A row of an episode, to which turns are added."""

    prompt: tuple[int, ...]
    draft: Draft = field(default_factory=Draft)
    media: tuple[PromptMedium, ...] = ()
    """Stored media whose placeholders are in the row, in their order."""
    turns: list[int] = field(default_factory=list)
    """Ends of its completed turns, counted in tokens after the prompt."""
    roles: list[str] = field(default_factory=lambda: [PROMPT_ROLE])
    """Roles of its messages so far; the prompt is one message of a user. Not used for agent
    programs, which send whole chats."""

    @classmethod
    def from_episode_row(cls, row: EpisodeRow) -> OpenRow:
        """An unfinished row that was read from a log."""
        draft = Draft.from_response(row.generation)
        return cls(tuple(row.prompt), draft, row.media or (), list(row.turns or ()))

    @property
    def length(self) -> int:
        """Tokens after the prompt."""
        return len(self.draft.token_versions)

    def prefix(self, tokens: int) -> Draft:
        """Draft of its first ``tokens`` after the prompt."""
        draft = self.draft
        return Draft(
            draft.token_ids[:tokens],
            draft.logprobs[:tokens],
            draft.token_versions[:tokens],
            {name: values[:tokens] for name, values in draft.extras.items()},
            draft.before,
        )

    def suffix(self, start: int, whole_turns: bool) -> EpisodeRow:
        """Copy without its first ``start`` tokens after the prompt; without the prompt too if
        ``start`` is above 0. ``whole_turns``: also without an unfinished last turn."""
        draft, turns = self.draft, tuple(self.turns)
        length = max(draft.turn_start, *turns, 0) if whole_turns else len(draft.token_versions)
        generation = self.prefix(length).partial_suffix(start)
        completed = tuple(end for end in turns if end <= start + len(generation.token_ids))
        return EpisodeRow(() if start else self.prompt, generation, self.media, completed)


@dataclass(slots=True)
class History:
    """The rows of an episode so far. Any thread may read it."""

    rows: list[OpenRow] = field(default_factory=list)
    ended: Episode | None = None
    """The whole episode, once it has ended."""
    may_differ_from_log: bool = False
    """Whether the episode was started again, so that its tokens may differ from the logged ones."""

    @classmethod
    def from_log(cls, logged: Generation | Episode, prompt: Sequence[int]) -> History:
        """An episode that began with ``prompt``, as far as it was logged."""
        episode = logged
        if isinstance(episode, Generation):
            episode = Episode([EpisodeRow(prompt, episode)])
        if episode.finish_reason == "partial":
            return cls([OpenRow.from_episode_row(row) for row in episode.rows])
        return cls(ended=episode)

    def snapshot(self) -> Episode:
        """The whole episode if it has ended, else a copy of its rows so far."""
        return self.ended or Episode([row.suffix(0, whole_turns=False) for row in self.rows])

    def suffix(self, starts: Mapping[int, int], whole_turns: bool) -> Episode:
        """Copy without the first tokens of its rows. ``starts``: row number -> tokens to leave out
        after the prompt. ``whole_turns``: also without unfinished last turns."""
        if not self.ended:
            return Episode(
                [
                    row.suffix(starts.get(number, 0), whole_turns)
                    for number, row in enumerate(self.rows)
                ]
            )
        rows = []
        for number, row in enumerate(self.ended.rows):
            start = starts.get(number, 0)
            generation = Draft.from_response(row.generation).suffix(start)
            rows.append(replace(row, prompt=() if start else row.prompt, generation=generation))
        return replace(self.ended, rows=rows)

    def restart(self) -> None:
        """Discard all rows."""
        self.rows, self.may_differ_from_log = [], True

    def end(self, reason: FinishReason, row: OpenRow, outcome: Mapping[str, Any]) -> Episode:
        """End the episode in ``row``. ``outcome``: `info` and `reward` of the environment."""
        rows = []
        for open_row in self.rows:
            generation = open_row.draft.snapshot()
            assert isinstance(generation, Generation)
            generation = replace(generation, finish_reason=reason)
            rows.append(
                EpisodeRow(open_row.prompt, generation, open_row.media, tuple(open_row.turns))
            )
        self.ended = Episode(rows, {**outcome, "row": self.rows.index(row)})
        return self.ended


def media_in(spans: Sequence[Mapping[str, Any]]) -> tuple[PromptMedium, ...]:
    """Media in the field `spans` of a logged row, one for each span. They serve for comparisons
    only, because a log does not have the sources of media."""
    return tuple(
        PromptMedium(
            Kind(span["kind"]), b"", ((span["start"], span["length"]),), Path(span["media_id"])
        )
        for span in spans
    )
