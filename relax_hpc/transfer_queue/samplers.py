"""Which data-parallel rank takes which rows: pure functions, so that every rank finds the same answer."""

from __future__ import annotations

from collections.abc import Sequence


def share(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal items of ``sizes`` (tokens) to ``ranks``: largest first to the least loaded, ties to the lower rank.

    Returns the item numbers of every rank, ascending. The heaviest rank carries at most 4/3 of the best possible
    (Graham 1969, "Bounds on multiprocessing timing anomalies").

    >>> share([5, 3, 3, 2], 2)
    [[0, 3], [1, 2]]
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        shares[rank].append(item)
        loads[rank] += sizes[item]
    return [sorted(items) for items in shares]
