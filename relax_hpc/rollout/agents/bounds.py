"""Bounds of an episode: how many turns it may have, and how many tokens of which kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from relax_hpc.config.schema import EnvironmentConfig
from relax_hpc.queue.row_ids import MAX_ROWS
from relax_hpc.rollout.agents.chat import Refused, TooLong
from relax_hpc.rollout.engines.engine import FinishReason
from relax_hpc.rollout.episodes.history import OpenRow
from relax_hpc.rollout.episodes.turn_budget import turn_budget


@dataclass(slots=True)
class Bounds:
    """Bounds of one episode."""

    limits: EnvironmentConfig
    row: int
    """Tokens that a row may have behind its prompt."""
    window: int
    """Tokens that a row may have."""
    met: FinishReason | None = field(default=None, init=False)
    """Bound for which the last request was refused; None: it was not refused. A program that
    compacts its history and gets another answer has not ended at the bound."""
    asked: int = field(default=0, init=False)
    """Turns so far."""

    def next_turn(
        self, rows: Sequence[OpenRow], row: OpenRow, known: int
    ) -> tuple[int, FinishReason]:
        """Tokens that another turn may have, and what limits it; it goes to ``row``, which may be
        none of the ``rows`` yet, behind its first ``known`` tokens. Refused: there is no room."""
        is_new = not any(row is known_row for known_row in rows)
        if self.asked == self.limits.max_turns or (is_new and len(rows) == MAX_ROWS):
            self.met = "max_turns"
            raise Refused(
                400, "max_turns", f"allowed are {self.limits.max_turns} turns, and {MAX_ROWS} rows"
            )
        drafts = [known_row.draft for known_row in rows]
        sampled = sum(int(np.count_nonzero(draft.token_versions)) for draft in drafts)
        other_tokens = sum(known_row.length for known_row in rows if known_row is not row)
        left, reason = turn_budget(
            self.limits, self.row, known - len(row.prompt), other_tokens, sampled
        )
        if (inside := self.window - known) < left:
            left, reason = inside, "length"
        if left < 1:
            self.met = reason
            if reason == "length":
                raise TooLong(known, known + left - 1)
            raise Refused(
                400,
                reason,
                f"a chat of {known} tokens leaves none to an answer (environment.{reason})",
            )
        self.asked += 1
        self.met = None
        return left, reason

    def forget_turn(self) -> None:
        """Do not count the last turn: its client hung up."""
        self.asked -= 1
