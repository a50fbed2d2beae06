"""Samplers: every row once, nobody much heavier than the others, no budget overrun, the same answer
for everybody."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.queue.row_ids import row_id
from relax_hpc.queue.samplers import (
    GroupSize,
    assign_groups,
    balanced,
    greedy_split,
    micro_batches,
    schedule,
    select_rows,
    sequential,
    whole_groups,
)

PARTS = st.integers(1, 8)
BUDGETS = st.integers(1, 400)
SAMPLERS = [
    sequential,
    balanced,
    lambda lengths, parts: balanced(lengths, parts, equal_counts=True),
]


def windows(most: int = 40, longest: int = 100) -> st.SearchStrategy[dict[int, int]]:
    """Tokens by ticket."""
    return st.dictionaries(st.integers(0, 10**6), st.integers(1, longest), max_size=most)


def loads(lengths: dict, parts: list[list]) -> list[int]:
    return [sum(lengths[key] for key in part) for part in parts]


def spread(found: list[int]) -> int:
    return max(found) - min(found)


def samples(window: dict[int, int], count: int = 3) -> dict[str, int]:
    """Sample ids of whole prompt groups, of various lengths."""
    return {row_id(ticket, k): size + k for ticket, size in window.items() for k in range(count)}


@pytest.mark.parametrize("sampler", SAMPLERS)
@given(lengths=windows(), parts=PARTS)
def test_every_item_is_in_exactly_one_part(sampler, lengths, parts):
    found = sampler(lengths, parts)
    assert len(found) == parts
    assert sorted(key for part in found for key in part) == sorted(lengths)
    assert all(part == sorted(part) for part in found)


@given(lengths=windows(), parts=PARTS)
def test_sequential_parts_follow_each_other(lengths, parts):
    found = sequential(lengths, parts)
    assert [key for part in found for key in part] == sorted(lengths)
    assert spread([len(part) for part in found]) <= 1


@given(lengths=windows(), parts=PARTS)
def test_balanced_is_never_worse_than_greedy(lengths, parts):
    sizes = [lengths[key] for key in sorted(lengths)]
    greedy = [sum(sizes[item] for item in items) for items in greedy_split(sizes, parts)]
    found = loads(lengths, balanced(lengths, parts))
    assert spread(found) <= min(spread(greedy), max(sizes, default=0))
    assert found == sorted(found, reverse=True)


@given(lengths=windows(most=7, longest=30), parts=st.integers(1, 3))
def test_the_heaviest_part_is_within_grahams_bound_of_the_best(lengths, parts):
    def heaviest(choice: tuple[int, ...]) -> int:
        return max(
            sum(s for s, where in zip(lengths.values(), choice, strict=True) if where == p)
            for p in range(parts)
        )

    best = min(map(heaviest, itertools.product(range(parts), repeat=len(lengths))))
    assert max(loads(lengths, balanced(lengths, parts))) <= (4 / 3 - 1 / (3 * parts)) * best


@given(lengths=windows(), parts=PARTS)
def test_equal_counts_are_equal_and_still_balanced(lengths, parts):
    found = balanced(lengths, parts, equal_counts=True)
    assert spread([len(part) for part in found]) <= 1
    assert spread(loads(lengths, found)) <= max(lengths.values(), default=0)


def test_differencing_beats_greedy_on_the_textbook_case():
    sizes = [8, 7, 6, 5, 4]
    lengths = dict(enumerate(sizes))
    assert sorted(loads(lengths, greedy_split(sizes, 2))) == [13, 17]
    assert loads(lengths, balanced(lengths, 2)) == [16, 14]


@given(window=windows(most=12), parts=PARTS)
def test_prompt_groups_stay_whole(window, parts):
    lengths = samples(window)
    found = whole_groups(lengths, parts)
    assert sorted(key for part in found for key in part) == sorted(lengths)
    owners = [{sample.partition(".")[0] for sample in part} for part in found]
    assert all(not one & other for one, other in itertools.combinations(owners, 2))


@given(lengths=windows(), budget=BUDGETS, least=st.integers(1, 12))
def test_only_a_single_long_item_may_exceed_the_budget(lengths, budget, least):
    found = micro_batches(lengths, budget, least)
    assert sorted(key for batch in found for key in batch) == sorted(lengths)
    assert all(
        total <= budget or len(batch) == 1
        for batch, total in zip(found, loads(lengths, found), strict=True)
    )
    assert all(found) and len(found) >= min(least, len(lengths))


def fewest(sizes: list[int], budget: int) -> int:
    """Micro-batches that are needed at least, by trying everything."""
    if not sizes:
        return 0
    first, rest = max(sizes), sorted(sizes)[:-1]
    subsets = (c for n in range(len(rest) + 1) for c in itertools.combinations(range(len(rest)), n))
    fitting = [{*c} for c in subsets if first + sum(rest[i] for i in c) <= budget] or [set()]
    return 1 + min(
        fewest([size for i, size in enumerate(rest) if i not in taken], budget) for taken in fitting
    )


@given(lengths=windows(most=6, longest=12), budget=st.integers(12, 40))
def test_a_window_has_few_micro_batches(lengths, budget):
    best = fewest(list(lengths.values()), budget)
    assert best <= len(micro_batches(lengths, budget)) <= 11 / 9 * best + 6 / 9


@given(seed=st.integers(0, 99))
def test_long_tails_leave_no_small_micro_batches(seed):
    """Of a lognormal window: as few as their tokens need, and of nearly equal size."""
    rng = random.Random(seed)
    lengths = {n: min(max(int(rng.lognormvariate(6.55, 1.0)), 8), 8192) for n in range(64)}
    sizes = loads(lengths, found := micro_batches(lengths, 16384))
    assert len(found) == -(-sum(sizes) // 16384) or max(sizes) > 16384 - 8
    assert spread(sizes) <= max(sizes) / 50


@given(
    window=windows(most=12),
    ranks=PARTS,
    budget=BUDGETS,
    batch=st.integers(0, 20),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("sampler", [*SAMPLERS, whole_groups])
def test_the_order_of_arrival_changes_nothing(sampler, window, ranks, budget, batch, seed):
    lengths = samples(window)
    arrived = dict(random.Random(seed).sample(sorted(lengths.items()), len(lengths)))
    expected = schedule(lengths, ranks, budget, batch, sampler)
    assert schedule(arrived, ranks, budget, batch, sampler) == expected
    assert sorted(key for rank in expected for part in rank for key in part) == sorted(lengths)


@given(lengths=windows(), ranks=PARTS, budget=BUDGETS, batch=st.integers(0, 20))
def test_a_schedule_gives_every_rank_as_many_micro_batches_of_about_as_many_tokens(
    lengths, ranks, budget, batch
):
    found = schedule(lengths, ranks, budget, batch)
    assert sorted(key for rank in found for part in rank for key in part) == sorted(lengths)
    for part in [part for rank in found for part in rank]:
        sizes = [lengths[key] for key in part]
        assert sum(sizes) <= budget or len(part) <= 1
    totals = [sum(lengths[key] for part in rank for key in part) for rank in found]
    assert spread(totals) <= max(lengths.values(), default=0)
    [most] = {len(rank) for rank in found}
    for rank in found:
        # Who has as many rows as others have micro-batches, or more, is never idle; nobody is
        # before he is through.
        assert all(map(len, rank[: min(most, sum(map(len, rank)))]))


@st.composite
def groups_with_media(draw):
    """Prompt groups whose rows each show some of the media of the group."""
    groups = []
    for _ in range(draw(st.integers(0, 6))):
        media = draw(st.lists(st.integers(1, 60), max_size=3))
        shown = draw(
            st.lists(
                st.sets(st.sampled_from(range(len(media)))) if media else st.just(set()),
                min_size=1,
                max_size=5,
            )
        )
        groups.append(
            (
                media,
                shown,
                draw(st.lists(st.integers(1, 60), min_size=len(shown), max_size=len(shown))),
            )
        )
    return groups


@given(groups=groups_with_media(), ranks=PARTS, budget=BUDGETS, bound=st.integers(0, 100))
def test_no_micro_batch_has_more_media_than_is_allowed_beside_its_tokens(
    groups, ranks, budget, bound
):
    sizes, rows = [], []
    for number, (media, shown, texts) in enumerate(groups):
        seen = [sum(media[k] for k in row) for row in shown]
        lengths = [text + some for text, some in zip(texts, seen, strict=True)]
        sizes.append(GroupSize(lengths, seen, sum(media[k] for k in set().union(*shown))))
        rows += [
            (length, {(number, k): media[k] for k in row})
            for length, row in zip(lengths, shown, strict=True)
        ]
    found = assign_groups(sizes, ranks, budget, bound)
    parts = [part for rank in found for part in rank]
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    for part in (part for part in parts if len(part) > 1):
        assert sum(rows[row][0] for row in part) <= budget
        distinct = {name: tokens for row in part for name, tokens in rows[row][1].items()}
        assert sum(distinct.values()) <= (bound or budget)
    [most] = {len(rank) for rank in found}
    assert all(map(any, zip(*found, strict=True))) if most else not rows


@given(
    lengths=st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=4), max_size=9),
    ranks=PARTS,
    budget=BUDGETS,
)
def test_rows_of_text_are_dealt_by_themselves(lengths, ranks, budget):
    sizes = [GroupSize(group, [0] * len(group), 0) for group in lengths]
    assert assign_groups(sizes, ranks, budget, 7) == schedule(
        dict(enumerate(itertools.chain(*lengths))), ranks, budget
    )


def test_rows_that_show_the_same_stay_together_but_no_rank_is_idle():
    """A tower encodes a medium once for a micro-batch, however many rows of it show it."""
    groups = [GroupSize([100] * 4, [90] * 4, 90) for _ in range(4)]
    assert assign_groups(groups, 2, 450, 0) == [
        [[0, 1, 2, 3], [12, 13, 14, 15]],
        [[4, 5, 6, 7], [8, 9, 10, 11]],
    ]
    assert assign_groups(groups[:1], 2, 450, 0) == [[[0, 1]], [[2, 3]]]
    assert [len(part) for part in assign_groups(groups[:1], 1, 250, 0)[0]] == [2, 2]


@given(lengths=windows(), ranks=PARTS, budget=BUDGETS, kept=st.sets(st.integers(0, 39)))
def test_what_is_left_of_a_window_stays_with_its_rank(lengths, ranks, budget, kept):
    sizes = list(lengths.values())
    rows = [number for number in range(len(sizes)) if number in kept]
    whole = schedule(dict(enumerate(sizes)), ranks, budget)
    left = select_rows(whole, rows)
    assert sorted(row for rank in left for part in rank for row in part) == list(range(len(rows)))
    # As many each, and never all of them idle at once.
    assert all(map(any, zip(*left, strict=True)))
    for before, after in zip(whole, left, strict=True):
        assert [rows[row] for part in after for row in part] == [
            r for part in before for r in part if r in kept
        ]


@given(lengths=windows(), ranks=PARTS)
def test_the_heaviest_part_goes_round(lengths, ranks):
    beyond = sum(lengths.values()) + 1
    heaviest = loads(lengths, balanced(lengths, ranks, equal_counts=True))[0]
    for batch in range(2 * ranks):
        mine = schedule(lengths, ranks, beyond, batch)[batch % ranks]
        assert sum(lengths[key] for part in mine for key in part) == heaviest


@pytest.mark.parametrize(
    "call", [lambda: balanced({}, 0), lambda: sequential({}, 0), lambda: micro_batches({}, 0)]
)
def test_impossible_shapes_are_refused(call):
    with pytest.raises(ValueError, match="expected at least 1"):
        call()
