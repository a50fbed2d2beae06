"""`python -m relax_hpc.environments.worker`: a process of environments, see `host`.

A plain method is called in a thread that its environment has to itself, so that one that waits
holds up no other; `async def` in one event loop. What is printed goes to the role's log.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, BinaryIO, TypeVar

from relax_hpc.base.error_origin import (
    NO_ORIGIN,
    ErrorOrigin,
    describe_error,
    format_stack,
    locate_error,
)
from relax_hpc.base.errors import ConfigError
from relax_hpc.environments import environment_class, made_with
from relax_hpc.environments.base import (
    Environment,
    EnvironmentFault,
    Message,
    Observation,
    Response,
    Step,
)
from relax_hpc.environments.wire import (
    Wire,
    beginning_from_wire,
    checked_messages,
    checked_observations,
    checked_step,
    digest_of,
    step_to_wire,
)
from relax_hpc.net.workers import frames
from relax_hpc.net.workers.serving import bound_memory, read_requests, serve, write_answer

T = TypeVar("T")
_SIGNALS = "signal only works in main thread"
_ADVICE = (
    "methods of environments run in threads, where signal.alarm() cannot be used; "
    "environment.step_timeout_s limits their time, or run the work in a process that you can kill"
)
_STACK_BYTES = 2 << 20
"""Stack of an environment's thread. All stacks count against the process's memory, and the system's
8 MiB are too many where hundreds of environments live in one."""


class ThreadLoops(asyncio.DefaultEventLoopPolicy):
    """Policy that gives each thread an event loop when it asks for one.

    Scorers written for the main thread call `asyncio.get_event_loop().run_until_complete(...)`. In
    other threads asyncio's own policy raises RuntimeError then (Python 3.11).
    """

    def __init__(self) -> None:
        super().__init__()
        self._own = threading.local()

    def get_event_loop(self) -> asyncio.AbstractEventLoop:
        try:
            return super().get_event_loop()
        except RuntimeError:
            loop = getattr(self._own, "loop", None)
            if loop is None or loop.is_closed():
                self._own.loop = loop = self.new_event_loop()
            self.set_event_loop(loop)
            return loop

    def close_own_loop(self) -> None:
        """Close the loop that this thread got, if it got one."""
        if loop := getattr(self._own, "loop", None):
            loop.close()


class Live:
    """One environment, from its making on."""

    def __init__(self, make: Callable[[], Environment], limit_s: float) -> None:
        self._make, self._limit_s = make, limit_s
        self._thread = ThreadPoolExecutor(1, initializer=self._note_thread)
        self._thread_id = 0
        self._environment: Any = None
        self._left: Future[Any] = Future()
        self._is_over_time = False

    def _note_thread(self) -> None:
        self._thread_id = threading.get_ident()

    @property
    def is_stuck(self) -> bool:
        """Whether a call that is over its time still has the thread, which nothing can end."""
        return self._is_over_time and self._left.running()

    async def begin(self, wire: Wire) -> Wire:
        """Begin; the environment's first messages, as of `step_to_wire`. EnvironmentFault."""
        return await self._within(self._begin(wire))

    async def step(self, wire: Wire) -> Wire:
        """Go on after a response, as of `step_to_wire`. EnvironmentFault."""
        return await self._within(self._step(Response(**wire)))

    async def again(self, begun: Wire, played: list[Wire], digests: list[str]) -> Wire:
        """Play all again that was played in another process; the last answer. EnvironmentFault: one
        differs now."""
        last = await self.begin(begun)
        for number, digest in enumerate(digests):
            if digest_of(last) != digest:
                where = f"after response {number}" if number else "at its beginning"
                raise EnvironmentFault(
                    "environment_differs", f"it said something else {where} when played again"
                )
            if number < len(played):
                last = await self.step(played[number])
        return last

    async def close(self) -> None:
        """Let it give back what it holds, once it is done with what it is at. EnvironmentFault."""
        if not self.is_stuck:
            await self._within(self._close())

    async def _begin(self, wire: Wire) -> Wire:
        self._environment = await self._call(self._make)
        said = checked_observations(
            await self._call(self._environment.reset, beginning_from_wire(wire))
        )
        return step_to_wire(Step(said), await self._formatted(said))

    async def _step(self, response: Response) -> Wire:
        step = checked_step(await self._call(self._environment.step, response))
        return step_to_wire(step, await self._formatted(step.observations))

    async def _formatted(self, observations: tuple[Observation, ...]) -> list[Message]:
        form = self._environment.format_observation
        return checked_messages(
            [(said.role, await self._call(form, said)) for said in observations]
        )

    async def _close(self) -> None:
        try:
            if self._environment:
                await self._call(self._environment.close)
        finally:
            if isinstance(policy := asyncio.get_event_loop_policy(), ThreadLoops):
                self._thread.submit(policy.close_own_loop)
            self._thread.shutdown(wait=False)

    async def _call(self, work: Callable[..., Any], *arguments: Any) -> Any:
        called = self._thread.submit(work, *arguments)
        try:
            found = await asyncio.wrap_future(called)
        finally:
            if called.running():
                self._left = called
        return await found if inspect.isawaitable(found) else found

    async def _within(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._limit_s) as clock:
                return await work
        except (EnvironmentFault, ConfigError, asyncio.CancelledError):
            raise
        except (
            BaseException
        ) as error:  # a user's method may raise what no `except Exception` catches
            if isinstance(error, TimeoutError) and clock.expired():
                self._is_over_time = True
                limit = f"{self._limit_s:g} s (environment.step_timeout_s)"
                text = f"not done in {limit}"
                raise EnvironmentFault("environment_timeout", text, self._stack()) from error
            text = describe_error(error)
            if _SIGNALS in text:
                text = f"{text}; {_ADVICE}"
            raise EnvironmentFault("environment_raised", text, locate_error(error)) from error

    def _stack(self) -> ErrorOrigin:
        """Place of the call that the environment's thread is at; empty if it is at none."""
        frame = sys._current_frames().get(self._thread_id)
        if frame is None or not self.is_stuck:
            return NO_ORIGIN
        return format_stack(traceback.extract_stack(frame))


