"""Requests about operations that change the engines of the run; see `queue.operations`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from relax_hpc.base.versions import Version
from relax_hpc.queue.controller.messages import Refused, Request, check_size
from relax_hpc.queue.controller.planning.operation_progress import (
    Change,
    advance_operation,
    follow_engines,
)
from relax_hpc.queue.controller.planning.operations import PresentEngines, plan_operation
from relax_hpc.queue.controller.registry import handles
from relax_hpc.queue.controller.topics import OPERATIONS
from relax_hpc.queue.controller.waiting import NotYet
from relax_hpc.queue.operations import (
    CANCELLABLE,
    CANCELLED,
    ENGINE_STATES,
    JOINING,
    LEFT,
    OUT,
    PHASES,
    ExternalEngine,
    MemberToken,
    Operation,
    OperationRefused,
    is_external,
)
from relax_hpc.queue.plan import SUPERVISOR

if TYPE_CHECKING:
    from relax_hpc.queue.controller.service import QueueService
    from relax_hpc.queue.controller.state.queue_state import QueueState

_NOTHING = Version(0, 0)
"""Version of a reader that serves no weights."""
_MAX_TEXT = 500
"""Most characters of a detail that is journaled."""
# Defaults of arguments. Handlers never modify them.
NO_MAP: dict[str, Any] = {}
NO_NUMBERS: dict[str, float] = {}
NO_NAMES: list[str] = []


class ReportedGroups:
    """Groups with engines, as the supervisor of the hub's group last reported them. They are not in
    the journal: the supervisor reports them again after a restart of the hub."""

    def __init__(self) -> None:
        self.present: PresentEngines | None = None
        self.content: dict[str, Any] = {}
        """The report, for clients: state, job and expected start of each group."""


def _refuse(code: str, message: str) -> dict[str, Any]:
    return {"refused": code, "message": message}


def serving_engines(state: QueueState) -> set[str]:
    """Readers that serve a version of the weights."""
    readers = state.weights.readers.items()
    return {name for name, (_, version) in readers if version != _NOTHING}


def _record_change(service: QueueService, operation: Operation, change: Change) -> None:
    service.record(
        op="operation_state",
        id=operation.id,
        at=time.time(),
        state_name=change.state,
        changes=change.changes,
    )


def update_operations(service: QueueService) -> None:
    """Move operations whose engines have changed or whose deadline has passed."""
    state = service.state
    for operation in state.operations.unfinished():
        external = {engine.name: engine for engine in state.operations.external.values()}
        change = follow_engines(operation, serving_engines(state), external, time.time())
        if change:
            _record_change(service, operation, change)


@handles("operation_create")
def create(
    service: QueueService, request: Request, kind: str, body: dict, timeout_s: float, key: str = ""
) -> Any:
    """Create an operation. The answer has the operation, and whether it is new; or a refusal with
    its code."""
    check_size("operation_create", body)
    present = service.reported_groups.present
    if present is None:
        return _refuse("hub_away", "the supervisor of the run has not reported its engines yet")
    state, plan = service.state.operations, service.plan.engine_plan
    if not plan.group:
        return _refuse("bad_request", "the run has no engines: its rows come from files")
    if service.state.progress.finished():
        return _refuse("bad_request", "the run is finished")
    try:
        planned = plan_operation(
            state, present, plan, kind, body, key, now=time.time(), timeout_s=timeout_s
        )
    except OperationRefused as refusal:
        return _refuse(refusal.code, str(refusal))
    operation = planned.operation
    if planned.is_new and not body.get("dry_run"):
        service.record(
            op="operation_new",
            operation=operation.message(),
            external=[engine.message() for engine in planned.external],
        )
        update_operations(service)
    return {"operation": operation.message(), "created": planned.is_new}


@handles("operation_cancel")
def cancel(service: QueueService, request: Request, id: str) -> Any:
    """Cancel a scale-out that has not started its engines yet."""
    operation = service.state.operations.by_id.get(id)
    if operation is None:
        return _refuse("unknown_operation", f"found {id!r:.80}, which is no operation of this run")
    if operation.state == CANCELLED:
        return {"operation": operation.message()}
    if operation.kind != OUT or operation.state not in CANCELLABLE:
        text = f"{id} is {operation.state}, allowed: a scale-out that is {', '.join(CANCELLABLE)}"
        return _refuse("too_late", text)
    own = [name for name in operation.engines if not is_external(name)]
    change = Change(CANCELLED, {"leftover": own, "done": []})
    _record_change(service, operation, change)
    return {"operation": operation.message()}


@handles("operation_get")
def get(service: QueueService, request: Request, id: str) -> Any:
    """One operation."""
    operation = service.state.operations.by_id.get(id)
    if operation is None:
        return _refuse("unknown_operation", f"found {id!r:.80}, which is no operation of this run")
    return {"operation": operation.message()}


@handles("operation_list")
def list_operations(
    service: QueueService, request: Request, kind: str = "", states: list[str] = NO_NAMES
) -> Any:
    """Operations of a kind in some states, oldest first; empty: all."""
    chosen = [
        operation.message()
        for operation in service.state.operations.by_id.values()
        if kind in ("", operation.kind) and (not states or operation.state in states)
    ]
    return {"operations": chosen}


@handles("operations_watch")
def watch(service: QueueService, request: Request, revision: int) -> Any:
    """Answer when operations, external engines or tokens have changed since ``revision``."""
    operations = service.state.operations
    if operations.revision == revision:
        raise NotYet(OPERATIONS, "waits for an operation")
    return {
        "revision": operations.revision,
        "operations": [operation.message() for operation in operations.unfinished()],
        "external": [engine.message() for engine in operations.external.values()],
        "tokens": [token.message() for token in operations.tokens.values() if not token.revoked],
    }


@handles("operation_advance")
def advance(
    service: QueueService,
    request: Request,
    id: str,
    state: str,
    detail: str = "",
    reason: str = "",
    jobs: dict = NO_MAP,
    expected_start: dict[str, float] = NO_NUMBERS,
) -> Any:
    """Report the progress of an operation. A final state never changes."""
    check_size("operation_advance", jobs)
    operation = service.state.operations.by_id.get(id)
    if operation is None:
        return _refuse("unknown_operation", f"found {id!r:.80}, which is no operation of this run")
    if operation.is_final:
        return {"operation": operation.message()}
    changes = {
        "detail": detail[:_MAX_TEXT],
        "reason": reason[:_MAX_TEXT],
        "jobs": {**operation.jobs, **jobs},
        "expected_start": dict(expected_start),
    }
    try:
        change = advance_operation(operation, state, changes)
    except OperationRefused as refusal:
        return _refuse(refusal.code, str(refusal))
    now_equal = all(getattr(operation, name) == value for name, value in change.changes.items())
    if change.state != operation.state or not now_equal:
        _record_change(service, operation, change)
    return {"operation": operation.message()}


@handles("operation_removed")
def note_removed(service: QueueService, request: Request, id: str, engines: list[str]) -> Any:
    """Report that engines which an ended operation had started are removed."""
    operation = service.state.operations.by_id.get(id)
    if operation is not None and operation.is_final:
        leftover = [name for name in operation.leftover if name not in engines]
        if leftover != operation.leftover:
            _record_change(service, operation, Change(operation.state, {"leftover": leftover}))
    return {}


@handles("engines_report")
def report_groups(
    service: QueueService,
    request: Request,
    groups: dict,
    without: list[str] = NO_NAMES,
    taken: list[str] = NO_NAMES,
) -> Any:
    """Receive the groups that have engines, from the supervisor of the hub's group: by name, the
    number of `engines`, and `state`, `job`, `expected_start` for people."""
    if request.owner[0] != SUPERVISOR and not request.owner[0].startswith(f"{SUPERVISOR}-"):
        raise Refused("refused", f"engines_report: not for {request.owner[0]}")
    counts = {}
    for name, group in groups.items():
        count = group.get("engines") if isinstance(group, dict) else None
        if type(name) is not str or type(count) is not int or not 0 <= count <= 4096:
            raise Refused("refused", f"engines_report: found {name!r:.80}, expected engines")
        counts[name] = count
    reported = service.reported_groups
    reported.present = PresentEngines(counts, frozenset(without), frozenset(taken))
    reported.content = {"groups": groups, "without": without, "ending": taken}
    return {}


@handles("engines_present")
def present_engines(service: QueueService, request: Request) -> Any:
    """The last report of `engines_report`, and the external engines."""
    external = service.state.operations.external.values()
    return {
        **service.reported_groups.content,
        "is_reported": service.reported_groups.present is not None,
        "external": [engine.message() for engine in external],
    }


@handles("engine_report")
def report_engine(
    service: QueueService,
    request: Request,
    name: str,
    state: str,
    phase: str = "",
    reason: str = "",
    detail: str = "",
    next_try: float = 0.0,
) -> Any:
    """Report the state of an external engine. An engine that is not wanted any more and has left
    does not change."""
    engine = service.state.operations.external_by_name(name)
    if engine is None:
        return _refuse("unknown_engine", f"found {name!r:.80}, which is no external engine")
    if state not in ENGINE_STATES:
        raise Refused("refused", f"engine_report: state: found {state!r:.40}")
    if state == JOINING and phase not in PHASES:
        raise Refused("refused", f"engine_report: phase: found {phase!r:.40}")
    if engine.state == LEFT and not engine.wanted:
        return {"wanted": False}
    _record_engine(service, engine, state, phase, reason, detail, next_try)
    return {"wanted": engine.wanted}


def _record_engine(
    service: QueueService,
    engine: ExternalEngine,
    state: str,
    phase: str,
    reason: str,
    detail: str,
    next_try: float,
) -> None:
    changes: dict[str, Any] = {
        "state": state,
        "phase": phase if state == JOINING else "",
        "reason": reason[:_MAX_TEXT],
        "detail": detail[:_MAX_TEXT],
        "next_try": next_try,
    }
    if state != engine.state:
        changes["since"] = time.time()
    if state == LEFT:
        changes["wanted"] = False
    if all(getattr(engine, name) == value for name, value in changes.items()):
        return
    service.record(op="engine_state", number=engine.number, changes=changes)
    update_operations(service)


@handles("member_token_add")
def add_token(service: QueueService, request: Request, digest: str, label: str = "") -> Any:
    """Add a token of member processes, by its digest; the answer has its id."""
    operations = service.state.operations
    # After a restart of the hub, the client repeats a request whose answer it has not received. A
    # second token with this digest would remain valid when one of them is revoked.
    for former in operations.tokens.values():
        if former.digest == digest[:_MAX_TEXT]:
            return {"id": former.id}
    token = MemberToken(
        id=f"mt-{operations.token_count + 1:06d}",
        digest=digest[:_MAX_TEXT],
        label=label[:_MAX_TEXT],
        created_at=time.time(),
    )
    service.record(op="member_token", token=token.message())
    return {"id": token.id}


@handles("member_token_revoke")
def revoke_token(service: QueueService, request: Request, id: str) -> Any:
    """Revoke a token. Its members can do nothing any more."""
    token = service.state.operations.tokens.get(id)
    if token is None:
        return _refuse("unknown_token", f"found {id!r:.80}, which is no token of this run")
    if not token.revoked:
        service.record(op="member_token_revoked", id=id)
    return {}
