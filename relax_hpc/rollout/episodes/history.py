"""An episode of several turns while it is played: rows that grow turn by turn, and what its
environment says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from relax_hpc.data.media import PromptMedium
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.rollout.engines.engine import Draft, Ended, Episode, EpisodeRow, Generation

OUTCOME = ("info", "reward", "row")
"""Names in `Episode.outcome`."""
PROMPT_ROLE, POLICY_ROLE = "user", "assistant"


@dataclass(slots=True, eq=False)
class OpenRow:
    """A row of an episode, to which turns are added."""

    prompt: tuple[int, ...]
    draft: Draft = field(default_factory=Draft)
    media: tuple[PromptMedium, ...] = ()
    """Media whose places are in the row, in their order, stored."""
    turns: list[int] = field(default_factory=list)
    """Ends of its turns that are over: tokens behind the prompt."""
    roles: list[str] = field(default_factory=lambda: [PROMPT_ROLE])
    """Roles of its messages so far, the prompt one of a user. Programs know theirs themselves, and
    leave this out."""

    @classmethod
    def of(cls, row: EpisodeRow) -> OpenRow:
        """An unfinished row of a log."""
        return cls(tuple(row.prompt), Draft.of(row.made), row.media or (), list(row.turns or ()))

    @property
    def length(self) -> int:
        """Tokens behind the prompt."""
        return len(self.draft.token_versions)

    def first(self, tokens: int) -> Draft:
        """Draft of its first ``tokens`` behind the prompt."""
        whole = self.draft
        extras = {name: values[:tokens] for name, values in whole.extras.items()}
        made = whole.token_ids[:tokens], whole.logprobs[:tokens], whole.token_versions[:tokens]
        return Draft(*made, extras, whole.before)

    def since(self, start: int, whole_turns: bool) -> EpisodeRow:
        """Copy without its first ``start`` tokens behind the prompt, which is left out too then; of
        ``whole_turns`` without the one that is being drawn."""
        draft, turns = self.draft, tuple(self.turns)
        length = max(draft.turn, *turns, 0) if whole_turns else len(draft.token_versions)
        made = self.first(length).drawn(start)
        over = tuple(end for end in turns if end <= start + len(made.token_ids))
        return EpisodeRow(() if start else self.prompt, made, self.media, over)


@dataclass(slots=True)
class History:
    """Rows of an episode so far; any thread may look."""

    rows: list[OpenRow] = field(default_factory=list)
    ended: Episode | None = None
    """The whole episode."""
    is_other: bool = False
    """Whether it was begun again, and is another one than before."""

    @classmethod
    def of(cls, made: Generation | Episode, prompt: Sequence[int]) -> History:
        """The beginning, or all, of an episode of a log, which began with ``prompt``."""
        found = made if isinstance(made, Episode) else Episode([EpisodeRow(prompt, made)])
        if found.finish_reason == "partial":
            return cls([OpenRow.of(row) for row in found.rows])
        return cls(ended=found)

    def so_far(self) -> Episode:
        """The whole episode, or a copy of what there is."""
        return self.ended or Episode([row.since(0, whole_turns=False) for row in self.rows])

    def since(self, starts: Mapping[int, int], whole_turns: bool) -> Episode:
        """The same without the first tokens of rows behind their prompts: by number of the row so
        many; of ``whole_turns`` without one that is being drawn."""
        if not self.ended:
            return Episode(
                [row.since(starts.get(n, 0), whole_turns) for n, row in enumerate(self.rows)]
            )
        rows = []
        for number, row in enumerate(self.ended.rows):
            start = starts.get(number, 0)
            rest = Draft.of(row.made).since(start)
            rows.append(replace(row, prompt=() if start else row.prompt, made=rest))
        return replace(self.ended, rows=rows)

    def begin_again(self) -> None:
        """Forget all of it."""
        self.rows, self.is_other = [], True

    def end(self, reason: Ended, row: OpenRow, outcome: Mapping[str, Any]) -> Episode:
        """End in ``row``; ``outcome``: `info` and `reward` of the environment."""
        rows = []
        for one in self.rows:
            made = one.draft.so_far()
            assert isinstance(made, Generation)
            rows.append(
                EpisodeRow(
                    one.prompt, replace(made, finish_reason=reason), one.media, tuple(one.turns)
                )
            )
        self.ended = Episode(rows, {**outcome, "row": self.rows.index(row)})
        return self.ended


def media_in(spans: Sequence[Mapping[str, Any]]) -> tuple[PromptMedium, ...]:
    """Media that a row of a log names in its field `spans`, to be compared with others: each run of
    one by itself."""
    return tuple(
        PromptMedium(
            Kind(span["kind"]), b"", ((span["start"], span["length"]),), Path(span["media_id"])
        )
        for span in spans
    )
