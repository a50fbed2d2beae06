"""The plane that is there wherever nodes have a network: plain sockets, one copy in the maker's
kernel, one here."""

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
"""Request: seconds that the reader waits, bytes of the name that follows."""
_ANSWER = struct.Struct("<BQQ")
"""Answer: whether the record is offered, its bytes, their XXH3 (64 bits); the bytes follow, if it
is."""
_ABSENT, _OFFERED, _COMING = range(3)
_OPTIONS = {
    socket.TCP_NODELAY: 1,
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
}
"""Options of sockets: an idle connection to a node that has lost its power ends after 30 s and
three times 10 s."""
_ANYWHERE = ("", "0.0.0.0", "::")
_FOLDER = "/"
"""Separator between the name of a folder and that of a record in it."""


class RecordPending(Exception):
    """A record is not there yet, but will be: whoever wants it asks again."""


Give = Callable[[str], memoryview | None]
"""Function that makes a record of a folder by name, in any thread; None: it is not offered.
`RecordPending`, after a moment: it will be."""


@dataclass(slots=True)
class _Place:
    """A descriptor: the record `name` of `size` bytes, of the plane `maker` that listens at `host`
    and `port`."""

    host: str
    port: int
    maker: str
    name: str
    size: int

    def __str__(self) -> str:
        return f"record {self.name} from {self.host}:{self.port}"

    @classmethod
    def from_descriptor(cls, descriptor: Descriptor) -> _Place:
        try:
            place = cls(**descriptor)
        except TypeError as error:
            raise PlaneError(f"tcp: no descriptor of this plane: {error}") from error
        words, numbers = (place.host, place.maker, place.name), (place.port, place.size)
        if not all(isinstance(word, str) for word in words) or not all(
            isinstance(n, int) for n in numbers
        ):
            raise PlaneError(f"tcp: no descriptor of this plane: {descriptor}")
        return place


@dataclass(slots=True, eq=False)
class _Record:
    memory: memoryview
    checksum: int | None = None
    """Checksum, made when it is first asked for: most records are read by a better plane."""


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


def _ask(connection: socket.socket, name: bytes, deadline: Deadline) -> tuple[int, int, int]:
    """Answer of the maker about record ``name``, once the record is not on its way to the maker any
    more.

    An OSError if that takes twice as long as silence may: it may have given up one silent peer of
    its own meanwhile.
    """
    asked = time.monotonic()
    while True:
        connection.settimeout(deadline.remaining())
        connection.sendall(
            _REQUEST.pack(min(deadline.remaining(), MAX_TIMEOUT_S), len(name)) + name
        )
        answer = _ANSWER.unpack(receive(connection, _ANSWER.size, deadline))
        if answer[0] != _COMING:
            return answer
        if time.monotonic() - asked > 2 * deadline.silence:
            raise PlaneError("its maker waits for it itself, and has for too long")


def _fetch(connection: socket.socket, place: _Place, deadline: Deadline) -> memoryview | None:
    """Ask for a record and receive it into memory that nothing else uses; None if its maker does
    not offer it.

    An OSError if it does not come whole.
    """
    state, size, checksum = _ask(connection, _checked_name(place.name), deadline)
    if state == _ABSENT:
        return None
    if state != _OFFERED or size != place.size:
        raise PlaneError(f"its maker has {size} bytes of it, the descriptor says {place.size}")
    record, found = memoryview(np.empty(size, np.uint8)), xxhash.xxh3_64()
    receive_into(connection, record, deadline, found.update)
    if found.intdigest() != checksum:
        raise PlaneError("the checksum does not match: damaged, or retired while it was sent")
    return record.toreadonly()


