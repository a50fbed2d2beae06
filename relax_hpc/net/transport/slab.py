"""Reusable shared memory: memfds whose pages are there before anybody waits for them, handed out in
pieces.

A memfd has no name in any filesystem, so nothing is left of a process that was killed.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import itertools
import mmap
import os
import threading
from dataclasses import dataclass

import numpy as np

PAGE_BYTES = 4096
MEMFD_BYTES = 8 << 20
"""Bytes of a memfd that many smaller slabs share: file descriptors are few."""
_ZEROS = bytes(1 << 20)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_SEAL_FUTURE_WRITE = 0x10
"""Seal that forbids writable mappings from now on, those that exist stay so; Linux 5.1, unknown to
Python 3.11."""


def slab_size(wanted: int) -> int:
    """Bytes of a slab for ``wanted`` bytes: pages, and 5, 6, 7 or 8 quarters of a power of two, so
    that many agree.

    >>> slab_size(1), slab_size(33_000), slab_size(1 << 20)
    (4096, 40960, 1048576)
    """
    step = max(PAGE_BYTES, 1 << max(0, (wanted - 1).bit_length() - 3))
    return max(1, -(-wanted // step)) * step


class Memfd:
    """``size`` bytes that other processes can map but not write; ``memory`` is this process's
    writable mapping.

    OSError if there is no room for its pages.
    """

    __slots__ = ("address", "fd", "memory", "size")

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self._fault_in()
            mapping = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._seal()
        except BaseException:
            os.close(self.fd)
            raise
        self.memory = memoryview(mapping)
        self.address = _address(self.memory)

    def _fault_in(self) -> None:
        # By writing, not by touching: it lets other threads run, and a lack of memory is an error
        # instead of a signal.
        for at in range(0, self.size, len(_ZEROS)):
            os.pwrite(self.fd, memoryview(_ZEROS)[: self.size - at], at)

    def _seal(self) -> None:
        """Readers need not fear that pages vanish under them, and cannot write by mistake."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)

    def open_read_only(self) -> int:
        """A file descriptor for others; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """The memory itself goes with the last view of it, here or in another process."""
        os.close(self.fd)
        self.memory = memoryview(b"")


def map_read_only(fd: int) -> memoryview:
    """The whole memfd ``fd`` as memory that cannot be written; ``fd`` may be closed afterwards."""
    return memoryview(
        mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    )


def _address(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """A piece of a memfd: `number` is the memfd's in its pool, `offset` is where in it `memory`
    (writable) begins."""

    fd: int
    number: int
    offset: int
    size: int
    memory: memoryview


class SlabPool:
    """Slabs to take and give back; any thread may. Memory that was given back is kept for the next
    who takes.

    >>> pool = SlabPool()
    >>> slab = pool.take(100_000)
    >>> slab.size, pool.taken
    (114688, 114688)
    >>> pool.give_back(slab)
    >>> pool.taken, pool.take(90_000) is slab
    (0, True)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._memfds: dict[int, Memfd] = {}
        self._addresses: list[tuple[int, int]] = []
        """Address at which it is mapped, and number, of every memfd, ascending."""
        self._made: dict[int, int] = {}
        """Number of slabs made so far, by their size."""
        self._free: dict[int, list[Slab]] = {}
        self._taken: set[Slab] = set()

    @property
    def bytes(self) -> int:
        """All memory that the pool holds, taken or not. It never shrinks."""
        with self._lock:
            return sum(memfd.size for memfd in self._memfds.values())

    @property
    def taken(self) -> int:
        """Bytes of the slabs that are taken."""
        with self._lock:
            return sum(slab.size for slab in self._taken)

    def take(self, size: int) -> Slab:
        """A slab of at least ``size`` bytes (about a quarter more at most, unless a larger one lies
        idle: then up to twice), which hold what was in them last. OSError if there is no memory or
        no file descriptor left."""
        if size < 0:
            raise ValueError(f"slab: found a size of {size} bytes, allowed 0 and more")
        with self._lock:
            slab = self._idle(slab_size(size))
        # Making memory takes long: others go on meanwhile.
        return slab or self._make(slab_size(size))

    def _idle(self, size: int) -> Slab | None:
        limit = 2 * size
        while size <= limit:
            if self._free.get(size):
                slab = self._free[size].pop()
                self._taken.add(slab)
                return slab
            size = slab_size(size + 1)
        return None

    def _make(self, size: int) -> Slab:
        count, number = self._count(size), next(self._numbers)
        memfd = Memfd(f"relax-slab-{number}", count * size)
        starts = range(0, memfd.size, size)
        slabs = [Slab(memfd.fd, number, at, size, memfd.memory[at : at + size]) for at in starts]
        with self._lock:
            self._made[size] = self._made.get(size, 0) + count
            self._memfds[number] = memfd
            bisect.insort(self._addresses, (memfd.address, number))
            self._free.setdefault(size, []).extend(slabs[1:])
            self._taken.add(slabs[0])
        return slabs[0]

    def _count(self, size: int) -> int:
        """Slabs to make next: as many as there are of this size, so that few file descriptors do
        for many slabs."""
        with self._lock:
            return max(1, min(self._made.get(size, 0), MEMFD_BYTES // size))

    def give_back(self, slab: Slab) -> None:
        """Nobody needs what is in ``slab``. ValueError if it is not one that was taken here."""
        with self._lock:
            if slab not in self._taken:
                raise ValueError(
                    f"slab {slab.number} at {slab.offset}: not taken from this pool, or given back "
                    "before"
                )
            self._taken.remove(slab)
            self._free.setdefault(slab.size, []).append(slab)

    def locate(self, record: memoryview) -> tuple[int, int] | None:
        """Number of the memfd in which ``record`` lies and where in it; None if it does not lie in
        one of this pool."""
        if not record.nbytes:
            return None
        address = _address(record)
        with self._lock:
            before = bisect.bisect_right(self._addresses, (address, 1 << 62))
            if not before:
                return None
            start, number = self._addresses[before - 1]
            inside = address + record.nbytes <= start + self._memfds[number].size
            return (number, address - start) if inside else None

    def open_read_only(self, number: int) -> int | None:
        """A file descriptor of memfd ``number`` for another process, to be closed by the caller;
        None if unknown."""
        with self._lock:
            memfd = self._memfds.get(number)
            return memfd.open_read_only() if memfd else None

    def close(self) -> None:
        """Hand the memory back, as far as nobody has a view of it; close the planes that use the
        pool before."""
        with self._lock:
            for memfd in self._memfds.values():
                memfd.close()
            for kept in (self._memfds, self._addresses, self._made, self._free, self._taken):
                kept.clear()
