"""Where torch's ranks of a group leave word for each other: what torch calls a store.

On one node it is a file in memory. Over several, or where each rank is in a container of its own, it is rank 0's
memory, reached by connections whose ends prove that they hold the run's token: torch's own TCPStore asks nobody, and
gives and takes whatever anybody wants.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgpack
import torch.distributed as dist

from relax_hpc.rendezvous.world import World
from relax_hpc.transfer_queue.planes.links import CONNECT_S, Deadline, Listener, prove, receive, wait_for_request

_LENGTH_BYTES = 8
_MOST_BYTES = 1 << 30
_PAUSE_S = 0.1
_SLACK_S = 30.0
"""Beyond the time that a request may wait at rank 0, for its way."""


def store_of(world: World, token: bytes, timeout_s: float) -> dist.Store | None:
    """The store of a group's ranks; None for one alone. Waits in it take at most ``timeout_s``."""
    if world.size == 1:
        return None
    first = world.cards[0]
    if world.on_one_node:
        # Left alone, gloo takes the address of the host's name, which other machines can reach; NCCL's bootstrap too.
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if world.open_to_each_other:
        return dist.FileStore(f"/proc/{first['pid']}/fd/{first['memory']}", world.size)
    if world.listening:
        return MeetingStore(serve(world.listening, token), timeout_s)
    return MeetingStore(Remote((first["address"], first["port"]), token, timeout_s), timeout_s)


class Table:
    """Values by key; `wait` returns when all of its keys are there. Safe to use from threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for it. TimeoutError: it did not come."""
        with self._changed:
            self._wait([key], timeout_s)
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """The sum so far."""
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self.set(key, b"%d" % total)
            return total

    def append(self, key: str, value: bytes) -> None:
        with self._changed:
            self.set(key, self._values.get(key, b"") + value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """What is there afterwards: ``desired`` if ``expected`` was, or nothing was and nothing is expected."""
        with self._changed:
            if key not in self._values and expected:
                return expected
            if self._values.get(key, b"") == expected:
                self.set(key, desired)
            return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """TimeoutError: one did not come."""
        with self._changed:
            self._wait(keys, timeout_s)

    def delete(self, key: str) -> bool:
        """Whether it was there."""
        with self._changed:
            return self._values.pop(key, None) is not None

    def count(self) -> int:
        with self._changed:
            return len(self._values)

    def _wait(self, keys: Sequence[str], timeout_s: float) -> None:
        if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_s):
            missing = [key for key in keys if key not in self._values]
            raise TimeoutError(f"no rank has left {missing[0]!r} here within {timeout_s:g} s")


_OPERATIONS = frozenset(name for name in vars(Table) if not name.startswith("_"))


def serve(listening: socket.socket, token: bytes) -> Table:
    """A table that whoever holds ``token`` may use by ``listening``, for as long as this process lives."""
    table = Table()

    def answer(connection: socket.socket) -> None:
        while wait_for_request(connection):
            name, arguments = _receive(connection, CONNECT_S)
            try:
                if name not in _OPERATIONS:
                    raise ValueError(f"no operation {name!r}")
                reply = {"result": getattr(table, name)(*arguments)}
            except (TimeoutError, TypeError, ValueError) as error:
                reply = {"error": str(error), "late": isinstance(error, TimeoutError)}
            _send(connection, reply, CONNECT_S)

    Listener(listening, token, _purpose(listening.getsockname()), answer, "meeting")
    return table


class Remote:
    """The same in another process; each request has a connection to itself, as some wait for others."""

    def __init__(self, address: tuple[str, int], token: bytes, patience_s: float = CONNECT_S) -> None:
        """``patience_s``: for rank 0 to let this one in, which it does once it has imported all that it needs."""
        self._address, self._token, self._patience_s = address, token, patience_s
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name not in _OPERATIONS:
            raise AttributeError(name)
        return lambda *arguments: self._ask(name, arguments)

    def _ask(self, name: str, arguments: tuple[Any, ...]) -> Any:
        waits_s = arguments[-1] if name in ("get", "wait") else 0.0
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connect()
        try:
            _send(connection, [name, arguments], CONNECT_S)
            reply = _receive(connection, waits_s + _SLACK_S)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        if "error" in reply:
            raise (TimeoutError if reply["late"] else RuntimeError)(reply["error"])
        return reply["result"]

    def _connect(self) -> socket.socket:
        deadline = Deadline(self._patience_s)
        while True:
            try:
                return self._knock(deadline)
            except OSError as error:
                # Of hundreds that come at once some are hung up on, or have no room in the line.
                if deadline.over(_PAUSE_S):
                    text = f"rank 0 has not let this rank in within {deadline.seconds:g} s; open its log: {error}"
                    raise type(error)(text) from error
                time.sleep(_PAUSE_S)

    def _knock(self, deadline: Deadline) -> socket.socket:
        connection = socket.create_connection(self._address, deadline.at_most(CONNECT_S).left())
        try:
            prove(connection, self._token, _purpose(self._address), deadline)
        except BaseException:
            connection.close()
            raise
        return connection


class MeetingStore(dist.Store):
    """torch's view of a table. torch calls it from its own threads, by the names of its C++ class too."""

    def __init__(self, table: Table | Remote, timeout_s: float) -> None:
        super().__init__()
        self._table, self._timeout_s = table, timeout_s
        self._clones: list[MeetingStore] = []
        """torch keeps their C++ halves alone, which are of no use once these are gone."""

    def set(self, key: str, value: str | bytes) -> None:
        self._table.set(key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self._table.get(key, self._timeout_s)

    def add(self, key: str, value: int) -> int:
        return self._table.add(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        self._table.append(key, _bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._table.compare_set(key, _bytes(expected_value), _bytes(desired_value))

    def check(self, keys: list[str]) -> bool:
        return self._table.check(keys)

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

    def clone(self) -> MeetingStore:
        self._clones.append(MeetingStore(self._table, self._timeout_s))
        return self._clones[-1]

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    deleteKey, getNumKeys, compareSet = delete_key, num_keys, compare_set
    multiGet, multiSet, hasExtendedApi, setTimeout = multi_get, multi_set, has_extended_api, set_timeout


def _purpose(address: tuple[Any, ...]) -> bytes:
    return f"meeting {address[0]}:{address[1]}".encode()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _send(connection: socket.socket, message: Any, within_s: float) -> None:
    data = msgpack.packb(message)
    connection.settimeout(within_s)
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def _receive(connection: socket.socket, within_s: float) -> Any:
    deadline = Deadline(within_s)
    size = int.from_bytes(receive(connection, _LENGTH_BYTES, deadline), "big")
    if size > _MOST_BYTES:
        raise ConnectionError(f"a message of {size} bytes")
    return msgpack.unpackb(receive(connection, size, deadline))
