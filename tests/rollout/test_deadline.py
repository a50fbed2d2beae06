"""An engine's silence ends its requests; a long answer, and the time of an update, do not."""

from __future__ import annotations

import asyncio

import pytest

from relax_hpc.base.model_sizes import read_seconds
from relax_hpc.rollout.engines.deadline import SilenceTimeout
from tests.rollout.virtual_clock import run_on_a_clock


def test_a_request_is_ended_when_nobody_was_told_anything_for_so_long() -> None:
    async def served() -> list[float]:
        silence, ends, clock = SilenceTimeout(120.0), [], asyncio.get_running_loop().time

        async def request(start: float) -> None:
            await asyncio.sleep(start)
            with pytest.raises(TimeoutError):
                with silence.for_request():
                    await asyncio.sleep(1e9)
            ends.append(clock())

        async def tokens_of_another() -> None:
            for _ in range(100):
                await asyncio.sleep(100.0)
                silence.note_output()

        await asyncio.gather(request(0.0), request(9950.0), tokens_of_another())
        return ends

    assert run_on_a_clock(served()) == [10120.0, 10120.0]


def test_an_update_is_no_silence() -> None:
    async def served() -> float:
        silence, clock = SilenceTimeout(120.0), asyncio.get_running_loop().time

        async def update() -> None:
            await asyncio.sleep(60.0)
            with silence.suspended():
                await asyncio.sleep(600.0)
                silence.note_output()
                await asyncio.sleep(600.0)

        updating = asyncio.create_task(update())
        with pytest.raises(TimeoutError):
            with silence.for_request():
                await asyncio.sleep(1e9)
        await updating
        return clock()

    assert run_on_a_clock(served()) == 60.0 + 1200.0 + 120.0


def test_time_to_read_weights_follows_from_their_bytes(tmp_path) -> None:
    assert read_seconds(tmp_path) == 0.0
    with (tmp_path / "model-00001-of-00002.safetensors").open("wb") as file:
        file.truncate(64 * 10**9)
    assert read_seconds(tmp_path) == 640.0


def test_who_is_cancelled_has_not_come_to_a_deadline() -> None:
    async def served() -> list[bool]:
        silence, loop = SilenceTimeout(120.0), asyncio.get_running_loop()

        async def request() -> None:
            with silence.for_request():
                await loop.create_future()

        cancelled, late = asyncio.create_task(request()), asyncio.create_task(request())
        await asyncio.sleep(60.0)
        cancelled.cancel()
        await asyncio.wait([cancelled, late])
        both = asyncio.create_task(request())
        # Whoever is cancelled at the deadline itself is cancelled.
        loop.call_later(120.0, both.cancel)
        await asyncio.wait([both])
        return [cancelled.cancelled(), isinstance(late.exception(), TimeoutError), both.cancelled()]

    assert run_on_a_clock(served()) == [True, True, True]
