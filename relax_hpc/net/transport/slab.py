"""Reusable shared memory: pieces of memfds whose pages are allocated before they are used.

A memfd has no name in any file system, so that nothing is left of a killed process.
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
"""Bytes of a memfd that many smaller slabs share, because file descriptors are limited."""
_ZEROS = bytes(1 << 20)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_SEAL_FUTURE_WRITE = 0x10
"""Seal that forbids new writable mappings; existing ones stay writable (Linux 5.1). Python 3.11
has no name for it."""


def slab_size(wanted: int) -> int:
    """Bytes of a slab for ``wanted`` bytes.

    They are whole pages, and 5, 6, 7 or 8 eighths of a power of two, so that many slabs have the
    same size.

    >>> slab_size(1), slab_size(33_000), slab_size(1 << 20)
    (4096, 40960, 1048576)
    """
    step = max(PAGE_BYTES, 1 << max(0, (wanted - 1).bit_length() - 3))
    return max(1, -(-wanted // step)) * step


class Memfd:
    """``size`` bytes that other processes can map but not write.

    ``memory``: this process's writable mapping. OSError: there is not enough memory.
    """

    __slots__ = ("address", "fd", "memory", "size")

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self._fault_in()
            # MAP_POPULATE fills the page table now. Otherwise the first write to each page takes a
            # page fault.
            mapping = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._seal()
        except BaseException:
            os.close(self.fd)
            raise
        self.memory = memoryview(mapping)
        self.address = _address(self.memory)

    def _fault_in(self) -> None:
        # Pages are allocated by pwrite, not by writes to the mapping. pwrite releases Python's
        # lock, so that other threads run, and a lack of memory is an error instead of SIGBUS.
        for offset in range(0, self.size, len(_ZEROS)):
            os.pwrite(self.fd, memoryview(_ZEROS)[: self.size - offset], offset)

    def _seal(self) -> None:
        """Fix the size, so that readers get no SIGBUS, and forbid readers to write."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        # Before Linux 5.1 the seal is unknown, and readers could write.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)

    def open_read_only(self) -> int:
        """A read-only file descriptor for another process. The caller closes it."""
        # A duplicate of `fd` would be writable. Opening it by its path gives a read-only one.
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the descriptor. The memory is freed with its last mapping in any process."""
        os.close(self.fd)
        self.memory = memoryview(b"")


def map_read_only(fd: int) -> memoryview:
    """Read-only mapping of the whole memfd ``fd``, which may be closed afterwards."""
    return memoryview(
        mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    )


def _address(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """A piece of a memfd. `number`: of the memfd in its pool. `offset`: of the piece in the memfd.
    `memory`: its writable bytes."""

    fd: int
    number: int
    offset: int
    size: int
    memory: memoryview


class SlabPool:
    """Slabs to take and to give back. Thread-safe. Returned memory is kept and used again.

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
        """(address of the mapping, number) of every memfd, ascending."""
        self._made: dict[int, int] = {}
        """Number of slabs that were created, by size."""
        self._free: dict[int, list[Slab]] = {}
        self._taken: set[Slab] = set()

    @property
    def bytes(self) -> int:
        """Bytes of all memory of the pool, taken or not. They never decrease."""
        with self._lock:
            return sum(memfd.size for memfd in self._memfds.values())

    @property
    def taken(self) -> int:
        """Bytes of the taken slabs."""
        with self._lock:
            return sum(slab.size for slab in self._taken)

    def take(self, size: int) -> Slab:
        """A slab of at least ``size`` bytes, with arbitrary content.

        A new slab is at most about a quarter larger, and an unused one at most twice as large.
        OSError: there is no memory or no file descriptor left.
        """
        if size < 0:
            raise ValueError(f"slab: found a size of {size} bytes, allowed 0 and more")
        with self._lock:
            slab = self._take_unused(slab_size(size))
        # Outside of the lock, because allocating memory takes long.
        return slab or self._create(slab_size(size))

    def _take_unused(self, size: int) -> Slab | None:
        limit = 2 * size
        while size <= limit:
            if self._free.get(size):
                slab = self._free[size].pop()
                self._taken.add(slab)
                return slab
            size = slab_size(size + 1)
        return None

    def _create(self, size: int) -> Slab:
        count, number = self._slab_count(size), next(self._numbers)
        memfd = Memfd(f"relax-slab-{number}", count * size)
        slabs = [
            Slab(memfd.fd, number, offset, size, memfd.memory[offset : offset + size])
            for offset in range(0, memfd.size, size)
        ]
        with self._lock:
            self._made[size] = self._made.get(size, 0) + count
            self._memfds[number] = memfd
            bisect.insort(self._addresses, (memfd.address, number))
            self._free.setdefault(size, []).extend(slabs[1:])
            self._taken.add(slabs[0])
        return slabs[0]

    def _slab_count(self, size: int) -> int:
        """Number of slabs in the next memfd: as many as exist of this size, so that few file
        descriptors are needed for many slabs."""
        with self._lock:
            return max(1, min(self._made.get(size, 0), MEMFD_BYTES // size))

    def give_back(self, slab: Slab) -> None:
        """Return ``slab`` to the pool. ValueError: it was not taken from this pool."""
        with self._lock:
            if slab not in self._taken:
                raise ValueError(
                    f"slab {slab.number} at {slab.offset}: not taken from this pool, or given back "
                    "before"
                )
            self._taken.remove(slab)
            self._free.setdefault(slab.size, []).append(slab)

    def locate(self, record: memoryview) -> tuple[int, int] | None:
        """(number of the memfd, offset) of ``record``. None: it is not in memory of this pool."""
        if not record.nbytes:
            return None
        address = _address(record)
        with self._lock:
            # 1 << 62 is larger than every number of a memfd, so a mapping at exactly `address` is
            # found too.
            index = bisect.bisect_right(self._addresses, (address, 1 << 62))
            if not index:
                return None
            start, number = self._addresses[index - 1]
            is_inside = address + record.nbytes <= start + self._memfds[number].size
            return (number, address - start) if is_inside else None

    def open_read_only(self, number: int) -> int | None:
        """A read-only descriptor of memfd ``number``, which the caller closes. None: unknown."""
        with self._lock:
            memfd = self._memfds.get(number)
            return memfd.open_read_only() if memfd else None

    def close(self) -> None:
        """Close all memfds. Memory with views stays until they are gone. Close the planes of the
        pool before."""
        with self._lock:
            for memfd in self._memfds.values():
                memfd.close()
            for entries in (self._memfds, self._addresses, self._made, self._free, self._taken):
                entries.clear()
