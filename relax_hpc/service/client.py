"""Client of the service of a run, for commands on this machine.

If the service listens on the loopback address of another node, its operations are requested from
the hub itself, as the service does. The answers are the same.
"""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.network import LOOPBACK
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.operations import OUT, OperationRefused
from relax_hpc.queue.records import OBSERVER_INCARNATION
from relax_hpc.service.address import ServiceAddress, read_address
from relax_hpc.service.live_run import HubAwayError
from relax_hpc.service.operations_routes import describe_operation

_ANSWER_S = 15.0
"""Seconds for an answer of the service or the hub."""
_MAX_ANSWER = 64 << 20


class EngineOperations(Protocol):
    """Requests of a command about the engines of a run. Every method raises OperationRefused with
    a code, or HubAwayError."""

    def create(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create an operation; its description."""

    def get(self, kind: str, id: str) -> dict[str, Any]:
        """Description of an operation."""

    def groups(self) -> tuple[list[str], list[str]]:
        """Names of the groups with engines, and engines of them that were removed."""


@contextmanager
def engine_operations(run: RunDir, config: Config) -> Iterator[EngineOperations]:
    """The client of a run's service, or of its hub. HubAwayError: the run has no service now."""
    address = read_address(run)
    if address is None:
        raise HubAwayError(
            f"{run.root}: no service has published its address, so the hub has not started, or "
            f"service.enabled is false; see relax-hpc status {run.root}"
        )
    is_here = address.host == socket.gethostname()
    if is_here or LOOPBACK not in address.url:
        yield ServiceClient(run, address)
        return
    with QueueClient(run, config, "observer", OBSERVER_INCARNATION) as client:
        yield HubClient(run, config, client)


class ServiceClient:
    """Client over HTTP."""

    def __init__(self, run: RunDir, address: ServiceAddress) -> None:
        self._run, self._address = run, address

    def create(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        accepted = self._ask("POST", f"/rollout/{kind}", body)
        if accepted["status"] == "NOOP":
            return {**accepted, "jobs": {}, "detail": accepted["message"]}
        return self.get(kind, accepted["request_id"])

    def get(self, kind: str, id: str) -> dict[str, Any]:
        return self._ask("GET", f"/rollout/{kind}/{id}")

    def groups(self) -> tuple[list[str], list[str]]:
        answer = self._ask("GET", "/rollout/engines")
        return [group["group"] for group in answer["groups"]], answer["removed_engines"]

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._address.url + path, data, method=method)
        request.add_header("Authorization", f"Bearer {self._address.token}")
        request.add_header("Content-Type", "application/json")
        # A proxy of the environment must not get the token.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=_ANSWER_S) as answer:
                return json.loads(answer.read(_MAX_ANSWER))
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        except (OSError, ValueError) as error:
            raise HubAwayError(
                f"{self._run.root}: the hub does not run, or this node cannot reach it: its "
                f"service at {self._address.url} does not answer ({error}); see relax-hpc status "
                f"{self._run.root}"
            ) from error

    def _refusal(self, error: urllib.error.HTTPError) -> RelaxError:
        try:
            content = json.loads(error.read(1 << 20))["error"]
            code, message = str(content["code"]), str(content["message"])
        except (OSError, ValueError, LookupError, TypeError):
            code, message = "bad_request", f"HTTP status {error.code}"
        if error.code in (429, 503):
            return HubAwayError(f"{self._run.root}: {message}; try again")
        return OperationRefused(code, message)


class HubClient:
    """Client of the hub itself."""

    def __init__(self, run: RunDir, config: Config, client: QueueClient) -> None:
        self._run, self._config, self._client = run, config, client

    def create(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        service = self._config.service
        limit_s = service.scale_out_timeout_s if kind == OUT else service.scale_in_timeout_s
        created = self._client.operations.create(kind, body, timeout_s=limit_s, timeout=_ANSWER_S)
        return describe_operation(self._await(created).operation)

    def get(self, kind: str, id: str) -> dict[str, Any]:
        return describe_operation(self._await(self._client.operations.get(id, timeout=_ANSWER_S)))

    def groups(self) -> tuple[list[str], list[str]]:
        present = self._await(self._client.operations.present(timeout=_ANSWER_S))
        return list(present.groups), list(present.without)

    def _await(self, future: Any) -> Any:
        try:
            return future.result(2 * _ANSWER_S)
        except OperationRefused:
            raise
        except (RelaxError, TimeoutError) as error:
            raise HubAwayError(
                f"{self._run.root}: the hub does not answer ({error}); see relax-hpc status "
                f"{self._run.root}"
            ) from error
