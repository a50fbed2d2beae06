"""Requests about operations that change the engines of the run; see `queue.operations`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from relax_hpc.base.errors import DeadlineError
from relax_hpc.queue.client.connection import Submit, ignore_answer, then
from relax_hpc.queue.operations import ExternalEngine, MemberToken, Operation, OperationRefused

Answer = Mapping[str, Any]
Output = TypeVar("Output")


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedState:
    """Operations and engines that a watcher has to bring about."""

    revision: int
    operations: Sequence[Operation] = ()
    """Operations for which a process still has to do something."""
    external: Sequence[ExternalEngine] = ()
    """External engines, also those that are not wanted any more."""
    tokens: Sequence[MemberToken] = ()
    """Tokens of members that are not revoked."""

    @classmethod
    def from_answer(cls, answer: Answer) -> WantedState:
        return cls(
            revision=answer["revision"],
            operations=[Operation.from_message(item) for item in answer["operations"]],
            external=[ExternalEngine.from_message(item) for item in answer["external"]],
            tokens=[MemberToken.from_message(item) for item in answer["tokens"]],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedOperation:
    """Answer to a request for an operation."""

    operation: Operation
    created: bool
    """Whether the request created it. Otherwise an equal request did so before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentReport:
    """Groups with engines as the supervisor of the hub's group last reported them."""

    is_reported: bool
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name: `engines`, their number; `state`, `job`, `expected_start`."""
    without: Sequence[str] = ()
    """Engines that were removed from these groups."""
    ending: Sequence[str] = ()
    external: Sequence[ExternalEngine] = ()

    @classmethod
    def from_answer(cls, answer: Answer) -> PresentReport:
        names = ("is_reported", "groups", "without", "ending")
        values = {name: answer[name] for name in names if name in answer}
        external = [ExternalEngine.from_message(item) for item in answer["external"]]
        return cls(**values, external=external)


def _checked(answer: Answer) -> Answer:
    if "refused" in answer:
        raise OperationRefused(answer["refused"], answer["message"])
    return answer


class OperationRequests:
    """Requests of the API, the reconciler and the rollout process. Every method returns a future,
    which raises OperationRefused with a code if the hub refuses the request."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit

    def _request(
        self,
        read: Callable[[Answer], Output],
        op: str,
        timeout: float | None = None,
        **args: Any,
    ) -> Future[Output]:
        return then(self._submit(op, timeout, **args), lambda answer: read(_checked(answer)))

    # -- clients of the API ------------------------------------------------------------------------

    def create(
        self,
        kind: str,
        body: Mapping[str, Any],
        key: str = "",
        timeout_s: float = 1800.0,
        timeout: float | None = None,
    ) -> Future[CreatedOperation]:
        """Create an operation. ``timeout_s``: seconds until it ends, unless the body has
        `timeout_secs`. ``timeout``: seconds to wait for the answer."""
        args = {"kind": kind, "body": dict(body), "key": key, "timeout_s": timeout_s}
        return self._request(
            lambda answer: CreatedOperation(
                operation=Operation.from_message(answer["operation"]), created=answer["created"]
            ),
            "operation_create",
            timeout,
            **args,
        )

    def cancel(self, id: str, timeout: float | None = None) -> Future[Operation]:
        return self._request(_operation, "operation_cancel", timeout, id=id)

    def get(self, id: str, timeout: float | None = None) -> Future[Operation]:
        return self._request(_operation, "operation_get", timeout, id=id)

    def list(
        self, kind: str = "", states: Sequence[str] = (), timeout: float | None = None
    ) -> Future[Sequence[Operation]]:
        """Operations of a kind in some states, oldest first; empty: all."""
        return self._request(
            lambda answer: [Operation.from_message(item) for item in answer["operations"]],
            "operation_list",
            timeout,
            kind=kind,
            states=[*states],
        )

    def present(self, timeout: float | None = None) -> Future[PresentReport]:
        """Groups with engines, and external engines."""
        return self._request(PresentReport.from_answer, "engines_present", timeout)

    # -- processes that bring the wanted state about -----------------------------------------------

    def watch(self, revision: int, timeout: float | None = None) -> Future[WantedState]:
        """The wanted state, as soon as it differs from ``revision``. With -1 it is the present one.
        DeadlineError: it has not changed within ``timeout`` seconds."""
        return self._request(
            WantedState.from_answer, "operations_watch", timeout, revision=revision
        )

    def watch_change(self, revision: int, timeout: float) -> WantedState | None:
        """Wait for a change since ``revision``; None: there was none within ``timeout`` seconds."""
        try:
            return self.watch(revision, timeout).result()
        except DeadlineError:
            return None

    def advance(
        self,
        id: str,
        state: str,
        detail: str = "",
        reason: str = "",
        jobs: Mapping[str, str] | None = None,
        expected_start: Mapping[str, float] | None = None,
        timeout: float | None = None,
    ) -> Future[Operation]:
        """Report the progress of an operation. States only go forward."""
        args: dict[str, Any] = {"id": id, "state": state, "detail": detail, "reason": reason}
        args |= {"jobs": dict(jobs or {}), "expected_start": dict(expected_start or {})}
        return self._request(_operation, "operation_advance", timeout, **args)

    def note_removed(
        self, id: str, engines: Sequence[str], timeout: float | None = None
    ) -> Future[None]:
        """Report that engines which an ended operation had started are removed."""
        return self._request(ignore_answer, "operation_removed", timeout, id=id, engines=[*engines])

    def report_groups(
        self,
        groups: Mapping[str, Mapping[str, Any]],
        without: Sequence[str] = (),
        taken: Sequence[str] = (),
        timeout: float | None = None,
    ) -> Future[None]:
        """Report the groups that have engines; see `PresentReport`."""
        args = {"groups": {name: dict(group) for name, group in groups.items()}}
        return self._request(
            ignore_answer, "engines_report", timeout, **args, without=[*without], taken=[*taken]
        )

    def report_engine(
        self,
        name: str,
        state: str,
        phase: str = "",
        reason: str = "",
        detail: str = "",
        next_try: float = 0.0,
        timeout: float | None = None,
    ) -> Future[bool]:
        """Report the state of an external engine: whether it is still wanted. ``phase``: of one
        that joins. ``next_try``: wall-clock time, of one that is lost. An engine that reports
        `left` is not wanted any more."""
        return self._request(
            lambda answer: answer["wanted"],
            "engine_report",
            timeout,
            name=name,
            state=state,
            phase=phase,
            reason=reason,
            detail=detail,
            next_try=next_try,
        )

    # -- tokens of members -------------------------------------------------------------------------

    def add_token(self, digest: str, label: str = "", timeout: float | None = None) -> Future[str]:
        """Add a token of member processes by its digest; its id."""
        return self._request(
            lambda answer: answer["id"], "member_token_add", timeout, digest=digest, label=label
        )

    def revoke_token(self, id: str, timeout: float | None = None) -> Future[None]:
        """Revoke a token: its members can do nothing any more."""
        return self._request(ignore_answer, "member_token_revoke", timeout, id=id)


def _operation(answer: Answer) -> Operation:
    return Operation.from_message(answer["operation"])
