"""Progress of operations: what follows for one from the states of its engines, from its deadline,
and from reports of the reconciler. All functions only read their arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_hpc.queue.operations import (
    ACTIVE,
    COMPLETED,
    DRAINING,
    ENGINE_DRAINING,
    FAILED,
    FINAL,
    FORWARD,
    IN,
    JOINING,
    LEFT,
    LOST,
    OUT,
    PARTIAL,
    PENDING,
    PHASES,
    REMOVING,
    SERVING,
    ExternalEngine,
    Operation,
    OperationRefused,
    is_external,
)


@dataclass(frozen=True, slots=True)
class Change:
    """New state of an operation, and new values of its fields."""

    state: str
    changes: dict[str, Any]


def follow_engines(
    operation: Operation,
    serving: Collection[str],
    external: Mapping[str, ExternalEngine],
    now: float,
) -> Change | None:
    """The change of an operation that follows from its engines and its deadline; None:
    nothing. ``serving``: engines that serve a version."""
    if operation.is_final:
        return None
    follow = _follow_joining if operation.kind == OUT else _follow_leaving
    change = follow(operation, serving, external)
    if change.state not in FINAL[operation.kind] and now >= operation.deadline_at:
        done = change.changes["done"]
        return end_operation(operation, done, "timeout", _describe_timeout(operation, done))
    if change.state == operation.state and not _differs(operation, change):
        return None
    return change


def _describe_timeout(operation: Operation, done: Sequence[str]) -> str:
    seconds = operation.deadline_at - operation.created_at
    verb = "serve" if operation.kind == OUT else "have left"
    count = len(operation.engines)
    return f"{len(done)} of {count} engines {verb} after {seconds:.0f} s"


def _differs(operation: Operation, change: Change) -> bool:
    return any(getattr(operation, name) != value for name, value in change.changes.items())


def end_operation(operation: Operation, done: Sequence[str], reason: str, detail: str) -> Change:
    """The end of an operation that did not reach its goal."""
    # External engines leave by themselves when they are not wanted any more.
    internal = [name for name in operation.engines if not is_external(name)]
    remaining = [name for name in internal if name not in done]
    changes: dict[str, Any] = {"reason": reason, "detail": detail, "done": list(done)}
    if operation.kind == IN:
        return Change(FAILED, changes)
    return Change(PARTIAL if done else FAILED, {**changes, "leftover": remaining})


def _follow_joining(
    operation: Operation, serving: Collection[str], external: Mapping[str, ExternalEngine]
) -> Change:
    done, failed, phases = list[str](), list[ExternalEngine](), list[int]()
    for name in operation.engines:
        engine = external.get(name)
        if engine is None:
            if name in serving:
                done.append(name)
        elif engine.state == SERVING:
            done.append(name)
        elif engine.state == LEFT:
            failed.append(engine)
        elif engine.state == JOINING:
            phases.append(PHASES.index(engine.phase))
    if len(done) == len(operation.engines):
        return Change(ACTIVE, {"done": done})
    if failed and len(done) + len(failed) == len(operation.engines):
        return end_operation(operation, done, failed[0].reason or "left", failed[0].detail)
    state = operation.state
    if phases and operation.engines and all(name in external for name in operation.engines):
        state = _later(operation, PHASES[min(phases)])
    return Change(state, {"done": done})


def _follow_leaving(
    operation: Operation, serving: Collection[str], external: Mapping[str, ExternalEngine]
) -> Change:
    done, draining = list[str](), False
    for name in operation.engines:
        engine = external.get(name)
        if engine is None:
            if name not in serving and not is_external(name):
                done.append(name)
        elif engine.state in (LEFT, LOST) and not engine.wanted:
            done.append(name)
        else:
            draining |= engine.state == ENGINE_DRAINING
    if all(map(is_external, operation.engines)):
        gone = [name for name in operation.engines if name in done or name not in external]
        if len(gone) == len(operation.engines):
            return Change(COMPLETED, {"done": gone})
    if operation.state == PENDING:
        state = DRAINING if draining else PENDING
    else:
        state = REMOVING if len(done) == len(operation.engines) else operation.state
    return Change(state, {"done": done})


def _later(operation: Operation, state: str) -> str:
    """The later one of the operation's state and ``state``."""
    order = FORWARD[operation.kind]
    return max(operation.state, state, key=order.index)


def advance_operation(operation: Operation, state: str, changes: Mapping[str, Any]) -> Change:
    """The change that a report of the reconciler makes. States only go forward. OperationRefused:
    the operation has no such state."""
    order = FORWARD[operation.kind]
    ends = (FAILED,) if operation.kind == OUT else (COMPLETED, FAILED)
    if state not in (*order, *ends):
        allowed = ", ".join((*order, *ends))
        raise OperationRefused("bad_request", f"state: found {state!r:.40}, allowed: {allowed}")
    new = {name: value for name, value in changes.items() if value not in (None, "")}
    if state == FAILED:
        reason, detail = new.get("reason", "failed"), new.get("detail", "")
        ended = end_operation(operation, operation.done, reason, detail)
        return Change(ended.state, {**new, **ended.changes})
    if state in order:
        state = _later(operation, state)
    return Change(state, new)
