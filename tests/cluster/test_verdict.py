"""Which evidence wins: each case has something stronger against something weaker that says the
opposite."""

from __future__ import annotations

from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_NO_PROGRESS, EXIT_RETRY
from relax_hpc.cluster.supervise.verdict import (
    GONE,
    LIVES,
    Evidence,
    Fate,
    Verdict,
    ended_normally,
    verdict,
)
from relax_hpc.config.schema import LivenessConfig

LIMITS = LivenessConfig(beat_s=1.0, lease_s=30.0, start_timeout_s=600.0, hang_s=1800.0)
FRESH, STALE = [{"age_s": 0.5, "busy_s": 0.0}], [{"age_s": 31.0, "busy_s": 0.0}]
DONE, STOPPED = (
    {"status": "done", "code": 0},
    {"status": "stopped", "code": EXIT_RETRY, "reason": "asked to stop"},
)
FAILED = {"status": "failed", "code": EXIT_RETRY, "reason": "a peer is gone"}


def killed() -> str:
    return "ended by signal 9"


def verdict_of(**evidence: Any) -> Verdict:
    return verdict(Evidence(**evidence), LIMITS)


def test_a_group_without_facts_lives() -> None:
    assert (
        verdict_of() is LIVES
        and verdict_of(beats=FRESH) is LIVES
        and verdict_of(job="RUNNING", beats=FRESH) is LIVES
    )


def test_a_finished_group_stays_finished() -> None:
    assert (
        verdict_of(
            mark=DONE, exit=killed, is_allocation_ending=lambda: True, job=GONE, beats=STALE
        ).fate
        is Fate.DONE
    )


@pytest.mark.parametrize("code", [EXIT_CONFIG, EXIT_NO_PROGRESS])
def test_a_permanent_error_counts_at_the_end_of_the_allocation(code: int) -> None:
    hopeless = {"status": "failed", "code": code, "reason": "no such file"}
    assert verdict_of(mark=hopeless, is_allocation_ending=lambda: True) == Verdict(
        Fate.HOPELESS, "no such file", code
    )


@pytest.mark.parametrize(
    ("progress", "fate", "code"), [(False, Fate.HOPELESS, EXIT_CONFIG), (True, Fate.DEAD, 0)]
)
def test_a_programming_error_is_hopeless_until_there_is_progress(
    progress: bool, fate: Fate, code: int
) -> None:
    mark = FAILED | {"is_programming_error": True, "reason": "NameError: name 'x' is not defined"}
    verdict = verdict_of(mark=mark, has_progress=lambda: progress)
    assert verdict == Verdict(fate, "NameError: name 'x' is not defined", code)


def test_progress_is_read_only_after_a_programming_error() -> None:
    def never() -> bool:
        raise AssertionError("the fact was read")

    assert verdict_of(mark=FAILED, has_progress=never).fate is Fate.DEAD


def test_a_group_that_ends_with_its_allocation_leaves() -> None:
    assert verdict_of(exit=killed, is_allocation_ending=lambda: True) == Verdict(
        Fate.LEAVES, "ended by signal 9"
    )
    assert verdict_of(mark=STOPPED, is_allocation_ending=lambda: True).fate is Fate.LEAVES


def test_an_exit_is_death_even_after_a_recent_beat() -> None:
    assert verdict_of(exit=killed, beats=FRESH) == Verdict(Fate.DEAD, "ended by signal 9")
    assert verdict_of(mark=FAILED, exit=killed, beats=FRESH) == Verdict(Fate.DEAD, "a peer is gone")


def test_slurm_is_queried_only_about_ended_processes() -> None:
    def never() -> bool:
        raise AssertionError("the fact was read")

    assert verdict_of(beats=STALE, is_allocation_ending=never).fate is Fate.DEAD
    assert verdict_of(mark=DONE, is_allocation_ending=never).fate is Fate.DONE


@pytest.mark.parametrize(
    ("job", "beats", "fate"),
    [
        ("PENDING", STALE, Fate.WAITS),
        ("CONFIGURING", STALE, Fate.WAITS),
        (GONE, FRESH, Fate.DEAD),
        ("COMPLETING", STALE, Fate.LEAVES),
        ("NODE_FAIL", FRESH, Fate.LEAVES),
        ("RUNNING", STALE, Fate.DEAD),
    ],
)
def test_the_state_of_a_separate_job_overrides_beats(job: str, beats: list, fate: Fate) -> None:
    assert verdict_of(job=job, beats=beats).fate is fate


@pytest.mark.parametrize(
    ("still_s", "used_s", "fate"),
    [(31.0, 1e6, Fate.DEAD), (29.0, 1e6, Fate.LIVES), (31.0, 5.0, Fate.LIVES)],
)
def test_a_silent_supervisor_in_a_running_job_is_dead(
    still_s: float, used_s: float, fate: Fate
) -> None:
    assert verdict_of(job="RUNNING", job_used_s=used_s, supervisor_silent_s=still_s).fate is fate
    assert (
        verdict_of(job="PENDING", job_used_s=used_s, supervisor_silent_s=still_s).fate is Fate.WAITS
    )


def test_a_group_of_another_supervisor_is_dead_only_if_all_members_are_silent() -> None:
    assert verdict_of(beats=STALE + FRESH, has_other_supervisor=True).fate is Fate.SUSPECT
    assert verdict_of(beats=STALE + STALE, has_other_supervisor=True).fate is Fate.DEAD
    assert verdict_of(beats=STALE + FRESH).fate is Fate.DEAD, (
        "for a group of this supervisor the slowest member counts"
    )


def test_a_loading_role_lives_and_a_role_with_one_long_task_is_dead() -> None:
    at_work = [{"age_s": 0.5, "busy_s": 1801.0}]
    assert verdict_of(beats=at_work) == Verdict(Fate.DEAD, "has worked on one task for over 1800 s")
    assert (
        verdict_of(beats=[{"age_s": 0.5, "busy_s": 0.0, "loads": True}], supervised_s=1e6) is LIVES
    )


def test_loading_without_progress_is_a_hang() -> None:
    stuck = [{"age_s": 0.5, "busy_s": 0.0, "loads": True, "loading_s": 1900.0}]
    assert (
        verdict_of(beats=stuck, load_s=2000.0) is LIVES
        and verdict_of(beats=stuck, load_s=1800.0, has_other_supervisor=True) is LIVES
    )
    hang = "has loaded one part for over 1800 s"
    assert verdict_of(beats=stuck, load_s=1800.0) == Verdict(Fate.DEAD, hang)


def test_a_group_is_done_when_all_members_ended_cleanly() -> None:
    assert (
        ended_normally([DONE, STOPPED])
        and not ended_normally([DONE, FAILED])
        and not ended_normally([DONE, {}])
    )
