"""Inside a group: MPI tells the ranks of each other, once, at start. Everything later goes other ways.

One MPI world never spans groups: a killed peer would leave its survivors hanging without an error.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a group. `cards` are in rank order; `master` is where rank 0 listens for torch.distributed."""

    rank: int
    size: int
    local_rank: int
    cards: list[dict[str, Any]]

    @property
    def leader(self) -> bool:
        """Rank 0 speaks for the group."""
        return self.rank == 0

    @property
    def master(self) -> tuple[str, int]:
        return self.cards[0]["address"], self.cards[0]["port"]


def free_port(host: str) -> int:
    """A port of ``host`` that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def join(address: str = "127.0.0.1") -> World:
    """Meet the other ranks that the MPI launcher started (alone without one); they reach this one at ``address``."""
    # Slurm may give nodes of one host name; its own name of the node tells them apart.
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    card = {"node": node, "address": address, "port": free_port(address), "pid": os.getpid()}
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    cards = [json.loads(text) for text in _allgather(MPI.COMM_WORLD, json.dumps(card).encode())]
    rank = MPI.COMM_WORLD.Get_rank()
    # Its shared memory goes now, not never when this process is killed; the launcher still ends all ranks with one.
    MPI.Finalize()
    local_rank = sum(other["node"] == node for other in cards[:rank])
    return World(rank, len(cards), local_rank, cards)


def _allgather(comm: Any, data: bytes) -> list[bytes]:
    """``data`` of every rank, in rank order, without pickling."""
    import numpy as np

    sizes = np.zeros(comm.Get_size(), dtype="i4")
    comm.Allgather(np.array([len(data)], dtype="i4"), sizes)
    flat = np.zeros(sizes.sum(), dtype="u1")
    comm.Allgatherv(np.frombuffer(data, dtype="u1"), (flat, sizes))
    ends = np.cumsum(sizes)
    return [flat[end - size : end].tobytes() for size, end in zip(sizes, ends, strict=True)]
