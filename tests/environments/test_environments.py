"""Environments in processes of their own: what one does there costs its own episode alone."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.environments import process as process_module
from relax_hpc.environments.base import (
    Context,
    EnvironmentFault,
    Message,
    Observation,
    Response,
    Step,
)
from relax_hpc.environments.host import Environments, Session
from relax_hpc.environments.wire import checked_step, step_to_wire
from tests.environments import hostile_environments
from tests.environments.environment_helpers import (
    HOSTILE,
    LIMIT_S,
    beginning,
    play,
    text_of,
    with_host,
)
from tests.environments.hostile_environments import BAD_STEPS, WELL
from tests.helpers.signalled import count_calls
from tests.requirements import PACKAGE

SLEEPS = "sleep 1000"
SAID = Observation("x")


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_GRACE_S", 0.5)


def together(*parts: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.gather(*parts)


async def pid_of(session: Session, turn: int = 0) -> int:
    step, _ = await session.step(Response("pid", "stop", turn))
    return step.info["pid"]


def test_what_an_environment_is_told_and_says_comes_over_whole() -> None:
    async def work(host: Environments) -> Any:
        session = await host.open(beginning(7))
        return session.opening, await session.step(Response("well", "stop", 0))

    opening, (step, messages) = with_host(work, options={"word": "opens"})
    [observation, _] = WELL.observations
    assert opening == (
        Message("tool", ("begun 7 {'id': 1000000000000000000000000000000, 'name': 'é'}",)),
    )
    assert messages == (Message("tool", (*observation.media, observation.text)),) * 2
    assert (step.done, step.info, step.reward, step.context) == (
        WELL.done,
        WELL.info,
        WELL.reward,
        WELL.context,
    )


def test_a_bad_answer_ends_its_own_episode_and_nothing_beside_it() -> None:
    async def work(host: Environments) -> Any:
        beside = await host.open(beginning())
        first = await pid_of(beside)
        ended = await together(*(play(host, "a", word) for word in BAD_STEPS))
        raised = [await play(host, word) for word in ("quit", "swell", "sleep x")]
        is_same, turns = first == await pid_of(beside, 1), itertools.count(2)
        # Nobody waits for that, but all of them are closed.
        while (
            text_of(await beside.step(Response("closed", "stop", turn := next(turns))))
            != f"{turn + 1} {all_of_them} 0"
        ):
            assert turn < 10_000
        return ended, raised, is_same

    all_of_them = [0] * (len(BAD_STEPS) + 3)
    ended, raised, is_same = with_host(work, memory_mb=1024)
    assert all(
        heard[0] == "1 a 0" and heard[1].startswith("environment_answer: ") for heard in ended
    ), ended
    assert raised == [
        ["environment_raised: SystemExit: 3"],
        ["environment_raised: MemoryError: "],
        ["environment_raised: ValueError: could not convert string to float: 'x'"],
    ]
    assert is_same


def test_one_that_hangs_ends_alone_and_nobody_comes_into_its_process_any_more() -> None:
    async def work(host: Environments) -> Any:
        beside = await host.open(beginning(5))
        first = await pid_of(beside)
        hung = await play(host, "a", SLEEPS)
        again, other = await pid_of(beside, 1), await host.open(beginning())
        others = await pid_of(other)
        gone = psutil.Process(first)
        await beside.close()
        await asyncio.to_thread(gone.wait, LIMIT_S)
        return hung, first == again, first == others

    hung, stayed, came = with_host(work, step_timeout_s=1.0)
    assert hung == ["1 a 0", "environment_timeout: not done in 1 s (environment.step_timeout_s)"]
    assert stayed and not came


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        ("exit", "environment_died: its process ended by exit code 7"),
        ("hang", "environment_timeout: its process did not answer in 2 s"),
    ],
)
def test_those_beside_one_that_ends_their_process_are_played_again(bad: str, fault: str) -> None:
    async def work(host: Environments) -> Any:
        idle, whim = await host.open(beginning(8)), await host.open(beginning(9))
        before = await pid_of(idle)
        await whim.step(Response("whim", "stop", 0))
        words = ("a", "sleep 0.2", "b"), (bad,), ("sleep 0.3", "b")
        heard = await together(
            *(play(host, *said, seed=seed) for seed, said in enumerate(words, 1))
        )
        with pytest.raises(
            EnvironmentFault,
            match="environment_differs: it returned another message after response 1",
        ):
            await whim.step(Response("b", "stop", 1))
        return heard, before == await pid_of(idle, 1)

    heard, is_same = with_host(work, step_timeout_s=2.0)
    assert heard == [["1 a 1", "2 None 1", "3 b 1"], [fault], ["1 None 3", "2 b 3"]]
    assert not is_same


@pytest.mark.parametrize(
    ("number", "deaths", "calls", "answer"),
    [
        (signal.SIGKILL, 2, 3, "1 call 3 0"),
        (
            signal.SIGKILL,
            9,
            3,
            "environment_died: its process was ended by SIGKILL, possibly because memory was short",
        ),
        (signal.SIGSTOP, 1, 2, "1 call 2 0"),
    ],
)
def test_an_episode_whose_process_dies_or_is_suspended_is_played_again(
    number: int, deaths: int, calls: int, answer: str, tmp_path: Path
) -> None:
    async def work(host: Environments) -> Any:
        return await play(host, f"signal {int(number)} {deaths} {tmp_path / 'log'}"), await play(
            host, "a"
        )

    answers, following = with_host(
        work, step_timeout_s=0.5 if number == signal.SIGSTOP else LIMIT_S
    )
    assert answers == [answer] and count_calls(str(tmp_path / "log")) == calls
    assert following == ["1 a 0"]


def test_calls_of_an_event_loop_are_many_at_a_time_and_end_in_time() -> None:
    async def work(host: Environments) -> Any:
        return await together(
            *(play(host, "await 0.2") for _ in range(50)), play(host, "await 1000")
        )

    *heard, late = with_host(
        work, "tests.environments.hostile_environments:Soon", step_timeout_s=3.0
    )
    assert heard == [["awaited"]] * 50
    assert late == ["environment_timeout: not done in 3 s (environment.step_timeout_s)"]


def test_places_are_kept_and_given_back() -> None:
    async def work(host: Environments) -> Any:
        first, second = [await host.open(beginning(seed)) for seed in (1, 2)]
        pids = {await pid_of(first), await pid_of(second)}
        waits = asyncio.create_task(host.open(beginning(3)))
        step = asyncio.create_task(second.step(Response("sleep 0.3", "stop", 1)))
        await asyncio.wait([waits], timeout=0.1)
        assert not waits.done()
        # Its rollout has no use for it any more, and waits for nothing: the place is free once the
        # call is over.
        step.cancel()
        await second.close()
        await second.close()
        assert not waits.done()
        third = await waits
        closed, _ = text_of(await third.step(Response("closed", "stop", 0))), await first.close()
        return len(pids), closed

    assert with_host(work, processes=2, per_process=1) == (2, "1 [2] 3")


def test_no_process_is_started_for_an_episode_that_outlives_all_environments() -> None:
    async def work(host: Environments) -> None:
        session = await host.open(beginning())
        await host.close()
        with pytest.raises(EnvironmentFault, match="environment_died: all environments were ended"):
            await session.step(Response("a", "stop", 0))
        await session.close()

    with_host(work)


def test_what_can_work_in_no_episode_is_said_as_a_mistake_of_the_configuration() -> None:
    async def work(host: Environments) -> None:
        with pytest.raises(ConfigError, match=r"environment\.options\.place: found here"):
            await play(host, "a", "refuse")

    with_host(work)


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [
        (HOSTILE, {"word": "refuses"}, "environment.options.word: found refuses"),
        (
            HOSTILE,
            {"words": ""},
            "environment.options: Hostile is not made with them: .*unexpected keyword",
        ),
        ("tool", {}, "environment.kind: found 'tool', allowed .*did you mean 'tools'"),
        ("relax_hpc.base.errors:ConfigError", {}, "found no class derived from"),
        (
            "relax_hpc.environments.base:Environment",
            {},
            "found a class without step; define it there",
        ),
    ],
)
def test_an_environment_that_cannot_be_had_is_said_at_once(
    kind: str, options: dict, error: str
) -> None:
    async def work(host: Environments) -> None:
        with pytest.raises(ConfigError, match=error):
            await host.start()

    with_host(work, kind, options=options)


def test_a_scorer_of_the_main_thread_has_an_event_loop_and_hears_why_it_has_no_alarm() -> None:
    async def work(host: Environments) -> Any:
        return await play(host, "loop", "loop"), await play(host, "alarm")

    loops, alarm = with_host(work)
    assert loops == ["1 7 True 0", "2 7 True 0"]
    assert alarm[0].startswith("environment_raised: ValueError: signal only works in main thread")
    assert "methods of environments run in threads" in alarm[0]


@pytest.mark.parametrize(
    ("step", "plain"),
    [
        (Step(done=np.bool_(True)), Step(done=True)),
        (Step(done=np.True_, reward=np.float32(0.5)), Step(done=True, reward=0.5)),
        (Step(done=True, reward=np.int64(3)), Step(done=True, reward=3.0)),
        (Step(done=True, reward=np.array(2.5)), Step(done=True, reward=2.5)),
        (Step(done=True, reward=np.bool_(True)), Step(done=True, reward=1.0)),
        (Step(done=True, info={"x": np.float32(1), 5: np.str_("s")}), {"x": 1.0, 5: "s"}),
        (Step(done=True, info={"deep": [{"t": (np.uint8(2), [np.bool_(False)])}]}), {"deep": [{"t": [2, [False]]}]}),
        (Step(done=True, info={np.int64(1): np.zeros((2, 1))}), {1: [[0.0], [0.0]]}),
        (Step(done=True, info={"cut": "half \ud83d"}), {"cut": "half \ufffd"}),
        (Step((SAID,), context=Context("a", np.int32(2))), Step((SAID,), context=Context("a", 2))),
    ],
)  # fmt: skip
def test_values_of_numpy_are_what_they_are_to_python(step: Step, plain: Any) -> None:
    checked = checked_step(step)
    assert checked == plain if isinstance(plain, Step) else checked.info == plain
    wire = json.loads(json.dumps(step_to_wire(checked, []), allow_nan=False))
    assert type(wire["done"]) is bool and (wire["reward"] is None or type(wire["reward"]) is float)


@pytest.mark.parametrize(
    "step",
    [
        Step(done=True, reward=np.float32("nan")),
        Step(done=True, reward=np.array([0.5, 0.5])),
        Step(done=True, reward="1"),
        Step(done=True, reward=10**400),
        Step(done=np.int64(1)),
        Step(done=np.array([True])),
        Step(done=True, info={"x": np.float32("inf")}),
        Step(done=True, info={"x": np.datetime64("2020-01-01")}),
        Step(done=True, info={"x": 1j}),
    ],
)
def test_a_value_that_is_no_number_is_still_refused_by_name(step: Step) -> None:
    with pytest.raises(EnvironmentFault, match=r"environment_answer: (done|reward|info)"):
        checked_step(step)


@pytest.mark.parametrize(
    ("response", "reason", "function"),
    [("sleep x", "environment_raised", "sleep"), (SLEEPS, "environment_timeout", "sleep")],
)
def test_a_fault_says_where_in_the_environment_it_was(
    response: str, reason: str, function: str
) -> None:
    async def work(host: Environments) -> EnvironmentFault:
        session = await host.open(beginning())
        with pytest.raises(EnvironmentFault) as caught:
            await session.step(Response(response, "stop", 0))
        return caught.value

    fault = with_host(work, step_timeout_s=1.0 if response == SLEEPS else LIMIT_S)
    assert fault.reason == reason
    path = hostile_environments.__file__
    assert re.fullmatch(rf"{re.escape(path)}:\d+ in {function}", fault.origin.location)
    assert "time.sleep(float(seconds))" in fault.origin.traceback
    assert PACKAGE not in fault.origin.traceback
