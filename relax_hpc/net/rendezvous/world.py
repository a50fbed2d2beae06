"""Meeting of the ranks of a group: each learns the addresses of all others, once, at start.

Within a node, the process that starts the ranks exchanges their cards
(`relax_hpc.cluster.supervise.ranks`). Over several nodes, MPI does. An MPI world never spans
groups: if a rank of another group were killed, the survivors would hang without an error.

MPI runs in a child process of each rank, which ends after the meeting. Its memory and its sockets
are then free. If MPI fails, it ends the child, and the rank can report which settings to change.
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
"""Environment variable of ranks that the launcher introduces to each other: number of the rank,
number of ranks, and the descriptor of a socket to the launcher."""
_REMEDY = (
    "let site.mpi.library and site.mpi.launcher name an MPI library and a launcher that belong "
    "together: library wheel "
    "(the mpich package next to mpi4py) with pmi2, the path of an Open MPI's libmpi.so with pmix"
)


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a group, as one of them sees it. `cards` are in rank order."""

    rank: int
    size: int
    local_rank: int
    cards: list[dict[str, Any]]
    listening: socket.socket | None = None
    """Socket of rank 0 for ranks of other nodes and containers. It listens since before they
    learned its address. None in all other ranks."""

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which represents the group."""
        return self.rank == 0

    @property
    def on_one_node(self) -> bool:
        return len({card["node"] for card in self.cards}) == 1

    @property
    def share_files_in_memory(self) -> bool:
        """Whether the ranks can open each other's files in memory: they are on one node, and not in
        separate containers."""
        return self.on_one_node and len({card.get("space") for card in self.cards}) == 1


def single_rank_world(address: str) -> World:
    """The world of a group of one rank, which needs neither MPI nor a launcher."""
    return World(0, 1, 0, [_card(address)])


def join_world(address: str, ranks: int, mpi: MpiConfig, patience_s: float) -> World:
    """Meet the other ranks of a group of ``ranks`` ranks, which reach this one at ``address``.

    RelaxError: MPI failed. ConfigError: it started another number of ranks. DeadlineError: the
    ranks did not meet within ``patience_s``.
    """
    # With port 0 the kernel chooses a free port, so that several runs on one node do not collide.
    listening = socket.create_server((address, 0))
    # Ranks on the same node open this file by its path in /proc. It disappears with the processes
    # that have it open, so that nothing is left if they are killed.
    memory = os.memfd_create("meeting")
    card = _card(address) | {"port": listening.getsockname()[1], "memory": memory}
    settings = f"site.mpi: with library {mpi.library} and launcher {mpi.launcher}"
    # MPICH leaves files in /dev/shm if its processes are killed while they meet.
    sweep_orphaned_memory()
    meeting = os.environ.pop(MEETING, "")
    if meeting:
        rank, cards = _exchange_by_launcher(meeting, card, patience_s)
    else:
        rank, cards = _run_in_child(lambda: _exchange_by_mpi(card), settings, patience_s)
    if len(cards) != ranks:
        raise ConfigError(
            f"{settings}: MPI_Init found {len(cards)} ranks, allowed: the {ranks} that were "
            f"started; {_REMEDY}"
        )
    local_rank = sum(other["node"] == card["node"] for other in cards[:rank])
    world = World(rank, ranks, local_rank, cards)
    # Only rank 0's file is used. The others are closed, which frees their memory.
    if not world.is_leader:
        os.close(memory)
    if world.is_leader and not world.share_files_in_memory:
        return replace(world, listening=listening)
    listening.close()
    return world


def _card(address: str) -> dict[str, Any]:
    # Nodes of Slurm may share one host name, if several slurmd run on one host. slurmd sets
    # SLURMD_NODENAME, which differs, in every task.
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    # The kernel refuses access to /proc/<pid>/fd of a process in another user namespace. Apptainer
    # creates one for each rank.
    space = "/".join(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "user"))
    return {"node": node, "address": address, "pid": os.getpid(), "space": space}


def _exchange_by_launcher(
    meeting: str, card: dict[str, Any], patience_s: float
) -> tuple[int, list[dict[str, Any]]]:
    """Number of this rank, and the cards of all, exchanged by the launcher.

    ``meeting``: value of the environment variable `MEETING`.
    """
    rank, _, descriptor = map(int, meeting.split())
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as lines:
        connection.settimeout(patience_s)
        connection.sendall(json.dumps(card).encode() + b"\n")
        try:
            return rank, [json.loads(line) for line in lines]
        except TimeoutError as error:
            raise DeadlineError(
                f"rank {rank} has not received the cards of all ranks within {patience_s:.0f} s"
            ) from error


def _run_in_child(work: Callable[[], Any], settings: str, patience_s: float) -> Any:
    """Result of ``work`` in a child process. Call it while this process has one thread.

    ``settings``: beginning of error messages.
    """
    # A forked child has only the thread that forked. A lock that another thread holds would stay
    # locked in the child for ever.
    reader, writer = os.pipe()
    parent, child = os.getpid(), os.fork()
    if not child:
        _work(work, parent, writer)
    os.close(writer)
    result = _read(reader, patience_s)
    os.close(reader)
    if result is None:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if result is None:
        raise DeadlineError(
            f"{settings}: the ranks of the group have not met within {patience_s:.0f} s; open "
            "their logs"
        )
    if not result:
        raise RelaxError(
            f"{settings}: MPI_Init {_describe_end(code)} (its messages are in this log); {_REMEDY}"
        )
    return json.loads(result)


def _read(pipe: int, patience_s: float) -> bytes | None:
    """All bytes until the other end is closed. None: that takes longer than ``patience_s``."""
    data, deadline = b"", time.monotonic() + patience_s
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        block = os.read(pipe, 1 << 16)
        if not block:
            return data
        data += block
    return None


def _describe_end(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended the process with code {code}"


def _work(work: Callable[[], Any], parent: int, writer: int) -> NoReturn:
    """Run ``work`` in the child, write its result to the pipe, and exit."""
    try:
        for number in stop_signals():
            signal.signal(number, signal.SIG_DFL)
        os.environ[PARENT] = str(parent)
        die_with_parent()
        result = json.dumps(work()).encode()
        with os.fdopen(writer, "wb", closefd=False) as file:
            file.write(result)
        sys.stdout.flush()
        sys.stderr.flush()
        # MPICH 5.0.2 tells its launcher that the rank ends in an exit handler of C (atexit). After
        # `os._exit`, which skips it, the launcher takes the rank for dead and kills all ranks. The
        # C function exit() runs the handler but does not end the Python interpreter, which
        # continues in the parent.
        ctypes.CDLL(None).exit(0)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


def _exchange_by_mpi(card: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """Number of this rank, and the cards of all, exchanged by MPI."""
    import mpi4py

    # Only one thread uses MPI. mpi4py 4.1.2 otherwise requests MPI_THREAD_MULTIPLE.
    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    cards = [json.loads(text) for text in _allgather(MPI.COMM_WORLD, json.dumps(card).encode())]
    rank = MPI.COMM_WORLD.Get_rank()
    # The launcher expects that every rank exits cleanly after MPI_Finalize. If one does not, it
    # ends all ranks.
    MPI.Finalize()
    return rank, cards


def _allgather(comm: Any, data: bytes) -> list[bytes]:
    """Bytes ``data`` of all ranks, in rank order."""
    # Not `comm.allgather`, which pickles: received bytes are never unpickled.
    import numpy as np

    sizes = np.zeros(comm.Get_size(), dtype="i4")
    comm.Allgather(np.array([len(data)], dtype="i4"), sizes)
    flat = np.zeros(sizes.sum(), dtype="u1")
    comm.Allgatherv(np.frombuffer(data, dtype="u1"), (flat, sizes))
    ends = np.cumsum(sizes)
    return [flat[end - size : end].tobytes() for size, end in zip(sizes, ends, strict=True)]
