"""A rank that was started ahead: it imports what its role needs, then waits to be told that it is
needed.

Until then it has no weights, no connection to the queue, no thread and nothing on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from relax_hpc.base.cuda_context import has_cuda_context
from relax_hpc.base.rundir import RunDir, write_json
from relax_hpc.net.rendezvous.process import SignalFlag
from relax_hpc.net.rendezvous.roster import latest_incarnation

_LOOK_S = 10.0
"""Seconds between looks at whether the process may still be needed; who needs it says so at
once."""
_LOW = 19
_OOM_SCORE, _FIRST_TO_GO = Path("/proc/self/oom_score_adj"), "1000"
_MEMORY = Path("/proc/self/smaps_rollup")
_STDIN = 0


class NotNeededError(Exception):
    """End of a process that never became an incarnation; the reason in words."""


def wait_to_begin(
    run: RunDir,
    args: argparse.Namespace,
    import_role: Callable[[], object],
    leader: bool,
    stop: SignalFlag,
) -> None:
    """Import, and wait for a byte of standard input, which is empty afterwards. NotNeededError:
    none is to come.

    The group's ``leader`` says in the run directory that it waits.
    """
    note = run.logs(args.group, args.incarnation) / f"ahead-{args.role}.json"
    with _first_to_go():
        began = time.monotonic()
        _at_low_priority(import_role)
        about = {"imported_s": round(time.monotonic() - began, 1), "memory_mb": _memory_mb()}
        print(f"{args.role}: started ahead, waits: {about}", flush=True)
        if has_cuda_context():
            raise NotNeededError(
                "an import has taken a GPU that others work on; set liveness.start_ahead_s: 0"
            )
        with _note(note if leader else None, about):
            _wait(run, args, stop)
    # The pipe is of no use to what the role starts.
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), _STDIN)


def _at_low_priority(work: Callable[[], object]) -> None:
    """Work in a thread, which ends: a process that has made way to others may not take its place
    again."""
    failed: list[BaseException] = []

    def run() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW)
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="imports")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@contextlib.contextmanager
def _first_to_go() -> Iterator[None]:
    """Let the system end this process rather than one at work where memory runs out."""
    before = ""
    with contextlib.suppress(OSError):
        before = _OOM_SCORE.read_text()
        _OOM_SCORE.write_text(_FIRST_TO_GO)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _OOM_SCORE.write_text(before)


@contextlib.contextmanager
def _note(path: Path | None, about: dict[str, float]) -> Iterator[None]:
    """Keep a note for `relax-hpc status`; a disk that takes nothing does not matter."""
    if path:
        with contextlib.suppress(OSError):
            write_json(path, about)
    try:
        yield
    finally:
        if path:
            with contextlib.suppress(OSError):
                path.unlink()


def _wait(run: RunDir, args: argparse.Namespace, stop: SignalFlag) -> None:
    passed_over = False
    while not select.select([_STDIN], [], [], _LOOK_S)[0]:
        if stop.is_set():
            raise NotNeededError("asked to stop before it was needed")
        if args.deadline and time.time() > args.deadline:
            raise NotNeededError("the allocation ends")
        with contextlib.suppress(OSError):
            if run.finished.exists() or run.stop.exists():
                raise NotNeededError("the run is over")
            # Its supervisor may be gone with the node of srun, which then closes nothing. Who
            # claims says so at once.
            before, passed_over = (
                passed_over,
                latest_incarnation(run, args.group) >= args.incarnation,
            )
            if before and passed_over:
                raise NotNeededError(f"incarnation {args.incarnation} was begun without it")
    if not os.read(_STDIN, 1):
        raise NotNeededError("its supervisor needs it no more, or has ended")


def _memory_mb() -> int:
    """Memory of this process in MB, what it shares with others divided among them; 0: not known."""
    with contextlib.suppress(OSError, StopIteration):
        lines = _MEMORY.read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("Pss:"))) // 1024
    return 0
