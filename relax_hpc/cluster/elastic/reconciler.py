"""The reconciler compares the engines that operations want with those that exist, and acts.

It runs in a thread of the supervisor of the hub's group, the only process that may submit jobs and
holds the lease. Each round starts from what exists (requests, ledger, Slurm), not from what the
reconciler did before. So any later supervisor continues an operation, and repeats nothing.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import fields

from relax_hpc.base.errors import RelaxError
from relax_hpc.cluster.elastic.members import RUNNING, GroupMembers, GroupState, StartRefusedError
from relax_hpc.cluster.elastic.removed_engines import RemovedEngines
from relax_hpc.cluster.supervise.requests import read_stop_request
from relax_hpc.cluster.supervise.supervisor import Supervisor
from relax_hpc.net.rendezvous.roster import latest_incarnation
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.client.operations import WantedState
from relax_hpc.queue.operations import (
    COMPLETED,
    CREATING,
    DRAINING,
    FAILED,
    HEALTH_CHECKING,
    OUT,
    Operation,
    group_of,
    is_external,
)

_ANSWER_S = 10.0
"""Seconds to wait for an answer of the hub."""
_REPORT_S = 2.0
"""Most seconds between two reports of the groups. A new hub has none of them."""
_FAILED_S = 30.0
"""Seconds until the next round after an error that should not occur."""
SUBMITTING = "submitting"
"""Identifier of a start that may have happened, in `Operation.jobs`."""


class Reconciler:
    """Brings operations about. ``pause_s``: least seconds between two rounds while an operation is
    unfinished. ``idle_s``: seconds for which the groups count as unchanged without operations."""

    def __init__(
        self,
        supervisor: Supervisor,
        group: str,
        members: GroupMembers,
        pause_s: float = 0.25,
        idle_s: float = 2.0,
    ) -> None:
        self._supervisor, self._group, self._members = supervisor, group, members
        self._pause_s, self._idle_s = pause_s, idle_s
        self._removed = RemovedEngines(supervisor.run, group)
        self._wanted = WantedState(revision=-1)
        self._groups: dict[str, GroupState] = {}
        self._looked_at = float("-inf")
        self._own_starts: set[tuple[str, str]] = set()
        """Operation and group of each start that this process has recorded as `SUBMITTING`."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name="reconciler", daemon=True)

    # -- the thread --------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def request_end(self) -> None:
        """Ask the thread to end. An operation that continues is taken over by the next
        supervisor."""
        self._closing.set()

    def close(self) -> None:
        """Wait until the thread has ended. The client of the supervisor is closed before."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _run_thread(self) -> None:
        failure = ""
        while not self._closing.is_set():
            try:
                if self._is_fenced():
                    return
                self.do_round()
                failure = ""
            except (RelaxError, OSError) as error:
                # The hub, Slurm or the disk does not answer. The next round tries again.
                if str(error) != failure and not self._closing.is_set():
                    failure = str(error)
                    print(f"reconciler: {failure}", flush=True)
                self._closing.wait(1.0)
            except Exception:
                # Without this thread, the operation would wait for its deadline, and so would all
                # later ones.
                if not self._closing.is_set():
                    print(f"reconciler: {traceback.format_exc().rstrip()}", flush=True)
                self._closing.wait(_FAILED_S)

    def _is_fenced(self) -> bool:
        """Whether a newer supervisor has taken over."""
        supervisor = self._supervisor
        newest = latest_incarnation(supervisor.run, supervisor.name)
        return supervisor.fenced or newest > supervisor.incarnation

    def _is_ending(self) -> bool:
        """Whether the run ends, so that no group may be started or ended here."""
        run = self._supervisor.run
        has_ended = run.finished.exists() or bool(read_stop_request(run))
        return bool(self._supervisor.interrupted) or has_ended

    def do_round(self) -> None:
        """Wait for a change, then compare and act once."""
        unfinished = self._wanted.operations
        wait_s = self._pause_s if unfinished else _REPORT_S
        change = self._client.operations.watch_change(self._wanted.revision, wait_s)
        self._wanted = change or self._wanted
        if self._is_fenced() or self._closing.is_set() or self._is_ending():
            return
        self._look()
        for operation in self._wanted.operations:
            self._handle(operation)
        self._report()

    @property
    def _client(self) -> QueueClient:
        client = self._supervisor.client
        assert client is not None, "the supervisor starts the reconciler after its client"
        return client

    # -- what exists -------------------------------------------------------------------------------

    def _look(self, now: bool = False) -> None:
        """Look which groups exist, if an operation is unfinished or the last look is old."""
        is_old = time.monotonic() - self._looked_at >= self._idle_s
        if now or is_old or self._wanted.operations:
            self._groups = self._members.groups()
            self._looked_at = time.monotonic()

    def _report(self) -> None:
        replicas, without = self._removed.read()
        ending = self._ending_groups()
        groups = {
            name: state.message(replicas)
            for name, state in self._groups.items()
            if name not in ending
        }
        report = self._client.operations.report_groups(groups, without, ending, timeout=_ANSWER_S)
        report.result(2 * _ANSWER_S)

    def _ending_groups(self) -> list[str]:
        """Groups that exist although an operation has removed all of their engines."""
        leaving = set[str]()
        for operation in self._wanted.operations:
            leaving.update(self._leaving(operation))
        return [name for name in self._groups if self._is_removed(name, leaving)]

    def _is_removed(self, group: str, leaving: set[str]) -> bool:
        if group == self._group:
            return False
        replicas, without = self._removed.read()
        names = {f"{group}/{number}" for number in range(replicas)} - set(without)
        return bool(names & leaving) and names <= leaving

    def _leaving(self, operation: Operation) -> list[str]:
        """Own engines that ``operation`` removes."""
        if operation.is_final:
            names = operation.leftover
        else:
            names = [] if operation.kind == OUT else operation.engines
        return [name for name in names if not is_external(name)]

    # -- operations --------------------------------------------------------------------------------

    def _handle(self, operation: Operation) -> None:
        own = [name for name in operation.engines if not is_external(name)]
        if operation.is_final:
            self._remove(operation, self._leaving(operation))
        elif own and operation.kind == OUT:
            self._add(operation, own)
        elif own:
            self._remove(operation, own)

    def _add(self, operation: Operation, engines: Sequence[str]) -> None:
        """Let engines of groups that exist serve again, and start missing groups."""
        missing = [
            name for name in dict.fromkeys(map(group_of, engines)) if name not in self._groups
        ]
        _, without = self._removed.read()
        # A group that starts has all of its engines.
        kept = [name for name in without if name not in engines and group_of(name) not in missing]
        self._removed.write(kept)
        for name in missing:
            if not self._start_missing(operation, name):
                return
        self._report_progress(operation, engines)

    def _start_missing(self, operation: Operation, name: str) -> bool:
        """Start a group that does not exist, unless it has failed. Returns whether the operation
        continues."""
        former = operation.jobs.get(name, "")
        if former not in ("", SUBMITTING):
            reason, detail = self._members.lost_reason(name, former)
            if reason:
                self._advance(operation, FAILED, reason=reason, detail=detail)
                return False
        if not former:
            # The intention is in the journal before the job exists. If this process is killed in
            # between, the next one looks for the job before it submits another one.
            self._own_starts.add((operation.id, name))
            self._advance(operation, CREATING, jobs={name: SUBMITTING})
        try:
            start = self._recover(operation, name) or self._members.start(operation, name)
        except StartRefusedError as error:
            self._advance(operation, FAILED, reason=error.reason, detail=str(error))
            return False
        except RelaxError as error:
            # After a timeout the job may exist.
            self._own_starts.discard((operation.id, name))
            self._advance(operation, CREATING, detail=str(error))
            return False
        # If the hub does not get this report, the next round looks for the job.
        self._own_starts.discard((operation.id, name))
        self._advance(operation, CREATING, jobs={name: start})
        return True

    def _recover(self, operation: Operation, name: str) -> str:
        """Identifier of a start whose outcome this process does not know; empty: none."""
        key = operation.id, name
        if operation.jobs.get(name) != SUBMITTING or key in self._own_starts:
            return ""
        start = self._members.recover(operation, name)
        self._own_starts.add(key)
        return start

    def _report_progress(self, operation: Operation, engines: Sequence[str]) -> None:
        groups = dict.fromkeys(map(group_of, engines))
        states = [self._groups[name] for name in groups if name in self._groups]
        waiting = [state for state in states if state.state != RUNNING]
        detail = "; ".join(state.detail for state in waiting if state.detail) or operation.detail
        expected = {state.name: state.expected_start for state in waiting if state.expected_start}
        jobs = {state.name: state.job for state in states if state.job}
        is_running = len(states) == len(groups) and not waiting
        state = HEALTH_CHECKING if is_running else CREATING
        self._advance(operation, state, detail=detail, jobs=jobs, expected_start=expected)

    def _remove(self, operation: Operation, engines: Sequence[str]) -> None:
        """Take engines out of groups that stay, and end groups of which no engine stays."""
        leaving = set(engines)
        groups = list(dict.fromkeys(map(group_of, engines)))
        ending = [name for name in groups if self._is_removed(name, leaving)]
        recovered = [name for name in ending if self._recover(operation, name)]
        present = [name for name in ending if name in (*self._groups, *recovered)]
        _, without = self._removed.read()
        kept = [name for name in without if group_of(name) not in ending]
        staying = [
            name
            for name in engines
            if group_of(name) not in ending and group_of(name) in self._groups
        ]
        self._removed.write({*kept, *staying})
        if not operation.is_final:
            self._advance(operation, DRAINING)
        for name in present:
            self._members.end(name, force=bool(operation.body.get("force")))
        if present:
            return
        # The next operation may begin when this one ends, so the hub must know the groups before.
        self._report()
        if operation.is_final:
            removed = self._client.operations.note_removed(
                operation.id, list(engines), timeout=_ANSWER_S
            )
            removed.result(2 * _ANSWER_S)
        elif set(operation.engines) <= set(operation.done):
            self._advance(operation, COMPLETED)

    def _advance(
        self,
        operation: Operation,
        state: str,
        reason: str = "",
        detail: str = "",
        jobs: dict[str, str] | None = None,
        expected_start: dict[str, float] | None = None,
    ) -> None:
        """Report progress to the hub, and take over its answer."""
        answer = self._client.operations.advance(
            operation.id,
            state,
            detail=detail,
            reason=reason,
            jobs=jobs,
            expected_start=expected_start,
            timeout=_ANSWER_S,
        ).result(2 * _ANSWER_S)
        for field in fields(Operation):
            setattr(operation, field.name, getattr(answer, field.name))
