"""Plane within a node: readers map the memory in which a record was written. Nothing is copied."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.net.rendezvous.network import peer_user
from relax_hpc.net.transport.links import (
    SILENCE_S,
    Deadline,
    ThreadListener,
    prove_token,
    receive,
    wait_for_request,
)
from relax_hpc.net.transport.peers import PeerLink, PeerLinks
from relax_hpc.net.transport.plane import Descriptor, Plane, PlaneError
from relax_hpc.net.transport.slab import Memfd, Slab, SlabPool, map_read_only

MAX_RECORDS = 1 << 16
"""Records that one process can offer at a time."""
_BOARD = 0
"""Number of the memfd of the board. Memfds of the pool have numbers from 1 on."""
_ANSWER_S = 5.0
_PAUSE_S = 0.01
_REQUEST = struct.Struct("<Q")
_FOUND, _UNKNOWN = b"+", b"-"


def node_identity() -> str:
    """Boot and network namespace of this process.

    A process can connect to an abstract unix socket of another one only if both are equal. A
    container may have its own network namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


@dataclass(slots=True)
class _RecordAddress:
    """Descriptor of a record: `size` bytes at offset `at` of memfd `memfd` of the maker at
    `socket`.

    The record is offered as long as `slot` of the board has the number `serial`.
    """

    name: str
    node: str
    socket: str
    memfd: int
    at: int
    size: int
    slot: int
    serial: int

    @classmethod
    def from_descriptor(cls, descriptor: Descriptor) -> _RecordAddress:
        """Raises ValueError or TypeError for an invalid descriptor. Other fields fail at their
        use."""
        address = cls(**descriptor)
        if min(address.memfd, address.at, address.size, address.slot, address.serial - 1) < 0:
            raise ValueError(f"a number that is none of this plane's in {descriptor}")
        return address


@dataclass(frozen=True, slots=True)
class _Record:
    slot: int
    copy: Slab | None
    """Slab with a copy that the plane has made. None: the record is in the memory of the pool."""


class _Board:
    """Shows which records are offered: a serial number in each slot, in memory that readers map."""

    def __init__(self) -> None:
        self.memfd = Memfd("relax-board", 8 * MAX_RECORDS)
        self._slots = self.memfd.memory.cast("Q")
        self._free: list[int] = []
        self._unused = iter(range(MAX_RECORDS))
        self._serials = itertools.count(1)

    def post(self) -> tuple[int, int]:
        """Slot and serial number of a new record."""
        slot = self._free.pop() if self._free else next(self._unused, None)
        if slot is None:
            raise PlaneError(
                f"shm: {MAX_RECORDS} records are published, which is the maximum; retire some"
            )
        serial = next(self._serials)
        self._slots[slot] = serial
        return slot, serial

    def clear(self, slot: int) -> None:
        self._slots[slot] = 0
        self._free.append(slot)

    def close(self) -> None:
        self._slots.release()
        self.memfd.close()


class _Maker(PeerLink):
    """Connection to a process that offers records, and the mappings of its memory."""

    def __init__(self, address: str, token: bytes) -> None:
        super().__init__(lambda deadline: _connect(address, token, deadline))
        self._mapped: dict[int, memoryview] = {}

    def view(self, address: _RecordAddress, deadline: Deadline) -> memoryview:
        """The record at ``address``. OSError: it is not offered."""
        board = self._memory(_BOARD, deadline).cast("Q")
        if address.slot >= len(board) or board[address.slot] != address.serial:
            raise PlaneError("its maker has retired it")
        memory = self._memory(address.memfd, deadline)
        end = address.at + address.size
        if end > len(memory):
            raise PlaneError(
                f"{address.size} bytes at {address.at} do not lie in a memfd of {len(memory)}"
            )
        return memory[address.at : end]

    def _memory(self, number: int, deadline: Deadline) -> memoryview:
        memory = self._mapped.get(number)
        if memory is None:
            with self.use(deadline) as connection:
                fd = _request_memfd(connection, number, deadline)
            if fd is None:
                raise PlaneError(f"its maker has no memfd {number}")
            try:
                memory = self._mapped[number] = map_read_only(fd)
            finally:
                os.close(fd)
        return memory


