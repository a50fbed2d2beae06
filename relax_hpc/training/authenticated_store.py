"""Store by which torch's ranks of a group leave word for each other.

On one node it is a file in memory. Over several, or where each rank is in a container of its own,
it is rank 0's memory, reached by connections whose ends prove that they hold the run's token:
torch's own TCPStore asks nobody, and gives and takes whatever anybody wants.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from relax_hpc.net.rendezvous.world import World
from relax_hpc.net.transport.links import ACCEPT_SHARE, CONNECT_S, Deadline
from relax_hpc.net.transport.listener import Listener
from relax_hpc.net.transport.sockets import FrameConnection, connect, endpoint_of
from relax_hpc.net.transport.wire import BadMessage, pack, unpack

_PAUSE_S = 0.1
_PATIENCE_S = 3600.0
"""Seconds that rank 0 waits for a message before it waits again; nothing depends on it."""
_SLACK_S = 30.0
"""Seconds for an answer that depends on nobody else."""


def make_store(world: World, token: bytes, timeout_s: float) -> dist.Store | None:
    """The store of a group's ranks; None for one alone. Waits in it take at most ``timeout_s``."""
    if world.size == 1:
        return None
    first = world.cards[0]
    if world.on_one_node:
        # Left alone, gloo takes the address of the host's name, which other machines can reach;
        # NCCL's bootstrap too.
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if world.share_files_in_memory:
        return dist.FileStore(f"/proc/{first['pid']}/fd/{first['memory']}", world.size)
    if world.listening:
        serve(world.listening, token)
    return AuthenticatedStore(
        RemoteTable((first["address"], first["port"]), token, timeout_s), timeout_s
    )


class StoreTable:
    """StoreTable of values by key. A rank that asks for one that is not there waits."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number at ``key``; the sum so far."""
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = b"%d" % total
        return total

    def append(self, key: str, value: bytes) -> None:
        self.values[key] = self.values.get(key, b"") + value

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Put ``desired`` in the place of ``expected``, or of nothing if that is empty; the value
        that is there afterwards."""
        if key not in self.values and expected:
            return expected
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        return self.values[key]

    def missing(self, keys: Sequence[str]) -> str | None:
        """First of ``keys`` that nothing is left at."""
        return next((key for key in keys if key not in self.values), None)

    def wait(self, keys: Sequence[str]) -> None:
        """Wait until something is left at all of ``keys``: answered then."""

    def delete(self, key: str) -> bool:
        """Delete ``key``; whether it was there."""
        return self.values.pop(key, None) is not None

    def count(self) -> int:
        return len(self.values)


_OPERATIONS = frozenset(name for name in vars(StoreTable) if not name.startswith("_"))


@dataclass(frozen=True, slots=True)
class _Asked:
    peer: int
    name: str
    arguments: Sequence[Any]

    @property
    def awaited(self) -> Sequence[str]:
        """Keys without which there is no answer."""
        if self.name == "get":
            return self.arguments[:1]
        return self.arguments[0] if self.name == "wait" else ()


class StoreHost:
    """Rank 0's part: a thread and a table for all ranks, itself included, however many they are.

    Who has waited for too long hangs up, and is forgotten when what it waited for comes.
    """

    def __init__(self, listener: Listener) -> None:
        self.table = StoreTable()
        self._listener = listener
        self._waiting: dict[str, list[_Asked]] = {}
        """Requests that wait, by one key that each lacks."""

    def serve(self) -> None:
        """Answer requests as long as this process lives."""
        # Should it end by a mistake of ours, all hear of it.
        with closing(self._listener):
            while True:
                for peer, payload in self._listener.receive(_PATIENCE_S):
                    try:
                        request = unpack(payload)
                        self._settle(_Asked(peer, request["name"], request["arguments"]))
                    except (BadMessage, LookupError, TypeError):
                        self._listener.refuse(peer)

    def _settle(self, asked: _Asked) -> None:
        """Answer now, or when what is awaited has come; and those who have waited for this."""
        if (lacking := self.table.missing(asked.awaited)) is not None:
            self._waiting.setdefault(lacking, []).append(asked)
            return
        self._listener.send(asked.peer, pack(self._answer(asked)))
        for key in asked.arguments[:1]:
            if isinstance(key, str) and key in self.table.values:
                for other in self._waiting.pop(key, ()):
                    self._settle(other)

    def _answer(self, asked: _Asked) -> dict[str, Any]:
        if asked.name not in _OPERATIONS:
            return {"error": f"no operation {asked.name!r}"}
        try:
            return {"result": getattr(self.table, asked.name)(*asked.arguments)}
        except (TypeError, ValueError) as error:
            return {"error": str(error)}


def serve(listening: socket.socket, token: bytes) -> None:
    """A table that whoever holds ``token`` may use by ``listening``, for as long as this process
    lives."""
    listener = Listener(listening, token, _purpose(listening.getsockname()), ACCEPT_SHARE)
    threading.Thread(target=StoreHost(listener).serve, name="meeting", daemon=True).start()


class RemoteTable:
    """A table in rank 0. Each request has a connection to itself, as some wait for others."""

    def __init__(
        self, address: tuple[str, int], token: bytes, patience_s: float = CONNECT_S
    ) -> None:
        """``patience_s``: for rank 0 to let this one in, which it does once it has imported all
        that it needs."""
        self._address, self._token, self._patience_s = address, token, patience_s
        self._idle: list[FrameConnection] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _OPERATIONS:
            raise AttributeError(name)
        return lambda *arguments: self._ask(self._taken(), name, arguments)

    def get(self, key: str, timeout_s: float) -> bytes:
        """Get the value at ``key``. TimeoutError: nobody has left anything there."""
        return self._await([key], timeout_s, "get", key)

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Wait for values at all of ``keys``. TimeoutError: nobody has left anything at one of
        them."""
        self._await(keys, timeout_s, "wait", list(keys))

    def _await(self, keys: Sequence[str], timeout_s: float, name: str, argument: Any) -> Any:
        connection = self._taken()
        try:
            return self._ask(connection, name, [argument], timeout_s)
        except TimeoutError:
            if (missing := self.missing(list(keys))) is not None:
                raise TimeoutError(
                    f"no rank has left {missing!r} here within {timeout_s:g} s"
                ) from None
        # It is the answer that is late.
        return self._ask(self._taken(), name, [argument])

    def _taken(self) -> FrameConnection:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        return connection or self._connect()

    def _ask(
        self,
        connection: FrameConnection,
        name: str,
        arguments: Sequence[Any],
        within_s: float = _SLACK_S,
    ) -> Any:
        """The answer of rank 0. TimeoutError: it has not come; ConnectionError: rank 0 has
        ended."""
        try:
            connection.send(pack({"name": name, "arguments": arguments}))
            reply = _next_message(connection, Deadline(within_s))
        except BaseException:
            # What comes late comes to nobody.
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["result"]

    def _connect(self) -> FrameConnection:
        deadline, endpoint = Deadline(self._patience_s), endpoint_of(*self._address)
        while True:
            try:
                within_s = deadline.shortened(CONNECT_S).remaining()
                return connect(endpoint, self._token, _purpose(self._address), within_s)
            except OSError as error:
                # Of hundreds that come at once some are hung up on, or have no room in the line.
                if deadline.ends_within(_PAUSE_S):
                    text = (
                        f"rank 0 has not let this rank in within {deadline.seconds:g} s; open "
                        f"its log: {error}"
                    )
                    raise type(error)(text) from error
                time.sleep(_PAUSE_S)


