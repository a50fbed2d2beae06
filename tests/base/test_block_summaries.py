"""Reading with a summary gives what reading without one gives, whatever became of the files."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base import block_summaries
from relax_hpc.base.log_rotation import compress_rotated_file, next_rotated_file
from relax_hpc.base.metrics.read import load_metrics
from relax_hpc.base.metrics.read_spans import read_processes
from relax_hpc.base.rundir import RunDir
from relax_hpc.config import dump
from relax_hpc.config.schema import SamplesConfig
from relax_hpc.ops.observe import sample_view, summaries
from relax_hpc.ops.observe.sample_view import SampleFilter, select_samples
from relax_hpc.queue.inspect.fates import Fate
from relax_hpc.rollout.sample_index import read_index
from relax_hpc.rollout.sample_log import SampleLog, read_samples
from tests.effort import effort
from tests.helpers.queue_helpers import make_run, small

_BLOCK_BYTES = 700
SPANS = "logs/actor/inc-000001/spans-actor-0.jsonl"
Act = Callable[[RunDir, random.Random], None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(block_summaries, "BLOCK_BYTES", _BLOCK_BYTES)
    # Fates come from the journal, see tests/queue/test_journal_summary.py.
    monkeypatch.setattr(sample_view, "read_fates", lambda *_: {(2, "a.shard"): Fate("accepted")})
    run = make_run(tmp_path / "run")
    dump(small(), run.config)
    for path in (run.samples, (run.root / SPANS).parent):
        path.mkdir(parents=True, exist_ok=True)
    return run


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def add_metrics(run: RunDir, chance: random.Random) -> None:
    """Lines of steps, evaluations and rollbacks, of several incarnations."""
    for _ in range(chance.randrange(1, 12)):
        step, incarnation = chance.randrange(20), chance.choice([1, 1, 2, 3])
        line: dict[str, Any] = {"step": step, "time": 5.5 + step, "incarnation": incarnation}
        if chance.random() < 0.15:
            line["event"] = "rolled_back"
        else:
            tags = ("reward/mean", "perf/step_s", "eval/held", "loss/a")
            values = (0.25, 1e-9, None, 7, math.pi)
            line |= {tag: chance.choice(values) for tag in tags if chance.random() < 0.8}
        append(run.metrics, json.dumps(line) + "\n")


def add_spans(run: RunDir, chance: random.Random) -> None:
    """Spans, stages, clocks of two boots, and lines that are none of them."""
    for _ in range(chance.randrange(1, 12)):
        start = round(chance.uniform(0, 50), 3)
        span: dict[str, Any] = {"role": "actor", "start": start, "end": start + chance.random()}
        kind = chance.random()
        if kind < 0.7:
            span |= {"what": chance.choice(["train", "wait"]), "step": chance.choice([None, 1, 2])}
            span |= chance.choice([{}, {"lane": "0"}, {"peer": "hub", "reason": "rows"}])
        elif kind < 0.8:
            span |= {"stage": "loading", "lane": ""}
        elif kind < 0.9:
            boot = chance.choice(["a", "b"])
            clock = {"monotonic": start, "wall": start + 1000, "boot": boot}
            span = {"role": chance.choice(["actor", "hub"]), **clock}
        else:
            span = chance.choice([{"ended": start}, {"role": 3}, {"what": "train", "start": "x"}])
        append(run.root / SPANS, json.dumps(span) + "\n")


def add_samples(run: RunDir, chance: random.Random) -> None:
    """Samples of training and of evaluations, some of them not valid."""
    name = f"rollout-inc-00000{chance.choice([1, 2])}-rank-0.jsonl.gz"
    log = SampleLog(run.samples / name, SamplesConfig(), steps=1000)
    samples = []
    for number in range(chance.randrange(1, 6)):
        ticket = chance.randrange(30)
        sample = {
            "id": chance.choice([f"{ticket:09d}.00.00", "x", f"{10**30}.00"]),
            "step": chance.randrange(5),
            "time": float(number),
            "prompt": "p" * chance.randrange(300),
            "response": str(chance.random()),
            "reward": chance.choice([0.0, 0.5, 1.0, math.nan]),
            "finish_reason": chance.choice(["stop", "length"]),
            "shard": chance.choice(["a.shard", None]),
        }
        sample |= chance.choice([{}, {"eval": "held"}, {"eval": None}, {"answer": 5}])
        samples.append(sample)
    log.keep(samples)
    log.close()


def rotate_spans(run: RunDir, chance: random.Random) -> None:
    path = run.root / SPANS
    if path.exists():
        rotated = path.replace(next_rotated_file(path))
        if chance.random() < 0.7:
            compress_rotated_file(rotated)


def tear(run: RunDir, chance: random.Random) -> None:
    """A file ends in the middle of a line or member, and is continued."""
    for path in (run.metrics, run.root / SPANS, *run.samples.iterdir()):
        if path.exists() and chance.random() < 0.5:
            data = path.read_bytes()
            path.write_bytes(data[: chance.randrange(len(data) + 1)])


def damage(run: RunDir, chance: random.Random) -> None:
    """A byte of a file of the run is another one. Packed files of spans are not compared."""
    paths = [run.metrics, run.root / SPANS, *run.samples.iterdir()]
    flip([path for path in paths if path.exists()], chance)


def damage_summary(run: RunDir, chance: random.Random) -> None:
    folder = run.root / block_summaries.FOLDER
    flip(sorted(folder.iterdir()) if folder.exists() else [], chance)


def flip(paths: list[Path], chance: random.Random) -> None:
    path = chance.choice(paths) if paths else None
    if path and path.stat().st_size:
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)


def summarise(run: RunDir, _: random.Random) -> None:
    for path, act in summaries._files(run)[1:]:
        if path.exists():
            act()


ACTS: list[Act] = [
    *[add_metrics] * 4,
    *[add_spans] * 4,
    *[add_samples] * 3,
    *[summarise] * 3,
    *(rotate_spans, tear, damage, damage_summary),
]


def readings(run: RunDir, with_summary: bool) -> list[str]:
    """Everything that is read, as text: nan is not equal to itself."""
    metrics = load_metrics(run.root, with_summary)
    complaints: list[str] = []
    index = read_index(run, complaints.append, with_summary)
    selections = [
        SampleFilter(limit=0, dropped=True, eval_set=None),
        SampleFilter(limit=3, dropped=True, order="best"),
        SampleFilter(limit=3, dropped=True, order="worst", eval_set="held", reason="stop"),
        SampleFilter(step=2, dropped=True),
    ]
    selected = [select_samples(run, selection, with_summary) for selection in selections]
    processes = [
        (process, list(process.spans)) for process in read_processes(run.root, with_summary)
    ]
    return [repr(metrics), repr(processes), repr(selected), repr((complaints, len(index)))]


@pytest.mark.parametrize("seed", range(effort(4, 60)))
def test_a_summary_changes_no_result(run: RunDir, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(25):
        chance.choice(ACTS)(run, chance)
        if chance.random() < 0.3:
            assert readings(run, True) == readings(run, False)
    summarise(run, chance)
    assert readings(run, True) == readings(run, False)


def test_the_index_has_the_samples_in_the_order_of_their_files(run: RunDir) -> None:
    chance = random.Random(0)
    for _ in range(8):
        add_samples(run, chance)
    summarise(run, chance)
    everything = SampleFilter(limit=0, dropped=True, eval_set=None)
    texts = {sample["response"] for sample in select_samples(run, everything).samples}
    valid = {
        sample["response"]
        for sample in read_samples(run.samples)
        if sample["reward"] is not None and not isinstance(sample.get("answer"), int)
    }
    assert texts == valid and texts


def test_what_is_summarised_is_not_parsed_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(1)
    for _ in range(30):
        add_metrics(run, chance)
    summarise(run, chance)
    parsed: list[int] = []
    form = block_summaries.BlockFormat(1, lambda data: parsed.append(len(data)), lambda *_: 0)
    summary = block_summaries.summary_of(run.root, run.metrics)
    list(block_summaries.read_blocks(run.metrics, summary, form))
    assert sum(parsed) < 2 * _BLOCK_BYTES < run.metrics.stat().st_size


def test_a_summary_that_somebody_else_wrote_ends_no_command(run: RunDir) -> None:
    """Its checksums are right, its content is not what this package writes."""
    chance = random.Random(2)
    for _ in range(30):
        add_metrics(run, chance)
        add_spans(run, chance)
        add_samples(run, chance)
    expected = readings(run, False)
    for content in ({}, [], {"torn": 0, "runs": [{}]}, {"bytes": 1, "texts": [], "lines": [[]]}):
        for path in (run.metrics, run.root / SPANS, *run.samples.iterdir()):
            summary = block_summaries.summary_of(run.root, path)
            summary.parent.mkdir(exist_ok=True)
            foreign = block_summaries.BlockFormat(1, lambda _, given=content: given, lambda *_: 0)
            summary.write_bytes(block_summaries._frame(path.read_bytes()[:_BLOCK_BYTES], foreign))
        assert readings(run, True) == expected


def test_a_packed_file_is_not_unpacked_if_it_is_summarised(run: RunDir) -> None:
    chance = random.Random(3)
    append(run.root / SPANS, '{"role": "actor", "monotonic": 1, "wall": 2, "boot": "a"}\n')
    for _ in range(10):
        add_spans(run, chance)
    rotated = compress_rotated_file((run.root / SPANS).replace(next_rotated_file(run.root / SPANS)))
    (run.root / SPANS).touch()
    expected = readings(run, False)
    summarise(run, chance)
    packed = bytearray(rotated.read_bytes())
    packed[len(packed) // 2] ^= 0xFF
    rotated.write_bytes(packed)
    assert readings(run, True)[1] == expected[1] != readings(run, False)[1]
    with gzip.open(rotated, "wb") as file:
        file.write(b"{}\n")
    assert readings(run, True) == readings(run, False), "another content, another checksum"
