"""`python -m relax_hpc.cluster.supervise.ranks N ARGUMENTS...`: start N processes
`python ARGUMENTS`, the ranks of a group on this node.

The ranks exchange their addresses over inherited sockets (`relax_hpc.net.rendezvous.world`). MPI is
not used within a node, because its launchers listen on every network interface. If a rank fails,
all ranks end. All ranks end with this process.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from relax_hpc.base.errors import EXIT_DONE, EXIT_RETRY
from relax_hpc.base.rundir import RunDir
from relax_hpc.net.rendezvous.process import (
    PARENT,
    STOP_SIGNALS,
    describe_end,
    die_with_parent,
    stop_signals,
)
from relax_hpc.net.rendezvous.world import MEETING

_WAKEUP_BYTES = 4096


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen
    connection: socket.socket
    card: bytearray = field(default_factory=bytearray)
    """Card that the rank sends: one line, complete when it ends with a newline."""
    log: Path | None = None
    """Log of the rank, if it is a rank of a role."""


def main(arguments: list[str]) -> int:
    """Start the ranks and wait for them. The exit code is that of the first rank that failed, or 0
    if all succeed."""
    die_with_parent()
    # Signals that arrive before the ranks exist stay pending until they are unblocked below.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    count = int(arguments[0])
    ranks = [_start(number, count, arguments[1:]) for number in range(count)]
    # Python runs a handler only between two of its instructions. A byte in this pipe ends the wait
    # for the ranks, so that the handler also runs if its signal came just before that wait.
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    for number in stop_signals():
        signal.signal(number, lambda received, _: _signal(ranks, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    code = _await_ranks(ranks, woken)
    _signal(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
    return code


def _start(number: int, count: int, arguments: list[str]) -> _Rank:
    ours, theirs = socket.socketpair()
    with theirs:
        meeting = f"{number} {count} {theirs.fileno()}"
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | {MEETING: meeting, PARENT: str(os.getpid())},
            pass_fds=(theirs.fileno(),),
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS),
        )
    return _Rank(number, process, ours, log=_find_log(arguments, number))


def _find_log(arguments: Sequence[str], number: int) -> Path | None:
    """Log of rank ``number`` of the role that ``arguments`` start. None: they start none."""
    # Ranks write to their own logs, so that the message of an abort by NCCL's watchdog (torch 2.13)
    # is not in the output of this process.
    options = dict(pairwise(arguments))
    if not {"--run_dir", "--group", "--incarnation", "--role"} <= options.keys():
        return None
    run = RunDir(Path(options["--run_dir"]))
    incarnation = int(options["--incarnation"])
    return run.rank_log(options["--group"], incarnation, options["--role"], number)


def _signal(ranks: list[_Rank], number: int) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            rank.process.send_signal(number)


def _await_ranks(ranks: list[_Rank], woken: int) -> int:
    """Send the cards of all ranks to each rank. Return when all have ended, or one has failed.

    ``woken``: the read end of a pipe to which each signal writes a byte.
    """
    running = len(ranks)
    with selectors.DefaultSelector() as selector:
        selector.register(woken, selectors.EVENT_READ)
        for new_rank in ranks:
            selector.register(new_rank.connection, selectors.EVENT_READ, new_rank)
            selector.register(os.pidfd_open(new_rank.process.pid), selectors.EVENT_READ, new_rank)
        while running:
            for key, _ in selector.select():
                if key.fd == woken:
                    os.read(woken, _WAKEUP_BYTES)
                    continue
                rank: _Rank = key.data
                if key.fileobj is rank.connection:
                    if not _receive_card(rank):
                        selector.unregister(rank.connection)
                    elif all(each.card.endswith(b"\n") for each in ranks):
                        _send_cards(ranks)
                    continue
                selector.unregister(key.fileobj)
                running -= 1
                code = rank.process.wait()
                if code:
                    return _report_failure(rank, code)
    return EXIT_DONE


def _report_failure(rank: _Rank, code: int) -> int:
    """Print how a rank failed; the exit code of this process."""
    print(f"rank {rank.number} {describe_end(code, rank.log)}", file=sys.stderr, flush=True)
    return EXIT_RETRY if code < 0 else code


def _receive_card(rank: _Rank) -> bool:
    """Read a part of a rank's card; False at the end of the connection."""
    with contextlib.suppress(ConnectionError):
        data = rank.connection.recv(1 << 16)
        rank.card += data
        return bool(data)
    return False


def _send_cards(ranks: list[_Rank]) -> None:
    cards = b"".join(rank.card for rank in ranks)
    for rank in ranks:
        # If a rank has just ended, its process shows that.
        with contextlib.suppress(ConnectionError):
            rank.connection.sendall(cards)
            rank.connection.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
