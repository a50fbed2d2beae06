"""`python -m relax_hpc.environments.worker`: a process of environments, see `host`.

Plain methods of an environment run in a separate thread for each environment, so that a waiting
environment does not block others. Coroutines (`async def`) of all environments run in one event
loop. Output is written to the log of the role.
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
from relax_hpc.environments import environment_class, make_environment
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
_SIGNAL_ERROR = "signal only works in main thread"
"""Text of the error that Python 3.11 raises if `signal.signal` is called in another thread."""
_ADVICE = (
    "methods of environments run in threads, where signal.alarm() cannot be used; "
    "environment.step_timeout_s limits their time, or run the work in a process that you can kill"
)
_STACK_BYTES = 2 << 20
"""Size of the stack of an environment's thread. All stacks count for the memory limit of the
process. The system's default of 8 MiB is too much for hundreds of environments in one process."""


class ThreadLoops(asyncio.DefaultEventLoopPolicy):
    """Policy that makes an event loop for each thread that asks for one.

    Code that was written for the main thread calls
    `asyncio.get_event_loop().run_until_complete(...)`. In other threads the default policy raises
    RuntimeError for that call (Python 3.11).
    """

    def __init__(self) -> None:
        super().__init__()
        self._local = threading.local()

    def get_event_loop(self) -> asyncio.AbstractEventLoop:
        try:
            return super().get_event_loop()
        except RuntimeError:
            loop = getattr(self._local, "loop", None)
            if loop is None or loop.is_closed():
                self._local.loop = loop = self.new_event_loop()
            self.set_event_loop(loop)
            return loop

    def close_thread_loop(self) -> None:
        """Close the loop that was made for this thread, if any."""
        loop = getattr(self._local, "loop", None)
        if loop:
            loop.close()


class EnvironmentThread:
    """One environment and its thread."""

    def __init__(self, make: Callable[[], Environment], limit_s: float) -> None:
        self._make, self._limit_s = make, limit_s
        self._thread = ThreadPoolExecutor(1, initializer=self._note_thread)
        self._thread_id = 0
        self._environment: Any = None
        self._abandoned: Future[Any] = Future()
        """The last call that was still running when its caller stopped to wait for it."""
        self._is_over_time = False

    def _note_thread(self) -> None:
        self._thread_id = threading.get_ident()

    @property
    def is_stuck(self) -> bool:
        """Whether a call beyond its time limit still runs in the thread. Nothing can end it."""
        return self._is_over_time and self._abandoned.running()

    async def begin(self, wire: Wire) -> Wire:
        """Begin the episode. Returns the first messages, see `step_to_wire`. EnvironmentFault."""
        return await self._limit_time(self._begin(wire))

    async def step(self, wire: Wire) -> Wire:
        """Continue after a response. Returns the step, see `step_to_wire`. EnvironmentFault."""
        return await self._limit_time(self._step(Response(**wire)))

    async def replay(self, begun: Wire, played: list[Wire], digests: list[str]) -> Wire:
        """Replay an episode of another process, and compare the steps by their ``digests``. Returns
        the last step. EnvironmentFault: a step differs."""
        last = await self.begin(begun)
        for number, digest in enumerate(digests):
            if digest_of(last) != digest:
                position = f"after response {number}" if number else "at its beginning"
                raise EnvironmentFault(
                    "environment_differs", f"it returned another message {position} in a replay"
                )
            if number < len(played):
                last = await self.step(played[number])
        return last

    async def close(self) -> None:
        """Close the environment after its present call. EnvironmentFault."""
        if not self.is_stuck:
            await self._limit_time(self._close())

    async def _begin(self, wire: Wire) -> Wire:
        self._environment = await self._call(self._make)
        beginning = beginning_from_wire(wire)
        observations = checked_observations(await self._call(self._environment.reset, beginning))
        return step_to_wire(Step(observations), await self._format(observations))

    async def _step(self, response: Response) -> Wire:
        step = checked_step(await self._call(self._environment.step, response))
        return step_to_wire(step, await self._format(step.observations))

    async def _format(self, observations: tuple[Observation, ...]) -> list[Message]:
        format_observation = self._environment.format_observation
        return checked_messages(
            [
                (observation.role, await self._call(format_observation, observation))
                for observation in observations
            ]
        )

    async def _close(self) -> None:
        try:
            if self._environment:
                await self._call(self._environment.close)
        finally:
            policy = asyncio.get_event_loop_policy()
            if isinstance(policy, ThreadLoops):
                self._thread.submit(policy.close_thread_loop)
            self._thread.shutdown(wait=False)

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Result of ``function`` in the environment's thread. An awaitable result is awaited
        here."""
        call = self._thread.submit(function, *arguments)
        try:
            result = await asyncio.wrap_future(call)
        finally:
            if call.running():
                self._abandoned = call
        return await result if inspect.isawaitable(result) else result

    async def _limit_time(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of ``work``. EnvironmentFault: it raised, or took longer than the limit."""
        try:
            async with asyncio.timeout(self._limit_s) as clock:
                return await work
        except (EnvironmentFault, ConfigError, asyncio.CancelledError):
            raise
        except BaseException as error:
            # A user's method may raise SystemExit, or an exception such as a panic of Rust, which
            # does not derive from Exception.
            if isinstance(error, TimeoutError) and clock.expired():
                self._is_over_time = True
                limit = f"{self._limit_s:g} s (environment.step_timeout_s)"
                text = f"not done in {limit}"
                raise EnvironmentFault("environment_timeout", text, self._stack()) from error
            text = describe_error(error)
            if _SIGNAL_ERROR in text:
                text = f"{text}; {_ADVICE}"
            raise EnvironmentFault("environment_raised", text, locate_error(error)) from error

    def _stack(self) -> ErrorOrigin:
        """Stack of the call that runs in the environment's thread; empty if no call runs."""
        frame = sys._current_frames().get(self._thread_id)
        if frame is None or not self.is_stuck:
            return NO_ORIGIN
        return format_stack(traceback.extract_stack(frame))


