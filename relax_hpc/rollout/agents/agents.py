"""Agent programs of a rollout process: each plays an episode, in a process of its own, at the run's endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from relax_hpc.config.schema import Config
from relax_hpc.data.chat import template_of
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.engines.engine import Episode
from relax_hpc.environments.base import Beginning, EnvironmentFault
from relax_hpc.gateway.broker import message_of
from relax_hpc.gateway.exchange import Gone, Message
from relax_hpc.gateway.front import key_of
from relax_hpc.gateway.link import Link
from relax_hpc.rollout.agents.bounds import Bounds
from relax_hpc.rollout.agents.endpoint import Endpoint
from relax_hpc.rollout.agents.options import AgentOptions
from relax_hpc.rollout.agents.program import Program
from relax_hpc.rollout.agents.rendering import Renderer
from relax_hpc.rollout.agents.session import Session
from relax_hpc.rollout.history import History, OpenRow
from relax_hpc.rollout.turns import Start
from relax_hpc.rundir import RunDir
from relax_hpc.transfer_queue.presence import longest_wait_s

_SHOWN = 2000
"""Characters of what a program has printed last that samples and faults show."""


class Agents:
    """A `Stage` of programs; for one event loop."""

    def __init__(self, config: Config, tokenizer: Tokenizer, count: Callable[[str], None]) -> None:
        """``count`` is called with the reason of each request that is refused. ConfigError: there is no program, or no
        template for its chats."""
        self._config, self._tokenizer, self._count = config, tokenizer, count
        self._options = options = AgentOptions.of(config.environment.options)
        names = tuple(sorted(tokenizer.named.items()))
        # Whoever wants a system's message has the program say it.
        about = tokenizer.directory, "", config.data.enable_thinking, names, config.data.template_date
        self._template = template_of(options.chat_template, *about)
        self._renderer = Renderer(self._template, tokenizer)
        limits = config.environment
        self._places = asyncio.Semaphore(limits.processes * limits.per_process)
        self._sessions: dict[str, Session] = {}
        self._names = map(str, itertools.count())
        self._endpoint = Endpoint(RunDir(Path(config.run_dir)), self._serve, longest_wait_s(config))

    async def start(self) -> None:
        """See `Stage.start`. DeadlineError: there is no gateway."""
        await self._endpoint.reached()

    async def close(self) -> None:
        """See `Stage.close`."""
        await self._endpoint.close()
        self._template.close()

    async def play(self, history: History, start: Start) -> Episode:
        """See `Stage.play`. While the gateway is replaced it is waited for, and the program asks for the same again."""
        rows, prompts = self._config.rollout.max_new_tokens, self._config.data.max_prompt_tokens
        bounds = Bounds(self._config.environment, start.request.budget, prompts + rows)
        with start.waiting():
            await self._places.acquire()
        try:
            while True:
                with start.waiting():
                    way = await self._endpoint.reached()
                session = Session(start, history, self._renderer, self._tokenizer, replace(bounds), self._count)
                if ended := await self._through(session, start.beginning, *way):
                    _leave_whole_turns(history)
                    return history.end(session.reason, *ended)
        finally:
            self._places.release()

    async def _through(
        self, session: Session, begin: Beginning, link: Link, url: str
    ) -> tuple[OpenRow, dict[str, Any]] | None:
        """Row in which a program has ended, and what is known of the episode beside its tokens; None: the gateway has
        gone. EnvironmentFault; BadAnswer and Repeat as `Start.drawn`."""
        task = {"prompt": begin.prompt, "metadata": begin.metadata, "seed": begin.seed, "episode": begin.episode}
        async with self._open(session, link) as bearer:
            variables = {
                "OPENAI_BASE_URL": f"{url}/v1",
                "OPENAI_API_KEY": bearer,
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_API_KEY": bearer,
            }
            limits = self._config.environment
            program = Program(self._options.command, self._options.env | variables, task, limits.memory_mb << 20)
            code = await _first(program.run(), session.over.wait(), link.lost.wait())
        if session.error:
            raise session.error
        if link.lost.is_set():
            return None
        how = f"it ended by code {code}" if code is not None else "it was ended"
        if not session.last or (code or 0) < 0:
            answers = "" if session.last else ", without an answer"
            raise EnvironmentFault("environment_died", f"{how}{answers}; it printed {program.output[-_SHOWN:]!r}")
        return session.last, _outcome(code, session, program)

    @contextlib.asynccontextmanager
    async def _open(self, session: Session, link: Link) -> AsyncIterator[str]:
        """The bearer of a session, while that is open."""
        name, bearer = next(self._names), f"sk-{secrets.token_urlsafe(32)}"
        self._sessions[name] = session
        # Who has lost the connection looks at `lost`.
        with contextlib.suppress(Gone):
            await link.call(do="open", session=name, key=key_of(bearer))
        try:
            yield bearer
        finally:
            del self._sessions[name]
            await session.close()
            with contextlib.suppress(Gone):
                await link.call(do="close", key=key_of(bearer))

    async def _serve(self, message: Message) -> Message:
        """Answer to the gateway. LookupError: of a session that has ended."""
        session = self._sessions[message["session"]]
        request = (message[name] for name in ("path", "body", "repeats", "idempotency"))
        return message_of(await session.reply(*request))


def _leave_whole_turns(history: History) -> None:
    """Leave out what a program has asked for and not waited for."""
    for row in list(history.rows):
        if not row.turns:
            history.rows.remove(row)
        elif row.length == row.turns[-1]:
            continue
        row.draft = row.first(row.turns[-1] if row.turns else 0)
        # Its log may have that.
        history.is_other = True


async def _first(work: Awaitable[int], *events: Awaitable[Any]) -> int | None:
    """Result of ``work``; None if one of ``events`` comes first, and it is cancelled. EnvironmentFault: there is no
    such program."""
    task = asyncio.ensure_future(work)
    tasks = [task, *map(asyncio.ensure_future, events)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    except OSError as error:
        raise EnvironmentFault("environment_died", f"the program cannot be started: {error}") from error
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.wait(tasks)


def _outcome(code: int | None, session: Session, program: Program) -> dict[str, Any]:
    """Words on an episode beside its tokens. An object in the last line that a program prints is its own word, also
    on the reward."""
    output = program.output
    info = {"exit_code": code, "refused": dict(session.refused), "output": output[-_SHOWN:]}
    try:
        said = json.loads(output.strip().rpartition("\n")[2])
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        return {"info": info, "reward": None}
    reward = said.get("reward")
    is_one = isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward)
    return {"info": info | {"said": said}, "reward": float(reward) if is_one else None}
