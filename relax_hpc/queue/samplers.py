"""Assignment of rows to ranks and micro-batches: pure functions of a window.

A window is what a task has claimed: the tokens of every prompt group by ticket, or of every row by
its id. The answers depend on nothing else, neither on the order of arrival nor on chance, and ties
go to the lower ticket. So every tensor, pipeline and context rank, and every retry, finds the same
rows for (step, task, data rank, batch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from typing import TypeVar

Key = TypeVar("Key", int, str)
"""A ticket, or a `row_id`; both sort in ticket order."""
Sampler = Callable[[Mapping[Key, int], int], list[list[Key]]]
"""Function (tokens by key, parts) -> the keys of every part. Each key is in one part; keys ascend
within it."""
Assignment = list[list[list[int]]]
"""Numbers of rows as [data rank][micro-batch][row of a window]; every rank has as many
micro-batches, of which some may have no row."""
_Part = tuple[int, tuple[int, ...]]
"""Minus the tokens of a part, so that the heaviest comes first, ties by the lowest item; and its
items."""
_DIFFERENCED = 32
"""Splits that are merged in the order of their spread: enough for spreads of few tokens."""


def sequential(lengths: Mapping[Key, int], parts: int) -> list[list[Key]]:
    """Runs of consecutive keys, whose counts differ by at most one; the first ones are the longer
    ones.

    >>> sequential({7: 10, 5: 10, 6: 10}, 2)
    [[5, 6], [7]]
    """
    _check("parts", parts)
    keys = sorted(lengths)
    size, longer = divmod(len(keys), parts)
    ends = accumulate(size + (part < longer) for part in range(parts))
    return [keys[start:end] for start, end in pairwise([0, *ends])]


def balanced(lengths: Mapping[Key, int], parts: int, equal_counts: bool = False) -> list[list[Key]]:
    """Parts of nearly equal tokens, heaviest first: the better of largest differencing and the
    greedy `share`.

    The spread between the parts is at most the longest item, and never more than the greedy one's.
    With ``equal_counts`` (differencing alone) the counts differ by at most one. Source: Karmarkar
    and Karp 1982, "The differencing method of set partitioning", UCB/CSD 82/113.

    >>> balanced({0: 8, 1: 7, 2: 6, 3: 5, 4: 4}, 2)
    [[1, 3, 4], [0, 2]]
    """
    _check("parts", parts)
    keys = sorted(lengths)
    if parts == 1:
        return [keys]
    sizes = [lengths[key] for key in keys]
    splits = [_difference(sizes, parts, equal_counts)]
    if not equal_counts:
        splits.append(share(sizes, parts))
    best = min(splits, key=lambda split: _spread(_loads(sizes, split)))
    heaviest_first = sorted(best, key=lambda items: (-sum(sizes[item] for item in items), items))
    return [[keys[item] for item in items] for items in heaviest_first]


def evenly(lengths: Mapping[Key, int], parts: int) -> list[list[Key]]:
    """Parts of equal counts, `balanced` by tokens."""
    return balanced(lengths, parts, equal_counts=True)


def whole_groups(
    lengths: Mapping[str, int], parts: int, equal_counts: bool = False
) -> list[list[str]]:
    """`balanced` with the rows of a prompt group kept together; keys are row ids.

    >>> whole_groups({"000000000.00.00": 5, "000000000.01.00": 5, "000000001.00.00": 9}, 2)
    [['000000000.00.00', '000000000.01.00'], ['000000001.00.00']]
    """
    groups: dict[str, list[str]] = {}
    for sample in sorted(lengths):
        groups.setdefault(sample.partition(".")[0], []).append(sample)
    totals = {
        ticket: sum(lengths[sample] for sample in samples) for ticket, samples in groups.items()
    }
    dealt = balanced(totals, parts, equal_counts)
    return [[sample for ticket in tickets for sample in groups[ticket]] for tickets in dealt]


def micro_batches(
    lengths: Mapping[Key, int], budget_tokens: int, least: int = 1
) -> list[list[Key]]:
    """Packs of at most ``budget_tokens``, heaviest first: few, and beyond that of nearly equal
    size, as small ones cost nearly as much time as full ones. An item beyond the budget stands
    alone.

    At least ``least``, if there are as many items; otherwise not more than first fit decreasing
    takes, 11/9 of the fewest (Johnson 1973, "Near-optimal bin packing algorithms").

    >>> micro_batches({0: 2, 1: 2, 2: 5, 3: 9}, 8)
    [[3], [2], [0, 1]]
    """
    _check("budget_tokens", budget_tokens)
    alone = sorted(
        (key for key in lengths if lengths[key] > budget_tokens),
        key=lambda key: (-lengths[key], key),
    )
    rest = {key: lengths[key] for key in sorted(lengths) if lengths[key] <= budget_tokens}
    return [[key] for key in alone] + _equal_packs(
        rest, budget_tokens, min(max(least - len(alone), 0), len(rest))
    )


def _equal_packs(lengths: Mapping[Key, int], budget_tokens: int, least: int) -> list[list[Key]]:
    if not lengths:
        return []
    fewest = max(-(-sum(lengths.values()) // budget_tokens), least, 1)
    if fewest == 1:
        return [sorted(lengths)]
    fitting = _first_fit(lengths, budget_tokens)
    for count in range(fewest, max(len(fitting), least) + 1):
        parts = balanced(lengths, count)
        if all(parts) and max(sum(lengths[key] for key in part) for part in parts) <= budget_tokens:
            return parts
    while len(fitting) < least:
        place = max(range(len(fitting)), key=lambda number: len(fitting[number]))
        whole = fitting[place]
        fitting[place : place + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    return fitting


def _first_fit(lengths: Mapping[Key, int], budget_tokens: int) -> list[list[Key]]:
    """Longest items first, each where it fits first."""
    packs: list[list[Key]] = []
    totals: list[int] = []
    for key in sorted(sorted(lengths), key=lengths.__getitem__, reverse=True):
        fits = (
            number for number, total in enumerate(totals) if total + lengths[key] <= budget_tokens
        )
        place = next(fits, len(packs))
        if place == len(packs):
            packs.append([])
            totals.append(0)
        packs[place].append(key)
        totals[place] += lengths[key]
    return [sorted(pack) for pack in packs]


def schedule(
    lengths: Mapping[Key, int],
    ranks: int,
    budget_tokens: int,
    batch: int = 0,
    sampler: Sampler = evenly,
    costs: Mapping[Key, int] | None = None,
) -> list[list[list[Key]]]:
    """The micro-batches of every data rank for window number ``batch`` of a step:
    [rank][micro-batch][key].

    Ranks have about as much of the ``costs``, those of time, as each other; None: time goes by
    ``lengths``.

    Parts move on by one rank from window to window, so that the heaviest one is not always the same
    rank's. All ranks get the same number of micro-batches, as collectives inside of a model need;
    those of one that has fewer items than another has micro-batches are empty at the end.

    >>> schedule({0: 4, 1: 4, 2: 8}, 2, 8, batch=1)
    [[[2]], [[0, 1]]]
    >>> schedule({0: 8, 1: 8, 2: 8}, 2, 8)
    [[[1], [2]], [[0], []]]
    """
    parts = sampler(costs or lengths, ranks)
    turned = [{key: lengths[key] for key in parts[(rank - batch) % ranks]} for rank in range(ranks)]
    least, found = 0, [micro_batches(part, budget_tokens) for part in turned]
    # Asked for as many as another has, a rank may come to need one more than that.
    while least < (most := max(map(len, found))):
        least, found = most, [micro_batches(part, budget_tokens, most) for part in turned]
    return _as_many(found)


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Size of a prompt group."""

    lengths: Sequence[int]
    """Tokens of each row."""
    media: Sequence[int]
    """Tokens of each row that stand for media."""
    distinct: int
    """Tokens of all its media, each counted once, however many rows show it."""


