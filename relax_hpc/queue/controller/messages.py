"""Messages of clients: parse them, and refuse those with wrong types or sizes."""

from __future__ import annotations

import inspect
import math
import reprlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack

from relax_hpc.net.transport.wire import BadMessage
from relax_hpc.queue.controller.planning.acceptance import PutGroup
from relax_hpc.queue.lengths import is_packed
from relax_hpc.queue.records import Cause, Owner
from relax_hpc.queue.row_ids import MAX_ROWS

Args = dict[str, Any]
MAX_WHOLE = 1 << 53
"""Bound of whole numbers in messages."""
MAX_TEXT = 4096
"""Longest text in a message, in characters."""
MAX_OPAQUE_BYTES = 16 << 10
"""Most bytes of a value that is passed on unchanged: a shard's descriptor, or the content of a
beat."""
MAX_OPAQUE_DEPTH = 8
"""Most levels of nested maps and lists in such a value. msgpack allows far more, so it can be
nested in other messages."""
_MAX_PATIENCE_S = 1e9
_GROUP_KEYS, _ONLY_INT = ("ticket", "episodes", "lengths", "versions"), frozenset([int])


class Refused(Exception):
    """A request that breaks a rule. The client gets `kind` and the message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True, eq=False)
class Request:
    """One message of a client, with the connection for the answer. Times are of the monotonic
    clock, in seconds."""

    peer: int
    id: int
    key: str
    owner: Owner
    op: str
    args: Args
    received_at: float
    deadline: float
    topic: str = ""
    """Topic for which it waits, one of `controller.topics`; empty: it was not tried yet."""
    reason: str = ""
    """Reason of the wait, for people; empty: the topic explains it."""
    common: bool = False
    """Whether no other request that waits for the topic can be answered either."""
    cause: Cause = ("", "")
    """Role for which it has waited since it was last tried, and why."""
    tried_at: float = 0.0
    waited: dict[Cause, float] = field(default_factory=dict)
    """Seconds of its waits by cause, in the order in which the causes came."""
    max_pause_s: float = 0.0
    """Seconds by which its deadline may still be moved because other groups are absent."""
    paused_s: float = 0.0
    """`GroupPresence.paused_s` at the last look at the deadline."""

    def count_wait(self) -> None:
        """Count the time since it was last tried as a wait for `cause`."""
        now = time.monotonic()
        if self.tried_at:
            self.waited[self.cause] = self.waited.get(self.cause, 0.0) + now - self.tried_at
        self.tried_at = now

    def waits(self) -> list[tuple[str, str, float]]:
        """Waits of the request so far: (peer, reason, seconds)."""
        if self.tried_at:
            self.count_wait()
        return [(*cause, seconds) for cause, seconds in self.waited.items()]


def parse(peer: int, message: dict[str, Any]) -> Request:
    """Request in ``message``. BadMessage: it is malformed."""
    try:
        number, incarnation = message["id"], message["incarnation"]
        client, group, op = message["client"], message["group"], message["op"]
        args, patience = message["args"], float(message["patience"])
        max_pause_s = float(message.get("may_stand", 0.0))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadMessage(f"{type(error).__name__}: {error}") from error
    are_valid = (
        all(map(is_whole, (number, incarnation)))
        and all(map(is_text, (client, group, op)))
        and type(args) is dict
    )
    is_finite = 0 <= patience < float("inf") and 0 <= max_pause_s < float("inf")
    if not are_valid or min(number, incarnation) < 0 or not is_finite:
        raise BadMessage("a part of the request has the wrong type")
    now = time.monotonic()
    return Request(
        peer,
        number,
        f"{client}#{number}",
        (group, incarnation),
        op,
        args,
        received_at=now,
        deadline=now + min(patience, _MAX_PATIENCE_S),
        max_pause_s=max_pause_s,
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
    "float": lambda value: type(value) in (int, float) and math.isfinite(value),
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
    """The arguments of an operation, from the annotations of its handler.

    >>> def handler(service, request, step: int, name: str = ""): ...
    >>> Schema(handler).find_fault({"step": "x"})
    "step: found 'x', expected int"
    """

    def __init__(self, handler: Callable) -> None:
        parameters = list(inspect.signature(handler).parameters.values())
        self._own_names = {parameter.name for parameter in parameters[:2]}
        """Names of the parameters that the service passes itself."""
        arguments = [
            parameter for parameter in parameters[2:] if parameter.kind is not parameter.VAR_KEYWORD
        ]
        self._types = {argument.name: argument.annotation for argument in arguments}
        self._checks = {name: _TYPES[annotation] for name, annotation in self._types.items()}
        self._required = {
            argument.name for argument in arguments if argument.default is argument.empty
        }
        self._is_open = len(arguments) < len(parameters) - 2

    def find_fault(self, args: Args) -> str:
        """Error in ``args``; empty if they are valid."""
        if not self._required <= args.keys():
            return f"{min(self._required - args.keys())} is missing"
        for name, value in args.items():
            if name not in self._checks:
                if not self._is_open or not is_text(name) or name in self._own_names:
                    return f"{reprlib.repr(name)} is unknown, allowed: {', '.join(self._checks)}"
            elif not self._checks[name](value):
                return f"{name}: found {reprlib.repr(value)}, expected {self._types[name]}"
        return ""


def parse_groups(summaries: list[dict], fields: list[str]) -> list[PutGroup]:
    """The prompt groups of a put. Refused: one is malformed."""
    groups: list[PutGroup] = []
    for summary in summaries:
        group = _parse_group(summary, "token_ids" in fields)
        if group is None:
            expected = ", ".join(_GROUP_KEYS)
            raise Refused(
                "refused", f"put: rows: found {reprlib.repr(summary)}, expected {expected}"
            )
        if "old_logprob_version" in fields and not group[3]:
            raise Refused(
                "refused", f"put: ticket {group[0]} has an old_logprob_version, but names none"
            )
        groups.append(group)
    if len({group[0] for group in groups}) < len(groups):
        raise Refused("refused", "put: a ticket occurs twice; a prompt group is put in one piece")
    return groups


def _parse_group(summary: dict, generated: bool) -> PutGroup | None:
    """The prompt group of a summary; None: it is malformed."""
    ticket, episodes, lengths, codes = (summary.get(name) for name in _GROUP_KEYS)
    if type(ticket) is not int or type(episodes) is not bytes or not episodes:
        return None
    if max(episodes) > MAX_ROWS or type(codes) is not list:
        return None
    if not _ONLY_INT.issuperset(map(type, codes)):
        return None
    if not is_packed(lengths, sum(episodes) if generated else 0):
        return None
    return ticket, episodes, lengths, codes


def check_size(name: str, value: dict) -> None:
    """Refused: ``value``, which is passed on to others, is larger than a few kilobytes, or nested
    too deeply."""
    size = len(msgpack.packb(value))
    if size > MAX_OPAQUE_BYTES:
        raise Refused("refused", f"{name}: {size} bytes, allowed {MAX_OPAQUE_BYTES}")
    if _is_deeper(value, MAX_OPAQUE_DEPTH):
        raise Refused("refused", f"{name}: nested too deeply, allowed {MAX_OPAQUE_DEPTH} levels")


def _is_deeper(value: Any, levels: int) -> bool:
    if not levels:
        return True
    inner = list(value.values()) if type(value) is dict else value
    if type(inner) is not list:
        return False
    return any(_is_deeper(item, levels - 1) for item in inner if type(item) in (dict, list))
