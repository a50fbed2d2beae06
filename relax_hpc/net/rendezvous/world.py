"""Ranks of a group are told of each other here, once, at start. Everything later goes other ways.

Within a node whoever started them tells them (`relax_hpc.cluster.supervise.ranks`), over several
nodes MPI does. One MPI world never spans groups: a killed peer would leave its survivors hanging
without an error. MPI runs in a child of each rank that ends with the meeting: its memory and its
sockets go then, and where it fails, which it does by ending its process, the rank lives to say what
to set.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from relax_hpc.base.errors import ConfigError, DeadlineError, RelaxError
from relax_hpc.base.orphaned_memory import sweep_orphaned_memory
from relax_hpc.config.schema import MpiConfig
from relax_hpc.net.rendezvous.process import PARENT, die_with_parent, stop_signals

MEETING = "RELAX_MEETING"
"""Environment variable by which ranks learn of each other: number, how many, their own socket."""
_CURE = (
    "let site.mpi.library and site.mpi.launcher name an MPI library and a launcher that belong "
    "together: library wheel "
    "(the mpich package beside mpi4py) with pmi2, the path of an Open MPI's libmpi.so with pmix"
)


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a group. `cards` are in rank order."""

    rank: int
    size: int
    local_rank: int
    cards: list[dict[str, Any]]
    listening: socket.socket | None = None
    """Socket at which rank 0 lets ranks of other nodes and containers in; it listens since before
    they were told of it. None in the others."""

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which speaks for the group."""
        return self.rank == 0

    @property
    def on_one_node(self) -> bool:
        return len({card["node"] for card in self.cards}) == 1

    @property
    def share_files_in_memory(self) -> bool:
        """Whether the ranks can open each other's files in memory: on one node, not each in a
        container of its own."""
        return self.on_one_node and len({card.get("space") for card in self.cards}) == 1


def single_rank_world(address: str) -> World:
    """A group of one rank, which needs no MPI, and no launcher."""
    return World(0, 1, 0, [_card(address)])


def join_world(address: str, ranks: int, mpi: MpiConfig, patience_s: float) -> World:
    """Meet the others of all ``ranks``; they reach this one at ``address``.

    RelaxError, ConfigError, DeadlineError: MPI failed, gave another number of ranks, or took over
    ``patience_s``.
    """
    listening = socket.create_server((address, 0))
    # For those that can open it, by its path in /proc: nothing to remove, however this process
    # ends.
    memory = os.memfd_create("meeting")
    card = _card(address) | {"port": listening.getsockname()[1], "memory": memory}
    what = f"site.mpi: with library {mpi.library} and launcher {mpi.launcher}"
    # Ranks that were killed while they met have left some.
    sweep_orphaned_memory()
    told = os.environ.pop(MEETING, "")
    rank, cards = (
        _be_told(told, card, patience_s)
        if told
        else _in_child(lambda: _meet(card), what, patience_s)
    )
    if len(cards) != ranks:
        raise ConfigError(
            f"{what}: MPI_Init found {len(cards)} ranks, allowed: the {ranks} that were started; "
            f"{_CURE}"
        )
    local_rank = sum(other["node"] == card["node"] for other in cards[:rank])
    world = World(rank, ranks, local_rank, cards)
    if not world.is_leader:
        os.close(memory)
    if world.is_leader and not world.share_files_in_memory:
        return replace(world, listening=listening)
    listening.close()
    return world


def _card(address: str) -> dict[str, Any]:
    # Slurm may give nodes of one host name; its own name of the node tells them apart.
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    # The kernel lets nobody into the processes of another user namespace, which Apptainer makes for
    # each rank.
    space = "/".join(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "user"))
    return {"node": node, "address": address, "pid": os.getpid(), "space": space}


def _be_told(
    told: str, card: dict[str, Any], patience_s: float
) -> tuple[int, list[dict[str, Any]]]:
    """The own rank, and the cards of all, by the socket that the launcher left us."""
    rank, _, number = map(int, told.split())
    with socket.socket(fileno=number) as line, line.makefile("rb") as cards:
        line.settimeout(patience_s)
        line.sendall(json.dumps(card).encode() + b"\n")
        try:
            return rank, [json.loads(text) for text in cards]
        except TimeoutError as error:
            raise DeadlineError(
                f"rank {rank} has not heard of all the others within {patience_s:.0f} s"
            ) from error


def _in_child(work: Callable[[], Any], what: str, patience_s: float) -> Any:
    """Result of ``work`` in a child that ends with it. Call it while there is one thread."""
    reader, writer = os.pipe()
    parent, child = os.getpid(), os.fork()
    if not child:
        _work(work, parent, writer)
    os.close(writer)
    found = _read(reader, patience_s)
    os.close(reader)
    if found is None:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if found is None:
        raise DeadlineError(
            f"{what}: the ranks of the group have not met within {patience_s:.0f} s; open their "
            "logs"
        )
    if not found:
        raise RelaxError(
            f"{what}: MPI_Init {_ended(code)} (its own words are in this log); {_CURE}"
        )
    return json.loads(found)


def _read(pipe: int, patience_s: float) -> bytes | None:
    """All that comes until the other end is closed; None: that takes longer."""
    found, until = b"", time.monotonic() + patience_s
    while select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
        if not (more := os.read(pipe, 1 << 16)):
            return found
        found += more
    return None


def _ended(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended the process with code {code}"


def _work(work: Callable[[], Any], parent: int, writer: int) -> NoReturn:
    """Run the child's work and end."""
    try:
        for number in stop_signals():
            signal.signal(number, signal.SIG_DFL)
        os.environ[PARENT] = str(parent)
        die_with_parent()
        answer = json.dumps(work()).encode()
        with os.fdopen(writer, "wb", closefd=False) as file:
            file.write(answer)
        sys.stdout.flush()
        sys.stderr.flush()
        # MPICH 5 says goodbye to its launcher only in an exit handler of C; who leaves without is
        # taken for dead, and all ranks are killed. The interpreter, which goes on in the parent, is
        # not ended.
        ctypes.CDLL(None).exit(0)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


def _meet(card: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """Number of this rank, and the cards of all."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    cards = [json.loads(text) for text in _allgather(MPI.COMM_WORLD, json.dumps(card).encode())]
    rank = MPI.COMM_WORLD.Get_rank()
    # From here on the launcher minds that the ranks' processes end well, and ends all with one that
    # does not.
    MPI.Finalize()
    return rank, cards


def _allgather(comm: Any, data: bytes) -> list[bytes]:
    """Bytes ``data`` of all ranks, in rank order, without pickling."""
    import numpy as np

    sizes = np.zeros(comm.Get_size(), dtype="i4")
    comm.Allgather(np.array([len(data)], dtype="i4"), sizes)
    flat = np.zeros(sizes.sum(), dtype="u1")
    comm.Allgatherv(np.frombuffer(data, dtype="u1"), (flat, sizes))
    ends = np.cumsum(sizes)
    return [flat[end - size : end].tobytes() for size, end in zip(sizes, ends, strict=True)]
