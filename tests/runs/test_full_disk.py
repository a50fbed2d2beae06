"""Whole runs on a disk that has no room for a while: it is said, nobody is restarted, nothing is
lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc.base.errors import EXIT_NO_PROGRESS, EXIT_RETRY
from relax_hpc.base.rundir import RunDir
from relax_hpc.ops.observe.status import status
from tests.effort import effort
from tests.helpers.audit import audit
from tests.helpers.run_helpers import LIGHT, Running, merged, running, trained_steps
from tests.helpers.small_disk import SmallDisk, small_disk
from tests.requirements import requires

requires("mpi", "torch", "megatron")

pytestmark = pytest.mark.run

STEPS = 48
OVER = merged(
    LIGHT,
    {
        "steps": STEPS,
        "max_staleness": 1,
        "checkpoint": {"every": 3},
        "queue": {"keep_steps": 2},
        "rollout": {"engine": {"simulated": {"response_s": 0.2}}},
        "liveness": {"lease_s": 12.0, "beat_s": 0.2},
    },
)
"""A run that is quick to notice who is dead."""
RANKS = {"actor": {"parallel": {"data": 2}}, "queue": {"wait_timeout_s": 8.0}}
"""Of them the second waits for the word of the first for 16 s."""
FULL, AGAIN = "No space left on device", "the disk is written again"
SAID_S, GOES_ON_S = 10.0, 60.0
LONG_S = 18.0
"""More than anybody's patience with who gives no sign: the lease, and that of a rank."""


def said(live: Running, what: str) -> list[str]:
    """Lines of the terminal with ``what`` in them."""
    return [line for line in live.output.read_text().splitlines() if what in line]


def waits_said(live: Running) -> list[str]:
    """Lines of the supervisor's that the run waits for a disk, whose end it says too; not of a
    group that cannot be started, which comes first where the hub is that group."""
    return [line for line in said(live, FULL) if "tried again" not in line]