def _next_message(connection: FrameConnection, deadline: Deadline) -> dict[str, Any]:
    while True:
        if payloads := connection.payloads(1):
            return unpack(payloads[0])
        connection.wait(deadline.remaining())
        connection.flush()
        connection.receive()


class AuthenticatedStore(dist.Store):
    """torch's view of a table. torch calls it from its own threads, by the names of its C++ class
    too."""

    def __init__(self, table: RemoteTable, timeout_s: float) -> None:
        super().__init__()
        self._table, self._timeout_s = table, timeout_s
        self._clones: list[AuthenticatedStore] = []
        """Clones of this store: torch keeps their C++ halves alone, which are of no use once these
        are gone."""

    def set(self, key: str, value: str | bytes) -> None:
        self._table.set(key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self._table.get(key, self._timeout_s)

    def add(self, key: str, value: int) -> int:
        return self._table.add(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        self._table.append(key, _bytes(value))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        return self._table.compare_set(key, _bytes(expected_value), _bytes(desired_value))

    def check(self, keys: list[str]) -> bool:
        return self._table.missing(keys) is None

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._table.wait(keys, timeout.total_seconds() if timeout else self._timeout_s)

    def delete_key(self, key: str) -> bool:
        return self._table.delete(key)

    def num_keys(self) -> int:
        return self._table.count()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> AuthenticatedStore:
        self._clones.append(AuthenticatedStore(self._table, self._timeout_s))
        return self._clones[-1]

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    deleteKey, getNumKeys, compareSet = delete_key, num_keys, compare_set
    multiGet, multiSet, hasExtendedApi, setTimeout = (
        multi_get,
        multi_set,
        has_extended_api,
        set_timeout,
    )


def _purpose(address: tuple[Any, ...]) -> bytes:
    return f"meeting {address[0]}:{address[1]}".encode()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
