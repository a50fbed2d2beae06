"""Samples for people: files that survive kills, damage and full disks, within their bound."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc.config.schema import SamplesConfig
from relax_hpc.rollout.sample_log import SampleLog, kept_of, read_samples
from tests.helpers.small_disk import small_disk

NAME = "rollout-inc-000001-rank-0.jsonl.gz"
WRITER = """
import sys
from pathlib import Path
from relax_hpc.config.schema import SamplesConfig
from relax_hpc.rollout.sample_log import SampleLog
log = SampleLog(Path(sys.argv[1]), SamplesConfig(), steps=10_000)
for step in range(10_000):
    log.keep([{"id": f"{step:09d}.00", "step": step, "response": "12 " * 1000}], step)
    print(step, flush=True)
"""


def ids(folder: Path) -> list[str]:
    return [sample["id"] for sample in read_samples(folder)]


def test_each_incarnation_and_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    for number, name in enumerate(
        ("rollout-inc-000002-rank-0", "rollout-inc-000001-rank-1", "rollout-inc-000001-rank-0")
    ):
        log = SampleLog(tmp_path / "samples" / f"{name}.jsonl.gz", SamplesConfig(), steps=10)
        log.keep([{"id": str(number), "response": "a\ud800b\u2028\n"}], step=0)
        log.keep([], step=1)
        log.close()
    assert ids(tmp_path / "samples") == ["2", "1", "0"]
    assert next(read_samples(tmp_path / "samples"))["response"] == "a?b\u2028\n"
    assert list(read_samples(tmp_path / "nothing")) == []
    assert not {path.stat().st_mode & 0o077 for path in (tmp_path / "samples").iterdir()} - {0}


def test_a_killed_writer_costs_nothing_that_it_had_told_of(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / NAME)], stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if int(line) >= 20:
                os.kill(process.pid, signal.SIGKILL)
                break
        told = [int(line) for line in process.stdout]
    kept = ids(tmp_path)
    assert kept[: 21 + len(told)] == [f"{step:09d}.00" for step in range(21 + len(told))]


def test_what_is_torn_or_damaged_is_left_out_alone(tmp_path: Path) -> None:
    log, ends = SampleLog(tmp_path / NAME, SamplesConfig(), steps=10), []
    for number in range(4):
        log.keep([{"id": f"{number}", "response": os.urandom(100_000).hex()}], step=9)
        ends.append((tmp_path / NAME).stat().st_size)
    log.close()
    data = bytearray((tmp_path / NAME).read_bytes())
    for cut in (1, 100, (ends[3] - ends[2]) // 2):
        (tmp_path / NAME).write_bytes(data[:-cut])
        assert ids(tmp_path) == ["0", "1", "2"]
    data[ends[1] + 5000 : ends[1] + 5100] = bytes(100)
    (tmp_path / NAME).write_bytes(data)
    assert ids(tmp_path) == ["0", "1", "3"]
    (tmp_path / NAME).write_bytes(b"")
    assert ids(tmp_path) == []


def test_steps_share_the_bound_and_evaluations_may_use_all(tmp_path: Path) -> None:
    limits = SamplesConfig(max_bytes=40_000, max_text_chars=1_000)
    log = SampleLog(tmp_path / NAME, limits, steps=10)
    for step in range(10):
        for _ in range(20):
            log.keep(
                [{"id": f"{step}", "response": os.urandom(500).hex(), "prompt": "x" * 10_000}], step
            )
    log.keep([{"id": "eval"}])
    kept = ids(tmp_path)
    assert set(kept) == {"eval", *map(str, range(10))}, "every step has some"
    skipped = log.take_skipped()
    assert len(kept) + skipped == 201 and skipped > 100 and not log.take_skipped()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limits.max_bytes
    prompt = next(read_samples(tmp_path))["prompt"]
    assert (
        prompt.startswith("x" * 500)
        and prompt.endswith("x" * 500)
        and "9000 characters left out" in prompt
    )
    other = SampleLog(tmp_path / NAME.replace("0.", "1."), limits, steps=10)
    other.keep([{"id": "other", "response": os.urandom(20_000).hex()[:1000]}] * 40, step=9)
    assert other.take_skipped() == 40, "it counts what others have written"


def test_a_full_disk_delays_and_never_ends_anything(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        log = SampleLog(disk.folder / "samples" / NAME, SamplesConfig(), steps=100)
        log.keep([{"id": "before"}], step=50)
        disk.fill()
        for number in range(60):
            log.keep([{"id": str(number), "response": os.urandom(300_000).hex()[:30_000]}], step=50)
        assert ids(disk.folder / "samples") != ["before", *map(str, range(60))]
        disk.free()
        log.close()
        assert ids(disk.folder / "samples") == ["before", *map(str, range(60))]


def test_a_folder_that_is_none_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "samples").write_text("somebody's notes")
    log = SampleLog(tmp_path / "samples" / NAME, SamplesConfig(), steps=10)
    for _ in range(3):
        log.keep([{"id": "0", "components": {"odd": {1}, (1, 2): 3}}], step=9)
    log.close()
    assert log.take_skipped() == 3 and capsys.readouterr().err.count("samples are not stored") == 1


@pytest.mark.parametrize(("per_step", "groups"), [(0, 0), (1, 1), (8, 1), (9, 2), (10_000, 32)])
def test_of_every_step_so_many_groups_are_kept(per_step: int, groups: int) -> None:
    for step in range(3):
        tickets = range(32 * step, 32 * (step + 1))
        assert sum(kept_of(ticket, per_step, 32, 8) for ticket in tickets) == groups
