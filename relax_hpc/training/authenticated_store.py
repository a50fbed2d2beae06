"""Store by which torch's ranks of a group exchange their addresses.

On one node the store is a file in memory. Over several nodes, or if each rank has a separate
container, it is a table in rank 0, reached by connections that are authenticated by the run's
token. torch's TCPStore (2.13) has no authentication: any host that reaches its port can read and
write values.
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
# Seconds of one wait for messages in rank 0, which then waits again.
_RECEIVE_S = 3600.0
# Seconds for a reply that does not depend on other ranks.
_REPLY_S = 30.0


def make_store(world: World, token: bytes, timeout_s: float) -> dist.Store | None:
    """The store of a group's ranks; None for one rank. Waits take at most ``timeout_s``."""
    if world.size == 1:
        return None
    first = world.cards[0]
    if world.on_one_node:
        # By default gloo and NCCL's bootstrap (torch 2.13) listen on the address of the host's
        # name, which other machines can reach.
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    # The file is memory of rank 0, opened through its process; it has no name in a file system.
    if world.share_files_in_memory:
        return dist.FileStore(f"/proc/{first['pid']}/fd/{first['memory']}", world.size)
    if world.listening:
        serve(world.listening, token)
    return AuthenticatedStore(
        RemoteTable((first["address"], first["port"]), token, timeout_s), timeout_s
    )


