"""Messages of clients: their parts have the types and sizes that they should have, or they are
refused."""

from __future__ import annotations

import inspect
import reprlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack

from relax_hpc.net.transport.wire import BadMessage
from relax_hpc.queue.controller.planning.acceptance import Row
from relax_hpc.queue.lengths import is_packed
from relax_hpc.queue.records import Cause, Owner
from relax_hpc.queue.row_ids import MAX_ROWS

Args = dict[str, Any]
MAX_WHOLE = 1 << 53
"""Bound below which whole numbers in messages lie."""
MAX_TEXT = 4096
"""Longest text in a message, characters."""
MAX_OPAQUE_BYTES = 16 << 10
"""Bytes of what is passed on as it is, at most: a shard's descriptor, and what a member says of
itself."""
MAX_OPAQUE_DEPTH = 8
"""Levels of maps and lists in each other, at most: far from the limits of msgpack, also within
other messages."""
_MAX_PATIENCE_S = 1e9
_ROW, _WHOLE = ("ticket", "episodes", "lengths", "versions"), frozenset([int])


class Refused(Exception):
    """A request that breaks a rule; the client gets `kind` and the message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True, eq=False)
class Request:
    """One message of a client, with where to send the answer. Times are of the monotonic clock,
    seconds."""

    peer: int
    id: int
    key: str
    owner: Owner
    op: str
    args: Args
    since: float
    deadline: float
    topic: str = ""
    """Topic that it waits for, one of `controller.topics`; empty: it was not tried yet."""
    why: str = ""
    """Cause of the wait in words for people; empty: the topic says enough."""
    common: bool = False
    """Whether no request that waits for the same can be answered either."""
    cause: Cause = ("", "")
    """Role that it has waited for since it was last tried, and why."""
    tried: float = 0.0
    waited: dict[Cause, float] = field(default_factory=dict)
    """Seconds that it has waited, by cause, in the order in which the causes came."""
    may_stand_s: float = 0.0
    """Seconds by which its deadline may be put off because others are not there."""
    paused_s: float = 0.0
    """Seconds for which clocks had stood when it came; see `Presence`."""

    def put_down(self) -> None:
        """Put the time since it was last tried down to `cause`."""
        now = time.monotonic()
        if self.tried:
            self.waited[self.cause] = self.waited.get(self.cause, 0.0) + now - self.tried
        self.tried = now

    def waited_for(self) -> list[tuple[str, str, float]]:
        """Waits of the request until now: (peer, reason, seconds); empty if there were none."""
        if self.tried:
            self.put_down()
        return [(*cause, seconds) for cause, seconds in self.waited.items()]


def parse(peer: int, message: dict[str, Any]) -> Request:
    """Request in ``message``; BadMessage if it is none."""
    try:
        number, incarnation, patience = (
            message["id"],
            message["incarnation"],
            float(message["patience"]),
        )
        may_stand = float(message.get("may_stand", 0.0))
        client, group, op, args = (
            message["client"],
            message["group"],
            message["op"],
            message["args"],
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadMessage(f"{type(error).__name__}: {error}") from error
    good = (
        is_whole(number)
        and is_whole(incarnation)
        and is_text(client)
        and is_text(group)
        and is_text(op)
    )
    finite = 0 <= patience < float("inf") and 0 <= may_stand < float("inf")
    if not good or min(number, incarnation) < 0 or type(args) is not dict or not finite:
        raise BadMessage("a part of the request has the wrong type")
    since = time.monotonic()
    deadline, key = since + min(patience, _MAX_PATIENCE_S), f"{client}#{number}"
    return Request(
        peer, number, key, (group, incarnation), op, args, since, deadline, may_stand_s=may_stand
    )


def is_whole(value: Any) -> bool:
    return type(value) is int and -MAX_WHOLE < value < MAX_WHOLE


def is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= MAX_TEXT


def _all_are(values: Any, kind: type) -> bool:
    return type(values) is list and frozenset([kind]).issuperset(map(type, values))


_TYPES: dict[str, Callable[[Any], bool]] = {
    "int": is_whole,
    "bool": lambda value: type(value) is bool,
    "str": is_text,
    "dict": lambda value: type(value) is dict,
    "list[int]": lambda value: _all_are(value, int) and all(map(is_whole, value)),
    "list[str]": lambda value: _all_are(value, str) and max(map(len, value), default=0) <= MAX_TEXT,
    "list[dict]": lambda value: _all_are(value, dict),
    "dict[str, float]": lambda value: (
        type(value) is dict
        and all(is_text(name) and isinstance(number, int | float) for name, number in value.items())
    ),
    "Any": lambda _: True,
}


class Schema:
    """The arguments of an operation, as its handler's annotations say.

    >>> def handler(service, request, step: int, name: str = ""): ...
    >>> Schema(handler).complaint({"step": "x"})
    "step: found 'x', expected int"
    """

    def __init__(self, handler: Callable) -> None:
        parameters = list(inspect.signature(handler).parameters.values())
        self._given = {parameter.name for parameter in parameters[:2]}
        """Names of the parameters that the service itself fills in."""
        parameters = parameters[2:]
        named = [
            parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD
        ]
        self._types = {parameter.name: parameter.annotation for parameter in named}
        self._checks = {name: _TYPES[annotation] for name, annotation in self._types.items()}
        self._needed = {
            parameter.name for parameter in named if parameter.default is parameter.empty
        }
        self._open = len(named) < len(parameters)

    def complaint(self, args: Args) -> str:
        """Complaint about ``args``; empty: they are as they should be."""
        if not self._needed <= args.keys():
            return f"{min(self._needed - args.keys())} is missing"
        for name, value in args.items():
            if name not in self._checks:
                if not self._open or not is_text(name) or name in self._given:
                    return f"{reprlib.repr(name)} is unknown, allowed: {', '.join(self._checks)}"
            elif not self._checks[name](value):
                return f"{name}: found {reprlib.repr(value)}, expected {self._types[name]}"
        return ""


def rows_of(summaries: list[dict], fields: list[str]) -> list[Row]:
    """The rows of a put, by prompt group; Refused if one is not as it should be."""
    rows: list[Row] = []
    generated = "token_ids" in fields
    for summary in summaries:
        row = ticket, episodes, lengths, codes = tuple(map(summary.get, _ROW))
        good = (
            type(ticket) is int
            and type(episodes) is bytes
            and episodes
            and max(episodes) <= MAX_ROWS
        )
        good = good and type(codes) is list and _WHOLE.issuperset(map(type, codes))
        if not good or not is_packed(lengths, sum(episodes) if generated else 0):
            raise Refused(
                "refused", f"put: rows: found {reprlib.repr(summary)}, expected {', '.join(_ROW)}"
            )
        if "old_logprob_version" in fields and not codes:
            raise Refused(
                "refused", f"put: ticket {ticket} has an old_logprob_version, but names none"
            )
        rows.append(row)
    if len({row[0] for row in rows}) < len(rows):
        raise Refused("refused", "put: a ticket is there twice; a prompt group comes in one piece")
    return rows


def check_size(what: str, value: dict) -> None:
    """Refused if ``value``, which others are told of, is larger than a few kilobytes, or nested
    deeply."""
    size = len(msgpack.packb(value))
    if size > MAX_OPAQUE_BYTES:
        raise Refused("refused", f"{what}: {size} bytes, allowed {MAX_OPAQUE_BYTES}")
    if _is_deeper(value, MAX_OPAQUE_DEPTH):
        raise Refused("refused", f"{what}: nested too deeply, allowed {MAX_OPAQUE_DEPTH} levels")


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if type(value) is dict else value if type(value) is list else ()
    return not levels or any(
        _is_deeper(one, levels - 1) for one in inner if type(one) in (dict, list)
    )
