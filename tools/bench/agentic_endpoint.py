"""CPU time of a request at the endpoint of agent programs, in gateway, rollout process and chat
template together. The engine responds instantly. `python tools/bench/agentic_endpoint.py`"""

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
from dataclasses import astuple, dataclass
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
class ChatShape:
    """Shape of the measured chats."""

    turns: int
    """Requests of a chat. Each request has all previous messages."""
    message_tokens: int
    """Characters of a user's message. Each character is a token."""
    response_tokens: int


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    # Clock of the process in the kernel, with a resolution of nanoseconds.
    return time.clock_gettime((~pid << 3) | 2)


async def serve(run: RunDir) -> None:
    """Run the gateway until this process is killed."""
    async with serving.gateway(run) as served:
        await served.serving


@contextlib.asynccontextmanager
async def gateway(run: RunDir) -> AsyncIterator[int]:
    """Start a gateway in another process, and yield its process id."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--serve", str(run.root)
    )
    try:
        yield process.pid
    finally:
        process.kill()
        await process.wait()


def session_of(tokenizer: Tokenizer, template: ChatTemplate, shape: ChatShape) -> AgentSession:
    """A session whose engine responds instantly."""
    tokens = [
        *tokenizer.encode("a" * (shape.response_tokens - 1), special=False),
        tokenizer.eos_ids[0],
    ]

    async def generate(request: GenerateRequest) -> Generation:
        draft = request.draft
        assert draft
        draft.add(tokens, [-1.0] * len(tokens), [1] * len(tokens))
        return Generation(
            draft.token_ids, draft.logprobs, np.array(draft.token_versions, np.int32), "stop"
        )

    start = EpisodeStart(
        Prompt("p", (1,), "", ""),
        GenerateRequest((1,), "p", 0, Sampling(1.0, 1.0, (), 0), ROOM),
        generate,
    )
    bounds = Bounds(EnvironmentConfig(max_turns=shape.turns), ROOM, ROOM)
    return AgentSession(start, History(), Renderer(template, tokenizer), tokenizer, bounds, print)


async def chat(session: aiohttp.ClientSession, shape: ChatShape, seed: int) -> AsyncIterator[None]:
    """Send the requests of a chat, one in each iteration."""
    generator = random.Random(seed)
    messages: list[dict[str, str]] = []
    for _ in range(shape.turns):
        text = "".join(generator.choices(CHARACTERS, k=shape.message_tokens))
        messages.append({"role": "user", "content": text})
        async with session.post(COMPLETIONS, json={"model": "any", "messages": messages}) as reply:
            assert reply.status == 200, await reply.text()
            messages.append((await reply.json())["choices"][0]["message"])
        yield


async def request_costs(folder: Path, shape: ChatShape, chats: int) -> list[float]:
    """CPU seconds of each request in all processes between client and engine.

    The client is another process, which is not counted.
    """
    run = RunDir(folder / "run")
    costs: list[float] = []
    sessions: dict[str, AgentSession] = {}
    run.create()
    run.rendezvous("hub").mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    tokenizer, template = load_tokenizer(folder), ChatTemplate(TEMPLATE, {}, "")
    template.render([{"role": "user", "content": "begin"}])

    async def respond(message: Message) -> Message:
        session = sessions[message["session"]]
        return encode_reply(await session.reply(message["path"], message["body"], 0))

    async with gateway(run) as pid:
        link = await reach(run, respond, 60.0)
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            "--client",
            link.address.url,
            json.dumps(astuple(shape)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert client.stdin and client.stdout and template._child
        processes = (pid, template._child.pid)
        for number in range(chats):
            name = str(number)
            sessions[name] = session_of(tokenizer, template, shape)
            await link.call(do="open", session=name, key=key_of(name))
            for _ in range(shape.turns):
                before = time.process_time() + sum(map(cpu_s, processes))
                client.stdin.write(f"{number}\n".encode())
                assert await client.stdout.readline()
                costs.append(time.process_time() + sum(map(cpu_s, processes)) - before)
        client.stdin.close()
        await client.wait()
        link.close()
    template.close()
    return costs


async def run_client(url: str, shape: ChatShape) -> None:
    """Run the client: send a request of a chat for each line of standard input, its number."""
    loop = asyncio.get_running_loop()
    chats: dict[str, AsyncIterator[None]] = {}
    async with contextlib.AsyncExitStack() as stack:
        while True:
            line = await loop.run_in_executor(None, sys.stdin.readline)
            if not line:
                return
            name = line.strip()
            if name not in chats:
                headers = {"Authorization": f"Bearer {name}"}
                session = aiohttp.ClientSession(url, headers=headers)
                chats[name] = chat(await stack.enter_async_context(session), shape, int(name))
            await anext(chats[name])
            print("done", flush=True)


def measure(
    folder: Path, chats: int = 40, shape: ChatShape = ChatShape(8, 400, 200)
) -> Iterator[Figure]:
    """CPU of a request, the median over all requests, and of the last request of a chat."""
    milliseconds = [1000 * cost_s for cost_s in asyncio.run(request_costs(folder, shape, chats))]
    value = median(milliseconds)
    target = f"<= {TARGET_MS:g}"
    yield Figure("endpoint: CPU of a request, median", value, "ms", target, value <= TARGET_MS)
    last = median(milliseconds[shape.turns - 1 :: shape.turns])
    yield Figure("endpoint: CPU of the last request of a chat", last, "ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(RunDir(args.serve)))
    elif args.client:
        url, shape = args.client
        asyncio.run(run_client(url, ChatShape(*json.loads(shape))))
    else:
        with tempfile.TemporaryDirectory() as folder:
            print_figures(measure(Path(folder), args.chats), {"chats": args.chats}, args.json)


if __name__ == "__main__":
    main()