def dealt(
    groups: Sequence[GroupSize],
    ranks: int,
    budget_tokens: int,
    budget_media: int,
    batch: int = 0,
    whole: bool = False,
) -> Assignment:
    """The rows of prompt ``groups``, numbered through, by `schedule`: in no micro-batch of several
    rows are more than ``budget_tokens``, or of media more than ``budget_media``; 0: there is no
    bound for these.

    Rows of a group that has media stay together as far as they fit, since a tower encodes a medium
    once for all rows of a micro-batch; ``whole``: those of any group do, and whether they fit or
    not. A token of media costs its time twice, in a tower and in what follows.

    >>> dealt([GroupSize([4, 4], [3, 3], 3), GroupSize([4, 4], [0, 0], 0)], 1, 12, 4)
    [[[0, 1], [2, 3]]]
    """
    most = budget_tokens, budget_media or budget_tokens
    # No part is larger than what each rank would have: else some would have none.
    fair = max(sum(map(sum, (group.lengths for group in groups))) // ranks, 1)
    rows, sizes, costs, number = list[range](), dict[int, int](), dict[int, int](), 0
    for group in groups:
        for part in _parts(group, (min(most[0], fair), most[1]), whole):
            tokens, media = sum(group.lengths[part.start : part.stop]), _media_of(group, part)
            # A part is as large as it is in what it takes more of, as a share of what there is.
            sizes[len(rows)] = max(tokens, -(-media * most[0] // most[1]))
            costs[len(rows)] = tokens + media
            rows.append(range(number + part.start, number + part.stop))
        number += len(group.lengths)
    found = schedule(sizes, ranks, budget_tokens, batch, costs=costs)
    return [
        [[row for part in micro_batch for row in rows[part]] for micro_batch in rank]
        for rank in found
    ]


def _parts(group: GroupSize, most: tuple[int, int], whole: bool) -> Iterator[range]:
    """Rows of a group that stay together: as many as have no more tokens, and tokens of media, than
    ``most``."""
    count = len(group.lengths)
    if whole:
        yield range(count)
        return
    if not group.distinct:
        yield from (range(row, row + 1) for row in range(count))
        return
    start = 0
    for end in range(1, count + 1):
        longer = range(start, end + 1)
        tokens = sum(group.lengths[start : end + 1])
        if end == count or tokens > most[0] or _media_of(group, longer) > most[1]:
            yield range(start, end)
            start = end


def _media_of(group: GroupSize, part: range) -> int:
    """Tokens of media in some rows of a group, each medium counted once, at most."""
    return min(sum(group.media[part.start : part.stop]), group.distinct) if group.distinct else 0


def _as_many(ranks: list[list[list[Key]]]) -> list[list[list[Key]]]:
    """Micro-batches of each rank, filled up with empty ones so that all ranks have as many."""
    most = max(map(len, ranks), default=0)
    return [[*rank, *([] for _ in range(most - len(rank)))] for rank in ranks]


def of_rows(assignment: Assignment, rows: Sequence[int]) -> Assignment:
    """Assignment that is left of ``assignment`` when a window keeps only ``rows``, ascending, which
    are numbered anew.

    >>> of_rows([[[0, 3], [1]], [[2], []]], [2, 3])
    [[[1]], [[0]]]
    >>> of_rows([[[0], [3]], [[1], [2]]], [0, 1, 3])
    [[[0], [2]], [[1], []]]
    """
    numbers = {row: number for number, row in enumerate(rows)}
    left = [
        [[numbers[row] for row in batch if row in numbers] for batch in rank] for rank in assignment
    ]
    return _as_many([[batch for batch in rank if batch] for rank in left])


def share(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal items of ``sizes`` (tokens) to ``ranks``: largest first to the least loaded, ties to the
    lower rank.

    Returns the item numbers of every rank, ascending. The heaviest rank carries at most 4/3 of the
    best possible (Graham 1969, "Bounds on multiprocessing timing anomalies").

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


def _difference(sizes: Sequence[int], parts: int, equal_counts: bool) -> list[list[int]]:
    """Merge the two splits of the largest spread, the heavy parts of one with the light parts of
    the other, and again.

    It begins with a split for every item or, for equal counts, for every ``parts`` items of similar
    size; those of the smallest items are merged in their order, which costs little and levels as
    well.
    """
    width = parts if equal_counts else 1
    items = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    chunks = [items[start : start + width] for start in range(0, len(items), width)]
    splits = [
        [(-sizes[item], (item,)) for item in chunk] for chunk in chunks[:_DIFFERENCED] or [[]]
    ]
    heap = [_entry(split + [(0, ())] * (parts - len(split))) for split in splits]
    heapify(heap)
    while len(heap) > 1:
        first, second = heappop(heap)[-1], heappop(heap)[-1]
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        heappush(heap, _entry(sorted(merged)))
    return _dealt(heap[0][-1], chunks[_DIFFERENCED:], sizes)


def _dealt(
    split: list[_Part], chunks: Iterable[Sequence[int]], sizes: Sequence[int]
) -> list[list[int]]:
    """The largest item of each chunk goes to the lightest part, and so on; the items of every
    part."""
    loads, found = [-load for load, _ in split], [list(items) for _, items in split]
    for chunk in chunks:
        lightest = sorted(range(len(loads)), key=loads.__getitem__)
        for part, item in zip(lightest, chunk, strict=False):
            loads[part] += sizes[item]
            found[part].append(item)
    return [sorted(items) for items in found]


def _entry(split: list[_Part]) -> tuple[int, tuple[int, ...], list[_Part]]:
    """A split, heaviest part first, as the heap orders them: by spread, ties by the items of the
    heaviest."""
    return split[0][0] - split[-1][0], split[0][1], split


def _loads(sizes: Sequence[int], split: Iterable[Iterable[int]]) -> list[int]:
    return [sum(sizes[item] for item in items) for items in split]


def _spread(loads: Sequence[int]) -> int:
    return max(loads) - min(loads)


def _check(name: str, number: int) -> None:
    if number < 1:
        raise ValueError(f"{name}: found {number}, expected at least 1")
