"""What the client makes of a server that fails, lies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.requirements import requires

requires("sglang")

import numpy as np  # noqa: E402
from aiohttp.test_utils import TestServer  # noqa: E402

import tests.rollout.engine_fake_server as fake  # noqa: E402
from relax_hpc.base.routes import NAME, RouteShape  # noqa: E402
from relax_hpc.base.versions import Version  # noqa: E402
from relax_hpc.rollout.engines.engine import BadAnswer, Draft, EngineFault, Generation  # noqa: E402
from relax_hpc.rollout.engines.sglang import process  # noqa: E402
from relax_hpc.rollout.engines.sglang.client import SglangClient  # noqa: E402
from tests.helpers.engine_helpers import TOKEN, make_config, request  # noqa: E402

pytestmark = pytest.mark.run

SERVED = Version(1, 3)
"""What a fake server says that it serves, before the ends of its responses."""
ROUTES = RouteShape(layers=2, experts=4, chosen=2)


@asynccontextmanager
async def client_and_server(
    routes: RouteShape | None = None, **settings: float
) -> AsyncIterator[tuple[SglangClient, TestServer]]:
    """A client of a fake server in this process."""
    server = TestServer(fake.application(TOKEN))
    await server.start_server()
    about = TOKEN, make_config("sglang", **settings).rollout.engine, SERVED
    client = SglangClient(str(server.make_url("/")), *about, routes=routes)
    try:
        yield client, server
    finally:
        await client.close()
        await server.close()


def ask(*kinds: int, served: Version = SERVED, **settings: Any) -> list[Generation | EngineFault]:
    """The client's answers to requests of each kind, which come at once."""

    async def generate() -> list[Generation | EngineFault]:
        async with client_and_server(**settings) as (client, _):
            client._version = served
            return await asyncio.gather(
                *(client.generate(request(kind)) for kind in kinds), return_exceptions=True
            )

    return asyncio.run(generate())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (fake.STATUS_500, "http_error"),
        (fake.NOT_JSON, "http_error"),
        (fake.MISSING, "wrong_count"),
        (fake.NO_INDEX, "http_error"),
        (fake.ERROR, "http_error"),
        (fake.NUMBER, "http_error"),
        (fake.HANG, "timeout"),
    ],
)
def test_a_broken_exchange_fails_what_has_no_answer_yet(kind: int, reason: str) -> None:
    _, fault = ask(fake.GOOD, kind, request_timeout_s=0.3)
    assert type(fault) is EngineFault and fault.reason == reason


def test_an_answer_that_is_there_is_no_longer_held_by_others_that_fail() -> None:
    good, fault = ask(fake.GOOD, fake.HANG, request_timeout_s=0.3)
    assert isinstance(good, Generation) and isinstance(fault, EngineFault)


def test_an_answer_may_take_longer_than_the_engine_may_be_silent() -> None:
    (answer,) = ask(fake.SLOW, request_timeout_s=2.5 * fake.PAUSE_S)
    assert isinstance(answer, Generation) and len(answer.token_ids) == 4


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (fake.FEW_LOGPROBS, "wrong_count"),
        (fake.TOO_MANY, "wrong_count"),
        (fake.EMPTY, "wrong_count"),
        (fake.NULL, "nan_logprob"),
        (fake.POSITIVE, "nan_logprob"),
        (fake.NO_VERSION, "unknown_version"),
        (fake.BAD_VERSION, "unknown_version"),
        (fake.GAP, "unknown_version"),
        (fake.MALFORMED, "http_error"),
        (fake.ABORTED, "http_error"),
    ],
)
def test_a_bad_answer_is_a_fault_of_its_own(kind: int, reason: str) -> None:
    first, second, third = ask(fake.GOOD, kind, fake.GOOD)
    assert isinstance(second, BadAnswer)
    assert second.reason == reason
    assert isinstance(first, Generation)
    assert isinstance(third, Generation)


def test_a_session_stays_with_its_copy_of_the_model_and_a_new_one_goes_where_least_is_asked() -> (
    None
):
    """Requests that come at once are one exchange a copy; those of no session the server deals
    out."""
    bodies: list[tuple[int | None, int]] = []

    async def generate() -> None:
        async with client_and_server(flags={"dp_size": 2}) as (client, _):
            body = client._body

            def noted(asked: Any) -> Any:
                found = body(asked)
                bodies.append((found.get("routed_dp_rank"), len(found["input_ids"])))
                return found

            client._body = noted
            for sessions in ("abc", "cba", ["d", "", ""]):
                asked = (replace(request(fake.GOOD), session=session) for session in sessions)
                await asyncio.gather(*map(client.generate, asked))

    asyncio.run(generate())
    assert bodies == [(0, 2), (1, 1), (0, 2), (1, 1), (0, 1), (None, 2)]


