"""Agent programs of a rollout process. Each program plays one episode in a separate process, and
uses the run's endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relax_hpc.base.error_origin import ErrorOrigin
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.data.chat import template_for
from relax_hpc.data.generation import Episode, FinishReason
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.environments.base import Beginning, EnvironmentFault
from relax_hpc.environments.plain_values import finite_number
from relax_hpc.net.rendezvous.network import LOOPBACK
from relax_hpc.net.transport.exchange import Message, PeerGone
from relax_hpc.queue.presence import longest_wait_s
from relax_hpc.rollout.agents.bounds import Bounds
from relax_hpc.rollout.agents.endpoint import Endpoint
from relax_hpc.rollout.agents.gateway.broker import encode_reply
from relax_hpc.rollout.agents.gateway.front import key_of
from relax_hpc.rollout.agents.gateway.link import Link
from relax_hpc.rollout.agents.options import AgentOptions
from relax_hpc.rollout.agents.program import Program
from relax_hpc.rollout.agents.rendering import Renderer
from relax_hpc.rollout.agents.session import AgentSession
from relax_hpc.rollout.engines.engine import BadAnswer
from relax_hpc.rollout.episodes.history import History, OpenRow
from relax_hpc.rollout.episodes.turns import EpisodeStart

_SHOWN_CHARS = 2000
"""Characters at the end of a program's output that samples and faults show."""
_SHOWN_REWARD_CHARS = 80
"""Characters of an invalid reward that samples and faults show."""


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """End of an episode that a program has played."""

    row: OpenRow
    """Row of the last answer."""
    reason: FinishReason
    outcome: Mapping[str, Any]
    """`info` and `reward`, see `Episode.outcome`."""


class ProgramKilled(EnvironmentFault):
    """Fault of a program that was ended by a signal after an answer."""

    def __init__(self, detail: str, end: ProgramEnd, origin: ErrorOrigin) -> None:
        super().__init__("environment_died", detail, origin)
        self.end = end