class Host:
    """The work of this process."""

    def __init__(self, first: Wire, answers: BinaryIO) -> None:
        self.make = partial(made_with, environment_class(first["kind"]), first["options"])
        """Maker of an environment; ConfigError: it cannot be made of these options."""
        self._limit_s, self._answers = first["limit_s"], answers
        self._live: dict[int, Live] = {}
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def serve(self, asked: BinaryIO) -> None:
        """Do what is asked, for any number of environments at a time."""
        write_answer(self._answers, {"at_once": 0})
        async for message in read_requests(asked):
            session = message["session"]
            if message["do"] == "close" and (playing := self._playing.get(session)):
                playing.cancel()
            do = self._close if message["do"] == "close" else self._play
            self._playing[session] = asyncio.create_task(self._answer(do, message))

    async def _answer(self, do: Callable[[Wire], Coroutine[Any, Any, Wire]], message: Wire) -> None:
        live = self._live.get(message["session"])
        try:
            answer = await do(message)
        except EnvironmentFault as fault:
            live = live or self._live[message["session"]]
            origin = [fault.origin.location, fault.origin.traceback]
            answer = {"fault": [fault.reason, fault.detail, *origin], "stuck": live.is_stuck}
        except ConfigError as error:
            answer = {"error": str(error)}
        write_answer(self._answers, {"id": message["id"], **answer})

    async def _play(self, message: Wire) -> Wire:
        session = message["session"]
        found: Wire = {}
        if history := message["history"]:
            self._live[session] = Live(self.make, self._limit_s)
            found = await self._live[session].again(
                history["begun"], history["played"], history["digests"]
            )
        if message["response"]:
            found = await self._live[session].step(message["response"])
        return {"step": found, "digest": digest_of(found)}

    async def _close(self, message: Wire) -> Wire:
        self._playing.pop(message["session"], None)
        if live := self._live.pop(message["session"], None):
            await live.close()
        return {}


def _serve(asked: BinaryIO, answers: BinaryIO) -> None:
    first = frames.read(asked)
    try:
        host = Host(first, answers)
        host.make()
    except ConfigError as error:
        write_answer(answers, {"error": str(error)})
        return
    bound_memory(first["memory_mb"])
    threading.stack_size(_STACK_BYTES)
    asyncio.set_event_loop_policy(ThreadLoops())
    asyncio.run(host.serve(asked))


if __name__ == "__main__":
    serve(_serve)
