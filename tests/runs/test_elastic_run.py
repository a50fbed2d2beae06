"""Operations of a whole run by the HTTP service: engines join and leave, and kill -9 of the service,
the hub, a new engine or the supervisor changes neither their end nor the rows."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.queue.operations import FINAL, IN, OUT
from relax_hpc.service.address import ServiceAddress, read_address
from tests.effort import effort
from tests.helpers.audit import audit
from tests.helpers.run_helpers import LIGHT, Running, merged, queue_state, running
from tests.requirements import requires
from tests.service.relax_client import RelaxClient

pytestmark = pytest.mark.run
SETTINGS = merged(
    LIGHT,
    {
        "steps": 100_000,
        "max_staleness": 1,
        "service": {"enabled": True},
        "liveness": {"beat_s": 0.2},
        "rollout": {"engine": {"simulated": {"response_s": 0.6}}},
    },
)
LIMIT_S = 120.0
VICTIMS = ("api", "controller", "rollout")
OUT_STATES = ("PENDING", "CREATING", "HEALTH_CHECKING")
IN_STATES = ("PENDING", "DRAINING", "REMOVING")


class Api:
    """The service of a run, which may be away for a while."""

    def __init__(self, live: Running) -> None:
        self._live = live

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        """The first answer that is not `hub_away`."""

        def answer() -> tuple[int, dict[str, Any]] | None:
            address: ServiceAddress | None = read_address(self._live.run)
            if address is None:
                return None
            client = RelaxClient(address.url, {"Authorization": f"Bearer {address.token}"})
            try:
                status, content = client.call(method, path, body)
            except OSError:
                return None
            return None if status == 503 else (status, content)

        return self._live.wait_until(answer, f"{method} {path} is answered", LIMIT_S)

    def create(self, kind: str, **body: Any) -> str:
        def created() -> str:
            status, content = self.call("POST", f"/{kind}", body)
            assert status in (200, 202) or content["error"]["code"] == "busy", content
            return content.get("request_id", "")

        return self._live.wait_until(created, f"{kind} is accepted", LIMIT_S)

    def get(self, kind: str, id: str) -> dict[str, Any]:
        status, content = self.call("GET", f"/{kind}/{id}")
        assert status == 200, content
        return content

    def await_state(self, kind: str, id: str, is_there: Callable[[str], bool]) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            operation = self.get(kind, id)
            return operation if is_there(operation["status"]) else None

        return self._live.wait_until(there, f"{id} goes on", LIMIT_S)

    def await_end(self, kind: str, id: str) -> dict[str, Any]:
        return self.await_state(kind, id, lambda state: state in FINAL[kind])


def has_passed(kind: str, state: str) -> Callable[[str], bool]:
    """Whether an operation has reached ``state``, or is beyond it."""
    order = OUT_STATES if kind == OUT else IN_STATES
    before = order[: order.index(state)]
    return lambda now: now not in before


def kill_in(live: Running, api: Api, kind: str, state: str, victim: str, **body: Any) -> None:
    """Kill a process when the operation is in ``state``, and await its only end."""
    id = api.create(kind, **body)
    api.await_state(kind, id, has_passed(kind, state))
    newest = live.processes(victim)
    if newest:
        os.kill(newest[-1].pid, signal.SIGKILL)
    operation = api.await_end(kind, id)
    assert operation["status"] in ("ACTIVE", "COMPLETED"), operation
    names = [name for name, _ in operation["history"]]
    assert len(set(names) & set(FINAL[kind])) == 1 and len(names) == len(set(names)), names


def assert_serves(live: Running, api: Api, *groups: str) -> None:
    """Exactly these groups have engines, and rows of each are accepted."""
    _, content = api.call("GET", "/engines")
    assert sorted(group["group"] for group in content["groups"]) == sorted(groups)
    for group in groups:
        live.wait_until(lambda group=group: accepted_from(live, group), f"{group} puts", LIMIT_S)


def accepted_from(live: Running, group: str) -> bool:
    """Whether the newest incarnation of ``group`` has put rows, by the names of its shards."""
    newest = f"{group}-i{live.incarnations(group):06d}"
    data = b"".join(path.read_bytes() for path in live.run.journal.glob("*.journal"))
    return newest.encode() in data


def test_operations_survive_kills(tmp_path: Path) -> None:
    requires("mpi", "torch", "megatron")
    with running(tmp_path, SETTINGS) as live:
        live.wait_for_step(0, LIMIT_S)
        api = Api(live)
        kill_in(live, api, OUT, "CREATING", "api", num_replicas=2)
        assert_serves(live, api, "rollout", "rollout-2")
        kill_in(live, api, OUT, "HEALTH_CHECKING", "rollout", num_replicas=3)
        kill_in(live, api, IN, "DRAINING", "controller", num_replicas=1)
        assert_serves(live, api, "rollout")
        for kind, states in ((OUT, OUT_STATES), (IN, IN_STATES)) if effort(0, 1) else ():
            for state in states:
                for victim in VICTIMS:
                    count = 2 if kind == OUT else 1
                    other = IN if kind == OUT else OUT
                    api.await_end(other, api.create(other, num_replicas=3 - count))
                    kill_in(live, api, kind, state, victim, num_replicas=count)
        live.process.send_signal(signal.SIGTERM)
        live.wait(60)
    steps = queue_state(live.run).progress.trained_steps
    assert not audit(live.run, steps).problems


@pytest.mark.skipif(not effort(0, 1), reason="restarts whole runs: only with --all")
@pytest.mark.parametrize("state", OUT_STATES)
def test_the_supervisor_is_killed(tmp_path: Path, state: str) -> None:
    """tests/cluster/test_elastic.py proves the same of one reconciler after another."""
    requires("mpi", "torch", "megatron")
    with running(tmp_path, SETTINGS) as live:
        live.wait_for_step(0, LIMIT_S)
        api = Api(live)
        id = api.create(OUT, num_replicas=2)
        api.await_state(OUT, id, has_passed(OUT, state))
        live.process.kill()
        live.process.wait(60)
    with running(tmp_path, SETTINGS, None, "--resume") as live:
        live.wait_for_step(0, LIMIT_S)
        operation = Api(live).await_end(OUT, id)
        assert operation["status"] in ("ACTIVE", "FAILED"), operation
        if operation["status"] == "ACTIVE":
            assert_serves(live, Api(live), "rollout", "rollout-2")