class Agents:
    """An `EpisodeBackend` of agent programs; for one event loop."""

    def __init__(self, config: Config, tokenizer: Tokenizer, count: Callable[[str], None]) -> None:
        """``count`` is called with the reason of each refused request or result. ConfigError: the
        options name no program, or the chat template does not exist."""
        self._config, self._tokenizer, self._count = config, tokenizer, count
        self._options = options = AgentOptions.from_options(config.environment.options)
        # No system message of the run: a program sends its own.
        chats = replace(config.data, chat_template=options.chat_template, system="")
        self._template = template_for(chats, tokenizer)
        self._renderer = Renderer(self._template, tokenizer)
        limits = config.environment
        self._programs = asyncio.Semaphore(limits.processes * limits.per_process)
        self._sessions: dict[str, AgentSession] = {}
        self._names = map(str, itertools.count())
        self._endpoint = Endpoint(RunDir(Path(config.run_dir)), self._serve, longest_wait_s(config))
        self._reported_namespaces = not options.pid_namespace

    async def start(self) -> None:
        """See `EpisodeBackend.start`. DeadlineError: no gateway was found."""
        await self._endpoint.connect()

    async def close(self) -> None:
        """See `EpisodeBackend.close`."""
        await self._endpoint.close()
        self._template.close()

    async def play(self, history: History, start: EpisodeStart) -> Episode:
        """See `EpisodeBackend.play`. If the gateway is replaced, the episode waits for the new one,
        and the program starts again and repeats its requests. BadAnswer: the prompt has media,
        which a program cannot get."""
        if start.prompt.media:
            kinds = ", ".join(sorted({medium.kind.value for medium in start.prompt.media}))
            raise BadAnswer(
                "environment_answer",
                f"found {kinds} in the prompt, allowed: text; agent programs get no media",
            )
        rows, prompts = self._config.rollout.max_new_tokens, self._config.data.max_prompt_tokens
        bounds = Bounds(self._config.environment, start.request.budget, prompts + rows)
        with start.waiting():
            await self._programs.acquire()
        try:
            while True:
                with start.waiting():
                    link, url = await self._endpoint.connect()
                session = AgentSession(
                    start, history, self._renderer, self._tokenizer, replace(bounds), self._count
                )
                end = await self._run_program(session, start.beginning, link, url)
                if end:
                    return _end_episode(history, end)
        finally:
            self._programs.release()

    def conclude(self, history: History, fault: EnvironmentFault) -> Episode | None:
        """See `EpisodeBackend.conclude`. The answers before a signal are an episode."""
        return _end_episode(history, fault.end) if isinstance(fault, ProgramKilled) else None

    async def _run_program(
        self, session: AgentSession, beginning: Beginning, link: Link, url: str
    ) -> ProgramEnd | None:
        """Run a program until its episode ends; None: the connection to the gateway was lost.
        EnvironmentFault; BadAnswer and EngineRetry as `EpisodeStart.draw_turn`."""
        task = {
            "prompt": beginning.prompt,
            "metadata": beginning.metadata,
            "seed": beginning.seed,
            "episode": beginning.episode,
        }
        options, memory_bytes = self._options, self._config.environment.memory_mb << 20
        async with self._open(session, link) as bearer:
            variables = _variables(options.env, url, bearer)
            program = Program(
                options.command, variables, task, memory_bytes, options.pid_namespace, bearer
            )
            code = await _run_until(program.run(), session.has_ended.wait(), link.lost.wait())
        self._report_namespaces(program)
        if session.error:
            raise session.error
        if link.lost.is_set():
            return None
        session.drop_unread()
        ending = f"it ended by code {code}" if code is not None else "it was ended"
        if not session.last:
            detail = f"{ending}, without an answer"
            if session.last_refusal:
                detail += f"; its last refused request: {session.last_refusal}"
            detail += f"; {_describe_output(program)}"
            raise EnvironmentFault("environment_died", detail, _last_errors(program))
        is_killed = (code or 0) < 0 and not program.has_sent_result
        info, result = self._read_result(program)
        # The last line of its output is not its result: it may be from the command that has sent
        # the signal.
        reward = None if is_killed else _read_reward(result)
        reason = session.reason
        if reason == "env_done" and code != 0 and reward is None:
            reason = "program_failed"
        info = {"exit_code": code, "refused": dict(session.refused), **info}
        end = ProgramEnd(session.last, reason, {"info": info, "reward": reward})
        if is_killed:
            detail = f"{ending}; {_describe_output(program)}"
            raise ProgramKilled(detail, end, _last_errors(program))
        return end

    def _read_result(self, program: Program) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Entries of `info` about a program, and its result, which is empty if it gave none. An
        invalid reward is named in `info`."""
        info: dict[str, Any] = {
            "output": program.output[-_SHOWN_CHARS:],
            "errors": program.errors[-_SHOWN_CHARS:],
        }
        if program.forged:
            self._count("forged_result")
            info["forged_result_bytes"] = program.forged
        try:
            result = program.read_result()
        except ValueError as error:
            self._count("bad_result")
            return {**info, "result_error": str(error)}, {}
        if result is None:
            return info, {}
        info["said"] = result
        if result.get("reward") is not None and _read_reward(result) is None:
            self._count("bad_result")
            value = json.dumps(result["reward"], ensure_ascii=False)[:_SHOWN_REWARD_CHARS]
            info["result_error"] = f"reward: found {value}, allowed: a finite number, true or false"
        return info, result

    def _report_namespaces(self, program: Program) -> None:
        """Print once in the log of this role why programs have no PID namespace."""
        if program.no_namespace and not self._reported_namespaces:
            self._reported_namespaces = True
            print(
                f"agent programs have no PID namespace on this node ({program.no_namespace}); "
                "their processes are found by their parents and killed at the end of each episode",
                flush=True,
            )

    @contextlib.asynccontextmanager
    async def _open(self, session: AgentSession, link: Link) -> AsyncIterator[str]:
        """Open a session at the gateway while the body runs, and return its bearer."""
        name, bearer = next(self._names), f"sk-{secrets.token_urlsafe(32)}"
        self._sessions[name] = session
        # `_run_program` waits for `link.lost` in the body.
        with contextlib.suppress(PeerGone):
            await link.call(do="open", session=name, key=key_of(bearer))
        try:
            yield bearer
        finally:
            del self._sessions[name]
            await session.close()
            with contextlib.suppress(PeerGone):
                await link.call(do="close", key=key_of(bearer))

    async def _serve(self, message: Message) -> Message:
        """Answer a request that the gateway forwards. LookupError: its session has ended."""
        session = self._sessions[message["session"]]
        request = (message[name] for name in ("path", "body", "repeats", "idempotency"))
        return encode_reply(await session.reply(*request))


def _end_episode(history: History, end: ProgramEnd) -> Episode:
    """End the episode, without answers that the program did not wait for."""
    for row in list(history.rows):
        if not row.turns:
            history.rows.remove(row)
        elif row.length == row.turns[-1]:
            continue
        row.draft = row.prefix(row.turns[-1] if row.turns else 0)
        # The log may have the answers that are removed here.
        history.may_differ_from_log = True
    return history.end(end.reason, end.row, end.outcome)


async def _run_until(work: Awaitable[int], *events: Awaitable[Any]) -> int | None:
    """Result of ``work``; None: one of ``events`` was first, and ``work`` was cancelled.
    EnvironmentFault: the program cannot be started."""
    task = asyncio.ensure_future(work)
    tasks = [task, *map(asyncio.ensure_future, events)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    except OSError as error:
        raise EnvironmentFault(
            "environment_died", f"the program cannot be started: {error}"
        ) from error
    finally:
        for waiting in tasks:
            waiting.cancel()
        await asyncio.wait(tasks)


def _read_reward(result: Mapping[str, Any]) -> float | None:
    """The reward in a program's result, with true as 1 and false as 0; None: the result has no
    reward, or it is not a finite number."""
    reward = result.get("reward")
    return finite_number(int(reward) if isinstance(reward, bool) else reward)


def _last_errors(program: Program) -> ErrorOrigin:
    """End of a program's standard error. For a Python program this is usually the traceback."""
    return ErrorOrigin(traceback=program.errors[-_SHOWN_CHARS:].rstrip())


