"""Choice of the data-parallel rank (flag `dp_size`) of an SGLang server for each request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

_MAX_SESSIONS = 1 << 16
"""Sessions whose rank is remembered; the ones used least recently are forgotten."""


class DataRanks:
    """The data-parallel ranks of one server. A session stays on the rank that has its keys and
    values; a new session goes to the rank with the fewest requests.

    >>> ranks = DataRanks(2)
    >>> with ranks.assign("a") as first, ranks.assign("b") as second, ranks.assign("a") as third:
    ...     first, second, third
    (0, 1, 0)
    """

    def __init__(self, count: int) -> None:
        self._in_flight = [0] * count
        """Number of requests in flight on each rank."""
        self._rank_by_session: OrderedDict[str, int] = OrderedDict()

    @contextmanager
    def assign(self, session: str) -> Iterator[int | None]:
        """Rank for a request of ``session``, counted as in flight while the body runs. None: the
        server may choose, because the request has no session or there is one rank."""
        if not session or len(self._in_flight) < 2:
            yield None
            return
        rank = self._rank_by_session.get(session)
        if rank is None:
            rank = self._in_flight.index(min(self._in_flight))
        self._rank_by_session[session] = rank
        self._rank_by_session.move_to_end(session)
        if len(self._rank_by_session) > _MAX_SESSIONS:
            self._rank_by_session.popitem(last=False)
        self._in_flight[rank] += 1
        try:
            yield rank
        finally:
            self._in_flight[rank] -= 1
