"""Plane over plain TCP sockets, for all nodes with a network.

A read copies the bytes once in the maker's kernel and once in the reader's.
"""

from __future__ import annotations

import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from relax_hpc.net.transport.links import (
    SILENCE_S,
    Deadline,
    ThreadListener,
    prove_token,
    receive,
    receive_into,
    wait_for_request,
)
from relax_hpc.net.transport.peers import PeerLink, PeerLinks
from relax_hpc.net.transport.plane import Descriptor, Plane, PlaneError

MAX_NAME_BYTES = 1024
MAX_TIMEOUT_S = 3600.0
_REQUEST_S = 5.0
_REQUEST = struct.Struct("<dH")
"""Request: seconds that the reader waits, and bytes of the name that follows."""
_ANSWER = struct.Struct("<BQQ")
"""Answer: state of the record, number of its bytes, and their checksum (XXH3, 64 bits). The bytes
follow if the record is offered."""
_ABSENT, _OFFERED, _PENDING = range(3)
_OPTIONS = {
    # Without it, Linux delays a small request until the previous packet is acknowledged.
    socket.TCP_NODELAY: 1,
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
}
"""Options of sockets. An idle connection to a node that has lost its power ends after 30 s and
three probes of 10 s."""
_ANYWHERE = ("", "0.0.0.0", "::")
_FOLDER = "/"
"""Separator between the name of a folder and that of a record in it."""


class RecordPending(Exception):
    """The record does not exist yet. The reader should request it again."""


Give = Callable[[str], memoryview | None]
"""Function that returns a record of a folder by name. It is called in any thread. None: the record
is not offered. It raises `RecordPending`, after a short wait, if the record does not exist yet."""


@dataclass(slots=True)
class _RecordAddress:
    """Descriptor of the record `name` of `size` bytes. Plane `maker` listens at `host` and
    `port`."""

    host: str
    port: int
    maker: str
    name: str
    size: int

    def __str__(self) -> str:
        return f"record {self.name} from {self.host}:{self.port}"

    @classmethod
    def from_descriptor(cls, descriptor: Descriptor) -> _RecordAddress:
        """Raises PlaneError for an invalid descriptor."""
        try:
            address = cls(**descriptor)
        except TypeError as error:
            raise PlaneError(f"tcp: no descriptor of this plane: {error}") from error
        texts = (address.host, address.maker, address.name)
        numbers = (address.port, address.size)
        are_texts = all(isinstance(text, str) for text in texts)
        if not are_texts or not all(isinstance(number, int) for number in numbers):
            raise PlaneError(f"tcp: no descriptor of this plane: {descriptor}")
        return address


@dataclass(slots=True, eq=False)
class _Record:
    memory: memoryview
    checksum: int | None = None
    """Checksum, computed at the first request, because most records are read on a better plane."""