def failure_of_program(episode: Episode | BadAnswer) -> tuple[str, ErrorOrigin] | None:
    """Description of a program that has failed after an answer and without a reward, and the end of
    its standard error. None: ``episode`` ended in another way."""
    if not isinstance(episode, Episode) or episode.finish_reason != "program_failed":
        return None
    info = (episode.outcome or {}).get("info", {})
    errors = str(info.get("errors", "")).rstrip()
    last_line = errors.rpartition("\n")[2] or "it printed nothing to standard error"
    detail = f"an agent program ended by code {info.get('exit_code')} without a reward: {last_line}"
    return detail, ErrorOrigin(traceback=errors)


def _describe_output(program: Program) -> str:
    output, errors = program.output[-_SHOWN_CHARS:], program.errors[-_SHOWN_CHARS:]
    return f"it printed {output!r}, and {errors!r} to standard error"


_OTHER_NAMES = {
    "OPENAI_API_BASE": "OPENAI_BASE_URL",
    "ANTHROPIC_API_BASE": "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_URL": "ANTHROPIC_BASE_URL",
    "ANTHROPIC_AUTH_TOKEN": "ANTHROPIC_API_KEY",
}
"""Other names of these variables, which langchain-openai 1.7, langchain-anthropic, litellm 1.110
and Claude Code read first. They are set only if the user's environment has them."""


def _variables(configured: Mapping[str, str], url: str, bearer: str) -> dict[str, str]:
    """Environment variables of a program in addition to those of this process, including the
    ``configured`` ones."""
    endpoint = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": bearer,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": bearer,
    }
    inherited = {
        name: endpoint[usual] for name, usual in _OTHER_NAMES.items() if name in os.environ
    }
    return {
        # The output of a Python program is then complete also if it is killed.
        "PYTHONUNBUFFERED": "1",
        **inherited,
        **configured,
        **_without_proxy(configured),
        **endpoint,
    }


def _without_proxy(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables with which HTTP clients connect to this node without a proxy.

    Sites set `http_proxy` on nodes without a route to the internet. urllib, requests and httpx then
    use the proxy for 127.0.0.1 too, unless `no_proxy` names it.
    """
    environment = {**os.environ, **variables}
    listed = ",".join(filter(None, (environment.get("no_proxy"), environment.get("NO_PROXY"))))
    hosts = [*filter(None, listed.split(",")), LOOPBACK, "localhost"]
    # "*" means all hosts only if the list has no other entry.
    value = "*" if "*" in hosts else ",".join(dict.fromkeys(hosts))
    return {"no_proxy": value, "NO_PROXY": value}
