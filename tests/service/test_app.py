"""The HTTP application of the service: tokens, limits, errors, the OpenAPI document, and what it
knows of the run."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest
from aiohttp import web

from relax_hpc.base.rundir import RunDir
from relax_hpc.service import app as app_module
from relax_hpc.service.address import (
    ServiceAddress,
    address_file,
    make_token,
    publish_address,
    read_address,
)
from relax_hpc.service.app import MEMBER, digest_token
from relax_hpc.service.metrics_follower import MetricsFollower
from tests.helpers.service_helpers import TOKEN, service


def test_requests_need_the_token_and_members_only_reach_their_paths(tmp_path: Path) -> None:
    async def read_own_id(request: web.Request) -> web.Response:
        return web.json_response({"id": request[MEMBER].id if MEMBER in request else ""})

    paths = ("/members/me", "/members/tokens", "/versions/x", "/other")

    async def play() -> None:
        routes = [web.get(path, read_own_id) for path in paths]
        async with service(tmp_path, routes=routes) as running:
            for forged in ("", "x", TOKEN + "x", TOKEN[:-1], "é", "Bearer " + TOKEN):
                answer = await running.ask("GET", "/openapi.json", token=forged)
                assert (answer.status, answer.code) == (401, "unauthorized")
            assert (await running.ask("GET", "/health", token="")).status == 200
            document = (await running.ask("GET", "/openapi.json")).content
            assert document["openapi"] == "3.1.0" and "/health" in document["paths"]
            answer = await running.ask("GET", "/nothing")
            assert (answer.status, answer.code) == (404, "not_found")

            member = "token of a member"
            id = await running.live.ask(
                running.supervisor.operations.add_token(digest_token(member.encode()))
            )
            while id not in {token.id for token in running.live.wanted.tokens}:
                await running.live.wait_for_change(10.0)
            statuses = [(await running.ask("GET", path, token=member)).status for path in paths]
            assert statuses == [200, 403, 200, 403]
            assert (await running.ask("GET", paths[0], token=member)).content == {"id": id}
            await running.live.ask(running.supervisor.operations.revoke_token(id))
            while running.live.wanted.tokens:
                await running.live.wait_for_change(10.0)
            assert (await running.ask("GET", paths[0], token=member)).status == 401
            assert running.limits.refused == {"unauthorized": 7, "forbidden": 2}

    asyncio.run(play())


def test_members_wait_until_their_tokens_are_known(tmp_path: Path) -> None:
    """A member takes 401 for a revoked token, and ends."""

    async def play() -> None:
        async with service(tmp_path, with_hub=False) as running:
            answer = await running.ask("GET", "/members/connect", token="token of a member")
            assert (answer.status, answer.code) == (503, "hub_away")
            for path, token in (("/openapi.json", "x"), ("/members/connect", "")):
                assert (await running.ask("GET", path, token=token)).status == 401

    asyncio.run(play())


def test_clients_without_the_token_do_not_use_up_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "_MAX_CONCURRENT", 1)

    async def play() -> None:
        async with service(tmp_path) as running:
            host, port = running.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /page/login HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.2)
            assert (await running.ask("GET", "/openapi.json")).status == 200
            writer.close()
            many = await running.ask("POST", "/page/login", data=b"a=1&b=2&c=3&d=4&e=5", token="")
            assert many.status == 400

    asyncio.run(play())


def test_a_repeated_request_for_a_token_adds_one(tmp_path: Path) -> None:
    async def play() -> None:
        async with service(tmp_path) as running:
            operations = running.supervisor.operations
            first, second = [
                await running.live.ask(operations.add_token(digest_token(b"member")))
                for _ in range(2)
            ]
            assert first == second
            await running.live.ask(operations.revoke_token(first))
            again = await running.live.ask(operations.add_token(digest_token(b"member")))
            while [token.id for token in running.live.wanted.tokens] != []:
                await running.live.wait_for_change(1.0)
            assert again == first

    asyncio.run(play())


def test_the_service_knows_the_age_of_what_it_knows(tmp_path: Path) -> None:
    async def play() -> None:
        async with service(tmp_path / "with hub") as running:
            while running.live.is_hub_away:
                await asyncio.sleep(0.01)
            assert running.live.status and running.live.status.steps == 4
            assert (await running.ask("GET", "/health")).content == {"status": "ok", "hub": True}
        async with service(tmp_path / "without", with_hub=False) as running:
            assert running.live.status_age_s == float("inf")
            assert (await running.ask("GET", "/health")).content == {"status": "ok", "hub": False}

    asyncio.run(play())


def test_the_address_and_the_token_are_for_this_user_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert read_address(run) is None
    address = ServiceAddress(3, "node1", "http://127.0.0.1:8000", make_token())
    publish_address(run, address)
    assert read_address(run) == address and address.token not in repr(address)
    assert stat.S_IMODE(address_file(run).stat().st_mode) == 0o600
    assert stat.S_IMODE(address_file(run).parent.stat().st_mode) == 0o700


def test_metrics_are_followed_line_by_line(tmp_path: Path) -> None:
    path, follower = tmp_path / "metrics.jsonl", MetricsFollower(tmp_path)
    assert not follower.poll()
    head = {"time": 5.0, "incarnation": 1}
    lines = [
        {**head, "step": 0, "reward/mean": 0.5, "perf/step_s": 2.0},
        {**head, "step": 1, "eval/x/reward": 0.25},
        {**head, "step": 1, "reward/mean": None, "perf/step_s": 3.0},
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(data[:-10])
    follower.poll()
    assert follower.values == {"reward/mean": 0.5, "perf/step_s": 2.0, "eval/x/reward": 0.25}
    path.write_bytes(data)
    follower.poll()
    assert (follower.step, follower.values["perf/step_s"]) == (1, 3.0) and len(follower.rows) == 3
    path.write_bytes(data[: data.index(b"\n") + 1])
    follower.poll()
    assert follower.values["perf/step_s"] == 2.0, "a file that became shorter is read again"
