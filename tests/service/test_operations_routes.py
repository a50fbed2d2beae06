"""Routes of operations: what a client of Relax sees, bad requests, several clients at once, and a
hub that is away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from relax_hpc.base.versions import Version
from tests.helpers.queue_helpers import small
from tests.helpers.service_helpers import TOKEN, Service, service
from tests.service.relax_client import RelaxClient

FIRST = Version(1, 0)


def client_of(running: Service) -> RelaxClient:
    return RelaxClient(running.url, {"Authorization": f"Bearer {TOKEN}"})


async def report(running: Service, groups: dict[str, int], **more: Any) -> None:
    content = {name: {"engines": count, "state": "running"} for name, count in groups.items()}
    await asyncio.wrap_future(running.supervisor.operations.report_groups(content, **more))


async def serve(running: Service, *engines: str, version: Version = FIRST) -> None:
    """Let engines serve a version, or none. Here the supervisor speaks for them."""
    for engine in engines:
        await asyncio.wrap_future(running.supervisor.weights.serve(engine, version))


def test_a_client_of_relax_works(tmp_path: Path) -> None:
    async def play() -> None:
        async with service(tmp_path) as running:
            relax, supervisor = client_of(running), running.supervisor.operations
            await serve(running, "rollout/0")

            status, accepted = await asyncio.to_thread(relax.scale_out, 3)
            assert status in (200, 202) and accepted["status"] == "PENDING"
            id = accepted["request_id"]
            status, refused = await asyncio.to_thread(relax.scale_in, 1)
            assert status == 409 and id in refused["detail"]
            await asyncio.wrap_future(supervisor.advance(id, "CREATING", jobs={"rollout-2": "7"}))
            assert (await asyncio.to_thread(relax.scale_out_status, id))["status"] == "CREATING"
            await report(running, {"rollout": 1, "rollout-2": 1, "rollout-3": 1})
            await serve(running, "rollout-2/0", "rollout-3/0")
            done = await asyncio.to_thread(relax.scale_out_status, id)
            assert (done["status"], done["engine_ids"], done["error_message"]) == (
                "ACTIVE",
                ["rollout-2/0", "rollout-3/0"],
                None,
            )
            status, again = await asyncio.to_thread(relax.scale_out, 3)
            assert (status, again["status"]) == (200, "NOOP")

            running.live.status = await asyncio.wrap_future(running.supervisor.status.get())
            engines = await asyncio.to_thread(relax.engines)
            assert set(engines) == {"rollout/0", "rollout-2/0", "rollout-3/0"}
            assert set(engines.values()) == {"ACTIVE"}

            status, preview = await asyncio.to_thread(relax.scale_in, 2, dry_run=True)
            assert status == 200 and preview["engine_ids"] == ["rollout-3/0"]
            status, accepted = await asyncio.to_thread(relax.scale_in, 2)
            id = accepted["request_id"]
            await asyncio.wrap_future(supervisor.advance(id, "DRAINING"))
            await serve(running, "rollout-3/0", version=Version(0, 0))
            state = await asyncio.to_thread(relax.scale_in_status, id)
            assert state["status"] == "REMOVING"
            assert state["removed_engines"] == state["selected_engines"] == ["rollout-3/0"]
            await report(running, {"rollout": 1, "rollout-2": 1})
            await asyncio.wrap_future(supervisor.advance(id, "COMPLETED"))
            assert (await asyncio.to_thread(relax.scale_in_status, id))["status"] == "COMPLETED"

            assert (await asyncio.to_thread(relax.call, "GET", "/scale_out/so-9"))[0] == 404
            assert (await asyncio.to_thread(relax.call, "GET", f"/scale_out/{id}"))[0] == 404
            assert (await asyncio.to_thread(relax.scale_in, 0, model_name="other"))[0] == 400
            await cancel_as_relax(running, relax)

    asyncio.run(play())


async def cancel_as_relax(running: Service, relax: RelaxClient) -> None:
    """Cancel one scale-out by its id, and another one by a filter."""
    _, accepted = await asyncio.to_thread(relax.scale_out, 4)
    id = accepted["request_id"]
    listed = await asyncio.to_thread(relax.list_scale_out, "?status=PENDING&model_name=default")
    assert [item["request_id"] for item in listed] == [id]
    assert not await asyncio.to_thread(relax.list_scale_out, "?model_name=other")
    cancel = {"status_filter": "PENDING", "dry_run": True}
    _, preview = await asyncio.to_thread(relax.call, "POST", "/scale_out_cancel", cancel)
    assert (preview["succeeded"], preview["dry_run"], preview["total_count"]) == ([id], True, 1)
    status, cancelled = await asyncio.to_thread(relax.call, "POST", f"/scale_out/{id}/cancel")
    assert (status, cancelled["status"]) == (200, "CANCELLED")
    operations = running.supervisor.operations
    await asyncio.wrap_future(operations.note_removed(id, ["rollout-3/0", "rollout-4/0"]))
    _, accepted = await asyncio.to_thread(relax.scale_out, 0, engine_urls=["http://10.0.0.9:30000"])
    id = accepted["request_id"]
    engine = (await asyncio.to_thread(relax.scale_out_status, id))["engine_ids"][0]
    await asyncio.wrap_future(operations.report_engine(engine, "joining", "PREFLIGHT"))
    state = await asyncio.to_thread(relax.scale_out_status, id)
    assert state["status"] == "HEALTH_CHECKING" and state["detail"].startswith("PREFLIGHT")
    _, result = await asyncio.to_thread(relax.call, "POST", "/scale_out_cancel", {})
    assert (result["succeeded"], result["skipped"][0]["request_id"]) == ([], id)


def test_what_relax_lacks(tmp_path: Path) -> None:
    async def play() -> None:
        async with service(tmp_path) as running:
            body = {"relative": 1}
            key = {"Idempotency-Key": "decision 7"}
            first = await running.ask("POST", "/rollout/scale_out", body, **key)
            second = await running.ask("POST", "/rollout/scale_out", body, **key)
            assert (first.status, second.status) == (202, 200)
            assert first.content["request_id"] == second.content["request_id"]
            other = await running.ask("POST", "/rollout/scale_out", {"relative": 2}, **key)
            assert (other.status, other.code) == (422, "key_reused")
            id = first.content["request_id"]
            expected = 1_900_000_000.0
            advance = running.supervisor.operations.advance(
                id, "CREATING", jobs={"rollout-2": "7"}, expected_start={"rollout-2": expected}
            )
            await asyncio.wrap_future(advance)
            pending = {"engines": 1, "state": "pending", "job": "7", "expected_start": expected}
            groups = {"rollout": {"engines": 1, "state": "running"}, "rollout-2": pending}
            await asyncio.wrap_future(running.supervisor.operations.report_groups(groups))
            state = await running.ask("GET", f"/rollout/scale_out/{id}")
            assert state.content["expected_start"] == {"rollout-2": expected}
            while running.live.status is None:
                await asyncio.sleep(0.01)
            content = (await running.ask("GET", "/rollout/engines")).content
            engine = content["models"]["default"]["engines"][1]
            assert (engine["state"], engine["job"]) == ("joining", "7")
            assert engine["expected_start"] == expected and content["hub"]

    asyncio.run(play())


def test_bad_requests_have_a_code_and_change_nothing(tmp_path: Path) -> None:
    config = small()
    config.service.max_body = 2048
    requests: list[tuple[Any, bytes | None, int, str]] = [
        (None, b"{", 400, "bad_request"),
        (None, b"[" * 3000, 413, "too_large"),
        (None, b"[" * 2000, 400, "bad_request"),
        (None, b"\xff\xfe", 400, "bad_request"),
        ([1], None, 400, "bad_request"),
        ({"num_replicas": "x"}, None, 400, "bad_request"),
        ({"num_replicas": 1e9}, None, 400, "bad_request"),
        ({"num_replicas": 10**30}, None, 400, "bad_request"),
        ({"num_replicas": 10**9}, None, 400, "bad_request"),
        ({"groups": 10**9}, None, 400, "bad_request"),
        ({"relative": 10**9}, None, 400, "bad_request"),
        ({"engine_urls": ["file:///etc/passwd"]}, None, 400, "bad_request"),
        ({"members": [{"member": "x"}]}, None, 400, "bad_request"),
        ({"relative": 1, "time": "1; rm -rf /"}, None, 400, "bad_request"),
        ({"engines": ["rollout/9"]}, None, 404, "unknown_engine"),
    ]

    async def play() -> None:
        async with service(tmp_path, config) as running:
            for body, data, status, code in requests:
                answer = await running.ask("POST", "/rollout/scale_out", body, data=data)
                assert (answer.status, answer.code) == (status, code), (body, data)
                assert "\n" not in answer.content["error"]["message"]
            answer = await running.ask("GET", "/rollout/scale_out?status=SLEEPING")
            assert (answer.status, answer.code) == (400, "bad_request")
            answer = await running.ask("POST", "/rollout/scale_in", {"num_replicas": 1, "x": 1})
            assert (answer.status, answer.code) == (400, "bad_request")
            answer = await running.ask("POST", "/rollout/scale_in", {"engines": ["rollout/0"]})
            assert (answer.status, answer.code) == (400, "protected")
            listed = await running.ask("GET", "/rollout/scale_out")
            assert listed.content["requests"] == []

    asyncio.run(play())


def test_two_clients_at_once_make_one_operation(tmp_path: Path) -> None:
    async def play() -> None:
        async with service(tmp_path) as running:
            bodies = [{"num_replicas": 2 + number % 2} for number in range(20)]
            answers = await asyncio.gather(
                *(running.ask("POST", "/rollout/scale_out", body) for body in bodies)
            )
            statuses = sorted(answer.status for answer in answers)
            assert statuses == [200] * 9 + [202] + [409] * 10
            listed = await running.ask("GET", "/rollout/scale_out")
            assert len(listed.content["requests"]) == 1

    asyncio.run(play())


def test_without_a_hub_the_client_is_told_to_retry(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("relax_hpc.service.operations_routes.HUB_S", 0.1)
    monkeypatch.setattr("relax_hpc.service.operations_routes._PRESENT_S", 0.1)

    async def play() -> None:
        async with service(tmp_path, with_hub=False) as running:
            for method, path, body in (
                ("POST", "/rollout/scale_out", {"num_replicas": 2}),
                ("GET", "/rollout/scale_out/so-000001", None),
                ("GET", "/rollout/engines", None),
            ):
                answer = await running.ask(method, path, body)
                assert (answer.status, answer.code) == (503, "hub_away")
                assert int(answer.headers["Retry-After"]) > 0
            document = (await running.ask("GET", "/openapi.json")).content
            assert {"/rollout/scale_out/{id}/cancel", "/rollout/engines"} <= document[
                "paths"
            ].keys()
            entry = document["paths"]["/rollout/scale_out"]["post"]
            assert set(entry["responses"]) == {
                *("200", "202", "400", "401", "404", "409", "422", "429", "503")
            }

    asyncio.run(play())
