"""Every second is put down once: to one label, in totals as in files, and to nobody twice."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.metrics.accounting import (
    OTHER,
    PRIORITY,
    UNFINISHED,
    Account,
    Label,
    even_split,
    uncovered_intervals,
)
from relax_hpc.base.metrics.read_spans import merge_intervals, read_processes
from relax_hpc.base.metrics.shares import is_by_peer, shares_of_time, tags_of_time
from relax_hpc.base.metrics.span_table import Merged, Span, SpanTable, seconds_by_label
from relax_hpc.base.metrics.spans import KINDS, OpenSpan, Spans
from relax_hpc.base.metrics.timeline import WorkerTimeline, workers_of_process

LABELS = st.sampled_from(
    [Label(what) for what in PRIORITY[:4]] + [Label("wait", "rollout"), Label("wait", "actor")]
)
TIMES = st.integers(-15, 15)
STRETCHES = st.lists(st.tuples(LABELS, TIMES, TIMES), max_size=8)


class Clock:
    """Stands in for time.monotonic."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def painted(stretches: list[tuple[Label, int, int]], start: int, end: int) -> dict[str, int]:
    """Seconds by kind, cell by cell: an independent way to the same."""
    kinds: dict[str, int] = {}
    for cell in range(start, end):
        at = [label.what for label, low, high in stretches if low <= cell < high]
        kind = min(at, key=PRIORITY.index, default=OTHER)
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def by_kind(seconds: dict[Label, float]) -> dict[str, float]:
    kinds: dict[str, float] = {}
    for label, spent in seconds.items():
        kinds[label.what] = kinds.get(label.what, 0.0) + spent
    return kinds


def test_every_kind_has_its_place() -> None:
    assert set(PRIORITY) == set(KINDS)


def table_of(stretches: list[tuple[Label, int, int]]) -> SpanTable:
    return SpanTable.from_spans(
        Span("actor", label.what, None, low, high, label.peer) for label, low, high in stretches
    )


def seconds_one_by_one(
    stretches: list[tuple[Label, int, int]], start: int, end: int
) -> dict[Label, float]:
    """Seconds by label, from an account that sees one edge after the other."""
    edges: list[tuple[float, bool, Label]] = []
    for label, low, high in stretches:
        low, high = max(low, start), min(high, end)
        if high > low:
            edges += [(low, True, label), (high, False, label)]
    account = Account(start)
    for time, is_begin, label in sorted(edges):
        (account.begin if is_begin else account.end)(label, time)
    return account.take(max(start, end))


@given(STRETCHES, TIMES, TIMES)
def test_a_partition_is_what_painting_gives(stretches, start, end) -> None:
    table = table_of(stretches)
    found = seconds_by_label(*table.labels, table.start, table.end, (start, end))
    assert by_kind(found) == painted(stretches, start, end)
    assert sum(found.values()) == max(0, end - start)
    assert found == seconds_one_by_one(stretches, start, end)


@given(STRETCHES, st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=5))
def test_columns_cover_what_single_intervals_cover(stretches, windows) -> None:
    merged = table_of(stretches).merged()
    pairs = list(zip(merged.starts.tolist(), merged.ends.tolist(), strict=True))
    assert pairs == merge_intervals((low, high) for _, low, high in stretches)
    lows, highs = np.array([(min(pair), max(pair)) for pair in windows], float).T
    covered = Merged(merged.starts, merged.ends).covered(lows, highs)
    assert covered.tolist() == [
        sum(max(0, min(high, end) - max(low, start)) for start, end in pairs)
        for low, high in zip(lows, highs, strict=True)
    ]


@given(TIMES, TIMES, st.lists(st.tuples(TIMES, TIMES), max_size=5))
def test_parts_without_holes_have_every_other_second(start, end, holes) -> None:
    parts = list(uncovered_intervals((start, end), holes))
    cells = {cell for low, high in parts for cell in range(low, high)}
    assert cells == set(range(start, end)) - {
        cell for low, high in holes for cell in range(low, high)
    }
    assert sum(high - low for low, high in parts) == len(cells)


@given(st.lists(st.tuples(st.integers(0, 3), LABELS), max_size=12))
def test_an_account_adds_up_whatever_it_is_told(steps) -> None:
    """Each label in turn begins or ends; takes in between lose nothing."""
    account, now, running, taken = Account(0.0), 0.0, set(), 0.0
    for passed, label in steps:
        now += passed
        (account.end if label in running else account.begin)(label, now)
        running ^= {label}
        if passed == 2:
            taken += sum(account.take(now).values())
    assert taken + sum(account.take(now + 1).values()) == now + 1


@given(st.floats(0, 10), st.floats(0, 10), st.integers(1, 40), st.integers(1, 40))
def test_no_split_is_more_even(rollout_s, actor_s, rollout, actor) -> None:
    def step(n: int) -> float:
        return max(rollout_s * rollout / n, actor_s * actor / (rollout + actor - n))

    found = even_split(rollout_s, actor_s, rollout, actor)
    assert sum(found) == rollout + actor and min(found) >= 1
    assert all(step(found[0]) <= step(n) for n in range(1, rollout + actor))