class StoreTable:
    """Values by key. A rank that requests a missing value waits for it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number at ``key``, and return the sum."""
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = b"%d" % total
        return total

    def append(self, key: str, value: bytes) -> None:
        self.values[key] = self.values.get(key, b"") + value

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Replace the value ``expected`` by ``desired``, and return the resulting value. An empty
        ``expected`` means that the key has no value."""
        if key not in self.values and expected:
            return expected
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        return self.values[key]

    def missing(self, keys: Sequence[str]) -> str | None:
        """First of ``keys`` without a value."""
        return next((key for key in keys if key not in self.values), None)

    def wait(self, keys: Sequence[str]) -> None:
        """Do nothing: the host replies only when all of ``keys`` have values."""

    def delete(self, key: str) -> bool:
        """Delete ``key``. Returns whether it had a value."""
        return self.values.pop(key, None) is not None

    def count(self) -> int:
        return len(self.values)


_OPERATIONS = frozenset(name for name in vars(StoreTable) if not name.startswith("_"))


@dataclass(frozen=True, slots=True)
class _StoreRequest:
    peer: int
    name: str
    arguments: Sequence[Any]

    @property
    def awaited_keys(self) -> Sequence[str]:
        """Keys that must have values before the reply."""
        if self.name == "get":
            return self.arguments[:1]
        return self.arguments[0] if self.name == "wait" else ()


class StoreHost:
    """Server in rank 0: one thread and one table for all ranks, including rank 0.

    A rank whose wait times out closes its connection. Its request is discarded when the awaited
    value arrives.
    """

    def __init__(self, listener: Listener) -> None:
        self.table = StoreTable()
        self._listener = listener
        # Requests that wait, by one missing key of each.
        self._waiting: dict[str, list[_StoreRequest]] = {}

    def serve(self) -> None:
        """Reply to requests until this process ends."""
        # If an error ends this loop, the closed listener tells all ranks.
        with closing(self._listener):
            while True:
                for peer, payload in self._listener.receive(_RECEIVE_S):
                    try:
                        message = unpack(payload)
                        request = _StoreRequest(peer, message["name"], message["arguments"])
                        self._process(request)
                    except (BadMessage, LookupError, TypeError):
                        self._listener.refuse(peer)

    def _process(self, request: _StoreRequest) -> None:
        """Reply to ``request``, or queue it until its keys have values. A reply may release other
        requests."""
        missing = self.table.missing(request.awaited_keys)
        if missing is not None:
            self._waiting.setdefault(missing, []).append(request)
            return
        self._listener.send(request.peer, pack(self._execute(request)))
        for key in request.arguments[:1]:
            if isinstance(key, str) and key in self.table.values:
                for waiting in self._waiting.pop(key, ()):
                    self._process(waiting)

    def _execute(self, request: _StoreRequest) -> dict[str, Any]:
        if request.name not in _OPERATIONS:
            return {"error": f"no operation {request.name!r}"}
        try:
            return {"result": getattr(self.table, request.name)(*request.arguments)}
        except (TypeError, ValueError) as error:
            return {"error": str(error)}


def serve(listening: socket.socket, token: bytes) -> None:
    """Serve a table on ``listening`` in a thread, to peers that hold ``token``, until this process
    ends."""
    listener = Listener(listening, token, _purpose(listening.getsockname()), ACCEPT_SHARE)
    threading.Thread(target=StoreHost(listener).serve, name="meeting", daemon=True).start()


class RemoteTable:
    """Client of the table in rank 0. Each request in flight has a separate connection, because some
    requests wait for others."""

    def __init__(
        self, address: tuple[str, int], token: bytes, connect_s: float = CONNECT_S
    ) -> None:
        """``connect_s``: limit for the first connection. Rank 0 accepts it after its imports."""
        self._address, self._token, self._connect_s = address, token, connect_s
        self._idle: list[FrameConnection] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _OPERATIONS:
            raise AttributeError(name)
        return lambda *arguments: self._request(self._take_connection(), name, arguments)

    def get(self, key: str, timeout_s: float) -> bytes:
        """Value at ``key``. TimeoutError: no rank has set it in time."""
        return self._await_keys([key], timeout_s, "get", key)

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Wait until all of ``keys`` have values. TimeoutError: no rank has set one in time."""
        self._await_keys(keys, timeout_s, "wait", list(keys))

    def _await_keys(self, keys: Sequence[str], timeout_s: float, name: str, argument: Any) -> Any:
        connection = self._take_connection()
        try:
            return self._request(connection, name, [argument], timeout_s)
        except TimeoutError:
            missing = self.missing(list(keys))
            if missing is not None:
                raise TimeoutError(
                    f"no rank has set {missing!r} in the store within {timeout_s:g} s"
                ) from None
        # All keys have values, so only the reply was late.
        return self._request(self._take_connection(), name, [argument])

    def _take_connection(self) -> FrameConnection:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        return connection or self._connect()

    def _request(
        self,
        connection: FrameConnection,
        name: str,
        arguments: Sequence[Any],
        within_s: float = _REPLY_S,
    ) -> Any:
        """Reply of rank 0. TimeoutError: it was not in time; ConnectionError: rank 0 has ended."""
        try:
            connection.send(pack({"name": name, "arguments": arguments}))
            reply = _next_message(connection, Deadline(within_s))
        except BaseException:
            # A late reply must not be read as the reply to another request.
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["result"]

    def _connect(self) -> FrameConnection:
        deadline, endpoint = Deadline(self._connect_s), endpoint_of(*self._address)
        while True:
            try:
                within_s = deadline.shortened(CONNECT_S).remaining()
                return connect(endpoint, self._token, _purpose(self._address), within_s)
            except OSError as error:
                # If hundreds of ranks connect at the same time, the kernel's listen queue may
                # overflow, and some connections are reset.
                if deadline.ends_within(_PAUSE_S):
                    text = (
                        f"rank 0 has not accepted this rank's connection within "
                        f"{deadline.seconds:g} s; open its log: {error}"
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
    """torch's interface to a table. torch calls it from its own threads, also by the names of its
    C++ class."""

    def __init__(self, table: RemoteTable, timeout_s: float) -> None:
        super().__init__()
        self._table, self._timeout_s = table, timeout_s
        # References to the clones of this store. torch keeps only their C++ parts, which fail after
        # the Python parts are collected.
        self._clones: list[AuthenticatedStore] = []

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
