"""The endpoint of agent programs: who gets in, what a session's opener is asked, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc.gateway.broker import message_of
from relax_hpc.gateway.exchange import Gone, Message
from relax_hpc.gateway.front import MOST_BYTES, Reply, key_of
from relax_hpc.gateway.place import purpose_of
from relax_hpc.transport.sockets import connect
from tests.gateway_helpers import LIMIT_S, gateway


async def post(url: str, bearer: str, body: bytes = b"{}", path: str = "/v1/chat/completions") -> tuple[int, bytes]:
    """Status and body of the answer."""
    import aiohttp

    headers = {"Authorization": f"Bearer {bearer}"}
    async with aiohttp.ClientSession() as session, session.post(url + path, data=body, headers=headers) as reply:
        assert reply.status == 200 or reply.headers["x-should-retry"] == "false"
        return reply.status, await reply.read()


async def code_of(url: str, bearer: str, **about: bytes) -> tuple[int, str]:
    status, body = await post(url, bearer, **about)
    return status, json.loads(body)["error"]["code"]


async def echo(message: Message) -> Message:
    said = {name: message[name] for name in ("session", "path")} | {"body": message["body"].decode()}
    return message_of(Reply(200, json.dumps(said).encode()))


def test_a_bearer_opens_its_session_and_nothing_else(tmp_path: Path) -> None:
    async def play() -> None:
        async with gateway(tmp_path) as there:
            one, first = await there.opened("one", echo)
            two, second = await there.opened("two", echo)
            for name, bearer in (("one", first), ("two", second)):
                status, body = await post(there.url, bearer, b'{"a": 1}', "/v1/models")
                assert (status, json.loads(body)) == (200, {"session": name, "path": "/v1/models", "body": '{"a": 1}'})
            token = there.run.token().decode()
            for forged in ("", "sk-three", key_of(first), first + "x", token, "Bearer"):
                assert await code_of(there.url, forged) == (401, "unknown_bearer")
            with pytest.raises(Gone, match="another has a session of this key"):
                await two.call(do="open", session="one", key=key_of(first))
            await two.call(do="close", key=key_of(first))
            assert (await post(there.url, first))[0] == 200, "nobody closes the session of another"
            await one.call(do="close", key=key_of(first))
            assert await code_of(there.url, first) == (401, "unknown_bearer"), "of a session that has ended"
            assert there.front.refused["unknown_bearer"] == 7
            for odd in ({"do": "kill"}, {"do": "open"}, {"do": "open", "key": ["x"], "session": 1}, {}):
                with pytest.raises(Gone):
                    await one.call(**odd)
            one.close()
            two.close()

    asyncio.run(play())


def test_what_is_too_large_or_never_comes_costs_nobody_else_anything(tmp_path: Path) -> None:
    async def play() -> None:
        async with gateway(tmp_path) as there:
            link, bearer = await there.opened("one", echo)
            place = there.url.removeprefix("http://").split(":")
            silent = [await asyncio.open_connection(*place) for _ in range(3)]
            assert await code_of(there.url, bearer, body=b" " * (MOST_BYTES + 1)) == (413, "too_large")
            reader, writer = await asyncio.open_connection(*place)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {bearer}\r\n"
            writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
            chunk = b"%x\r\n%b\r\n" % (1 << 20, b" " * (1 << 20))
            for _ in range(MOST_BYTES >> 20):
                writer.write(chunk)
            writer.write(chunk + b"0\r\n\r\n")
            assert b" 413 " in await reader.readline(), "it did not say how much would come"
            for head in (b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", b"\x16\x03\x01\r\n\r\n"):
                reader, writer = await asyncio.open_connection(*place)
                writer.write(head)
                assert b" 400 " in await reader.readline()
            # Who shows no bearer in time is turned away.
            assert [await reader.read() for reader, _ in silent] == [b""] * 3
            assert there.front.refused == {"too_large": 2, "silent": 3}
            assert (await post(there.url, bearer))[0] == 200
            link.close()

    asyncio.run(play())


def test_who_does_not_hold_the_runs_token_opens_nothing(tmp_path: Path) -> None:
    async def play() -> None:
        async with gateway(tmp_path) as there:
            for token, purpose in ((b"x" * 64, purpose_of(1)), (there.run.token(), purpose_of(2))):
                with pytest.raises(ConnectionError):
                    await asyncio.to_thread(connect, there.broker.endpoint, token, purpose, LIMIT_S)

    asyncio.run(play())


def test_requests_of_a_session_whose_opener_dies_are_answered(tmp_path: Path) -> None:
    async def play() -> None:
        async with gateway(tmp_path) as there:
            asked = asyncio.Event()

            async def never(message: Message) -> Message:
                asked.set()
                return await asyncio.get_running_loop().create_future()

            link, bearer = await there.opened("one", never)
            other, kept = await there.opened("two", echo)
            waiting = asyncio.create_task(code_of(there.url, bearer))
            await asked.wait()
            link.close()
            assert await waiting == (503, "session_gone")
            assert await code_of(there.url, bearer) == (401, "unknown_bearer")
            assert (await post(there.url, kept))[0] == 200
            other.close()

    asyncio.run(play())


def test_agents_of_another_node_go_through_its_forwarder(tmp_path: Path) -> None:
    """The bearer itself never leaves the node: between them only its digest is sent, which opens nothing."""

    async def play() -> None:
        async with gateway(tmp_path) as there:
            link, bearer = await there.opened("one", echo)
            command = [sys.executable, "-m", "relax_hpc.gateway.forward", "--run_dir", str(there.run.root)]
            forwarder = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            try:
                assert forwarder.stdout
                url = (await forwarder.stdout.readline()).decode().strip()
                assert url != there.url
                status, body = await post(url, bearer, b"hello")
                assert status == 200 and json.loads(body)["body"] == "hello"
                assert await code_of(url, key_of(bearer)) == (401, "unknown_bearer")
                assert await code_of(url, bearer, body=b" " * (MOST_BYTES + 1)) == (413, "too_large")
            finally:
                forwarder.kill()
                await forwarder.wait()
            link.close()

    asyncio.run(play())


def test_neither_gateway_nor_forwarder_imports_torch() -> None:
    code = "import sys, relax_hpc.roles.gateway, relax_hpc.gateway.forward; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S).returncode == 0