class EnvironmentServer:
    """Server of the requests of an `EnvironmentSession`, for all environments of this process."""

    def __init__(self, setup: Wire, answers: BinaryIO) -> None:
        self.make = partial(make_environment, environment_class(setup["kind"]), setup["options"])
        """Makes an environment. ConfigError: it cannot be made with these options."""
        self._limit_s, self._answers = setup["limit_s"], answers
        self._environments: dict[int, EnvironmentThread] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, requests: BinaryIO) -> None:
        """Answer requests, for any number of environments concurrently."""
        write_answer(self._answers, {"at_once": 0})
        async for message in read_requests(requests):
            session = message["session"]
            is_close = message["do"] == "close"
            task = self._tasks.get(session)
            if is_close and task:
                task.cancel()
            handler = self._close if is_close else self._play
            self._tasks[session] = asyncio.create_task(self._answer(handler, message))

    async def _answer(
        self, handler: Callable[[Wire], Coroutine[Any, Any, Wire]], message: Wire
    ) -> None:
        environment = self._environments.get(message["session"])
        try:
            answer = await handler(message)
        except EnvironmentFault as fault:
            environment = environment or self._environments[message["session"]]
            origin = [fault.origin.location, fault.origin.traceback]
            answer = {"fault": [fault.reason, fault.detail, *origin], "stuck": environment.is_stuck}
        except ConfigError as error:
            answer = {"error": str(error)}
        write_answer(self._answers, {"id": message["id"], **answer})

    async def _play(self, message: Wire) -> Wire:
        session, history = message["session"], message["history"]
        step: Wire = {}
        if history:
            self._environments[session] = EnvironmentThread(self.make, self._limit_s)
            step = await self._environments[session].replay(
                history["begun"], history["played"], history["digests"]
            )
        if message["response"]:
            step = await self._environments[session].step(message["response"])
        return {"step": step, "digest": digest_of(step)}

    async def _close(self, message: Wire) -> Wire:
        self._tasks.pop(message["session"], None)
        environment = self._environments.pop(message["session"], None)
        if environment:
            await environment.close()
        return {}


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    setup = frames.read(requests)
    try:
        server = EnvironmentServer(setup, answers)
        server.make()
    except ConfigError as error:
        write_answer(answers, {"error": str(error)})
        return
    bound_memory(setup["memory_mb"])
    threading.stack_size(_STACK_BYTES)
    asyncio.set_event_loop_policy(ThreadLoops())
    asyncio.run(server.serve(requests))


if __name__ == "__main__":
    serve(_serve)
