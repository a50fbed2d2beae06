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


def said(**evidence: Any) -> Verdict:
    return verdict(Evidence(**evidence), LIMITS)


def test_nothing_known_is_no_death() -> None:
    assert (
        said() is LIVES and said(beats=FRESH) is LIVES and said(job="RUNNING", beats=FRESH) is LIVES
    )


def test_done_is_done_however_silent_and_whatever_ends() -> None:
    assert (
        said(mark=DONE, exit=killed, is_allocation_ending=lambda: True, job=GONE, beats=STALE).fate
        is Fate.DONE
    )


@pytest.mark.parametrize("code", [EXIT_CONFIG, EXIT_NO_PROGRESS])
def test_what_cannot_be_mended_is_not_excused_by_the_end_of_its_allocation(code: int) -> None:
    hopeless = {"status": "failed", "code": code, "reason": "no such file"}
    assert said(mark=hopeless, is_allocation_ending=lambda: True) == Verdict(
        Fate.HOPELESS, "no such file", code
    )


@pytest.mark.parametrize(
    ("progress", "fate", "code"), [(False, Fate.HOPELESS, EXIT_CONFIG), (True, Fate.DEAD, 0)]
)
def test_a_programming_error_is_hopeless_until_there_is_progress(
    progress: bool, fate: Fate, code: int
) -> None:
    mark = FAILED | {"is_programming_error": True, "reason": "NameError: name 'x' is not defined"}
    found = said(mark=mark, has_progress=lambda: progress)
    assert found == Verdict(fate, "NameError: name 'x' is not defined", code)


def test_progress_is_asked_for_only_after_a_programming_error() -> None:
    def never() -> bool:
        raise AssertionError("asked")

    assert said(mark=FAILED, has_progress=never).fate is Fate.DEAD


def test_what_ends_with_its_allocation_makes_way() -> None:
    assert said(exit=killed, is_allocation_ending=lambda: True) == Verdict(
        Fate.LEAVES, "ended by signal 9"
    )
    assert said(mark=STOPPED, is_allocation_ending=lambda: True).fate is Fate.LEAVES


def test_an_exit_is_death_at_once_although_it_has_just_beaten() -> None:
    assert said(exit=killed, beats=FRESH) == Verdict(Fate.DEAD, "ended by signal 9")
    assert said(mark=FAILED, exit=killed, beats=FRESH) == Verdict(Fate.DEAD, "a peer is gone")


def test_slurm_is_asked_only_about_what_has_ended() -> None:
    def never() -> bool:
        raise AssertionError("asked")

    assert said(beats=STALE, is_allocation_ending=never).fate is Fate.DEAD
    assert said(mark=DONE, is_allocation_ending=never).fate is Fate.DONE


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
def test_slurms_word_on_a_groups_own_job_is_more_than_beats(
    job: str, beats: list, fate: Fate
) -> None:
    assert said(job=job, beats=beats).fate is fate


@pytest.mark.parametrize(
    ("still_s", "used_s", "fate"),
    [(31.0, 1e6, Fate.DEAD), (29.0, 1e6, Fate.LIVES), (31.0, 5.0, Fate.LIVES)],
)
def test_a_silent_supervisor_in_a_job_that_has_run_all_the_while_is_gone(
    still_s: float, used_s: float, fate: Fate
) -> None:
    assert said(job="RUNNING", job_used_s=used_s, supervisor_silent_s=still_s).fate is fate
    assert said(job="PENDING", job_used_s=used_s, supervisor_silent_s=still_s).fate is Fate.WAITS


def test_of_others_all_members_have_to_be_silent() -> None:
    assert said(beats=STALE + FRESH, has_other_supervisor=True).fate is Fate.SUSPECT
    assert said(beats=STALE + STALE, has_other_supervisor=True).fate is Fate.DEAD
    assert said(beats=STALE + FRESH).fate is Fate.DEAD, "of one's own the slowest counts"


def test_who_waits_or_loads_beats_and_lives_and_who_is_at_one_thing_for_too_long_does_not() -> None:
    at_work = [{"age_s": 0.5, "busy_s": 1801.0}]
    assert said(beats=at_work) == Verdict(Fate.DEAD, "has worked on one task for over 1800 s")
    assert said(beats=[{"age_s": 0.5, "busy_s": 0.0, "loads": True}], supervised_s=1e6) is LIVES


def test_who_loads_without_getting_on_hangs() -> None:
    stuck = [{"age_s": 0.5, "busy_s": 0.0, "loads": True, "loading_s": 1900.0}]
    assert (
        said(beats=stuck, load_s=2000.0) is LIVES
        and said(beats=stuck, load_s=1800.0, has_other_supervisor=True) is LIVES
    )
    hang = "has loaded one part for over 1800 s"
    assert said(beats=stuck, load_s=1800.0) == Verdict(Fate.DEAD, hang)


def test_a_group_is_over_when_all_of_it_ended_in_order() -> None:
    assert (
        ended_normally([DONE, STOPPED])
        and not ended_normally([DONE, FAILED])
        and not ended_normally([DONE, {}])
    )
