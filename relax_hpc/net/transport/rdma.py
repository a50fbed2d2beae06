"""The plane between nodes with InfiniBand cards: one-sided reads by NIXL over UCX, which the maker
need not notice.

Within a node the same code runs over the kernel's process_vm_readv. A record is one descriptor, in
memory that was registered before, and is read into registered memory. What is built against, all of
it observed:

- A read that was given up on can land later. Its destination is never used again while the reading
  agent lives; when
  too much has gone that way, the agent ends and a new one begins.
- With verbs the metadata of a dead process is accepted, and reads hang. So every read has a
  deadline, who misses one
  is left alone for a while, and the queue's controller tells nobody what a maker offered whose
  lease is over.
- Without one-sided transport UCX emulates it over TCP, slowly, and there a reader that goes away in
  the middle of a
  read aborts the maker's process ("unexpected error: Endpoint timeout"). Such reads are refused,
  unless `emulated`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator

import numpy as np

from relax_hpc.net.transport.links import Deadline
from relax_hpc.net.transport.plane import Descriptor, Plane, PlaneError
from relax_hpc.net.transport.rdma_agent import NixlAgent, Transfer, address_of, check_nixl
from relax_hpc.net.transport.rdma_path import Route, find_route
from relax_hpc.net.transport.rdma_source import WORD_BYTES, RdmaAddress, RdmaSource
from relax_hpc.net.transport.slab import Slab, SlabPool


class _Sink:
    """One life of the agent that reads: its destinations, and those that were given up on."""

    def __init__(self, owner: str) -> None:
        self.agent = NixlAgent(owner)
        self.readers = 0
        self.quarantined = 0
        """Bytes of destinations that were given up on."""
        self._pool = SlabPool()
        self._given_up: list[tuple[Slab, Transfer]] = []
        self._returned: deque[Slab] = deque()
        """Slabs that nobody has a view of any more. They come from finalizers, which must not take
        a lock."""

    def fetch(self, place: RdmaAddress, deadline: Deadline) -> memoryview:
        """A copy of the record; what was taken for it comes back with the last view of it."""
        while self._returned:
            with contextlib.suppress(IndexError):
                self._pool.give_back(self._returned.popleft())
        slab = self._pool.take(place.size + 2 * WORD_BYTES)
        transfer = Transfer(self.agent)
        try:
            self._fill(place, slab, transfer, deadline)
        except BaseException:
            self._let_go(slab, transfer)
            raise
        record = np.frombuffer(slab.memory, np.uint8, place.size)
        weakref.finalize(record, self._returned.append, slab).atexit = False
        return memoryview(record).toreadonly()

    def _fill(self, place: RdmaAddress, slab: Slab, transfer: Transfer, deadline: Deadline) -> None:
        self.agent.register(slab.number, slab.memory, deadline)
        self.agent.add_peer(place.agent, place.metadata, deadline)
        mine, word = address_of(slab.memory), -(-place.size // WORD_BYTES) * WORD_BYTES
        if place.size:
            transfer.run(place.agent, place.address, mine, place.size, deadline)
        # The word on the board comes last: what it allows was still true when the record had been
        # read.
        transfer.run(place.agent, place.slot, mine + word, WORD_BYTES, deadline)
        if int.from_bytes(slab.memory[word : word + WORD_BYTES], "little") != place.serial:
            raise PlaneError("its maker has retired it")

    def _let_go(self, slab: Slab, transfer: Transfer) -> None:
        if transfer.is_open:
            self._given_up.append((slab, transfer))
            self.quarantined += slab.size
        else:
            self._pool.give_back(slab)

    def close(self) -> None:
        """Close the agent: nothing can land any more in what was given up on."""
        for _, transfer in self._given_up:
            transfer.release()
        self.agent.close()
        self._given_up.clear()
        self._pool.close()


class RdmaPlane(Plane):
    """Plane of one-sided reads by NIXL. PlaneError, with the reason, if NIXL is not there or cannot
    start."""

    name = "rdma"

    def __init__(
        self,
        token: bytes,
        pool: SlabPool,
        owner: str,
        *,
        emulated: bool = False,
        poll_s: float = 0.02,
        suspect_s: float = 30.0,
        quarantine_bytes: int = 1 << 30,
    ) -> None:
        """``pool``: where records lie that are published without a copy. ``owner``: this process,
        for messages. ``poll_s``: how often to look for readers that connect."""
        usable, why_not = check_nixl()
        if not usable:
            raise PlaneError(f"rdma: {why_not}")
        self.owner, self.emulated, self.suspect_s, self.quarantine_bytes = (
            owner,
            emulated,
            suspect_s,
            quarantine_bytes,
        )
        self.routes: dict[str, Route] = {}
        """Route to each agent of another process, as it was found at its first record."""
        self.restarts = 0
        """Times that the reading agent ended for what it had given up on."""
        self._token, self._pool, self._poll_s = token, pool, poll_s
        self._lock = threading.Lock()
        self._source: RdmaSource | None = None
        self._sink: _Sink | None = None
        self._closed = False
        self._suspects: dict[str, float] = {}

    def publish(self, name: str, record: memoryview) -> Descriptor:
        """See `Plane`. Nothing is copied if ``record`` lies in a slab of the pool. PlaneError if
        ``name`` is taken."""
        try:
            return self._offering().publish(name, memoryview(record).cast("B"))
        except Exception as error:
            raise PlaneError(f"rdma: record {name}: {_text(error)}") from error

    def _offering(self) -> RdmaSource:
        with self._lock:
            self._check_open()
            if self._source is None:
                self._source = RdmaSource(self._token, self.owner, self._pool, self._poll_s)
            return self._source

    def _check_open(self) -> None:
        if self._closed:
            raise PlaneError("this plane is closed")

    def path(self, descriptor: Descriptor) -> str:
        """See `Plane`: `cma`, `verbs`, or `tcp` with what is in the way of a better one."""
        return str(self._route(RdmaAddress.from_descriptor(descriptor, self._token)))

    def _route(self, place: RdmaAddress) -> Route:
        found = self.routes.get(place.agent)
        if found is None:
            found = self.routes[place.agent] = find_route(place.card, place.address)
            _say(f"the way from {place.peer} is {found}")
        return found

    def read(self, descriptor: Descriptor, timeout_s: float) -> memoryview:
        """See `Plane`: a copy."""
        try:
            place = RdmaAddress.from_descriptor(descriptor, self._token)
            self._check_peer(place)
            with self._reading() as sink:
                return self._fetch(sink, place, Deadline(timeout_s))
        # NIXL's own errors have nothing in common but this.
        except Exception as error:
            why = _text(error)
        # Not as its consequence: whoever keeps the error would keep the agent, and what it may
        # overwrite.
        raise PlaneError(
            f"rdma: record {descriptor.get('name')} from {descriptor.get('peer')}: {why}"
        )

    def _fetch(self, sink: _Sink, place: RdmaAddress, deadline: Deadline) -> memoryview:
        try:
            return sink.fetch(place, deadline)
        except PlaneError:
            raise
        except TimeoutError:
            self._suspects[place.agent] = time.monotonic() + self.suspect_s
            raise
        except Exception:
            sink.agent.remove_peer(place.agent)
            raise

    def _check_peer(self, place: RdmaAddress) -> None:
        if time.monotonic() < self._suspects.get(place.agent, 0.0):
            raise PlaneError(
                f"it has not answered in time, and is left alone for {self.suspect_s:g} s"
            )
        found = self._route(place)
        if found.kind == "tcp" and not self.emulated:
            raise PlaneError(
                f"the only way is {found}, slow and unsafe for its maker; take plane tcp"
            )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[_Sink]:
        """The agent that reads. It is given up once too much is in quarantine, and ends with its
        last reader."""
        with self._lock:
            self._check_open()
            if self._sink is None:
                self._sink = _Sink(self.owner)
            sink = self._sink
            sink.readers += 1
        try:
            yield sink
        finally:
            with self._lock:
                sink.readers -= 1
                if sink is self._sink and sink.quarantined > self.quarantine_bytes:
                    self._restart(sink)
                if sink is not self._sink and not sink.readers:
                    sink.close()

    def _restart(self, sink: _Sink) -> None:
        self._sink = None
        self.restarts += 1
        _say(f"a new agent, for {sink.quarantined} bytes may still be overwritten")

    def retire(self, name: str) -> None:
        """See `Plane`. Nobody may need the bytes any more: the memory is used again."""
        if self._source is not None:
            self._source.retire(name)

    def close(self) -> None:
        """See `Plane`. What others of this process are reading ends by its deadline."""
        with self._lock:
            self._closed = True
            source, sink = self._source, self._sink
            self._source = self._sink = None
            if sink is not None and not sink.readers:
                sink.close()
        if source is not None:
            source.close()


def _say(text: str) -> None:
    print(f"plane rdma: {text}", file=sys.stderr, flush=True)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
