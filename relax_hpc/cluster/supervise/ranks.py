"""`python -m relax_hpc.cluster.supervise.ranks N WORDS...`: N processes `python WORDS`, the ranks
of a group on this node.

They meet by sockets that each has inherited (`relax_hpc.net.rendezvous.world`), so that no MPI is
needed within a node: its launchers listen on every interface. The end of a rank that failed is the
end of all, and all end with this process.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field

from relax_hpc.base.errors import EXIT_DONE, EXIT_RETRY
from relax_hpc.net.rendezvous.process import PARENT, STOP_SIGNALS, die_with_parent, stop_signals
from relax_hpc.net.rendezvous.world import MEETING

_WAKEUP_BYTES = 4096


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen
    line: socket.socket
    card: bytearray = field(default_factory=bytearray)
    """Card that the rank prints: a line, when it is whole."""


def main(words: list[str]) -> int:
    """The exit code of the first rank that failed; 0 when all are done."""
    die_with_parent()
    # A signal that comes before there is somebody to tell waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    ranks = [_start(number, int(words[0]), words[1:]) for number in range(int(words[0]))]
    # Python runs a handler only between two of its instructions. A byte in this pipe ends the wait
    # for the ranks, so that the handler also runs if its signal came just before that wait.
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    for number in stop_signals():
        signal.signal(number, lambda given, _: _signal(ranks, given))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    code = _look_after(ranks, woken)
    _signal(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
    return code


def _start(number: int, count: int, words: list[str]) -> _Rank:
    ours, theirs = socket.socketpair()
    with theirs:
        meeting = f"{number} {count} {theirs.fileno()}"
        process = subprocess.Popen(
            [sys.executable, *words],
            env=os.environ | {MEETING: meeting, PARENT: str(os.getpid())},
            pass_fds=(theirs.fileno(),),
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS),
        )
    return _Rank(number, process, ours)


def _signal(ranks: list[_Rank], number: int) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            rank.process.send_signal(number)


def _look_after(ranks: list[_Rank], woken: int) -> int:
    """Pass the cards of all ranks to each, and wait until all have ended, or one has failed.

    ``woken``: the read end of a pipe to which each signal writes a byte.
    """
    left = len(ranks)
    with selectors.DefaultSelector() as selector:
        selector.register(woken, selectors.EVENT_READ)
        for rank in ranks:
            selector.register(rank.line, selectors.EVENT_READ, rank)
            selector.register(os.pidfd_open(rank.process.pid), selectors.EVENT_READ, rank)
        while left:
            for key, _ in selector.select():
                if key.fd == woken:
                    os.read(woken, _WAKEUP_BYTES)
                    continue
                rank: _Rank = key.data
                if key.fileobj is rank.line:
                    if not _hear(rank):
                        selector.unregister(rank.line)
                    elif all(each.card.endswith(b"\n") for each in ranks):
                        _tell(ranks)
                    continue
                selector.unregister(key.fileobj)
                left -= 1
                if code := rank.process.wait():
                    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
                    print(f"rank {rank.number} {how}", file=sys.stderr, flush=True)
                    return EXIT_RETRY if code < 0 else code
    return EXIT_DONE


def _hear(rank: _Rank) -> bool:
    """Whether more of a rank's card is to come."""
    with contextlib.suppress(ConnectionError):
        part = rank.line.recv(1 << 16)
        rank.card += part
        return bool(part)
    return False


def _tell(ranks: list[_Rank]) -> None:
    cards = b"".join(rank.card for rank in ranks)
    for rank in ranks:
        # Who has just ended is noticed as such.
        with contextlib.suppress(ConnectionError):
            rank.line.sendall(cards)
            rank.line.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
