"""Copies of the model in one server (its flag `dp_size`): who is asked for the next turn of an
episode."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

_KEPT = 1 << 16
"""Sessions whose rank is known; those that were asked last stay."""


class DataRanks:
    """Ranks of one server: a session stays where its keys and values are, a new one goes where
    least is asked.

    >>> ranks = DataRanks(2)
    >>> with ranks.place("a") as first, ranks.place("b") as second, ranks.place("a") as again:
    ...     first, second, again
    (0, 1, 0)
    """

    def __init__(self, count: int) -> None:
        self._asked = [0] * count
        """Requests that each is at."""
        self._of: OrderedDict[str, int] = OrderedDict()

    @contextmanager
    def place(self, session: str) -> Iterator[int | None]:
        """Rank that a request of ``session`` goes to; None: the server may choose, as of requests
        of no session."""
        if not session or len(self._asked) < 2:
            yield None
            return
        rank = self._of[session] if session in self._of else self._asked.index(min(self._asked))
        self._of[session] = rank
        self._of.move_to_end(session)
        if len(self._of) > _KEPT:
            self._of.popitem(last=False)
        self._asked[rank] += 1
        try:
            yield rank
        finally:
            self._asked[rank] -= 1
