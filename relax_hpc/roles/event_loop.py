"""Roles with an event loop: run it, end it on a signal, and choose the error to report."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from relax_hpc.base.errors import StoppedError
from relax_hpc.net.rendezvous.process import SignalFlag


def run_until_stopped(serve: Callable[[], Awaitable[None]], stop: SignalFlag) -> None:
    """Run ``serve`` to its end. StoppedError: a stop signal cancelled it."""

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in stop.signals:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await serve()

    try:
        asyncio.run(main())
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    except asyncio.CancelledError:
        raise StoppedError("asked to stop") from None


def first_error(group: BaseExceptionGroup) -> BaseException:
    """Return the error of a task group to show to the user: a configuration or progress error
    before all others."""
    errors: list[BaseException] = []
    for error in group.exceptions:
        errors.append(first_error(error) if isinstance(error, BaseExceptionGroup) else error)
    return max(errors, key=lambda error: getattr(error, "exit_code", 0))
