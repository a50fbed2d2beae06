"""The endpoint of agent programs: who gets in, what a session's opener is asked, and what goes
wrong on the way."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc.net.transport.exchange import Exchange, Message, PeerGone, TooLarge
from relax_hpc.net.transport.sockets import connect
from relax_hpc.net.transport.wire import BadMessage, pack
from relax_hpc.rollout.agents.gateway.address import purpose_of
from relax_hpc.rollout.agents.gateway.broker import encode_reply
from relax_hpc.rollout.agents.gateway.forward import Forwarder
from relax_hpc.rollout.agents.gateway.front import MAX_BYTES, Reply, key_of
from tests.rollout.gateway_helpers import LIMIT_S, gateway


async def post(
    url: str, bearer: str, body: bytes = b"{}", path: str = "/v1/chat/completions"
) -> tuple[int, bytes]:
    """Status and body of the answer."""
    import aiohttp

    headers = {"Authorization": f"Bearer {bearer}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, data=body, headers=headers) as reply,
    ):
        assert reply.status == 200 or reply.headers["x-should-retry"] == "false"
        return reply.status, await reply.read()


async def code_of(url: str, bearer: str, **about: bytes) -> tuple[int, str]:
    status, body = await post(url, bearer, **about)
    return status, json.loads(body)["error"]["code"]


async def echo(message: Message) -> Message:
    said = {name: message[name] for name in ("session", "path")} | {
        "body": message["body"].decode()
    }
    return encode_reply(Reply(200, json.dumps(said).encode()))


def test_a_bearer_opens_its_session_and_nothing_else(tmp_path: Path) -> None:
    async def play() -> None:
        async with gateway(tmp_path) as there:
            one, first = await there.opened("one", echo)
            two, second = await there.opened("two", echo)
            for name, bearer in (("one", first), ("two", second)):
                status, body = await post(there.url, bearer, b'{"a": 1}', "/v1/models")
                assert (status, json.loads(body)) == (
                    200,
                    {"session": name, "path": "/v1/models", "body": '{"a": 1}'},
                )
            token = there.run.token().decode()
            for forged in ("", "sk-three", key_of(first), first + "x", token, "Bearer"):
                assert await code_of(there.url, forged) == (401, "unknown_bearer")
            with pytest.raises(PeerGone, match="another peer has a session with this key"):
                await two.call(do="open", session="one", key=key_of(first))
            await two.call(do="close", key=key_of(first))
            assert (await post(there.url, first))[0] == 200, "nobody closes the session of another"
            await one.call(do="close", key=key_of(first))
            assert await code_of(there.url, first) == (401, "unknown_bearer"), (
                "of a session that has ended"
            )
            assert there.front.refused["unknown_bearer"] == 7
            for odd in (
                {"do": "kill"},
                {"do": "open"},
                {"do": "open", "key": ["x"], "session": 1},
                {},
            ):
                with pytest.raises(PeerGone):
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
            assert await code_of(there.url, bearer, body=b" " * (MAX_BYTES + 1)) == (
                413,
                "too_large",
            )
            reader, writer = await asyncio.open_connection(*place)
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
                f"{bearer}\r\n"
            )
            writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
            chunk = b"%x\r\n%b\r\n" % (1 << 20, b" " * (1 << 20))
            for _ in range(MAX_BYTES >> 20):
                writer.write(chunk)
            writer.write(chunk + b"0\r\n\r\n")
            assert b" 413 " in await reader.readline(), "it did not say how much would come"
            for head in (
                b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
                b"\x16\x03\x01\r\n\r\n",
            ):
                reader, writer = await asyncio.open_connection(*place)
                writer.write(head)
                assert b" 400 " in await reader.readline()
            # Who shows no bearer in time is turned away.
            assert [await reader.read() for reader, _ in silent] == [b""] * 3
            assert there.front.refused == {"too_large": 2, "silent": 3, "malformed": 1}
            assert (await post(there.url, bearer))[0] == 200
            link.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("header", "status", "repeats"),
    [
        (b"Authorization: Bearer \xff\xfe", 401, None),
        (b"x-api-key: \xf0\x9f", 401, None),
        (b"x-stainless-retry-count: 2", 200, 2),
        (b"x-stainless-retry-count: " + b"9" * 5000, 200, 0),
        (b"x-stainless-retry-count: 1208925819614629174706176", 200, 0),
        (b"x-stainless-retry-count: \xb2", 200, 0),
        (b"Idempotency-Key: \xff" + b"k" * 1000, 200, None),
        (b"Content-Encoding: gzip", 400, None),
    ],
)
def test_odd_headers_are_no_fault_of_the_gateway(
    tmp_path: Path, capfd: pytest.CaptureFixture, header: bytes, status: int, repeats: int | None
) -> None:
    async def play() -> None:
        requests = []

        async def note(message: Message) -> Message:
            requests.append(message)
            return encode_reply(Reply(200, b"{}"))

        async with gateway(tmp_path) as there:
            link, bearer = await there.opened("one", note)
            reader, writer = await asyncio.open_connection(
                *there.url.removeprefix("http://").split(":")
            )
            lines = [b"POST /v1/%FF HTTP/1.1", b"Host: x", b"Content-Length: 2", header]
            if status != 401:
                lines.append(f"Authorization: Bearer {bearer}".encode())
            writer.write(b"\r\n".join([*lines, b"", b"{}"]))
            assert f" {status} ".encode() in await reader.readline()
            assert [message["repeats"] for message in requests] == (
                [repeats] if status == 200 else []
            )
            writer.close()
            link.close()
        assert bearer not in "".join(capfd.readouterr())

    asyncio.run(play())


def test_a_malformed_request_leaves_no_bearer_in_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    async def play() -> None:
        async with gateway(tmp_path) as there:
            address = there.url.removeprefix("http://").split(":")
            for bad in (
                b"Bad Header: x",
                b"Content-Length: -1",
                b"Transfer-Encoding: nonsense",
                b"X: " + b"y" * 100_000,
            ):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(
                    b"POST /v1/models HTTP/1.1\r\nAuthorization: Bearer sk-secret\r\n"
                    + bad
                    + b"\r\n\r\n"
                )
                assert b" 400 " in await reader.readline()
                writer.close()
            assert there.front.refused["malformed"] == 4

    asyncio.run(play())
    assert "sk-secret" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("through", ["gateway", "forwarder"])
def test_a_client_that_hangs_up_takes_its_request_back(tmp_path: Path, through: str) -> None:
    async def play() -> None:
        async with gateway(tmp_path) as there:
            begun, cancelled = asyncio.Event(), asyncio.Event()

            async def never(message: Message) -> Message:
                begun.set()
                try:
                    return await asyncio.get_running_loop().create_future()
                finally:
                    cancelled.set()

            link, bearer = await there.opened("one", never)
            front = there.front
            if through == "forwarder":
                forwarder = Forwarder(there.run)
                serving = asyncio.create_task(forwarder.serve())
                while not forwarder.front.url:
                    await asyncio.sleep(0.01)
                front = forwarder.front
            _, writer = await asyncio.open_connection(*front.url.removeprefix("http://").split(":"))
            head = (
                "POST /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
                f"{bearer}\r\nContent-Length: 0\r\n\r\n"
            )
            writer.write(head.encode())
            await begun.wait()
            assert not cancelled.is_set()
            writer.close()
            await cancelled.wait()
            if through == "forwarder":
                serving.cancel()
                await front.close()
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
    """The bearer itself never leaves the node: between them only its digest is sent, which opens
    nothing."""

    async def play() -> None:
        async with gateway(tmp_path) as there:
            link, bearer = await there.opened("one", echo)
            command = [
                sys.executable,
                "-m",
                "relax_hpc.rollout.agents.gateway.forward",
                "--run_dir",
                str(there.run.root),
            ]
            forwarder = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            try:
                assert forwarder.stdout
                url = (await forwarder.stdout.readline()).decode().strip()
                assert url != there.url
                status, body = await post(url, bearer, b"hello")
                assert status == 200 and json.loads(body)["body"] == "hello"
                assert await code_of(url, key_of(bearer)) == (401, "unknown_bearer")
                assert await code_of(url, bearer, body=b" " * (MAX_BYTES + 1)) == (
                    413,
                    "too_large",
                )
            finally:
                forwarder.kill()
                await forwarder.wait()
            link.close()

    asyncio.run(play())


def test_neither_gateway_nor_forwarder_imports_torch() -> None:
    code = (
        "import sys, relax_hpc.roles.gateway, relax_hpc.rollout.agents.gateway.forward; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S).returncode == 0


@pytest.mark.parametrize("message", [{"re": [1]}, {"re": {}}, {"cancel": "1"}, {"id": None}])
def test_a_message_without_the_number_of_a_request_is_refused(message: Message) -> None:
    async def serve(message: Message) -> Message:
        return message

    with pytest.raises(BadMessage, match="as the number of a request"):
        Exchange(lambda payload: None, serve).receive(pack(message))


@pytest.mark.parametrize(
    "value", [2**70, "\ud800", object()], ids=["integer", "surrogate", "object"]
)
@pytest.mark.parametrize("raises", [False, True])
def test_an_answer_that_no_message_can_hold_is_an_error_of_its_request(
    value: object, raises: bool
) -> None:
    async def serve(message: Message) -> Message:
        if raises:
            raise ValueError(value)
        return {"value": value}

    async def play() -> None:
        asking = Exchange(lambda payload: answering.receive(payload), serve)
        answering = Exchange(lambda payload: asking.receive(payload), serve)
        with pytest.raises(PeerGone, match="Error: "):
            async with asyncio.timeout(LIMIT_S):
                await asking.call(number=3)

    asyncio.run(play())


def test_an_answer_that_is_too_large_costs_its_request_alone(tmp_path: Path) -> None:
    """The connection of its rollout process goes on, with all other sessions."""

    async def serve(message: Message) -> Message:
        size = 9 << 20 if message["session"] == "large" else 2
        return {"status": 200, "body": b"x" * size, "content_type": "application/json"}

    async def play() -> None:
        async with gateway(tmp_path) as there:
            link, bearer = await there.opened("large", serve)
            await link.call(do="open", session="other", key=key_of("sk-other"))
            assert await code_of(there.url, bearer) == (503, "session_gone")
            assert (await post(there.url, "sk-other"))[0] == 200
            with pytest.raises(TooLarge, match="a request of 9437"):
                await link.call(do="open", session="x" * (9 << 20), key="k")
            assert not link.lost.is_set() and (await post(there.url, "sk-other"))[0] == 200
            link.close()

    asyncio.run(play())