def status_of(live: Running) -> dict:
    words = [sys.executable, "-m", "relax_hpc", "status", str(live.run.root), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def incarnations(live: Running) -> dict[str, int]:
    return {
        path.name: live.incarnations(path.name)
        for path in (live.run.root / "logs").iterdir()
        if path.is_dir()
    }


def waited_s(live: Running) -> float:
    """For how long somebody has waited for the disk by now, by his own clock."""
    return max((one["seconds"] for one in status(live.run).get("disk", [])), default=0.0)


def full_for_a_while(
    live: Running, disk: SmallDisk, left: int, kill: str = "", seconds: float = 0.0
) -> None:
    """Nothing goes on, which is said; with room again everything does, and nobody was started anew
    but who died."""
    before, lines = incarnations(live), len(waits_said(live))
    disk.fill(left)
    if kill:
        live.kill(kill)

    def hinders() -> bool:
        # Whatever is removed meanwhile makes room again.
        disk.fill(left)
        waits = any(not one["loose"] for one in status(live.run).get("disk", []))
        return waits and len(waits_said(live)) > lines

    live.wait_until(hinders, "the terminal says so", SAID_S)
    told = waits_said(live)[-1]
    assert str(live.run.root) in told and "free space there, the run then continues" in told
    found = status_of(live)["disk"]
    assert found and all(one["path"].startswith(str(live.run.root)) for one in found), found
    live.wait_until(lambda: waited_s(live) >= seconds, f"somebody waits for {seconds} s", 60.0)
    again = len(said(live, AGAIN))
    disk.free()
    live.wait_until(lambda: len(said(live, AGAIN)) > again, "that is said too", GOES_ON_S)
    live.wait_for_step(trained_steps(live.run)[-1]["step"] + 2, GOES_ON_S)
    after = {
        group: count - (kill == "controller" and group == "hub")
        for group, count in incarnations(live).items()
    }
    assert after == before, live.story()


def run_with(directory: Path, name: str, elsewhere: Path) -> None:
    """Make a run's directory one folder of which lies on a disk of its own."""
    run = RunDir(directory / "run")
    run.create()
    (run.root / name).rmdir()
    (run.root / name).symlink_to(elsewhere)


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    """However much room is left: for nothing, for a journal's record but no shard. Who dies
    meanwhile comes back.

    Ranks wait for their leader, who waits for the disk, for as long as that takes.
    """
    with small_disk(tmp_path / "disk") as disk, running(disk.folder, merged(OVER, RANKS)) as live:
        live.wait_for_step(1, 120.0)
        full_for_a_while(live, disk, 4096, seconds=LONG_S)
        full_for_a_while(live, disk, 0, kill="controller")
        live.finish(120.0)
        assert [row["step"] for row in trained_steps(live.run)] == list(range(STEPS))
        audit(live.run)


def test_unsaved_work_is_said(tmp_path: Path) -> None:
    """Checkpoints on a disk of their own, which is full: training goes on, and each that is missed
    is said.

    Then their folder is gone, which no room brings back: after some of them the run ends with 93.
    """
    with small_disk(tmp_path / "saves") as saves:
        run_with(tmp_path, "checkpoints", saves.folder)
        saves.fill()
        checkpoint = OVER["checkpoint"] | {"max_failures": 3}
        with running(tmp_path, OVER | {"steps": 10_000, "checkpoint": checkpoint}) as live:
            live.wait_until(
                lambda: len(said(live, "NOT SAVED since step 0 (")) > 1,
                "two are missed, and said",
                120.0,
            )
            found = status_of(live)["unsaved"]
            assert found["failed"] > 0 and found["steps"] > 2 and FULL in found["why"], found
            assert "at risk: " in said(live, "NOT SAVED")[-1]
            assert max(row["perf/unsaved_steps"] for row in trained_steps(live.run)) > 2
            saves.free()
            live.wait_until(
                lambda: said(live, "checkpoint: saved again"), "it is saved again", GOES_ON_S
            )
            live.run.checkpoints.unlink()
            live.run.checkpoints.symlink_to(tmp_path / "nowhere")
            assert live.wait(120.0) == EXIT_NO_PROGRESS, live.story()
    told = said(live, "checkpoint.max_failures=3")[-1]
    assert "3 checkpoints in a row were not saved" in told and str(live.run.checkpoints) in told, (
        told
    )
    assert "NOT SAVED since step" in live.output.read_text().partition("checkpoint: saved again")[2]
    assert incarnations(live)["actor"] == 1, live.story()


@pytest.mark.skipif(
    not effort(0, 1),
    reason="one more whole run, which waits for long: env/test.sh --all, or RELAX_WHOLE=1",
)
def test_a_wait_that_takes_too_long_saves_what_it_can(tmp_path: Path) -> None:
    """A disk of their own for weights, which stays full: the run saves the step that it is at, and
    ends with 75.

    With room again it goes on from there, with nothing lost.
    """
    # A start may take no longer either.
    limits = OVER["liveness"] | {"longest_wait_s": 40.0, "stop_timeout_s": 20.0}
    over = OVER | {"steps": 10_000, "checkpoint": {"every": 10_000}, "liveness": limits}
    with small_disk(tmp_path / "weights") as disk:
        run_with(tmp_path, "weights", disk.folder)
        with running(tmp_path, over) as live:
            live.wait_for_step(1, 120.0)
            disk.fill()
            assert live.wait(240.0) == EXIT_RETRY, live.story()
        last = trained_steps(live.run)[-1]["step"] + 1
        assert [step for step, _ in live.run.saved()] == [last], live.story()
        told = said(live, "allowed liveness.longest_wait_s=40")[-1]
        assert str(live.run.weights) in told and FULL in told
        disk.free()
        with running(tmp_path, over | {"steps": last + 3}, None, "--resume") as live:
            live.finish(120.0)
        audit(live.run)
        assert [row["step"] for row in trained_steps(live.run)] == list(range(last + 3))