def _connect(address: str, token: bytes, deadline: Deadline) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _connect_patiently(connection, address, deadline)
        _check_user(connection)
        prove_token(connection, token, address.encode(), deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_patiently(connection: socket.socket, address: str, deadline: Deadline) -> None:
    """Connect. While the listener's queue of connections is full, try again."""
    while True:
        connection.settimeout(deadline.remaining())
        # If the queue is full, connect(2) on a unix socket with a timeout fails with EAGAIN.
        try:
            return connection.connect(f"\0{address}")
        except BlockingIOError:
            time.sleep(_PAUSE_S)


def _check_user(connection: socket.socket) -> None:
    """Raise PermissionError if the process at the other end belongs to another user."""
    user = peer_user(connection)
    if user != os.getuid():
        raise PermissionError(f"the peer is of user {user}, allowed is {os.getuid()}")


def _request_memfd(connection: socket.socket, number: int, deadline: Deadline) -> int | None:
    """File descriptor of the maker's memfd ``number``. None: there is no such memfd."""
    connection.settimeout(deadline.remaining())
    connection.sendall(_REQUEST.pack(number))
    connection.settimeout(deadline.next_wait())
    # MSG_CMSG_CLOEXEC: child programs do not inherit the descriptor.
    answer, fds, *_ = socket.recv_fds(connection, len(_FOUND), 1, socket.MSG_CMSG_CLOEXEC)
    if answer == _UNKNOWN:
        return None
    if answer != _FOUND or not fds:
        raise ConnectionError("its maker has ended")
    return fds[0]


class ShmPlane(Plane):
    """Records in memfds. Readers of the same user and node receive them over an abstract unix
    socket.

    Readers keep the mappings, so that a further record in mapped memory needs no message. `read`
    returns the maker's memory. It changes when the maker has retired the record and uses the memory
    again. Mapped memory stays readable if the maker is killed.
    """

    name = "shm"

    def __init__(self, token: bytes, pool: SlabPool, silence_s: float = SILENCE_S) -> None:
        """``pool``: records in its memory are published without a copy. `close` does not close it.
        ``silence_s``: seconds without data after which a read fails."""
        self._pool, self._silence_s = pool, silence_s
        self._node, self._address = node_identity(), f"relax-shm-{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._board = _Board()
        self._records: dict[str, _Record] = {}
        self._makers: PeerLinks[str, _Maker] = PeerLinks(lambda address: _Maker(address, token))
        # The name begins with a zero byte: an abstract socket, which has no file. Nothing is left
        # of it if the process is killed. It has no file mode either, so the user of each peer is
        # checked.
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(f"\0{self._address}")
        listening.listen()
        self._listener = ThreadListener(
            listening, token, self._address.encode(), self._serve, "plane-shm", _check_user
        )

    def publish(self, name: str, record: memoryview) -> Descriptor:
        """See `Plane`. A record in a slab of the pool is not copied. PlaneError: ``name`` is in
        use."""
        record = memoryview(record).cast("B")
        copy: Slab | None = None
        location = self._pool.locate(record)
        if location is None:
            copy = self._pool.take(len(record))
            copy.memory[: len(record)] = record
            location = copy.number, copy.offset
        try:
            slot, serial = self._post(name, copy)
        except PlaneError:
            self._give_back(copy)
            raise
        memfd, offset = location
        return {
            "name": name,
            "node": self._node,
            "socket": self._address,
            "memfd": memfd,
            "at": offset,
            "size": len(record),
            "slot": slot,
            "serial": serial,
        }

    def _post(self, name: str, copy: Slab | None) -> tuple[int, int]:
        with self._lock:
            if name in self._records:
                raise PlaneError(f"shm: record {name} is published already; retire it first")
            slot, serial = self._board.post()
            self._records[name] = _Record(slot, copy)
            return slot, serial

    def _give_back(self, copy: Slab | None) -> None:
        if copy is not None:
            self._pool.give_back(copy)

    def read(self, descriptor: Descriptor, timeout_s: float) -> memoryview:
        """See `Plane`: a read-only mapping."""
        try:
            address = _RecordAddress.from_descriptor(descriptor)
            if address.node != self._node:
                raise PlaneError(
                    f"its node is {address.node}, this is {self._node}; take another plane"
                )
            maker = self._makers.link(address.socket)
            return maker.view(address, Deadline(timeout_s, self._silence_s))
        except (OSError, ValueError, TypeError, struct.error) as error:
            record = f"record {descriptor.get('name')} from {descriptor.get('socket')}"
            raise PlaneError(f"shm: {record} (in {timeout_s:g} s): {error}") from error

    def is_still_offered(self, descriptor: Descriptor) -> bool:
        """See `Plane`."""
        try:
            self.read(descriptor, _ANSWER_S)
        except PlaneError:
            return False
        return True

    def retire(self, name: str) -> None:
        """See `Plane`. The memory is used again, so that no reader may still need the record."""
        with self._lock:
            record = self._records.pop(name, None)
            if record is not None:
                self._board.clear(record.slot)
        if record is not None:
            self._give_back(record.copy)

    def close(self) -> None:
        """See `Plane`."""
        self._listener.close()
        self._makers.close()
        for name in list(self._records):
            self.retire(name)
        self._board.close()

    def _serve(self, connection: socket.socket) -> None:
        while wait_for_request(connection):
            (number,) = _REQUEST.unpack(receive(connection, _REQUEST.size, Deadline(_ANSWER_S)))
            self._answer(connection, number)

    def _answer(self, connection: socket.socket, number: int) -> None:
        connection.settimeout(_ANSWER_S)
        fd = (
            self._board.memfd.open_read_only()
            if number == _BOARD
            else self._pool.open_read_only(number)
        )
        if fd is None:
            connection.sendall(_UNKNOWN)
            return
        try:
            socket.send_fds(connection, [_FOUND], [fd])
        finally:
            os.close(fd)
