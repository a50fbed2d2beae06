"""Spans: files, totals and unions of intervals."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.log_rotation import read_all_lines, rotate_closed_file, rotated_files
from relax_hpc.base.metrics import spans as spans_module
from relax_hpc.base.metrics.read_spans import (
    merge_intervals,
    read_processes,
    read_spans,
    union_length,
)
from relax_hpc.base.metrics.spans import Spans, process_start_time

INTERVALS = st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 20)), max_size=12)


class Clock:
    """Stands in for time.monotonic."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def span_file(run_dir: Path, group: str) -> Path:
    return run_dir / "logs" / group / "inc-000001" / f"spans-{group}-0.jsonl"


def test_spans_are_written_and_read(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    spans = Spans(span_file(tmp_path, "actor"), "actor")
    with spans("train", step=3):
        clock.now += 2
    with spans("wait"):
        clock.now += 1
    spans.close()
    spans.close()
    train, wait = read_spans(tmp_path)
    assert (train.role, train.what, train.step, wait.what, wait.step) == (
        "actor",
        "train",
        3,
        "wait",
        None,
    )
    assert train.end - train.start == pytest.approx(2, abs=1e-5) and wait.start == train.end
    lines = [json.loads(line) for line in span_file(tmp_path, "actor").read_text().splitlines()]
    assert lines[1] == {"role": "actor", "what": "train", "step": 3, "start": 100.0, "end": 102.0}


def test_a_span_counts_when_its_block_fails(tmp_path):
    spans = Spans(span_file(tmp_path, "actor"), "actor")
    with pytest.raises(RuntimeError), spans("train"):
        raise RuntimeError
    spans.close()
    assert [span.what for span in read_spans(tmp_path)] == ["train"]


def test_totals_include_what_still_runs(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    spans = Spans(span_file(tmp_path, "actor"), "actor")
    with spans("train"):
        clock.now += 2
    with spans("wait"):
        clock.now += 3
        assert spans.take() == {"train": 2, "wait": 3}
        clock.now += 4
    assert spans.take() == {"wait": 4}
    assert spans.take() == {}
    spans.close()


def test_finished_spans_reach_the_file_while_a_long_one_runs(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    spans = Spans(span_file(tmp_path, "actor"), "actor")
    with spans("train"):
        clock.now += 0.5
    assert read_spans(tmp_path) == []
    clock.now += 1
    with spans("wait"):
        assert [span.what for span in read_spans(tmp_path)] == ["train"]
    spans.close()


def test_threads_share_spans(tmp_path):
    spans = Spans(span_file(tmp_path, "rollout"), "rollout")

    def work() -> None:
        for step in range(50):
            with spans("generate", step=step):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    spans.close()
    assert len(read_spans(tmp_path)) == 200


def test_processes_of_one_boot_share_a_clock_and_others_are_moved(tmp_path):
    for group, boot, monotonic, wall in (
        ("a", "x", 10.0, 1010.0),
        ("b", "x", 20.0, 1020.4),
        ("c", "y", 5.0, 1020.0),
    ):
        path = span_file(tmp_path, group)
        path.parent.mkdir(parents=True)
        anchor = {"role": group, "monotonic": monotonic, "wall": wall, "boot": boot}
        span = {
            "role": group,
            "what": "wait",
            "step": None,
            "start": monotonic,
            "end": monotonic + 1,
        }
        path.write_text(json.dumps(anchor) + "\n" + json.dumps(span) + '\n{"role": "a", "wh')
    assert [(span.role, span.start) for span in read_spans(tmp_path)] == [
        ("a", 1010.0),
        ("b", 1020.0),
        ("c", 1020.0),
    ]


def test_reopened_file_is_healed(tmp_path):
    path = span_file(tmp_path, "a")
    path.parent.mkdir(parents=True)
    path.write_text('{"role": "a", "wh')
    spans = Spans(path, "a")
    with spans("wait"):
        pass
    spans.close()
    assert len(read_spans(tmp_path)) == 1


@given(INTERVALS, st.integers(-20, 20), st.integers(-20, 20))
def test_union_length_counts_covered_cells(intervals, start, end):
    covered = {cell for low, high in intervals for cell in range(low, high)} & set(
        range(start, end)
    )
    assert union_length(intervals, start, end) == len(covered)


@given(INTERVALS)
def test_merged_intervals_are_disjoint_and_cover_the_same(intervals):
    merged = merge_intervals(intervals)
    assert all(first[1] < second[0] for first, second in pairwise(merged))
    assert {c for low, high in merged for c in range(low, high)} == {
        c for low, high in intervals for c in range(low, high)
    }


@given(INTERVALS, INTERVALS)
def test_union_length_grows_with_intervals_up_to_the_window(some, more):
    assert union_length(some, -10, 10) <= union_length(some + more, -10, 10) <= 20


def test_a_long_file_is_cut_into_parts_and_read_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(spans_module, "ROTATION_BYTES", 2000)
    monkeypatch.setattr(spans_module, "_FLUSH_S", 0.0)
    path = tmp_path / "logs/rollout/inc-000001/spans-rollout-0.jsonl"
    spans = Spans(path, "rollout", process_start_time())
    for step in range(100):
        with spans("generate", step=step):
            pass
    spans.close()
    for thread in [one for one in threading.enumerate() if one.name == "compression"]:
        thread.join(60)
    assert len(rotated_files(path)) > 3 and all(
        part.suffix == ".gz" for part in rotated_files(path)
    )
    assert path.stat().st_size < 4000
    (process,) = read_processes(tmp_path)
    assert [span.step for span in process.spans if span.what == "generate"] == list(range(100))
    assert process.ended and process.began == pytest.approx(time.time(), abs=3600)
    for old in rotated_files(path)[:2]:
        old.unlink()
    (fewer,) = read_processes(tmp_path)
    assert fewer.began == pytest.approx(process.began, abs=0.01), "each part has its time"
    assert [span.step for span in fewer.spans][-1] == 99 and len(fewer.spans) < len(process.spans)


def test_what_cannot_be_cut_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(spans_module, "ROTATION_BYTES", 500)
    monkeypatch.setattr(spans_module, "_FLUSH_S", 0.0)
    monkeypatch.setattr(
        Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    spans = Spans(tmp_path / "spans-rollout-0.jsonl", "rollout")
    for step in range(20):
        with spans("generate", step=step):
            pass
    spans.close()
    assert rotated_files(tmp_path / "spans-rollout-0.jsonl") == []
    lines = (tmp_path / "spans-rollout-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if '"generate"' in line] == list(range(20))


def test_parts_that_are_cut_at_once_are_all_compressed(tmp_path):
    path = tmp_path / "spans.jsonl"
    for step in range(50):
        path.write_text(f"{step}\n" * 1000)
        rotate_closed_file(path, kept=100)
    for thread in [one for one in threading.enumerate() if one.name == "compression"]:
        thread.join(60)
    assert len(rotated_files(path)) == 50 and all(
        part.suffix == ".gz" for part in rotated_files(path)
    )
    assert list(read_all_lines(path))[::1000] == [f"{step}\n".encode() for step in range(50)]


def test_stages_of_a_start_are_no_spans(tmp_path, monkeypatch):
    """Each lane has its own stages. The time of a start stays of kind `start`."""
    clock = Clock(monkeypatch)
    clock.now = 10.0
    spans = Spans(span_file(tmp_path, "rollout"), "rollout", began=8.0)
    for moment, stage, lane in (
        (11.0, "importing libraries", ""),
        (13.0, "importing libraries", ""),
        (14.0, "", ""),
        (15.0, "SGLang is starting", "engine 0"),
        (19.0, "", "engine 0"),
    ):
        clock.now = moment
        spans.enter_stage(stage, lane)
    assert spans.is_starting()
    clock.now = 20.0
    with spans("generate", lane="0"):
        pass
    assert spans.take() == {"start": 12.0}
    spans.close()
    spans.enter_stage("after the end")
    (process,) = read_processes(tmp_path)
    lengths = [(stage.name, stage.lane, stage.end - stage.start) for stage in process.stages]
    assert lengths == [
        ("starting the process", "", pytest.approx(3.0)),
        ("importing libraries", "", pytest.approx(3.0)),
        ("SGLang is starting", "engine 0", pytest.approx(4.0)),
    ]
