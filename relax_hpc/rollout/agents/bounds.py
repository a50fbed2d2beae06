"""Bounds of an episode: numbers of turns, rows and tokens."""

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
    """Most tokens of a row after its prompt."""
    window: int
    """Most tokens of a row with its prompt."""
    reached: FinishReason | None = field(default=None, init=False)
    """Bound because of which the last request was refused; None: it was not refused. A program that
    compacts its history and then gets an answer has not ended at the bound."""
    turns: int = field(default=0, init=False)
    """Turns so far."""

    def next_turn(
        self, rows: Sequence[OpenRow], row: OpenRow, context_tokens: int
    ) -> tuple[int, FinishReason]:
        """Most tokens of another turn, and the limit that applies. The turn follows the first
        ``context_tokens`` of ``row``, which may be a new row. Refused: no turn is allowed."""
        is_new = not any(row is known_row for known_row in rows)
        if self.turns == self.limits.max_turns or (is_new and len(rows) == MAX_ROWS):
            self.reached = "max_turns"
            raise Refused(
                400, "max_turns", f"allowed are {self.limits.max_turns} turns, and {MAX_ROWS} rows"
            )
        drafts = [known_row.draft for known_row in rows]
        sampled = sum(int(np.count_nonzero(draft.token_versions)) for draft in drafts)
        other_tokens = sum(known_row.length for known_row in rows if known_row is not row)
        length = context_tokens - len(row.prompt)
        budget, reason = turn_budget(self.limits, self.row, length, other_tokens, sampled)
        if self.window - context_tokens < budget:
            budget, reason = self.window - context_tokens, "length"
        if budget < 1:
            self.reached = reason
            if reason == "length":
                raise TooLong(context_tokens, context_tokens + budget - 1)
            raise Refused(
                400,
                reason,
                f"a chat of {context_tokens} tokens leaves none for an answer "
                f"(environment.{reason})",
            )
        self.turns += 1
        self.reached = None
        return budget, reason

    def forget_turn(self) -> None:
        """Do not count the last turn, because its client hung up."""
        self.turns -= 1
