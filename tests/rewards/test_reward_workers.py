"""Rewards in processes of their own: what hangs, crashes or says nonsense there costs its prompt
group alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.net.workers import pool as pool_module
from relax_hpc.rewards import RewardError, RewardInput, Score, Scores
from relax_hpc.rewards.placement import InThread
from relax_hpc.rewards.pool import RewardPool
from tests.helpers.signalled import count_calls
from tests.requirements import PACKAGE

LIMIT_S = 60.0
REWARDS = '''
import asyncio, ctypes, os, signal, subprocess, sys, threading, time
from pathlib import Path
from tests.helpers.signalled import signal_first_calls

def word(sample):
    """By the response: crash, hang, or tell of this process."""
    what, *rest = sample.response_text.split()
    if what == "exit":
        os._exit(7)
    if what == "base":
        raise GeneratorExit
    if what == "segfault":
        ctypes.string_at(0)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "signal":
        signal_first_calls(int(rest[0]), int(rest[1]), rest[2])
        return 1.0
    if what == "hang":
        # In C, with the interpreter's lock, where no signal handler of Python's runs; beside it a child.
        child = subprocess.Popen(["sleep", "1000"])
        Path(rest[0]).write_text(f"{os.getpid()} {child.pid}")
        ctypes.PyDLL(None).sleep(1000)
    if what == "rows":
        return sample.rows == [["4?", "2"], ["2?", "rows"]]
    if what == "main":
        return threading.current_thread() is threading.main_thread()
    if what == "loop":
        # A library that has an event loop of its own.
        return asyncio.run(asyncio.sleep(0, 0.5))
    if what == "alarm":
        signal.alarm(100)
        return signal.alarm(0) > 0
    if what == "print":
        print("noise", flush=True)
        os.write(1, b"more noise")
        return sys.stdin.read() == ""
    if what == "meet":
        # Until another process is here too.
        Path(f"{rest[0]}-{os.getpid()}").touch()
        while len(list(Path(rest[0]).parent.glob("here-*"))) < 2:
            time.sleep(0.01)
        return 1.0
    if what == "modules":
        heavy = ("numpy", "torch", "yaml", "msgpack", "relax_hpc.config", "relax_hpc.rollout.engines")
        return {"total": 1, **{name: 1 for name in heavy if name in sys.modules}}
    if what == "environment":
        return {"total": 1, **{name: 1 for name in os.environ if name in ("RELAX_PARENT", "PMI_RANK", "SLURM_JOB_ID")}}
    return {"total": float(what), "pid": os.getpid()}

async def soon(samples):
    """Any number at a time; together with one that crashes if asked to."""
    what = samples[0].response_text
    if what == "block":
        time.sleep(1000)
    if what.startswith("signal"):
        _, number, calls, log = what.split()
        signal_first_calls(int(number), int(calls), log)
    if what == "exit":
        os._exit(7)
    await asyncio.sleep(1000 if what == "late" else 0.05 if what == "wait" else 0)
    return [os.getpid() if what == "pid" else 1.0 for _ in samples]

if os.environ.get("NO_IMPORT"):
    os._exit(9)
'''


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RewardPool]:
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)

    def make(name: str = "word", count: int = 1, limit_s: float = LIMIT_S) -> RewardPool:
        return RewardPool(f"own_rewards:{name}", count, limit_s)

    return make


def sample(text: str) -> RewardInput:
    return RewardInput(
        "4?",
        "4",
        text,
        "stop",
        {"id": 10**30, "name": "é", "none": None},
        [["4?", "2"], ["2?", text]],
    )


def with_pool(pool: RewardPool, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        try:
            async with asyncio.timeout(LIMIT_S):
                return await work()
        finally:
            await pool.close()

    return asyncio.run(main())


def one_after_the_other(pool: RewardPool, *texts: str) -> list[Scores]:
    async def work() -> list[Scores]:
        return [await pool.run([sample(text)]) for text in texts]

    return with_pool(pool, work)


def pid_of(scores: Scores) -> int:
    assert isinstance(scores, list), scores
    return int(scores[0].components["pid"])


def test_what_ends_a_worker_costs_its_group_and_the_next_one_is_well(
    pool: Callable[..., RewardPool],
) -> None:
    texts = "1", "exit", "2", "segfault", "killed", "base", "3"
    before, ended, after, hit, killed, raised, last = one_after_the_other(pool(), *texts)
    assert ended == RewardError(
        "reward_died", "the process that computed own_rewards:word ended by exit code 7"
    )
    assert hit == RewardError(
        "reward_died", "the process that computed own_rewards:word was ended by SIGSEGV"
    )
    want = (
        "the process that computed own_rewards:word was ended by SIGKILL, possibly because "
        "memory was short"
    )
    assert killed == RewardError("reward_died", want)
    assert raised == RewardError(
        "reward_died", "the process that computed own_rewards:word ended by exit code 1"
    )
    assert [before[0].total, after[0].total, last[0].total] == [1.0, 2.0, 3.0]
    assert len({pid_of(before), pid_of(after), pid_of(last)}) == 3


@pytest.mark.parametrize("name", ["word", "soon"])
@pytest.mark.parametrize(
    ("number", "deaths", "calls", "reason"),
    [
        (signal.SIGKILL, 2, 3, ""),
        (signal.SIGKILL, 9, 3, "reward_died"),
        (signal.SIGSTOP, 1, 2, ""),
    ],
)
def test_a_worker_that_dies_or_is_suspended_is_replaced_and_its_request_repeated(
    name: str,
    number: int,
    deaths: int,
    calls: int,
    reason: str,
    pool: Callable[..., RewardPool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The pool waits for a suspended worker.
    monkeypatch.setattr(pool_module, "_GRACE_S", 0.2)
    limit_s = 0.5 if number == signal.SIGSTOP else LIMIT_S
    text = f"signal {int(number)} {deaths} {tmp_path / 'log'}"
    scores, following = one_after_the_other(pool(name, limit_s=limit_s), text, "1")
    assert count_calls(str(tmp_path / "log")) == calls
    assert (scores.reason if isinstance(scores, RewardError) else "") == reason
    assert isinstance(following, list) and following[0].total == 1.0


def test_a_worker_that_has_ended_is_not_killed_again(
    pool: Callable[..., RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another process's by then."""
    own, killed, real = pool(), list[int](), os.killpg

    async def work() -> int:
        await own.start()
        [worker] = own.workers
        await own.run([sample("exit")])
        monkeypatch.setattr(
            os, "killpg", lambda pid, number: killed.append(pid) or real(pid, number)
        )
        await worker.end()
        return worker.busy

    assert with_pool(own, work) == 0 and killed == []


