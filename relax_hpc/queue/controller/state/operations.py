"""Operations, external engines and tokens of member processes; see `queue.operations`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relax_hpc.queue.controller.registry import applies
from relax_hpc.queue.controller.topics import OPERATIONS
from relax_hpc.queue.operations import (
    ACTIVE,
    FINAL,
    FIRST_EXTERNAL,
    LEFT,
    OUT,
    READY,
    ExternalEngine,
    MemberToken,
    Operation,
)

if TYPE_CHECKING:
    from relax_hpc.queue.controller.state.queue_state import QueueState

KEPT = 500
"""Number of operations that are kept. The oldest final ones are forgotten first."""


@dataclass(slots=True)
class Operations:
    """Operations by id, in the order of their creation, and what they have added."""

    by_id: dict[str, Operation] = field(default_factory=dict)
    external: dict[int, ExternalEngine] = field(default_factory=dict)
    """External engines by number. One that has left is forgotten with its operation."""
    tokens: dict[str, MemberToken] = field(default_factory=dict)
    count: int = 0
    """Number of operations so far."""
    next_external: int = FIRST_EXTERNAL
    token_count: int = 0
    revision: int = 0
    """Number of changes so far. A watcher passes it to wait for the next change."""

    def unfinished(self) -> list[Operation]:
        """Operations for which a process still has to do something."""
        return [operation for operation in self.by_id.values() if operation.is_unfinished]

    @property
    def has_open(self) -> bool:
        """Whether an operation has not ended. Only the newest one can be open."""
        newest = next(reversed(self.by_id.values()), None)
        return newest is not None and not newest.is_final

    def by_key(self, key: str) -> Operation | None:
        """The operation with an idempotency key."""
        if not key:
            return None
        return next((item for item in self.by_id.values() if item.key == key), None)

    def external_by_name(self, name: str) -> ExternalEngine | None:
        return next((item for item in self.external.values() if item.name == name), None)

    def wanted_external(self) -> list[ExternalEngine]:
        return [engine for engine in self.external.values() if engine.wanted]

    def forget_oldest(self) -> None:
        """Forget the oldest finished operations above `KEPT`, and engines that have left."""
        surplus = len(self.by_id) - KEPT
        for operation in list(self.by_id.values())[: max(0, surplus)]:
            if not operation.is_unfinished:
                del self.by_id[operation.id]
        for number, engine in list(self.external.items()):
            if engine.state == LEFT and not engine.wanted and engine.operation not in self.by_id:
                del self.external[number]

    def dump(self) -> Any:
        return (
            [operation.message() for operation in self.by_id.values()],
            [engine.message() for engine in self.external.values()],
            [token.message() for token in self.tokens.values()],
            (self.count, self.next_external, self.token_count, self.revision),
        )

    def load(self, values: Any) -> None:
        operations, external, tokens, numbers = values
        self.by_id = {item["id"]: Operation.from_message(item) for item in operations}
        self.external = {item["number"]: ExternalEngine.from_message(item) for item in external}
        self.tokens = {item["id"]: MemberToken.from_message(item) for item in tokens}
        self.count, self.next_external, self.token_count, self.revision = numbers


def _note_change(state: QueueState) -> None:
    state.operations.revision += 1
    state.woken.add(OPERATIONS)


@applies("operation_new")
def add_operation(
    state: QueueState, operation: dict[str, Any], external: list[dict[str, Any]]
) -> None:
    """Add an operation, and the external engines that it adds."""
    operations, new = state.operations, Operation.from_message(operation)
    operations.by_id[new.id] = new
    operations.count += 1
    for message in external:
        engine = ExternalEngine.from_message(message)
        operations.external[engine.number] = engine
        operations.next_external = max(operations.next_external, engine.number + 1)
    if new.kind != OUT:
        _stop_wanting(state, new.engines)
    operations.forget_oldest()
    _note_change(state)


@applies("operation_state")
def change_operation(
    state: QueueState, id: str, at: float, state_name: str, changes: dict[str, Any]
) -> None:
    """Move an operation to ``state_name``. ``changes``: new values of its fields."""
    operation = state.operations.by_id[id]
    for name, value in changes.items():
        setattr(operation, name, value)
    if state_name != operation.state:
        if state_name == ACTIVE and operation.state != READY:
            operation.history.append([READY, at])
        operation.history.append([state_name, at])
        operation.state = state_name
    operation.updated_at = at
    if operation.state in FINAL[operation.kind] and operation.kind == OUT:
        _stop_wanting(state, [name for name in operation.engines if name not in operation.done])
    _note_change(state)


def _stop_wanting(state: QueueState, names: list[str]) -> None:
    for engine in state.operations.external.values():
        if engine.name in names:
            engine.wanted = False


@applies("engine_state")
def change_engine(state: QueueState, number: int, changes: dict[str, Any]) -> None:
    """Change fields of an external engine."""
    engine = state.operations.external[number]
    for name, value in changes.items():
        setattr(engine, name, value)
    if engine.state == LEFT:
        # Its name is never used again.
        state.weights.readers.pop(engine.name, None)
    state.operations.forget_oldest()
    _note_change(state)


@applies("member_token")
def add_token(state: QueueState, token: dict[str, Any]) -> None:
    new = MemberToken.from_message(token)
    state.operations.tokens[new.id] = new
    state.operations.token_count += 1
    _note_change(state)


@applies("member_token_revoked")
def revoke_token(state: QueueState, id: str) -> None:
    state.operations.tokens[id].revoked = True
    _note_change(state)