def _checked_name(name: str) -> bytes:
    encoded = name.encode()
    if len(encoded) > MAX_NAME_BYTES:
        raise PlaneError(f"tcp: a name of {len(encoded)} bytes, allowed {MAX_NAME_BYTES}")
    return encoded


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _OPTIONS.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _connect(address: tuple[str, int, str], token: bytes, deadline: Deadline) -> socket.socket:
    host, port, maker = address
    connection = socket.create_connection((host, port), deadline.next_wait())
    try:
        _tune(connection)
        prove_token(connection, token, maker.encode(), deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def _request(connection: socket.socket, name: bytes, deadline: Deadline) -> tuple[int, int, int]:
    """The maker's answer about record ``name``, after the record is no longer pending there.

    The maker may forward the record and be reading it itself. OSError: it is pending for twice
    `Deadline.silence`. In this time the maker can have replaced one silent peer by another.
    """
    begin = time.monotonic()
    while True:
        connection.settimeout(deadline.remaining())
        connection.sendall(
            _REQUEST.pack(min(deadline.remaining(), MAX_TIMEOUT_S), len(name)) + name
        )
        answer = _ANSWER.unpack(receive(connection, _ANSWER.size, deadline))
        if answer[0] != _PENDING:
            return answer
        if time.monotonic() - begin > 2 * deadline.silence:
            raise PlaneError("its maker waits for it itself, and has for too long")


def _fetch(
    connection: socket.socket, address: _RecordAddress, deadline: Deadline
) -> memoryview | None:
    """Request a record and receive it into new memory. None: its maker does not offer it.

    OSError: it has not arrived completely.
    """
    state, size, checksum = _request(connection, _checked_name(address.name), deadline)
    if state == _ABSENT:
        return None
    if state != _OFFERED or size != address.size:
        raise PlaneError(f"its maker has {size} bytes of it, the descriptor says {address.size}")
    # np.empty, unlike bytearray, does not fill the memory with zeros.
    record, digest = np.empty(size, np.uint8).data, xxhash.xxh3_64()
    receive_into(connection, record, deadline, digest.update)
    if digest.intdigest() != checksum:
        raise PlaneError("the checksum does not match: damaged, or retired while it was sent")
    return record.toreadonly()


class TcpPlane(Plane):
    """Records over plain sockets. A reader keeps one connection to each maker, which serves each
    connection in a thread."""

    name = "tcp"

    def __init__(self, token: bytes, host: str, silence_s: float = SILENCE_S) -> None:
        """``host``: address at which other nodes reach this one. ValueError: it means all
        addresses. ``silence_s``: seconds without data after which a read fails."""
        # The descriptor has this address, so it must be one that other nodes can connect to.
        if host in _ANYWHERE:
            raise ValueError(
                f"tcp: found host {host!r}, allowed one address of this node, such as 127.0.0.1"
            )
        self._host, self._maker, self._silence_s = host, secrets.token_hex(8), silence_s
        self._lock = threading.Lock()
        self._records: dict[bytes, _Record] = {}
        self._folders: dict[str, Give] = {}
        self.sent_bytes = 0
        """Bytes of all records that were sent, to all readers."""
        self._peers: PeerLinks[tuple[str, int, str], PeerLink] = PeerLinks(
            lambda address: PeerLink(lambda deadline: _connect(address, token, deadline))
        )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family)
        self._port = listening.getsockname()[1]
        self._listener = ThreadListener(
            listening, token, self._maker.encode(), self._serve, "plane-tcp"
        )

    def publish(self, name: str, record: memoryview) -> Descriptor:
        """See `Plane`. Nothing is copied. PlaneError: ``name`` is in use, or too long."""
        memory, key = memoryview(record).cast("B"), _checked_name(name)
        with self._lock:
            if key in self._records:
                raise PlaneError(f"tcp: record {name} is published already; retire it first")
            self._records[key] = _Record(memory)
        return self._own_address() | {"name": name, "size": len(memory)}

    def _own_address(self) -> Descriptor:
        return {"host": self._host, "port": self._port, "maker": self._maker}

    def open_folder(self, name: str, give: Give) -> Descriptor:
        """Offer the records that ``give`` returns, until `close_folder`.

        `record_in_folder` gives the descriptor of one of them.
        """
        with self._lock:
            self._folders[name] = give
        return self.folder(name)

    def folder(self, name: str) -> Descriptor:
        """Descriptor of an open folder, see `record_in_folder`."""
        return self._own_address() | {"folder": name}

    def close_folder(self, name: str) -> None:
        """Stop offering a folder. An unknown one is ignored."""
        with self._lock:
            self._folders.pop(name, None)

    def read(
        self, descriptor: Descriptor, timeout_s: float, silence_s: float = math.inf
    ) -> memoryview:
        """See `Plane`: a copy with a verified checksum. ``silence_s``: seconds without data after
        which the read fails, if they are fewer than those of the plane."""
        address = _RecordAddress.from_descriptor(descriptor)
        deadline = Deadline(timeout_s, min(silence_s, self._silence_s))
        try:
            link = self._peers.link((address.host, address.port, address.maker))
            with link.use(deadline) as connection:
                record = _fetch(connection, address, deadline)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            raise PlaneError(f"tcp: {address} (in {timeout_s:g} s): {error}") from error
        if record is None:
            raise PlaneError(f"tcp: {address}: its maker has retired it")
        return record

    def retire(self, name: str) -> None:
        """See `Plane`. If the memory changes while a reader receives the record, the checksum does
        not match."""
        with self._lock:
            self._records.pop(name.encode(), None)

    def close(self) -> None:
        """See `Plane`."""
        self._listener.close()
        self._peers.close()
        self._records.clear()
        self._folders.clear()

    def _serve(self, connection: socket.socket) -> None:
        _tune(connection)
        while wait_for_request(connection):
            patience, size = _REQUEST.unpack(
                receive(connection, _REQUEST.size, Deadline(_REQUEST_S))
            )
            # The second condition also refuses NaN, for which every comparison is false.
            if size > MAX_NAME_BYTES or not 0 < patience <= MAX_TIMEOUT_S:
                return
            self._send(connection, receive(connection, size, Deadline(_REQUEST_S)), patience)

    def _send(self, connection: socket.socket, name: bytes, patience: float) -> None:
        """Answer with the record ``name``. ``patience``: seconds that the reader waits for it."""
        connection.settimeout(patience)
        try:
            record = self._offered(name)
        except RecordPending:
            connection.sendall(_ANSWER.pack(_PENDING, 0, 0))
            return
        if record is None:
            connection.sendall(_ANSWER.pack(_ABSENT, 0, 0))
            return
        # With MSG_MORE the kernel sends the head and the first bytes in one packet. Without
        # following bytes it would delay the head.
        flags = socket.MSG_MORE if record.memory else 0
        connection.sendall(_ANSWER.pack(_OFFERED, len(record.memory), record.checksum), flags)
        connection.sendall(record.memory)
        with self._lock:
            self.sent_bytes += len(record.memory)

    def _offered(self, name: bytes) -> _Record | None:
        """The record with its checksum, or None. RecordPending: see `Give`."""
        record = self._records.get(name)
        if record is None:
            return self._record_of_folder(name)
        if record.checksum is not None:
            return record
        # Outside of the lock, because it takes long for a large record, and other readers must not
        # wait.
        checksum = xxhash.xxh3_64_intdigest(record.memory)
        with self._lock:
            # Retired meanwhile: the memory may have changed while the checksum was computed.
            if self._records.get(name) is not record:
                return None
            record.checksum = checksum
        return record

    def _record_of_folder(self, name: bytes) -> _Record | None:
        """Record of a folder. None: there is no such folder or record."""
        folder, _, record_name = name.decode(errors="replace").partition(_FOLDER)
        give = self._folders.get(folder)
        memory = give(record_name) if give else None
        return None if memory is None else _Record(memory, xxhash.xxh3_64_intdigest(memory))


def record_in_folder(folder: Descriptor, name: str, size: int) -> Descriptor:
    """Descriptor of record ``name`` of ``size`` bytes in ``folder``, see `TcpPlane.open_folder`.

    LookupError, TypeError: ``folder`` is invalid.
    """
    plane = {key: folder[key] for key in ("host", "port", "maker")}
    return plane | {"name": f"{folder['folder']}{_FOLDER}{name}", "size": size}
