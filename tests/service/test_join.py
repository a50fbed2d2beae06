"""Engines join through a member process: it fetches versions, relays requests, and may vanish."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE
from relax_hpc.net.http_limits import HttpLimits
from relax_hpc.queue.client import QueueClient
from relax_hpc.service.address import read_address
from relax_hpc.service.join.versions import sweep
from relax_hpc.service.live_run import LiveRun
from relax_hpc.service.role import serving
from tests.helpers.external_scenario import (  # noqa: F401
    LIMIT_S,
    Scenario,
    model_fixture,
    scenario_fixture,
)
from tests.helpers.external_server import Behaviour, external_server

pytestmark = pytest.mark.run


class Api:
    """The service of a scenario's run."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        address = read_address(scenario.run)
        assert address
        self.url, self.token, self.folder = address.url, address.token, folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def ask(self, method: str, path: str, body: Any = None, token: str = "") -> tuple[int, Any]:
        """Status and content of an answer."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token or self.token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def join(self, engine: str, token: str) -> subprocess.Popen[bytes]:
        """Start `relax-hpc join` for an engine."""
        file = self.folder / f"token-{len(self.processes)}"
        file.write_text(token)
        staging = self.folder / "staging"
        staging.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "relax_hpc", "join", engine, "--api", self.url]
        options = ["--token-file", str(file), "--staging", str(staging)]
        with (self.folder / f"member-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen([*command, *options], stderr=log, stdout=log)
        self.processes.append(process)
        return process


@contextmanager
def served_api(scenario: Scenario, folder: Path) -> Iterator[Api]:
    """The service of the run in a thread, with an event loop of its own."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    stopping: list[asyncio.Event] = []

    async def serve() -> None:
        stopping.append(asyncio.Event())
        with QueueClient(scenario.run, scenario.config, "hub", 1, "api") as client:
            live = LiveRun(scenario.run, scenario.config, client)
            context: Any = SimpleNamespace(
                run=scenario.run, config=scenario.config, group="hub", incarnation=1
            )
            async with serving(context, live, HttpLimits()):
                following = asyncio.create_task(live.follow())
                started.set()
                await stopping[0].wait()
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(LIMIT_S)
    api = Api(scenario, folder)
    try:
        yield api
    finally:
        for process in api.processes:
            process.kill()
            process.wait(LIMIT_S)
        loop.call_soon_threadsafe(stopping[0].set)
        thread.join(LIMIT_S)
        loop.close()


def test_an_engine_joins_by_its_member_and_leaves_with_it(
    scenario: Scenario, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The member ends with the engine. Its token permits only what an engine needs."""
    behaviour = Behaviour(model, pause_s=0.01)

    def act() -> None:
        status, created = api.ask("POST", "/members/tokens", {"label": "other cluster"})
        assert status == 200
        token = created["token"]
        process = api.join(url, token)
        scenario.until(scenario.present, lambda engines: len(engines) == 1)
        engine = scenario.until(scenario.engine, lambda engine: engine.state == "active")
        assert (engine.url, engine.token) == (url, created["id"])
        scenario.train()
        scenario.train()
        assert behaviour.generated > 0
        folder = Path(behaviour.updates[-1])
        assert folder.is_relative_to(tmp_path / "staging"), "fetched, not read from the run"

        relayed = f"/members/{engine.member}/engine/model_info"
        assert api.ask("GET", relayed)[1]["weight_version"] == behaviour.version
        assert api.ask("GET", f"/members/{engine.member}/engine/shutdown")[0] == 403
        for path in ("/rollout/engines", "/members/tokens", relayed, "/openapi.json"):
            assert api.ask("GET", path, token=token)[0] == 403
        files = api.ask("GET", f"/versions/{behaviour.version}/files.json", token=token)[1]
        assert "model.safetensors" in files
        for name in ("i000001-v999999/files.json", "..%2Fconfig.yaml/x", "x/files.json"):
            assert api.ask("GET", f"/versions/{name}", token=token)[0] == 404

        removing = scenario.scale("scale_in", engines=["rollout/1000"])
        assert scenario.ended(removing).state == "COMPLETED"
        assert process.wait(LIMIT_S) == EXIT_DONE
        assert not list((tmp_path / "staging").iterdir())

    with external_server(behaviour) as url, served_api(scenario, tmp_path) as api:
        scenario.play(monkeypatch, act)


def test_members_that_are_killed_revoked_or_have_another_model_do_not_stop_the_run(
    scenario: Scenario, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    behaviour = Behaviour(model, pause_s=0.01)

    def act() -> None:
        created = api.ask("POST", "/members/tokens", {})[1]
        first = api.join(url, created["token"])
        scenario.until(scenario.present, lambda engines: len(engines) == 1)
        scenario.until(scenario.engine, lambda engine: engine.state == "active")
        first.kill()
        first.wait(LIMIT_S)
        scenario.train()
        scenario.train()
        scenario.until(scenario.engine, lambda engine: engine.state == "lost")
        assert list((tmp_path / "staging").iterdir())

        second = api.join(url, created["token"])
        scenario.until(scenario.present, lambda engines: len(engines) == 2)
        scenario.until(lambda: scenario.engine(1001), lambda engine: engine.state == "active")
        assert len(list((tmp_path / "staging").iterdir())) == 1, "that of the first is removed"
        scenario.train()
        assert api.ask("DELETE", f"/members/tokens/{created['id']}")[0] == 200
        assert second.wait(LIMIT_S) == EXIT_CONFIG
        scenario.train()
        refused = api.join(url, created["token"])
        assert refused.wait(LIMIT_S) == EXIT_CONFIG and b"answers 401" in log_of(api)

        config = json.loads((model / "config.json").read_bytes())
        (model / "config.json").write_text(json.dumps(config | {"rope_theta": 100}))
        other = api.join(url, api.ask("POST", "/members/tokens", {})[1]["token"])
        assert other.wait(LIMIT_S) == EXIT_CONFIG
        assert b"model_mismatch" in log_of(api) and b"rope_theta: found 100" in log_of(api)
        scenario.train()

    with external_server(behaviour) as url, served_api(scenario, tmp_path) as api:
        scenario.play(monkeypatch, act)


def log_of(api: Api) -> bytes:
    """Output of the last member."""
    return (api.folder / f"member-{len(api.processes) - 1}.log").read_bytes()


def test_versions_of_members_that_live_are_kept(tmp_path: Path) -> None:
    user, living = os.getuid(), os.getpid()
    for name in (f"relax-join-{user}-{living}", f"relax-join-{user}-4194305", "other"):
        (tmp_path / name).mkdir()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "other",
        f"relax-join-{user}-{living}",
    ]