def test_routes_come_with_prompt_and_response() -> None:
    """The last token has none, and a server that gives none is for who looks at rows."""
    good, without = ask(fake.GOOD, fake.NO_ROUTES, routes=ROUTES)
    assert good.before[NAME].tolist() == [[[[0], [1]], [[2], [3]]]] * 2
    assert good.extras[NAME].tolist() == [[[[0], [1]], [[2], [3]]]] * 3 + [
        [[[255], [255]], [[255], [255]]]
    ]
    assert isinstance(without, Generation) and not without.extras and not without.before


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (fake.FEW_ROUTES, "found those of 4 tokens, expected 5"),
        (fake.FAR_ROUTES, "experts 0 to 4, allowed 0 to 3"),
        (fake.OTHER_ROUTES, "expected 2 layers, 2 of 4 experts each"),
        (fake.TORN_ROUTES, "expected 2 layers, 2 of 4 experts each"),
    ],
)
def test_routes_of_another_model_or_number_are_a_bad_answer(kind: int, says: str) -> None:
    first, second = ask(fake.GOOD, kind, routes=ROUTES)
    assert isinstance(first, Generation) and isinstance(second, BadAnswer)
    assert second.reason == "bad_routes" and says in str(second)


def test_versions_come_from_spans_or_from_the_one_version() -> None:
    one, spans = ask(fake.GOOD, fake.SPANS)
    new, old = Version(1, 4).encode(), Version(1, 3).encode()
    assert one.token_versions.tolist() == [new] * 4
    assert spans.token_versions.tolist() == [old, old, new, new]


def test_tokens_of_older_weights_than_those_served_are_a_fault() -> None:
    (fault,) = ask(fake.GOOD, served=Version(1, 5))
    assert type(fault) is EngineFault and fault.reason == "old_version"
    assert "found tokens of i000001-v000004 from an engine that serves i000001-v000005" in str(
        fault
    )


def drafts_after(*kinds: int, served: Version = SERVED) -> list[Draft]:
    """What requests of these kinds have left in their drafts, of which the first has a token from
    before."""
    before = Generation([3], [-0.1], np.array([Version(1, 2).encode()], np.int32), "partial")
    drafts = [Draft.from_response(before), *(Draft() for _ in kinds[1:])]
    requests = [request(kind, k, drafts[k]) for k, kind in enumerate(kinds)]

    async def generate() -> None:
        async with client_and_server(request_timeout_s=1.0) as (client, _):
            client._version = served
            await asyncio.gather(*map(client.generate, requests), return_exceptions=True)

    asyncio.run(generate())
    return drafts


def test_what_a_server_told_before_it_failed_is_in_the_drafts() -> None:
    """Two tokens of each are told, then all of the first; the last one's end never comes."""
    first, second = drafts_after(fake.SPANS, fake.HANG)
    assert first.ended and first.ended.finish_reason == "length"
    assert first.ended.token_ids == [3, 7, 7, 7]
    assert first.ended.token_versions.tolist() == [Version(1, n).encode() for n in (2, 3, 3, 4)]
    assert (
        not second.ended
        and second.snapshot().token_ids == [7, 7]
        and second.snapshot().logprobs == [-0.5, -0.5]
    )
    assert second.token_versions == [SERVED.encode()] * 2


def test_tokens_that_may_be_of_other_weights_wait_for_the_end_of_the_response() -> None:
    first, second = drafts_after(fake.GOOD, fake.HANG, served=Version(1, 2))
    assert first.ended and first.ended.token_ids == [3, 7, 7, 7]
    assert not second.ended and second.token_ids == []


def test_of_a_response_that_is_whole_nothing_is_asked() -> None:
    whole = Draft.from_response(Generation([3] * 4, [-0.1] * 4, np.ones(4, np.int32), "partial"))

    async def generate() -> Generation:
        async with client_and_server() as (client, _):
            return await client.generate(request(fake.STATUS_500, draft=whole))

    answer = asyncio.run(generate())
    assert answer is whole.ended and answer.finish_reason == "length"


def test_only_an_update_beside_running_requests_pauses_the_server() -> None:
    async def updates() -> list[str]:
        async with client_and_server() as (client, server):
            await client.generate(request(fake.GOOD))
            await client.update_weights(Path("weights"), Version(1, 5))
            hanging = asyncio.create_task(client.generate(request(fake.HANG)))
            async with asyncio.timeout(60):
                await server.app[fake.HANGING].wait()
            await client.update_weights(Path("weights"), Version(1, 6))
            hanging.cancel()
            return server.app[fake.CALLS]

    calls = asyncio.run(updates())
    assert calls == [
        "/freeze_gc",
        "i000001-v000005",
        "/pause_generation",
        "i000001-v000006",
        "/continue_generation",
    ]


