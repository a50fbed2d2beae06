"""Bounds of an episode: how many turns it may have, and how many tokens of which kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from relax_hpc.config.schema import EnvironmentConfig
from relax_hpc.engines.engine import Ended
from relax_hpc.rollout.agents.chat import Refused
from relax_hpc.rollout.history import OpenRow
from relax_hpc.rollout.room import room
from relax_hpc.transfer_queue.row_ids import MAX_ROWS


@dataclass(slots=True)
class Bounds:
    """Bounds of one episode."""

    limits: EnvironmentConfig
    row: int
    """Tokens that a row may have behind its prompt."""
    window: int
    """Tokens that a row may have."""
    met: Ended | None = field(default=None, init=False)
    """Bound that something was refused for."""
    asked: int = field(default=0, init=False)
    """Turns so far."""

    def next_turn(self, rows: Sequence[OpenRow], row: OpenRow, known: int) -> tuple[int, Ended]:
        """Tokens that another turn may have, and what limits it; it goes to ``row``, which may be none of the ``rows``
        yet, behind its first ``known`` tokens. Refused: there is no room."""
        if self.asked == self.limits.max_turns or len(rows) == MAX_ROWS:
            raise self._refused("max_turns", f"allowed are {self.limits.max_turns} turns, and {MAX_ROWS} rows")
        drafts = [one.draft for one in rows]
        sampled = sum(int(np.count_nonzero(draft.token_versions)) for draft in drafts)
        others = sum(one.length for one in rows if one is not row)
        left, reason = room(self.limits, self.row, known - len(row.prompt), others, sampled)
        if (inside := self.window - known) < left:
            left, reason = inside, "length"
        if left < 1:
            raise self._refused(reason, f"a chat of {known} tokens leaves none to an answer")
        self.asked += 1
        return left, reason

    def _refused(self, reason: Ended, detail: str) -> Refused:
        self.met = reason
        # By this code clients tell that a chat is too long.
        return Refused(400, "context_length_exceeded" if reason == "length" else reason, detail)
