"""Assignment of rows to ranks and micro-batches: pure functions of a window.

A window is the result of a claim: the tokens of every prompt group by ticket, or of every row by
its id. The results depend on nothing else: not on the order of arrival, and not on chance. The
lower ticket wins a tie. So every tensor, pipeline and context rank, and every retry, computes the
same rows for (step, task, data rank, batch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, pairwise
from typing import TypeVar

Key = TypeVar("Key", int, str)
"""A ticket, or a row id; both sort in ticket order."""
Sampler = Callable[[Mapping[Key, int], int], list[list[Key]]]
"""Function (tokens by key, number of parts) -> the keys of every part. Each key is in one part.
Keys ascend within a part."""
Assignment = list[list[list[int]]]
"""Row numbers as [data rank][micro-batch][row of the window]. All ranks have the same number of
micro-batches; some may have no row."""
_Load = tuple[int, tuple[int, ...]]
"""Minus the tokens of a part, so that the heaviest part sorts first, and the items of the part.
The lowest item decides a tie."""
_DIFFERENCED = 32
"""Most splits that are merged in the order of their spread. Later ones have small spreads."""


def sequential(lengths: Mapping[Key, int], part_count: int) -> list[list[Key]]:
    """Runs of consecutive keys, whose counts differ by at most one. The longer runs come first.

    >>> sequential({7: 10, 5: 10, 6: 10}, 2)
    [[5, 6], [7]]
    """
    _check("parts", part_count)
    keys = sorted(lengths)
    size, longer = divmod(len(keys), part_count)
    sizes: list[int] = [size + (number < longer) for number in range(part_count)]
    return [keys[start:end] for start, end in pairwise([0, *accumulate(sizes)])]


def balanced(
    lengths: Mapping[Key, int], part_count: int, equal_counts: bool = False
) -> list[list[Key]]:
    """Parts with nearly equal tokens, heaviest first: the better result of largest differencing and
    of `greedy_split`.

    The spread between the parts is at most the longest item, and never more than the greedy one's.
    With ``equal_counts``, only differencing is used, and the counts differ by at most one. Source:
    Karmarkar and Karp 1982, "The differencing method of set partitioning", UCB/CSD 82/113.

    >>> balanced({0: 8, 1: 7, 2: 6, 3: 5, 4: 4}, 2)
    [[1, 3, 4], [0, 2]]
    """
    _check("parts", part_count)
    keys = sorted(lengths)
    if part_count == 1:
        return [keys]
    sizes = [lengths[key] for key in keys]
    splits = [_difference(sizes, part_count, equal_counts)]
    if not equal_counts:
        splits.append(greedy_split(sizes, part_count))
    best = min(splits, key=lambda split: _spread(_loads(sizes, split)))
    heaviest_first = sorted(best, key=lambda items: (-sum(sizes[item] for item in items), items))
    return [[keys[item] for item in items] for items in heaviest_first]


def evenly(lengths: Mapping[Key, int], part_count: int) -> list[list[Key]]:
    """Parts with equal counts, `balanced` by tokens."""
    return balanced(lengths, part_count, equal_counts=True)


def whole_groups(
    lengths: Mapping[str, int], part_count: int, equal_counts: bool = False
) -> list[list[str]]:
    """`balanced` for prompt groups: rows of one group stay together. Keys are row ids.

    >>> whole_groups({"000000000.00.00": 5, "000000000.01.00": 5, "000000001.00.00": 9}, 2)
    [['000000000.00.00', '000000000.01.00'], ['000000001.00.00']]
    """
    groups: dict[str, list[str]] = {}
    for sample in sorted(lengths):
        groups.setdefault(sample.partition(".")[0], []).append(sample)
    totals = {
        ticket: sum(lengths[sample] for sample in samples) for ticket, samples in groups.items()
    }
    split = balanced(totals, part_count, equal_counts)
    return [list(chain.from_iterable(groups[ticket] for ticket in tickets)) for tickets in split]


def micro_batches(
    lengths: Mapping[Key, int], budget_tokens: int, minimum: int = 1
) -> list[list[Key]]:
    """Packs of at most ``budget_tokens``, heaviest first. An item above the budget is alone in its
    pack.

    There are few packs, since a small pack takes nearly as much time as a full one, and their sizes
    are nearly equal. There are at least ``minimum``, if there are so many items. Otherwise there
    are not more than first fit decreasing takes, 11/9 of the fewest (Johnson 1973, "Near-optimal
    bin packing algorithms").

    >>> micro_batches({0: 2, 1: 2, 2: 5, 3: 9}, 8)
    [[3], [2], [0, 1]]
    """
    _check("budget_tokens", budget_tokens)
    oversized = sorted(
        (key for key in lengths if lengths[key] > budget_tokens),
        key=lambda key: (-lengths[key], key),
    )
    fitting = {key: lengths[key] for key in sorted(lengths) if lengths[key] <= budget_tokens}
    fewest = min(max(minimum - len(oversized), 0), len(fitting))
    return [[key] for key in oversized] + _equal_packs(fitting, budget_tokens, fewest)


def _equal_packs(lengths: Mapping[Key, int], budget_tokens: int, minimum: int) -> list[list[Key]]:
    """Packs of nearly equal tokens, at least ``minimum``; no item is above the budget."""
    if not lengths:
        return []
    fewest = max(-(-sum(lengths.values()) // budget_tokens), minimum, 1)
    if fewest == 1:
        return [sorted(lengths)]
    packs = _first_fit(lengths, budget_tokens)
    for count in range(fewest, max(len(packs), minimum) + 1):
        equal = balanced(lengths, count)
        loads = [sum(lengths[key] for key in pack) for pack in equal]
        if all(equal) and max(loads) <= budget_tokens:
            return equal
    while len(packs) < minimum:
        longest = max(range(len(packs)), key=lambda number: len(packs[number]))
        pack = packs[longest]
        packs[longest : longest + 1] = [pack[: len(pack) // 2], pack[len(pack) // 2 :]]
    return packs


def _first_fit(lengths: Mapping[Key, int], budget_tokens: int) -> list[list[Key]]:
    """First fit decreasing: the longest items first, each into the first pack with enough space."""
    packs: list[list[Key]] = []
    totals: list[int] = []
    for key in sorted(sorted(lengths), key=lengths.__getitem__, reverse=True):
        fits = (
            number for number, total in enumerate(totals) if total + lengths[key] <= budget_tokens
        )
        index = next(fits, len(packs))
        if index == len(packs):
            packs.append([])
            totals.append(0)
        packs[index].append(key)
        totals[index] += lengths[key]
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

    Ranks get nearly equal sums of ``costs``, which estimate the time; None: ``lengths`` are the
    costs. Parts move on by one rank from window to window, so that the heaviest part is not always
    on the same rank.

    All ranks get the same number of micro-batches, because collectives in the model need it. If a
    rank has fewer items than another has micro-batches, its last micro-batches are empty.

    >>> schedule({0: 4, 1: 4, 2: 8}, 2, 8, batch=1)
    [[[2]], [[0, 1]]]
    >>> schedule({0: 8, 1: 8, 2: 8}, 2, 8)
    [[[1], [2]], [[0], []]]
    """
    key_parts = sampler(costs or lengths, ranks)
    moved = [key_parts[(rank - batch) % ranks] for rank in range(ranks)]
    by_rank = [{key: lengths[key] for key in keys} for keys in moved]
    count, batches = 0, [micro_batches(keys, budget_tokens) for keys in by_rank]
    # A rank that is asked for as many batches as another one may need one more than that.
    while count < max(map(len, batches)):
        count = max(map(len, batches))
        batches = [micro_batches(keys, budget_tokens, count) for keys in by_rank]
    return _pad_batches(batches)


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Size of a prompt group."""

    lengths: Sequence[int]
    """Tokens of each row."""
    media: Sequence[int]
    """Tokens of each row that stand for media."""
    distinct: int
    """Tokens of its distinct media, each counted once, even if several rows contain it."""


def assign_groups(
    groups: Sequence[GroupSize],
    ranks: int,
    budget_tokens: int,
    budget_media: int,
    batch: int = 0,
    whole: bool = False,
) -> Assignment:
    """Assign the rows of prompt ``groups``, numbered in order, by `schedule`.

    A micro-batch of several rows has at most ``budget_tokens`` tokens, and at most ``budget_media``
    tokens of media (0: no such bound).

    Rows of a group with media stay together as far as they fit, because a tower encodes a medium
    once for all rows of a micro-batch. With ``whole``, rows of any group stay together, even if
    they do not fit. A token of media costs time twice: in a tower and in the language model.

    >>> assign_groups([GroupSize([4, 4], [3, 3], 3), GroupSize([4, 4], [0, 0], 0)], 1, 12, 4)
    [[[0, 1], [2, 3]]]
    """
    media_bound = budget_media or budget_tokens
    # A part larger than a rank's fair share would leave other ranks without rows.
    fair = max(sum(map(sum, (group.lengths for group in groups))) // ranks, 1)
    bounds = min(budget_tokens, fair), media_bound
    rows, sizes, costs, first_row = list[range](), dict[int, int](), dict[int, int](), 0
    for group in groups:
        for run in _parts(group, bounds, whole):
            tokens, media = sum(group.lengths[run.start : run.stop]), _media_tokens(group, run)
            # The size of a part is in tokens of text, whichever of the two bounds it is closer to.
            sizes[len(rows)] = max(tokens, -(-media * budget_tokens // media_bound))
            costs[len(rows)] = tokens + media
            rows.append(range(first_row + run.start, first_row + run.stop))
        first_row += len(group.lengths)
    scheduled = schedule(sizes, ranks, budget_tokens, batch, costs=costs)
    return [
        [list(chain.from_iterable(rows[run] for run in micro_batch)) for micro_batch in rank]
        for rank in scheduled
    ]


def _parts(group: GroupSize, bounds: tuple[int, int], whole: bool) -> Iterator[range]:
    """Rows of a group that stay together: runs of at most as many tokens and tokens of media as
    ``bounds`` allow."""
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
        if end == count or tokens > bounds[0] or _media_tokens(group, longer) > bounds[1]:
            yield range(start, end)
            start = end


def _media_tokens(group: GroupSize, run: range) -> int:
    """Upper bound of the tokens of distinct media in some rows of a group."""
    if not group.distinct:
        return 0
    return min(sum(group.media[run.start : run.stop]), group.distinct)


def _pad_batches(ranks: list[list[list[Key]]]) -> list[list[list[Key]]]:
    """Micro-batches of each rank, with empty ones added so that all ranks have the same number."""
    count: int = max(map(len, ranks), default=0)
    return [batches + [[] for _ in range(count - len(batches))] for batches in ranks]


def select_rows(assignment: Assignment, rows: Sequence[int]) -> Assignment:
    """The ``assignment`` of a window that keeps only ``rows`` (ascending), numbered from 0.

    >>> select_rows([[[0, 3], [1]], [[2], []]], [2, 3])
    [[[1]], [[0]]]
    >>> select_rows([[[0], [3]], [[1], [2]]], [0, 1, 3])
    [[[0], [2]], [[1], []]]
    """
    numbers = {row: number for number, row in enumerate(rows)}
    ranks = []
    for rank in assignment:
        batches = [[numbers[row] for row in batch if row in numbers] for batch in rank]
        ranks.append([batch for batch in batches if batch])
    return _pad_batches(ranks)


def greedy_split(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign items of ``sizes`` (tokens) to ``ranks``: the largest first, each to the least loaded
    rank. The lower rank wins a tie.

    Returns the item numbers of every rank, ascending. The heaviest rank carries at most 4/3 of the
    best possible (Graham 1969, "Bounds on multiprocessing timing anomalies").

    >>> greedy_split([5, 3, 3, 2], 2)
    [[0, 3], [1, 2]]
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        rank = min(range(ranks), key=lambda number: (loads[number], number))
        shares[rank].append(item)
        loads[rank] += sizes[item]
    return [sorted(items) for items in shares]


def _difference(sizes: Sequence[int], part_count: int, equal_counts: bool) -> list[list[int]]:
    """Karmarkar-Karp: merge the two splits with the largest spread, the heavy parts of one with the
    light parts of the other, until one split is left.

    It begins with a split for every item or, for equal counts, for every ``part_count`` items of
    similar size. Splits of the smallest items are added in their order, which is faster and as
    good.
    """
    width = part_count if equal_counts else 1
    items = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    chunks = [items[start : start + width] for start in range(0, len(items), width)]
    splits = [
        [(-sizes[item], (item,)) for item in chunk] for chunk in chunks[:_DIFFERENCED] or [[]]
    ]
    heap = [_entry(split + [(0, ())] * (part_count - len(split))) for split in splits]
    heapify(heap)
    while len(heap) > 1:
        first, second = heappop(heap)[-1], heappop(heap)[-1]
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        heappush(heap, _entry(sorted(merged)))
    return _add_chunks(heap[0][-1], chunks[_DIFFERENCED:], sizes)


def _add_chunks(
    split: list[_Load], chunks: Iterable[Sequence[int]], sizes: Sequence[int]
) -> list[list[int]]:
    """Add the items of each chunk to ``split``: the largest item to the lightest part, and so on.
    The items of every part."""
    loads, items_by_part = [-load for load, _ in split], [list(items) for _, items in split]
    for chunk in chunks:
        lightest = sorted(range(len(loads)), key=loads.__getitem__)
        for number, item in zip(lightest, chunk, strict=False):
            loads[number] += sizes[item]
            items_by_part[number].append(item)
    return [sorted(items) for items in items_by_part]


def _entry(split: list[_Load]) -> tuple[int, tuple[int, ...], list[_Load]]:
    """A split, heaviest part first, as the heap orders it: by spread, then by the items of its
    heaviest part."""
    return split[0][0] - split[-1][0], split[0][1], split


def _loads(sizes: Sequence[int], split: Iterable[Iterable[int]]) -> list[int]:
    return [sum(sizes[item] for item in items) for items in split]


def _spread(loads: Sequence[int]) -> int:
    return max(loads) - min(loads)


def _check(name: str, number: int) -> None:
    if number < 1:
        raise ValueError(f"{name}: found {number}, expected at least 1")
