"""Operations that change the engines of a run: scale out and scale in, as a client requests them.

An operation is a part of the queue's journal, so that it survives every process. The hub checks a
request and decides which engines it concerns. The reconciler in the supervisor of the hub's group
(`cluster/elastic/reconciler.py`) and the rollout process bring the wanted state about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from relax_hpc.base.errors import RelaxError

Kind = Literal["scale_out", "scale_in"]
OUT, IN = "scale_out", "scale_in"
PENDING, CREATING, CONNECTING = "PENDING", "CREATING", "CONNECTING"
HEALTH_CHECKING, PREFLIGHT, WEIGHT_SYNCING = "HEALTH_CHECKING", "PREFLIGHT", "WEIGHT_SYNCING"
READY, ACTIVE, PARTIAL, CANCELLED, NOOP = "READY", "ACTIVE", "PARTIAL", "CANCELLED", "NOOP"
DRAINING, REMOVING, COMPLETED, FAILED = "DRAINING", "REMOVING", "COMPLETED", "FAILED"
FORWARD = {
    OUT: (PENDING, CREATING, CONNECTING, HEALTH_CHECKING, PREFLIGHT, WEIGHT_SYNCING, READY),
    IN: (PENDING, DRAINING, REMOVING),
}
"""States of an operation that continues, by its kind, in their order."""
FINAL = {OUT: (ACTIVE, PARTIAL, FAILED, CANCELLED, NOOP), IN: (COMPLETED, FAILED, NOOP)}
"""States in which an operation stays."""
CANCELLABLE = (PENDING, CREATING, CONNECTING)
"""States in which a scale-out can be cancelled."""
PHASES = (CONNECTING, HEALTH_CHECKING, PREFLIGHT, WEIGHT_SYNCING)
"""Phases of an external engine that joins."""
JOINING, SERVING, ENGINE_DRAINING, LOST, LEFT = "joining", "active", "draining", "lost", "left"
ENGINE_STATES = (JOINING, SERVING, ENGINE_DRAINING, LOST, LEFT)
FIRST_EXTERNAL = 1000
"""Smallest number of an external engine. A number is never used for two engines."""


class OperationRefused(RelaxError):
    """The hub refused a request about operations; ``code``: one of the codes of the API."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True, kw_only=True)
class Operation:
    """One operation. Times are wall-clock seconds. The names of the fields are keys of messages."""

    id: str
    kind: str
    body: dict[str, Any]
    created_at: float
    deadline_at: float
    key: str = ""
    """Idempotency key of the client; empty: it sent none."""
    digest: str = ""
    """Digest of kind and body, by which a repeated request is recognised."""
    engines: list[str] = field(default_factory=list)
    """Engines that are added or removed, as GROUP/NUMBER."""
    state: str = PENDING
    reason: str = ""
    """Code of a failure, such as `timeout`; empty: it has not failed."""
    detail: str = ""
    updated_at: float = 0.0
    done: list[str] = field(default_factory=list)
    """Engines among `engines` that serve, or that have left."""
    leftover: list[str] = field(default_factory=list)
    """Engines that an operation which failed or was cancelled has started, and that still have to
    be removed. Until then no other operation begins."""
    jobs: dict[str, str] = field(default_factory=dict)
    """Slurm job of each group that the operation starts."""
    expected_start: dict[str, float] = field(default_factory=dict)
    """Slurm's expected start of each group whose job is pending."""
    history: list[list[Any]] = field(default_factory=list)
    """State, and the time at which the operation entered it."""

    @property
    def is_final(self) -> bool:
        return self.state in FINAL[self.kind]

    @property
    def is_unfinished(self) -> bool:
        """Whether a process still has to do something for it."""
        return not self.is_final or bool(self.leftover)

    def message(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Operation:
        """The operation in a message; keys of newer code are ignored."""
        return cls(**{name: message[name] for name in cls.__slots__ if name in message})


@dataclass(slots=True, kw_only=True)
class ExternalEngine:
    """An engine that was started elsewhere. The names of the fields are keys of messages."""

    number: int
    name: str
    """GROUP/NUMBER, its name as a reader of weights."""
    operation: str
    """Operation that added it."""
    url: str = ""
    """Address of the engine; empty: a member process connects it."""
    member: str = ""
    """Member process on the engine's node; empty: the rollout process reaches the engine itself."""
    token: str = ""
    """Id of the token of the member."""
    wanted: bool = True
    state: str = JOINING
    phase: str = CONNECTING
    reason: str = ""
    """Code of its last failure, such as `model_mismatch`."""
    detail: str = ""
    since: float = 0.0
    """Wall-clock time at which it entered its state."""
    next_try: float = 0.0
    """Wall-clock time of the next attempt to reach it, in state lost."""

    def message(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> ExternalEngine:
        """The engine in a message; keys of newer code are ignored."""
        return cls(**{name: message[name] for name in cls.__slots__ if name in message})


@dataclass(slots=True, kw_only=True)
class MemberToken:
    """Token of member processes. The hub knows only its digest."""

    id: str
    digest: str
    label: str = ""
    created_at: float = 0.0
    revoked: bool = False

    def message(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> MemberToken:
        """The token in a message; keys of newer code are ignored."""
        return cls(**{name: message[name] for name in cls.__slots__ if name in message})


def group_of(engine: str) -> str:
    """The group of an engine.

    >>> group_of("rollout-2/3")
    'rollout-2'
    """
    return engine.rpartition("/")[0]


def number_of(engine: str) -> int:
    """The number of an engine in its group.

    >>> number_of("rollout-2/3")
    3
    """
    return int(engine.rpartition("/")[2])


def is_external(engine: str) -> bool:
    """Whether ``engine`` was started elsewhere."""
    return number_of(engine) >= FIRST_EXTERNAL
