"""A rank that was started in advance: it imports the libraries of its role, then waits until it is
needed.

Until then it has no weights, no connection to the queue, no further thread and no GPU memory.
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
"""Seconds between checks whether the process may still be needed. The supervisor writes a byte when
it needs the process."""
_LOW_PRIORITY = 19
_OOM_SCORE, _KILL_FIRST = Path("/proc/self/oom_score_adj"), "1000"
_MEMORY = Path("/proc/self/smaps_rollup")
_STDIN = 0


class NotNeededError(Exception):
    """End of a process that never became an incarnation, with the reason."""


def wait_to_begin(
    run: RunDir,
    args: argparse.Namespace,
    import_role: Callable[[], object],
    leader: bool,
    stop: SignalFlag,
) -> None:
    """Import, then wait for a byte on standard input. Standard input is empty afterwards.

    The group's ``leader`` records the wait in the run directory. NotNeededError: no byte will come.
    """
    note = run.logs(args.group, args.incarnation) / f"ahead-{args.role}.json"
    with _kill_first():
        began = time.monotonic()
        _run_at_low_priority(import_role)
        state = {"imported_s": round(time.monotonic() - began, 1), "memory_mb": _memory_mb()}
        print(f"{args.role}: started ahead, waits: {state}", flush=True)
        if has_cuda_context():
            raise NotNeededError(
                "an import uses memory of a GPU that other processes use; set "
                "liveness.start_ahead_s: 0"
            )
        with _note(note if leader else None, state):
            _wait(run, args, stop)
    # Child processes of the role must not inherit the pipe.
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), _STDIN)


def _run_at_low_priority(work: Callable[[], object]) -> None:
    """Run ``work`` in a thread that ends afterwards: without privileges a thread cannot raise its
    priority again."""
    failed: list[BaseException] = []

    def run() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
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
def _kill_first() -> Iterator[None]:
    """Let the kernel kill this process before any process that works, if memory runs out."""
    before = ""
    with contextlib.suppress(OSError):
        before = _OOM_SCORE.read_text()
        _OOM_SCORE.write_text(_KILL_FIRST)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _OOM_SCORE.write_text(before)


@contextlib.contextmanager
def _note(path: Path | None, state: dict[str, float]) -> Iterator[None]:
    """Write a note for `relax-hpc status` during the block. Errors of the disk are ignored."""
    if path:
        with contextlib.suppress(OSError):
            write_json(path, state)
    try:
        yield
    finally:
        if path:
            with contextlib.suppress(OSError):
                path.unlink()


def _wait(run: RunDir, args: argparse.Namespace, stop: SignalFlag) -> None:
    was_replaced = False
    while not select.select([_STDIN], [], [], _LOOK_S)[0]:
        if stop.is_set():
            raise NotNeededError("asked to stop before it was needed")
        if args.deadline and time.time() > args.deadline:
            raise NotNeededError("the allocation ends")
        with contextlib.suppress(OSError):
            if run.finished.exists() or run.stop.exists():
                raise NotNeededError("the run is over")
            # If the node of srun died, the pipe of the supervisor may stay open. A supervisor that
            # uses this process writes its byte immediately after it claims the incarnation.
            replaced_before = was_replaced
            was_replaced = latest_incarnation(run, args.group) >= args.incarnation
            if replaced_before and was_replaced:
                raise NotNeededError(f"incarnation {args.incarnation} started without it")
    if not os.read(_STDIN, 1):
        raise NotNeededError("its supervisor no longer needs it, or has ended")


def _memory_mb() -> int:
    """Return the proportional memory of this process in MB (shared pages are divided among their
    processes); 0 if it is unknown."""
    with contextlib.suppress(OSError, StopIteration):
        lines = _MEMORY.read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("Pss:"))) // 1024
    return 0