def test_what_hangs_in_c_is_killed_with_all_that_it_started(
    pool: Callable[..., RewardPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_GRACE_S", 0.2)
    late, after = one_after_the_other(pool(limit_s=1.5), f"hang {tmp_path / 'pids'}", "2")
    assert isinstance(late, RewardError) and late.reason == "reward_timeout"
    assert "rollout.reward_timeout_s is 1.5" in late.detail and after[0].total == 2.0
    assert not any(map(alive, map(int, (tmp_path / "pids").read_text().split())))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_worker_has_what_libraries_want(
    pool: Callable[..., RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RELAX_PARENT", "PMI_RANK", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    found = one_after_the_other(
        pool(), "main", "loop", "alarm", "print", "modules", "environment", "rows"
    )
    assert found == [[Score(0.5 if number == 1 else 1.0)] for number in range(7)]


def test_no_more_workers_than_were_asked_for_and_none_that_is_not_needed(
    pool: Callable[..., RewardPool], tmp_path: Path
) -> None:
    both = pool(count=2)

    async def work() -> tuple[list[Scores], list[Scores]]:
        alone = [await both.run([sample("1"), sample("2")]) for _ in range(3)]
        await asyncio.gather(*(both.run([sample(f"meet {tmp_path / 'here'}")]) for _ in range(2)))
        return alone, await asyncio.gather(*(both.run([sample("1")]) for _ in range(20)))

    alone, together = with_pool(both, work)
    assert [score.total for score in alone[0]] == [1.0, 2.0]
    assert len(set(map(pid_of, alone))) == 1 and len(set(map(pid_of, together))) == 2


def test_of_async_rewards_many_are_under_way(pool: Callable[..., RewardPool]) -> None:
    many = pool("soon", limit_s=0.5)

    async def work() -> list[Scores]:
        await many.start()
        begun = time.monotonic()
        found = await asyncio.gather(
            *(many.run([sample(text)]) for text in ["wait"] * 60 + ["late", "late"])
        )
        assert time.monotonic() - begun < 60 * 0.05
        return found

    found = with_pool(many, work)
    assert found[:60] == [[Score(1.0)]] * 60
    assert [late.reason for late in found[60:]] == ["reward_timeout"] * 2


@pytest.mark.parametrize(("bad", "reason"), [("exit", "reward_died"), ("block", "reward_timeout")])
def test_of_those_under_way_the_guilty_one_is_found(
    pool: Callable[..., RewardPool], bad: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_GRACE_S", 0.2)
    many = pool("soon", limit_s=0.5)

    async def work() -> list[Scores]:
        await many.start()
        return await asyncio.gather(
            *(many.run([sample(text)]) for text in ["wait", "pid", bad, "wait", "wait"])
        )

    *good, last = sorted(with_pool(many, work), key=lambda scores: isinstance(scores, RewardError))
    assert len(good) == 4 and all(isinstance(scores, list) for scores in good)
    assert isinstance(last, RewardError) and last.reason == reason


def test_a_reward_that_cannot_be_had_is_said_at_once(
    pool: Callable[..., RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match="module 'own_rewards' has no function 'words'; did you mean 'word'"
    ):
        asyncio.run(pool("words").start())
    monkeypatch.setenv("NO_IMPORT", "1")
    with pytest.raises(
        RelaxError, match="own_rewards:word ended by exit code 9 while it started, 3 times in a row"
    ):
        asyncio.run(pool().start())


def test_a_thread_that_takes_too_long_is_left_behind() -> None:
    never = threading.Event()
    slow, quick = InThread(lambda _: never.wait(), 0.05), InThread(lambda _: 3, LIMIT_S)
    late, three = (asyncio.run(rewards.score([sample("")])) for rewards in (slow, quick))
    never.set()
    assert (
        isinstance(late, RewardError) and late.reason == "reward_timeout" and three == [Score(3.0)]
    )


def test_what_json_has_no_word_for_costs_its_group(pool: Callable[..., RewardPool]) -> None:
    strange = RewardInput("4?", "4", "1", "stop", {"what": object()})

    async def work() -> list[Scores]:
        return [await own.run([strange]), await own.run([sample("1")])]

    own = pool()
    found, after = with_pool(own, work)
    assert (
        isinstance(found, RewardError)
        and found.reason == "reward_exception"
        and "JSON" in found.detail
    )
    assert after[0].total == 1.0


ROLE = """
import asyncio, sys
from relax_hpc.rewards import RewardInput
from relax_hpc.rewards.pool import RewardPool

async def main():
    pool = RewardPool("own_rewards:word", 1, 1000.0)
    print(int((await pool.run([RewardInput("", "", "1", "stop")]))[0].components["pid"]), flush=True)
    await pool.run([RewardInput("", "", "hang " + sys.argv[1], "stop")])

asyncio.run(main())
"""


def test_a_worker_ends_with_its_role_also_while_it_hangs(
    pool: Callable[..., RewardPool], tmp_path: Path
) -> None:
    words = [sys.executable, "-c", ROLE, str(tmp_path / "pids")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as role:
        try:
            worker = psutil.Process(int(role.stdout.readline()))
            until = time.monotonic() + LIMIT_S
            while not (tmp_path / "pids").exists() and time.monotonic() < until:
                time.sleep(0.01)
        finally:
            role.send_signal(signal.SIGKILL)
    assert worker.wait(LIMIT_S) is None or not worker.is_running()
    for pid in (tmp_path / "pids").read_text().split():
        if alive(int(pid)):
            os.kill(int(pid), signal.SIGKILL)


def test_a_failing_reward_says_where_in_its_own_file(
    pool: Callable[..., RewardPool], tmp_path: Path
) -> None:
    (tmp_path / "bad_rewards.py").write_text(
        "def inner(sample):\n    return sample.metadata['solution']\n\n\ndef score(sample):\n    "
        "return inner(sample)\n"
    )
    bad = RewardPool("bad_rewards:score", 1, LIMIT_S)
    [failure] = one_after_the_other(bad, "1")
    assert failure == RewardError("reward_exception", "KeyError: 'solution'")
    assert failure.origin.location == f"{tmp_path / 'bad_rewards.py'}:2 in inner"
    traceback = failure.origin.traceback
    assert "line 6, in score\n    return inner(sample)" in traceback
    assert PACKAGE not in traceback and traceback.endswith("KeyError: 'solution'")


def test_a_reward_that_hangs_says_where(pool: Callable[..., RewardPool], tmp_path: Path) -> None:
    path = tmp_path / "slow_rewards.py"
    path.write_text(
        "import threading\ndef score(sample):\n    if sample.response_text == 'hang':\n"
        "        threading.Event().wait()\n    return 1\n"
    )
    slow = RewardPool("slow_rewards:score", 1, 0.3)
    late, after = one_after_the_other(slow, "hang", "1")
    assert isinstance(late, RewardError) and late.reason == "reward_timeout"
    assert late.origin.location == f"{path}:4 in score"
    assert after == [Score(1.0)], "the worker that hung was replaced"
