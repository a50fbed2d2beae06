"""Work beside everything else: in order, waited for with a deadline, and its failure is heard
of."""

from __future__ import annotations

import threading

import pytest

from relax_hpc.base.background import BackgroundThread, run_in_thread
from relax_hpc.base.errors import FencedError

SOON_S = 60.0


def test_jobs_are_done_in_order() -> None:
    done: list[int] = []
    work = BackgroundThread("test", done.append)
    for number in range(100):
        work.put(number)
    assert work.wait(SOON_S) and done == list(range(100)) and work.pending == 0


def test_whoever_waits_waits_for_as_many_as_asked_for() -> None:
    hold = threading.Event()
    work = BackgroundThread("test", lambda _: hold.wait(SOON_S))
    work.put(1)
    work.put(2)
    assert (
        not work.wait(0.01)
        and not work.wait(0.01, max_pending=1)
        and work.wait(0.01, max_pending=2)
    )
    hold.set()
    assert work.wait(SOON_S)


def test_a_failure_is_heard_of_by_all_who_ask(capfd: pytest.CaptureFixture[str]) -> None:
    def fenced(_: int) -> None:
        raise FencedError("incarnation 2 exists")

    work = BackgroundThread("letters", fenced)
    work.put(1)
    for ask in (lambda: work.wait(SOON_S), work.check, lambda: work.put(2)):
        with pytest.raises(FencedError, match="incarnation 2 exists"):
            ask()
    assert capfd.readouterr().err == "letters: ends with FencedError('incarnation 2 exists')\n"


def test_time_in_which_nobody_can_work_does_not_count() -> None:
    hold, looks = threading.Event(), iter([True, True, False])
    work = BackgroundThread("test", lambda _: hold.wait(SOON_S))
    work.put(1)
    assert not work.wait(0.01, is_paused=lambda: next(looks)), (
        "two looks at which time stood, and one at which it ran"
    )
    assert next(looks, None) is None
    hold.set()


def test_what_a_thread_finds_or_fails_at_is_handed_over() -> None:
    assert run_in_thread(lambda: 7).result(SOON_S) == 7
    with pytest.raises(ZeroDivisionError):
        run_in_thread(lambda: 1 // 0).result(SOON_S)
