"""Records that a process offers on plane `rdma`: registered memory, a board, and descriptors."""

from __future__ import annotations

import contextlib
import hmac
import threading
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgpack

from relax_hpc.net.transport.links import CLOSE_S, Deadline
from relax_hpc.net.transport.plane import Descriptor, PlaneError
from relax_hpc.net.transport.rdma_agent import NixlAgent, address_of
from relax_hpc.net.transport.rdma_path import route_facts
from relax_hpc.net.transport.slab import Memfd, Slab, SlabPool

MAX_RECORDS = 1 << 16
"""Records that one process can offer at a time."""
_BOARD = 0
"""Number of the memfd of the board. Memfds of the pool have numbers from 1 on."""
WORD_BYTES = 8
"""Bytes of a slot of the board."""
_PROOF_BYTES = 16
_PUBLISH_S = 10.0


@dataclass(slots=True)
class RdmaAddress:
    """Descriptor of a record: `size` bytes at `address` of NIXL agent `agent` in process `peer`.

    The record is offered as long as the 8 bytes at address `slot` are `serial`. `card` has the
    facts of the process, see `route_facts`.
    """

    name: str
    size: int
    peer: str
    agent: str
    metadata: bytes
    card: dict[str, Any]
    address: int
    slot: int
    serial: int

    def descriptor(self, token: bytes) -> Descriptor:
        """Descriptor with a proof that it comes from a holder of ``token``."""
        # NIXL 1.5.1 crashes if metadata were changed, so they are authenticated before it reads
        # them.
        fields = {field: getattr(self, field) for field in self.__slots__}
        return fields | {"proof": _proof(fields, token)}

    @classmethod
    def from_descriptor(cls, descriptor: Descriptor, token: bytes) -> RdmaAddress:
        """Raises ValueError or TypeError for a descriptor that is invalid, or that does not come
        from a holder of ``token``."""
        fields = dict(descriptor)
        proof = fields.pop("proof", None)
        if not isinstance(proof, bytes) or not hmac.compare_digest(proof, _proof(fields, token)):
            raise ValueError(
                "the descriptor was not made with the token of this run, or was changed"
            )
        return cls(**fields)


def _proof(fields: Descriptor, token: bytes) -> bytes:
    return blake2b(msgpack.packb(fields), key=token, digest_size=_PROOF_BYTES).digest()


class RdmaSource:
    """Records that this process offers, and a thread that lets readers connect.

    `retire` clears a record's slot of the board before the memory is used again. A reader reads the
    slot after the record. If the slot has the record's serial number, the record was valid.
    """

    def __init__(self, token: bytes, owner: str, pool: SlabPool, poll_s: float) -> None:
        self._token, self._owner, self._pool, self._poll_s = token, owner, pool, poll_s
        self._card = route_facts()
        self._agent = NixlAgent(owner)
        self._lock = threading.Lock()
        self._board = Memfd("relax-rdma-board", WORD_BYTES * MAX_RECORDS)
        self._slots = self._board.memory.cast("Q")
        self._free = deque(range(MAX_RECORDS))
        self._serial = 0
        self._records: dict[str, tuple[int, Slab | None]] = {}
        self._metadata: dict[int, bytes] = {}
        self._ending = threading.Event()
        self._agent.register(_BOARD, self._board.memory, Deadline(_PUBLISH_S))
        self._thread = threading.Thread(target=self._poll, name="plane-rdma", daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        # NIXL's own progress thread would keep a core busy (1.5.1). Without any polling, readers
        # cannot connect.
        while not self._ending.wait(self._poll_s):
            with contextlib.suppress(TimeoutError):
                self._agent.serve_readers(Deadline(_PUBLISH_S))

    def publish(self, name: str, record: memoryview) -> Descriptor:
        """Offer ``record``. It is copied unless it is in a slab of the pool.

        PlaneError or an exception of NIXL: it cannot be offered.
        """
        copy: Slab | None = None
        location = self._pool.locate(record)
        if location is None:
            copy = self._pool.take(len(record))
            copy.memory[: len(record)] = record
            memory, number = copy.memory, copy.number
        else:
            memory, number = record, location[0]
        try:
            metadata = self._register(number, memory)
            slot, serial = self._post(name, copy)
        except BaseException:
            self._give_back(copy)
            raise
        address = RdmaAddress(
            name=name,
            size=len(record),
            peer=self._owner,
            agent=self._agent.name,
            metadata=metadata,
            card=self._card,
            address=address_of(memory),
            slot=self._board.address + WORD_BYTES * slot,
            serial=serial,
        )
        return address.descriptor(self._token)

    def _register(self, number: int, memory: memoryview) -> bytes:
        """Register memfd ``number``. Returns the metadata for its readers."""
        metadata = self._metadata.get(number)
        if metadata is None:
            deadline = Deadline(_PUBLISH_S)
            self._agent.register(number, memory, deadline)
            metadata = self._metadata[number] = self._agent.metadata([_BOARD, number], deadline)
        return metadata

    def _post(self, name: str, copy: Slab | None) -> tuple[int, int]:
        with self._lock:
            if name in self._records:
                raise PlaneError(f"{name} is published already; retire it first")
            if not self._free:
                raise PlaneError(
                    f"{MAX_RECORDS} records are published, which is the maximum; retire some"
                )
            slot = self._free.popleft()
            self._serial += 1
            self._slots[slot] = self._serial
            self._records[name] = slot, copy
            return slot, self._serial

    def retire(self, name: str) -> None:
        """Stop offering a record. An unknown one is ignored."""
        with self._lock:
            slot, copy = self._records.pop(name, (None, None))
            if slot is not None:
                self._slots[slot] = 0
                self._free.append(slot)
        self._give_back(copy)

    def _give_back(self, copy: Slab | None) -> None:
        if copy is not None:
            self._pool.give_back(copy)

    def close(self) -> None:
        """Stop offering records, end the thread, and free the memory."""
        self._ending.set()
        self._thread.join(CLOSE_S)
        for name in list(self._records):
            self.retire(name)
        self._agent.close()
        self._slots.release()
        self._board.close()
