"""What supervisors leave for each other: fruitless starts are counted, and torn files say
nothing."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from relax_hpc.base.rundir import RunDir, write_json
from relax_hpc.cluster.supervise import launch_records
from relax_hpc.cluster.supervise.launch_records import Launch
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark
from relax_hpc.net.rendezvous.life_signs import process_identity
from relax_hpc.net.rendezvous.roster import claim_incarnation
from relax_hpc.ops.observe.status_groups import group_status
from tests.helpers.queue_helpers import make_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


def started(run: RunDir, group: str, launch: Launch | None = None) -> int:
    """Another incarnation of `group`; one without ``launch`` was claimed only."""
    incarnation = claim_incarnation(run, group)
    run.logs(group, incarnation).mkdir(parents=True)
    if launch:
        launch_records.record_launch(run, group, incarnation, launch)
    return incarnation


def test_only_starts_of_this_attempt_without_progress_since_count(run: RunDir) -> None:
    here = (3, 40, 1)
    assert launch_records.count_fruitless_starts(run, "actor", 2, here) == 0
    for attempt, progress in ((1, here), (2, (2, 40, 1)), (2, here), (2, here)):
        started(run, "actor", Launch(attempt, progress))
    assert launch_records.count_fruitless_starts(run, "actor", 2, here) == 2
    assert launch_records.count_fruitless_starts(run, "actor", 3, here) == 0, (
        "a resume starts from nothing"
    )
    assert launch_records.count_fruitless_starts(run, "actor", 2, (3, 41, 1)) == 0, (
        "one new sample is progress"
    )
    assert launch_records.count_fruitless_starts(run, "rollout", 2, here) == 0


def test_lives_of_a_job_that_each_came_far_are_no_crash_loop(run: RunDir) -> None:
    """Preempted five times, and then its first rank fails before its supervisor knows how far the
    run is."""
    for life in range(6):
        started(run, "actor", Launch(1, launch_records.UNKNOWN, "7", f"7-{life}"))
    assert launch_records.count_fruitless_starts(run, "actor", 1, launch_records.UNKNOWN) == 1
    started(run, "actor", Launch(1, launch_records.UNKNOWN, "7", "7-5"))
    assert launch_records.count_fruitless_starts(run, "actor", 1, launch_records.UNKNOWN) == 2


def test_starts_of_a_supervisor_that_knows_nothing_yet_count_between_fruitless_ones(
    run: RunDir,
) -> None:
    here = (3, 40, 1)
    started(run, "actor", Launch(1, launch_records.UNKNOWN))
    started(run, "actor", Launch(1, here))
    started(run, "actor", Launch(1, launch_records.UNKNOWN))
    started(run, "actor", Launch(1, here))
    assert launch_records.count_fruitless_starts(run, "actor", 1, here) == 3
    started(run, "actor", Launch(1, launch_records.UNKNOWN))
    assert launch_records.count_fruitless_starts(run, "actor", 1, here) == 4
    assert launch_records.count_fruitless_starts(run, "actor", 1, (3, 41, 1)) == 0


def test_what_was_claimed_or_torn_neither_counts_nor_ends_the_counting(run: RunDir) -> None:
    started(run, "actor", Launch(1, (0, 0, 0)))
    torn = started(run, "actor", Launch(1, (0, 0, 0)))
    (run.rendezvous("actor") / f"inc-{torn:06d}.launch.json").write_text('{"attempt": 1, "progr')
    started(run, "actor")
    started(run, "actor", Launch(1, (0, 0, 0)))
    assert launch_records.read_launch(run, "actor", torn) is None
    assert launch_records.count_fruitless_starts(run, "actor", 1, (0, 0, 0)) == 2


def test_a_launch_is_read_as_it_was_recorded(run: RunDir) -> None:
    launch = Launch(1, (1, 2, 3), "9", "8-0", {"actor": "actor.actor.i000001"})
    incarnation = started(run, "actor", launch)
    assert launch_records.read_launch(run, "actor", incarnation) == launch
    assert launch_records.read_launch(run, "actor", incarnation + 1) is None


def test_the_newest_incarnation_says_whether_a_group_is_done(run: RunDir) -> None:
    config = Config()
    assert launch_records.all_ended(run, config, "actor"), "it never began"
    assert not launch_records.all_done(run, config, "actor")
    incarnation = started(run, "actor")
    assert not launch_records.all_ended(run, config, "actor")
    write_exit_mark(run.exit_mark("actor", incarnation, "actor"))
    assert launch_records.all_done(run, config, "actor") and launch_records.all_ended(
        run, config, "actor"
    )
    incarnation = started(run, "actor")
    run.exit_mark("actor", incarnation, "actor").write_text("")
    assert not launch_records.all_done(run, config, "actor") and not launch_records.all_ended(
        run, config, "actor"
    )
    write_exit_mark(run.exit_mark("actor", incarnation, "actor"), 75, "asked to stop", stopped=True)
    assert not launch_records.all_done(run, config, "actor") and launch_records.all_ended(
        run, config, "actor"
    )


def test_the_controllers_end_does_not_keep_a_hub_from_being_done(run: RunDir) -> None:
    config = Config()
    assert not launch_records.all_done(run, config, "hub")
    incarnation = started(run, "hub")
    for role in config.groups["hub"].roles:
        write_exit_mark(run.exit_mark("hub", incarnation, role))
    assert launch_records.all_done(run, config, "hub") and not launch_records.all_ended(
        run, config, "hub"
    )
    config.groups["hub"].roles = []
    assert not launch_records.all_done(run, config, "hub"), (
        "the controller alone serves until the run is finished"
    )
    run.finished.touch()
    assert launch_records.all_done(run, config, "hub")


def test_the_last_beat_is_the_newest_that_can_be_read(run: RunDir) -> None:
    assert launch_records.last_beat_s(run, "rollout") == math.inf
    started(run, "rollout")
    (run.rendezvous("rollout") / "beat-rollout-1.json").write_text('{"tim')
    assert launch_records.last_beat_s(run, "rollout") == math.inf
    write_json(run.rendezvous("rollout") / "beat-rollout.json", {"time": 0.0})
    assert math.inf > launch_records.last_beat_s(run, "rollout") > 1e9


def test_a_process_that_runs_is_there_however_old_its_sign_is(run: RunDir) -> None:
    """On a full disk none is young."""
    config = Config(layout="local")
    started(run, "rollout")
    about = {
        "time": time.time() - 1e6,
        "incarnation": 1,
        "gap_s": 0.0,
        "busy_s": 0.0,
        "progress": 1,
        **process_identity(),
    }
    path = run.rendezvous("rollout") / "beat-rollout.json"
    write_json(path, about)
    assert launch_records.has_live_process(run, "rollout")
    assert group_status(run, config, "rollout", {}, {}, False, False)["state"] == "suspect"
    write_json(path, about | {"born": about["born"] - 1})
    assert not launch_records.has_live_process(run, "rollout")
    assert group_status(run, config, "rollout", {}, {}, False, False)["state"] == "absent", (
        "its launch left no record"
    )


def test_members_are_what_is_configured_and_what_ever_began(run: RunDir) -> None:
    config = Config()
    for name in ("rollout-2", "rollout-10", "supervisor", "supervisor-rollout", "actor"):
        started(run, name)
    run.rendezvous("rollout-3").mkdir()
    assert launch_records.members_of(run, config) == [*config.groups, "rollout-10", "rollout-2"]
