"""CPU that a request at the endpoint of agent programs takes: gateway, rollout process and chat
template together, with an engine that answers at once. `python tools/bench/agentic_endpoint.py`"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
import numpy as np
from figures import Figure, print_figures

from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import EnvironmentConfig
from relax_hpc.data.chat import ChatTemplate
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.net.transport.exchange import Message
from relax_hpc.rollout.agents.bounds import Bounds
from relax_hpc.rollout.agents.gateway import serving
from relax_hpc.rollout.agents.gateway.broker import encode_reply
from relax_hpc.rollout.agents.gateway.front import key_of
from relax_hpc.rollout.agents.gateway.link import reach
from relax_hpc.rollout.agents.rendering import Renderer
from relax_hpc.rollout.agents.session import AgentSession
from relax_hpc.rollout.engines.engine import GenerateRequest, Generation, Sampling
from relax_hpc.rollout.episodes.history import History
from relax_hpc.rollout.episodes.turns import EpisodeStart
from relax_hpc.training.models.tiny_tokenizer import CHARACTERS, write_tokenizer

COMPLETIONS = "/v1/chat/completions"
TARGET_MS = 5.0
ROOM = 1 << 20
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>{% endfor "
    "%}assistant: "
)


@dataclass(frozen=True, slots=True)
class Talk:
    """Form of the chats that are measured."""

    turns: int
    """Requests of a chat, each with all of it so far."""
    said: int
    """Characters of a message, each a token."""
    answered: int
    """Tokens of an answer."""


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far: the kernel's clock of it, in nanoseconds."""
    return time.clock_gettime((~pid << 3) | 2)


async def serve(run: RunDir) -> None:
    """Be the gateway, until this process is ended."""
    async with serving.gateway(run) as there:
        await there.serving


@contextlib.asynccontextmanager
async def gateway(run: RunDir) -> AsyncIterator[int]:
    """A gateway in a process of its own; its number."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--serve", str(run.root)
    )
    try:
        yield process.pid
    finally:
        process.kill()
        await process.wait()


def session_of(tokenizer: Tokenizer, template: ChatTemplate, talk: Talk) -> AgentSession:
    """A session whose engine answers at once."""
    drawn = [*tokenizer.encode("a" * (talk.answered - 1), special=False), tokenizer.eos_ids[0]]

    async def ask(request: GenerateRequest) -> Generation:
        draft = request.draft
        assert draft
        draft.add(drawn, [-1.0] * len(drawn), [1] * len(drawn))
        return Generation(
            draft.token_ids, draft.logprobs, np.array(draft.token_versions, np.int32), "stop"
        )

    start = EpisodeStart(
        Prompt("p", (1,), "", ""),
        GenerateRequest((1,), "p", 0, Sampling(1.0, 1.0, (), 0), ROOM),
        ask,
    )
    bounds = Bounds(EnvironmentConfig(max_turns=talk.turns), ROOM, ROOM)
    return AgentSession(start, History(), Renderer(template, tokenizer), tokenizer, bounds, print)


async def chat(session: aiohttp.ClientSession, talk: Talk, seed: int) -> AsyncIterator[None]:
    """Hold a chat, request by request."""
    drawn, messages = random.Random(seed), list[dict[str, str]]()
    for _ in range(talk.turns):
        messages.append(
            {"role": "user", "content": "".join(drawn.choices(CHARACTERS, k=talk.said))}
        )
        async with session.post(COMPLETIONS, json={"model": "any", "messages": messages}) as reply:
            assert reply.status == 200, await reply.text()
            messages.append((await reply.json())["choices"][0]["message"])
        yield


async def costs(folder: Path, talk: Talk, chats: int) -> list[float]:
    """CPU seconds of each request, of all that is between a client, which has a process of its own,
    and an engine."""
    run, found, sessions = RunDir(folder / "run"), list[float](), dict[str, AgentSession]()
    run.create()
    run.rendezvous("hub").mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    tokenizer, template = load_tokenizer(folder), ChatTemplate(TEMPLATE, {}, "")
    template.render([{"role": "user", "content": "begin"}])

    async def answer(message: Message) -> Message:
        return encode_reply(
            await sessions[message["session"]].reply(message["path"], message["body"], 0)
        )

    async with gateway(run) as pid:
        link = await reach(run, answer, 60.0)
        client = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                __file__,
                "--ask",
                link.address.url,
                json.dumps([talk.turns, talk.said, talk.answered]),
            ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert client.stdin and client.stdout and template._child
        parts = (pid, template._child.pid)
        for number in range(chats):
            name = str(number)
            sessions[name] = session_of(tokenizer, template, talk)
            await link.call(do="open", session=name, key=key_of(name))
            for _ in range(talk.turns):
                before = time.process_time() + sum(map(cpu_s, parts))
                client.stdin.write(f"{number}\n".encode())
                assert await client.stdout.readline()
                found.append(time.process_time() + sum(map(cpu_s, parts)) - before)
        client.stdin.close()
        await client.wait()
        link.close()
    template.close()
    return found


async def ask(url: str, talk: Talk) -> None:
    """Be the client: one request for each line that comes, by the session that it names."""
    loop, held = asyncio.get_running_loop(), dict[str, AsyncIterator[None]]()
    async with contextlib.AsyncExitStack() as stack:
        while name := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            if name not in held:
                headers = {"Authorization": f"Bearer {name}"}
                held[name] = chat(
                    await stack.enter_async_context(aiohttp.ClientSession(url, headers=headers)),
                    talk,
                    int(name),
                )
            await anext(held[name])
            print("answered", flush=True)


def measure(folder: Path, chats: int = 40, talk: Talk = Talk(8, 400, 200)) -> Iterator[Figure]:
    """CPU of a request, the median over all of some chats, and of the longest."""
    found = [1000 * seconds for seconds in asyncio.run(costs(folder, talk, chats))]
    value = median(found)
    yield Figure(
        "endpoint: CPU of a request, median", value, "ms", f"<= {TARGET_MS:g}", value <= TARGET_MS
    )
    yield Figure(
        "endpoint: CPU of the last request of a chat",
        median(found[talk.turns - 1 :: talk.turns]),
        "ms",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ask", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(RunDir(args.serve)))
    elif args.ask:
        asyncio.run(ask(args.ask[0], Talk(*json.loads(args.ask[1]))))
    else:
        with tempfile.TemporaryDirectory() as folder:
            print_figures(measure(Path(folder), args.chats), {"chats": args.chats}, args.json)


if __name__ == "__main__":
    main()