@given(
    STRETCHES,
    TIMES,
    st.integers(0, 20),
    st.booleans(),
    TIMES,
    TIMES,
    st.lists(st.tuples(TIMES, TIMES), max_size=4),
)
def test_a_worker_is_accounted_for_all_of_its_life(
    stretches, began, life, told, start, end, holes
) -> None:
    """Killed in a span or not, before its first one, in whatever part of its life, but for
    holes."""
    spans = [
        Span("actor", label.what, None, low, high, label.peer)
        for label, low, high in stretches
        if began <= low < high <= began + life
    ]
    seconds = WorkerTimeline("actor", 1, "actor", began, began + life, spans, told).seconds(
        start, end, holes
    )
    cells = set(range(max(start, began), min(end, began + life)))
    assert sum(seconds.values()) == len(
        cells - {cell for low, high in holes for cell in range(low, high)}
    )
    last = max((span.end for span in spans), default=began + life)
    tail = cells & set(range(last, began + life)) - {
        cell for low, high in holes for cell in range(low, high)
    }
    assert by_kind(seconds).get(UNFINISHED, 0) == (0 if told else len(tail))


# -- one process -----------------------------------------------------------------------------------


def test_a_process_is_accounted_from_its_start_to_its_end(tmp_path, monkeypatch) -> None:
    clock = Clock(monkeypatch)
    path = tmp_path / "logs/rollout/inc-000002/spans-rollout-0.jsonl"
    spans = Spans(path, "rollout", began=90.0)
    for lane in ("0", "1"):
        with spans("generate", step=0, lane=lane):
            clock.now += 4
            with spans("engine_update", lane=lane):
                clock.now += 1
    clock.now += 2
    assert spans.take() == {
        "start": 10.0 + 15.0,
        "generate": 8.0,
        "engine_update": 2.0,
        "other": 7.0 + 2.0,
    }
    spans.close()
    (process,) = read_processes(tmp_path)
    assert (process.group, process.incarnation, process.rank, process.ended - process.began) == (
        "rollout",
        2,
        "0",
        22.0,
    )
    first, second = workers_of_process(process, math.inf)
    start, end = process.began, process.ended
    assert by_kind(first.seconds(start, end)) == {
        "start": 10,
        "generate": 4,
        "engine_update": 1,
        "other": 7,
    }
    assert by_kind(second.seconds(start, end)) == {
        "start": 15,
        "generate": 4,
        "engine_update": 1,
        "other": 2,
    }


def test_a_wait_says_what_it_was_for(tmp_path, monkeypatch) -> None:
    clock = Clock(monkeypatch)
    spans = Spans(tmp_path / "logs/actor/inc-000001/spans-actor-0.jsonl", "actor")
    with spans("wait", step=1, cause=("hub", "an answer")) as waiting:
        clock.now += 10
        waiting.set_causes([("rollout", "rows", 6.0), ("actor_fwd", "scores", 1.0)])
        clock.now += 0.01
    with spans("wait", cause=("hub", "an answer")) as waiting:
        clock.now += 2
        waiting.set_causes([("rollout", "rows", math.inf)])
        clock.now += 1
    taken = spans.take()
    spans.close()
    assert taken == pytest.approx(
        {"wait_for_hub": 3 + 1, "wait_for_rollout": 6 + 2, "wait_for_actor_fwd": 1.01}
    )
    (process,) = read_processes(tmp_path)
    found = [(span.peer, round(span.end - span.start, 3), span.step) for span in process.spans]
    assert found == [
        ("hub", 3, 1),
        ("rollout", 6, 1),
        ("actor_fwd", 1.01, 1),
        ("rollout", 2, None),
        ("hub", 1, None),
    ]


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.0, 5.0)), max_size=6),
    st.floats(0.1, 9.0),
    st.floats(0, 2),
)
def test_the_pieces_of_a_wait_have_no_gaps(waited, length, rest) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock = Clock(monkeypatch)
        span = OpenSpan("wait", None, "", ("hub", ""), clock.now, clock.now)
        clock.now += length
        span.set_causes([(peer, "", seconds) for peer, seconds in waited])
        end = clock.now + rest
        pieces = span.pieces(end)
    assert pieces[0][1] == 100.0 and pieces[-1][2] == end
    assert all(before[2] == after[1] for before, after in pairwise(pieces))


def test_what_goes_on_for_long_is_in_the_file_with_every_take(tmp_path, monkeypatch) -> None:
    clock = Clock(monkeypatch)
    spans = Spans(tmp_path / "logs/rollout/inc-000001/spans-rollout-0.jsonl", "rollout")
    with spans("generate", step=4):
        clock.now += 30
        assert spans.take() == {"generate": 30}
        clock.now += 1
        assert spans.longest_work_s() == 31, "it is one piece of work all the same"
        with spans("queue", step=4):
            assert [span.end - span.start for span in read_processes(tmp_path)[0].spans] == [30]
    spans.close()
    assert [
        (span.what, span.end - span.start) for span in read_processes(tmp_path)[0].spans[::2]
    ] == [
        ("generate", 30),
        ("generate", 1),
    ]


# -- shares ----------------------------------------------------------------------------------------


def test_tags_of_a_step_and_back() -> None:
    tags = tags_of_time("actor", {"train": 6.0, "wait_for_rollout": 3.0, "wait": 0.5, "other": 0.5})
    assert tags == {
        "idle/actor": 0.35,
        "idle/actor_for_rollout": 0.3,
        "perf/actor_train_s": 6.0,
        "perf/actor_other_s": 0.5,
        "perf/actor_wait_s": 3.5,
    }
    assert [tag for tag in tags if is_by_peer(tag)] == ["idle/actor_for_rollout"]
    more = tags_of_time("actor", {"train": 10.0}) | tags_of_time(
        "actor_fwd", {"wait_for_actor": 1.0}
    )
    assert tags_of_time("actor", {}) == {}
    assert shares_of_time([tags, more | {"perf/step_s": 9.0}]) == {
        "actor": {"at": {"train": 0.8, "wait": 0.175, "other": 0.025}, "for": {"rollout": 0.15}},
        "actor_fwd": {"at": {"wait": 1.0}, "for": {"actor": 1.0}},
    }
