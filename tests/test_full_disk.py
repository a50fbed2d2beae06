"""Whole runs on a disk that has no room for a while: it is said, nobody is restarted, nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.audit import audit
from tests.requirements import requires
from tests.run_helpers import Running, running, trained_steps
from tests.small_disk import SmallDisk, small_disk

requires("mpi", "torch", "megatron")

STEPS = 24
OVER = {
    "steps": STEPS,
    "max_staleness": 1,
    "checkpoint": {"every": 3},
    "queue": {"keep_steps": 2},
    "rollout": {"engine": {"kind": "simulated", "simulated": {"response_s": 0.2}}},
    "liveness": {"lease_s": 5.0, "beat_s": 0.2},
}
"""A run that is quick to notice who is dead."""
FULL, AGAIN = "No space left on device", "the disk is written again"
SAID_S, GOES_ON_S = 10.0, 60.0


def said(live: Running, what: str) -> list[str]:
    """Lines of the terminal with ``what`` in them."""
    return [line for line in live.output.read_text().splitlines() if what in line]


def status_of(live: Running) -> dict:
    words = [sys.executable, "-m", "relax_hpc", "status", str(live.run.root), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def epochs(live: Running) -> dict[str, int]:
    return {path.name: live.epochs(path.name) for path in (live.run.root / "logs").iterdir() if path.is_dir()}


def full_for_a_while(live: Running, disk: SmallDisk, left: int, kill: str = "") -> None:
    """Nothing goes on, which is said; with room again everything does, and nobody was started anew but who died."""
    before, lines = epochs(live), len(said(live, FULL))
    disk.fill(left)
    if kill:
        live.kill(kill)
    live.wait_until(lambda: len(said(live, FULL)) > lines, "the terminal says so", SAID_S)
    told = said(live, FULL)[-1]
    assert str(live.run.root) in told and "free space there, the run goes on by itself" in told
    found = status_of(live)["disk"]
    assert found and all(one["path"].startswith(str(live.run.root)) for one in found), found
    again = len(said(live, AGAIN))
    disk.free()
    live.wait_until(lambda: len(said(live, AGAIN)) > again, "that is said too", SAID_S)
    live.wait_for_step(trained_steps(live.run)[-1]["step"] + 2, GOES_ON_S)
    after = {group: count - (kill == "controller" and group == "hub") for group, count in epochs(live).items()}
    assert after == before, live.story()


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    """However much room is left: for nothing, for a journal's record but no shard. Who dies meanwhile comes back."""
    with small_disk(tmp_path / "disk") as disk, running(disk.folder, OVER) as live:
        live.wait_for_step(1, 120.0)
        full_for_a_while(live, disk, 4096)
        full_for_a_while(live, disk, 0, kill="controller")
        live.finish(120.0)
        assert [row["step"] for row in trained_steps(live.run)] == list(range(STEPS))
        audit(live.run)


def test_unsaved_work_is_said(tmp_path: Path) -> None:
    """Checkpoints on a disk of their own, which is full: training goes on, and each that is missed is said."""
    with small_disk(tmp_path / "saves") as saves:
        (tmp_path / "run").mkdir(mode=0o700)
        (tmp_path / "run" / "checkpoints").symlink_to(saves.folder)
        (tmp_path / "run" / "token").write_text("0" * 64)
        saves.fill()
        with running(tmp_path, OVER | {"steps": 10_000}) as live:
            live.wait_until(lambda: len(said(live, "NOT SAVED since step 0 (")) > 1, "two are missed, and said", 120.0)
            found = status_of(live)["unsaved"]
            assert found["failed"] > 0 and found["steps"] > 2 and FULL in found["why"], found
            assert "at risk: " in said(live, "NOT SAVED")[-1]
            assert max(row["perf/unsaved_steps"] for row in trained_steps(live.run)) > 2
            saves.free()
            live.wait_until(lambda: said(live, "checkpoint: saved again"), "it is saved again", GOES_ON_S)
            assert epochs(live).pop("actor") == 1, live.story()