class TcpPlane(Plane):
    """Records over plain sockets; one connection to each maker is kept, and one thread of a maker
    serves one reader."""

    name = "tcp"

    def __init__(self, token: bytes, host: str, silence_s: float = SILENCE_S) -> None:
        """``host``: the address of this node at which others reach it. ValueError if it stands for
        all addresses. ``silence_s``: for a maker without any sign."""
        if host in _ANYWHERE:
            raise ValueError(
                f"tcp: found host {host!r}, allowed one address of this node, such as 127.0.0.1"
            )
        self._host, self._maker, self._silence_s = host, secrets.token_hex(8), silence_s
        self._lock = threading.Lock()
        self._records: dict[bytes, _Record] = {}
        self._folders: dict[str, Give] = {}
        self.sent_bytes = 0
        """Bytes of all records so far, to all readers."""
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
        """See `Plane`. Nothing is copied. PlaneError if ``name`` is taken or too long."""
        memory = memoryview(record).cast("B")
        with self._lock:
            if self._records.setdefault(_checked_name(name), made := _Record(memory)) is not made:
                raise PlaneError(f"tcp: record {name} is published already; retire it first")
        return self._here() | {"name": name, "size": len(memory)}

    def _here(self) -> Descriptor:
        return {"host": self._host, "port": self._port, "maker": self._maker}

    def open_folder(self, name: str, give: Give) -> Descriptor:
        """Offer what ``give`` makes when it is asked for, until `close_folder`; see
        `record_in_folder` for how to find it."""
        with self._lock:
            self._folders[name] = give
        return self.folder(name)

    def folder(self, name: str) -> Descriptor:
        """Descriptor of an open folder, which leads to its records."""
        return self._here() | {"folder": name}

    def close_folder(self, name: str) -> None:
        """Stop offering a folder; an unknown one is fine."""
        with self._lock:
            self._folders.pop(name, None)

    def read(
        self, descriptor: Descriptor, timeout_s: float, silence_s: float = math.inf
    ) -> memoryview:
        """See `Plane`: a copy, whose checksum was compared. ``silence_s``: for a maker without any
        sign, if that is less than for others."""
        place = _Place.from_descriptor(descriptor)
        deadline = Deadline(timeout_s, min(silence_s, self._silence_s))
        try:
            with self._peers.link((place.host, place.port, place.maker)).use(
                deadline
            ) as connection:
                record = _fetch(connection, place, deadline)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            raise PlaneError(f"tcp: {place} (in {timeout_s:g} s): {error}") from error
        if record is None:
            raise PlaneError(f"tcp: {place}: its maker has retired it")
        return record

    def retire(self, name: str) -> None:
        """See `Plane`. Whoever is just receiving it finds that the checksum does not match if it
        then changes."""
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
            if size > MAX_NAME_BYTES or not 0 < patience <= MAX_TIMEOUT_S:
                return
            self._send(connection, receive(connection, size, Deadline(_REQUEST_S)), patience)

    def _send(self, connection: socket.socket, name: bytes, patience: float) -> None:
        """Answer with the record ``name``, within ``patience`` seconds: then nobody waits for it
        any more."""
        connection.settimeout(patience)
        try:
            record = self._offered(name)
        except RecordPending:
            connection.sendall(_ANSWER.pack(_COMING, 0, 0))
            return
        if record is None:
            connection.sendall(_ANSWER.pack(_ABSENT, 0, 0))
            return
        # Head and bytes share a packet; with nothing to follow it would be held back.
        more = socket.MSG_MORE if record.memory else 0
        connection.sendall(_ANSWER.pack(_OFFERED, len(record.memory), record.checksum), more)
        connection.sendall(record.memory)
        with self._lock:
            self.sent_bytes += len(record.memory)

    def _offered(self, name: bytes) -> _Record | None:
        """The record with its checksum, which is of bytes that were offered until it was made.
        Coming: see `Give`."""
        record = self._records.get(name)
        if record is None:
            return self._given(name)
        if record.checksum is not None:
            return record
        checksum = xxhash.xxh3_64_intdigest(record.memory)
        with self._lock:
            if self._records.get(name) is not record:
                return None
            record.checksum = checksum
        return record

    def _given(self, name: bytes) -> _Record | None:
        """Record under this name in a folder; None if there is no such folder or record."""
        folder, _, inside = name.decode(errors="replace").partition(_FOLDER)
        give = self._folders.get(folder)
        memory = give(inside) if give else None
        return None if memory is None else _Record(memory, xxhash.xxh3_64_intdigest(memory))


def record_in_folder(folder: Descriptor, name: str, size: int) -> Descriptor:
    """The descriptor of record ``name`` of ``size`` bytes in what `TcpPlane.open_folder` gave.
    LookupError or TypeError if it gave no such thing."""
    where = {key: folder[key] for key in ("host", "port", "maker")}
    return where | {"name": f"{folder['folder']}{_FOLDER}{name}", "size": size}
