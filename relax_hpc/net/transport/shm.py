"""The plane within a node: readers map the memory in which a record was written, and nothing is
copied."""

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
"""Number of the board, where memfds of the pool begin at 1."""
_ANSWER_S = 5.0
_PAUSE_S = 0.01
_REQUEST = struct.Struct("<Q")
_HERE, _UNKNOWN = b"+", b"-"


def node_identity() -> str:
    """Equal in two processes if an abstract socket of one can be reached by the other: one kernel,
    one network namespace. Containers may have another."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


@dataclass(slots=True)
class _Place:
    """A descriptor: `size` bytes from `at` on in memfd `memfd` of the maker at `socket`; they are
    there as long as the board says `serial` in `slot`."""

    name: str
    node: str
    socket: str
    memfd: int
    at: int
    size: int
    slot: int
    serial: int

    @classmethod
    def from_descriptor(cls, descriptor: Descriptor) -> _Place:
        """ValueError or TypeError if it is none. What is not looked at here fails where it is
        used."""
        place = cls(**descriptor)
        if min(place.memfd, place.at, place.size, place.slot, place.serial - 1) < 0:
            raise ValueError(f"a number that is none of this plane's in {descriptor}")
        return place


@dataclass(frozen=True, slots=True)
class _Record:
    slot: int
    copy: Slab | None
    """Memory that the plane itself took from the pool for it; None: the record lay in the pool."""


class _Board:
    """Says which records are offered: a serial number a slot, in memory that the readers have
    mapped."""

    def __init__(self) -> None:
        self.memfd = Memfd("relax-board", 8 * MAX_RECORDS)
        self._slots = self.memfd.memory.cast("Q")
        self._free: list[int] = []
        self._unused = iter(range(MAX_RECORDS))
        self._serials = itertools.count(1)

    def post(self) -> tuple[int, int]:
        """Slot and serial number of one more record."""
        slot = self._free.pop() if self._free else next(self._unused, None)
        if slot is None:
            raise PlaneError(
                f"shm: {MAX_RECORDS} records are published, the most there can be; retire some"
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
    """A process that offers records, another or this one: what was mapped of its memory so far."""

    def __init__(self, address: str, token: bytes) -> None:
        super().__init__(lambda deadline: _connect(address, token, deadline))
        self._mapped: dict[int, memoryview] = {}

    def view(self, place: _Place, deadline: Deadline) -> memoryview:
        """The record at ``place``; an OSError if there is none."""
        board = self._memory(_BOARD, deadline).cast("Q")
        if place.slot >= len(board) or board[place.slot] != place.serial:
            raise PlaneError("its maker has retired it")
        memory = self._memory(place.memfd, deadline)
        if place.at + place.size > len(memory):
            raise PlaneError(
                f"{place.size} bytes at {place.at} do not lie in a memfd of {len(memory)}"
            )
        return memory[place.at : place.at + place.size]

    def _memory(self, number: int, deadline: Deadline) -> memoryview:
        found = self._mapped.get(number)
        if found is None:
            with self.use(deadline) as connection:
                fd = _ask(connection, number, deadline)
            if fd is None:
                raise PlaneError(f"its maker has no memfd {number}")
            try:
                found = self._mapped[number] = map_read_only(fd)
            finally:
                os.close(fd)
        return found


def _connect(address: str, token: bytes, deadline: Deadline) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _knock(connection, address, deadline)
        _check_user(connection)
        prove_token(connection, token, address.encode(), deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def _knock(connection: socket.socket, address: str, deadline: Deadline) -> None:
    """Connect; where strangers fill the line of those who wait to be accepted, again and again."""
    while True:
        connection.settimeout(deadline.remaining())
        try:
            return connection.connect(f"\0{address}")
        except BlockingIOError:
            time.sleep(_PAUSE_S)


def _check_user(connection: socket.socket) -> None:
    """PermissionError if the other end is another user's."""
    if (user := peer_user(connection)) != os.getuid():
        raise PermissionError(f"the peer is of user {user}, allowed is {os.getuid()}")


def _ask(connection: socket.socket, number: int, deadline: Deadline) -> int | None:
    """A file descriptor of the maker's memfd ``number``; None if it has no such."""
    connection.settimeout(deadline.remaining())
    connection.sendall(_REQUEST.pack(number))
    connection.settimeout(deadline.next_wait())
    answer, fds, *_ = socket.recv_fds(connection, len(_HERE), 1, socket.MSG_CMSG_CLOEXEC)
    if answer == _UNKNOWN:
        return None
    if answer != _HERE or not fds:
        raise ConnectionError("its maker has ended")
    return fds[0]


class ShmPlane(Plane):
    """Records in memfds, which readers of the same user and node get over an abstract unix socket
    and keep mapped: a further record in memory that is mapped costs no message.

    What `read` gives is the maker's memory itself: when the maker has retired the record and uses
    the memory again, it changes. Of a maker that was killed, what is mapped stays readable.
    """

    name = "shm"

    def __init__(self, token: bytes, pool: SlabPool, silence_s: float = SILENCE_S) -> None:
        """``pool``: where the records lie that are published without a copy. It is not closed with
        the plane. ``silence_s``: for a maker without any sign."""
        self._pool, self._silence_s = pool, silence_s
        self._node, self._address = node_identity(), f"relax-shm-{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._board = _Board()
        self._records: dict[str, _Record] = {}
        self._makers: PeerLinks[str, _Maker] = PeerLinks(lambda address: _Maker(address, token))
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(f"\0{self._address}")
        listening.listen()
        self._listener = ThreadListener(
            listening, token, self._address.encode(), self._serve, "plane-shm", _check_user
        )

    def publish(self, name: str, record: memoryview) -> Descriptor:
        """See `Plane`. Nothing is copied if ``record`` lies in a slab of the pool. PlaneError if
        ``name`` is taken."""
        record = memoryview(record).cast("B")
        place, copy = self._pool.locate(record), None
        if place is None:
            copy = self._pool.take(len(record))
            copy.memory[: len(record)] = record
        try:
            slot, serial = self._post(name, copy)
        except PlaneError:
            self._give_back(copy)
            raise
        memfd, at = place or (copy.number, copy.offset)
        found = {
            "name": name,
            "node": self._node,
            "socket": self._address,
            "memfd": memfd,
            "at": at,
        }
        return found | {"size": len(record), "slot": slot, "serial": serial}

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
        """See `Plane`: a mapping, which cannot be written."""
        try:
            place = _Place.from_descriptor(descriptor)
            if place.node != self._node:
                raise PlaneError(
                    f"its node is {place.node}, this is {self._node}; take another plane"
                )
            return self._makers.link(place.socket).view(place, Deadline(timeout_s, self._silence_s))
        except (OSError, ValueError, TypeError, struct.error) as error:
            which = f"record {descriptor.get('name')} from {descriptor.get('socket')}"
            raise PlaneError(f"shm: {which} (in {timeout_s:g} s): {error}") from error

    def is_still_offered(self, descriptor: Descriptor) -> bool:
        """See `Plane`."""
        try:
            self.read(descriptor, _ANSWER_S)
        except PlaneError:
            return False
        return True

    def retire(self, name: str) -> None:
        """See `Plane`. Nobody may need the bytes any more: the memory is used again."""
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
            socket.send_fds(connection, [_HERE], [fd])
        finally:
            os.close(fd)