def test_a_server_that_does_not_give_requests_up_is_not_asked_to_flush_or_release() -> None:
    """It goes on with what nobody waits for any more, and says that it is not idle."""

    async def updates() -> list[str]:
        async with client_and_server(update_timeout_s=0.2) as (client, server):
            hanging = asyncio.create_task(client.generate(request(fake.HANG)))
            async with asyncio.timeout(60):
                await server.app[fake.HANGING].wait()
            hanging.cancel()
            await asyncio.wait([hanging])
            assert hanging.cancelled() and not client.gate.inside
            await client.update_weights(Path("weights"), Version(1, 6))
            with pytest.raises(
                EngineFault, match=r"the server still works on cancelled requests after 0\.2 s"
            ):
                await client.release()
            return server.app[fake.CALLS]

    assert asyncio.run(updates()) == [
        "/pause_generation",
        "i000001-v000006",
        "/continue_generation",
    ]


def test_an_abort_that_came_before_its_request_is_told_again() -> None:
    async def gives_up() -> bool:
        async with client_and_server() as (client, server):
            late = asyncio.create_task(client.generate(request(fake.LATE)))
            async with asyncio.timeout(60):
                await server.app[fake.HANGING].wait()
            late.cancel()
            await asyncio.wait([late])
            return late.cancelled() and not server.app[fake.HANGING].is_set()

    assert asyncio.run(gives_up()), "the server is at it still"


def test_all_of_its_memory_is_asked_for_and_is_back_before_an_update() -> None:
    """Without tags SGLang's memory saver gives back keys and values, weights and CUDA graphs."""

    async def turns() -> list[str]:
        async with client_and_server() as (client, server):
            await client.release()
            await client.update_weights(Path("weights"), Version(1, 5))
            await client.update_weights(Path("weights"), Version(1, 6))
            return server.app[fake.CALLS]

    released, resumed = (f"/{what}_memory_occupation all" for what in ("release", "resume"))
    assert asyncio.run(turns()) == [released, resumed, "i000001-v000005", "i000001-v000006"]


def test_nothing_is_asked_of_unknown_weights() -> None:
    async def generate() -> None:
        async with client_and_server() as (client, _):
            with pytest.raises(EngineFault, match="no such file"):
                await client.update_weights(Path("broken"), Version(1, 5))
            with pytest.raises(EngineFault, match="weights are unknown"):
                await client.generate(request(fake.GOOD))
            await client.update_weights(Path("weights"), Version(1, 5))
            with pytest.raises(EngineFault, match="found tokens of"):
                await client.generate(request(fake.GOOD))

    asyncio.run(generate())


@pytest.mark.parametrize(
    ("directory", "what"), [("broken", "no such file"), ("stale", "reports version")]
)
def test_an_update_that_did_not_happen_is_a_fault(directory: str, what: str) -> None:
    async def update() -> None:
        async with client_and_server() as (client, _):
            await client.update_weights(Path(directory), Version(1, 5))

    with pytest.raises(EngineFault, match=what) as caught:
        asyncio.run(update())
    assert caught.value.reason == "update_failed"


def test_large_weights_have_longer_for_their_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []
    call = SglangClient._call

    async def noted(self: SglangClient, path: str, body: dict | None, timeout_s: float) -> object:
        limits.extend([timeout_s] if path == "/update_weights_from_disk" else [])
        return await call(self, path, body, timeout_s)

    monkeypatch.setattr(SglangClient, "_call", noted)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(140 * 10**9)

    async def update() -> None:
        async with client_and_server() as (client, _):
            await client.update_weights(tmp_path, Version(1, 5))

    asyncio.run(update())
    assert limits == [60.0 + 1400.0]


def test_a_server_that_is_not_there_is_a_connection_fault() -> None:
    async def generate() -> None:
        client = SglangClient(
            "http://127.0.0.1:9", TOKEN, make_config("sglang").rollout.engine, SERVED
        )
        try:
            await client.generate(request(fake.GOOD))
        finally:
            await client.close()

    with pytest.raises(EngineFault) as caught:
        asyncio.run(generate())
    assert caught.value.reason == "connection"


def test_the_port_of_a_server_that_has_ended_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger who took it would be sent the key with the next request. Who asks there is hung up
    on."""
    monkeypatch.setattr(process, "_SERVER", "this")
    arguments = {"host": "127.0.0.1", "port": 0}

    async def main() -> None:
        server = process.ServerProcess(
            process.Launch(
                arguments=arguments, name="server", logs=tmp_path, threads=1, stop_s=20.0
            )
        )
        await server.start()
        address = "127.0.0.1", server.arguments["port"]
        early, _ = await asyncio.open_connection(*address)
        await server.session.ended
        late, _ = await asyncio.open_connection(*address)
        for stream in (early, late):
            with contextlib.suppress(ConnectionResetError):
                assert await stream.read() == b""
        with pytest.raises(OSError, match="in use"):
            socket.create_server(address)
        await server.close()
        socket.create_server(address).close()

    asyncio.run(main())
