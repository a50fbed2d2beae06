"""Groups of engines as processes of one machine, which one supervisor starts and ends."""

from __future__ import annotations

import contextlib

from relax_hpc.cluster.elastic.members import RUNNING, WAITING, GroupState
from relax_hpc.cluster.supervise import requests
from relax_hpc.cluster.supervise.supervisor import Supervisor
from relax_hpc.config.groups import base_name
from relax_hpc.queue.operations import Operation


class LocalMembers:
    """Members of ``group`` under ``supervisor``. Its own thread serves the requests."""

    def __init__(self, supervisor: Supervisor, group: str) -> None:
        self._supervisor, self._group = supervisor, group
        self._run = supervisor.run

    def groups(self) -> dict[str, GroupState]:
        # In this order: the supervisor adds a group to its table before it answers the request, so
        # that a group that starts is always in one of both.
        pending, table = self._pending(), self._supervisor.table
        names = [name for name in table.names if base_name(name, {self._group})]
        starting = [
            request.group
            for request in pending
            if request.op == "start" and request.group not in names
        ]
        states = {}
        for name in dict.fromkeys([self._group, *names, *starting]):
            state = RUNNING if name in table.supervised else WAITING
            states[name] = GroupState(name, state)
        return states

    def start(self, operation: Operation, name: str) -> str:
        self._request("start", name)
        return self._attempt_name()

    def recover(self, operation: Operation, name: str) -> str:
        # A request of an earlier supervisor is a file that `groups` finds.
        return ""

    def end(self, name: str, force: bool) -> None:
        self._request("release", name)

    def lost_reason(self, name: str, start: str) -> tuple[str, str]:
        if start != self._attempt_name():
            # The run was resumed. Its supervisor starts only the configured groups.
            return "", ""
        with contextlib.suppress(OSError):
            error = self._supervisor.failures.repeated_start_error(name)
            if error:
                return "start_failed", error
        return "start_failed", f"{name} has ended; see its logs"

    def _attempt_name(self) -> str:
        return f"attempt {self._supervisor.failures.attempt}"

    def _pending(self) -> list[requests.GroupRequest]:
        return requests.pending_requests(
            self._run, lambda name: bool(base_name(name, {self._group}))
        )

    def _request(self, op: str, name: str) -> None:
        """Send a request to the supervisor, unless an equal one is not answered yet."""
        pending = [request.op for request in self._pending() if request.group == name]
        # The supervisor may have served a request since the last look at the groups.
        exists = name in self._supervisor.table.names or "start" in pending
        if op in pending or exists == (op == "start"):
            return
        requests.send_request(self._run, op, name)
        self._supervisor.wakeups.wake()
