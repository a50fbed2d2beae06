"""Plane between nodes with InfiniBand cards: one-sided reads by NIXL over UCX.

The maker takes no part in a read. Within a node the same code uses the kernel's process_vm_readv. A
record is one descriptor of registered memory, and is read into registered memory. The code deals
with this behaviour of NIXL 1.5.1, which was observed:

- A read that was abandoned can still write to its destination later. The destination is not used
  again while the reading agent lives. When too many bytes are abandoned, the agent is closed and a
  new one is created.
- With verbs, the metadata of a dead process are accepted, and reads hang. Therefore every read has
  a deadline, and a peer that missed one is not used for a while. The queue's controller does not
  pass on records of a maker whose lease has expired.
- Without a one-sided transport, UCX emulates reads over TCP. This is slow, and a reader that ends
  during a read aborts the maker's process ("unexpected error: Endpoint timeout"). Such reads are
  refused, unless `emulated` is set.
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
    """An agent that reads, with the memory of its destinations."""

    def __init__(self, owner: str) -> None:
        self.agent = NixlAgent(owner)
        self.readers = 0
        self.quarantined = 0
        """Bytes of destinations whose read was abandoned."""
        self._pool = SlabPool()
        self._given_up: list[tuple[Slab, Transfer]] = []
        """Abandoned reads, with their destinations."""
        self._returned: deque[Slab] = deque()
        """Slabs without views, which finalizers append. A finalizer can run in any thread at any
        time, so it must not take the lock of the pool."""

    def fetch(self, address: RdmaAddress, deadline: Deadline) -> memoryview:
        """A copy of the record. Its memory returns to the pool with the last view of it."""
        while self._returned:
            with contextlib.suppress(IndexError):
                self._pool.give_back(self._returned.popleft())
        slab = self._pool.take(address.size + 2 * WORD_BYTES)
        transfer = Transfer(self.agent)
        try:
            self._fill(address, slab, transfer, deadline)
        except BaseException:
            self._discard(slab, transfer)
            raise
        record = np.frombuffer(slab.memory, np.uint8, address.size)
        # Not at the exit of the process, where returning the memory has no use.
        weakref.finalize(record, self._returned.append, slab).atexit = False
        return record.data.toreadonly()

    def _fill(
        self, address: RdmaAddress, slab: Slab, transfer: Transfer, deadline: Deadline
    ) -> None:
        """Read the record, then the maker's slot on the board. PlaneError: it was retired."""
        self.agent.register(slab.number, slab.memory, deadline)
        self.agent.add_peer(address.agent, address.metadata, deadline)
        target = address_of(slab.memory)
        slot_offset = -(-address.size // WORD_BYTES) * WORD_BYTES
        if address.size:
            transfer.run(address.agent, address.address, target, address.size, deadline)
        # The slot is read last: if it still has the serial number, the record was valid while it
        # was read.
        transfer.run(address.agent, address.slot, target + slot_offset, WORD_BYTES, deadline)
        serial = int.from_bytes(slab.memory[slot_offset : slot_offset + WORD_BYTES], "little")
        if serial != address.serial:
            raise PlaneError("its maker has retired it")

    def _discard(self, slab: Slab, transfer: Transfer) -> None:
        """Give the memory of a failed read back, unless the read may still write to it."""
        if transfer.is_open:
            self._given_up.append((slab, transfer))
            self.quarantined += slab.size
        else:
            self._pool.give_back(slab)

    def close(self) -> None:
        """Close the agent. Abandoned reads can then no longer write."""
        for _, transfer in self._given_up:
            transfer.release()
        self.agent.close()
        self._given_up.clear()
        self._pool.close()


class RdmaPlane(Plane):
    """Plane of one-sided reads by NIXL. PlaneError: NIXL is not installed, or cannot start."""

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
        """Check NIXL. Agents are created at their first use.

        Args:
            token: secret of the run.
            pool: records in its memory are published without a copy.
            owner: name of this process in messages.
            emulated: also read from peers that UCX reaches only over TCP.
            poll_s: seconds between two polls for readers that connect.
            suspect_s: seconds for which a peer is not used after a read has timed out.
            quarantine_bytes: bytes of abandoned reads above which the agent is replaced.
        """
        usable, reason = check_nixl()
        if not usable:
            raise PlaneError(f"rdma: {reason}")
        self.owner, self.emulated = owner, emulated
        self.suspect_s, self.quarantine_bytes = suspect_s, quarantine_bytes
        self.routes: dict[str, Route] = {}
        """Route to each agent of another process, computed at its first record."""
        self.restarts = 0
        """Number of agents that were replaced because of abandoned reads."""
        self._token, self._pool, self._poll_s = token, pool, poll_s
        self._lock = threading.Lock()
        self._source: RdmaSource | None = None
        self._sink: _Sink | None = None
        self._closed = False
        self._suspects: dict[str, float] = {}

    def publish(self, name: str, record: memoryview) -> Descriptor:
        """See `Plane`. A record in a slab of the pool is not copied. PlaneError: ``name`` is in
        use."""
        try:
            return self._open_source().publish(name, memoryview(record).cast("B"))
        except Exception as error:
            raise PlaneError(f"rdma: record {name}: {_text(error)}") from error

    def _open_source(self) -> RdmaSource:
        with self._lock:
            self._check_open()
            if self._source is None:
                self._source = RdmaSource(self._token, self.owner, self._pool, self._poll_s)
            return self._source

    def _check_open(self) -> None:
        if self._closed:
            raise PlaneError("this plane is closed")

    def path(self, descriptor: Descriptor) -> str:
        """See `Plane`: `cma`, `verbs`, or `tcp` with the reason why there is no better path."""
        return str(self._route(RdmaAddress.from_descriptor(descriptor, self._token)))

    def _route(self, address: RdmaAddress) -> Route:
        route = self.routes.get(address.agent)
        if route is None:
            route = self.routes[address.agent] = find_route(address.card, address.address)
            _log(f"the path from {address.peer} is {route}")
        return route

    def read(self, descriptor: Descriptor, timeout_s: float) -> memoryview:
        """See `Plane`: a copy."""
        try:
            address = RdmaAddress.from_descriptor(descriptor, self._token)
            self._check_peer(address)
            with self._reading() as sink:
                return self._fetch(sink, address, Deadline(timeout_s))
        except Exception as error:  # NIXL's exceptions have no other common base
            reason = _text(error)
        # Outside of the except block: as its cause, the first exception and its traceback would
        # keep the agent and its memory alive.
        raise PlaneError(
            f"rdma: record {descriptor.get('name')} from {descriptor.get('peer')}: {reason}"
        )

    def _fetch(self, sink: _Sink, address: RdmaAddress, deadline: Deadline) -> memoryview:
        try:
            return sink.fetch(address, deadline)
        except PlaneError:
            raise
        except TimeoutError:
            self._suspects[address.agent] = time.monotonic() + self.suspect_s
            raise
        except Exception:
            sink.agent.remove_peer(address.agent)
            raise

    def _check_peer(self, address: RdmaAddress) -> None:
        """Raise PlaneError if the peer has timed out recently, or is reached only by emulation."""
        if time.monotonic() < self._suspects.get(address.agent, 0.0):
            raise PlaneError(
                f"it has not answered in time, and is not used for {self.suspect_s:g} s"
            )
        route = self._route(address)
        if route.kind == "tcp" and not self.emulated:
            raise PlaneError(
                f"the only path is {route}, slow and unsafe for its maker; take plane tcp"
            )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[_Sink]:
        """The agent that reads. If it has too many abandoned reads, it is replaced, and closed
        after its last reader."""
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
                # The memory of abandoned reads is free only after their agent is closed, and the
                # agent can be closed only without readers.
                if sink is self._sink and sink.quarantined > self.quarantine_bytes:
                    self._restart(sink)
                if sink is not self._sink and not sink.readers:
                    sink.close()

    def _restart(self, sink: _Sink) -> None:
        self._sink = None
        self.restarts += 1
        _log(f"a new agent, because {sink.quarantined} bytes may still be overwritten")

    def retire(self, name: str) -> None:
        """See `Plane`. The memory is used again, so that no reader may still need the record."""
        if self._source is not None:
            self._source.retire(name)

    def close(self) -> None:
        """See `Plane`. Reads of other threads of this process end by their deadlines."""
        with self._lock:
            self._closed = True
            source, sink = self._source, self._sink
            self._source = self._sink = None
            if sink is not None and not sink.readers:
                sink.close()
        if source is not None:
            source.close()


def _log(text: str) -> None:
    print(f"plane rdma: {text}", file=sys.stderr, flush=True)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
