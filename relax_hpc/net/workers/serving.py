"""Worker side of the protocol: requests arrive on standard input, answers go to standard output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from relax_hpc.base.terminal_text import log_entry
from relax_hpc.net.rendezvous.process import die_with_parent
from relax_hpc.net.workers import frames

_OOM_SCORE = 500
"""Value of oom_score_adj, with which the kernel kills this process before its parent or an engine
if the node runs out of memory."""


def serve(work: Callable[[BinaryIO, BinaryIO], None], dies_with_thread: bool = True) -> NoReturn:
    """Run ``work``, which reads requests and writes answers until the requests end, and exit.

    ``dies_with_thread``: the kernel kills this process when the thread that started it ends, see
    PR_SET_PDEATHSIG in prctl(2). Otherwise the end of the requests ends this process.
    """
    if dies_with_thread:
        die_with_parent()
    try:
        with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
            work(*_pipes())
    except BaseException:  # a user's function may raise SystemExit and the like
        print(log_entry(traceback.format_exc().rstrip()), file=sys.stderr, flush=True)
        # Exit while the pipe is still open. If a worker closes its pipe, the parent kills it, and
        # would report SIGKILL instead of exit code 1.
        _end(1)
    _end(0)


async def read_requests(file: BinaryIO) -> AsyncIterator[Any]:
    """Requests in ``file`` until its end, for one event loop."""
    reader = asyncio.StreamReader(limit=frames.MOST_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, file)
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            head = await reader.readexactly(frames.HEAD.size)
            yield json.loads(await reader.readexactly(frames.read_size(head)))


def bound_memory(additional_mb: int) -> None:
    """Let this process allocate ``additional_mb`` more private memory than it has now, at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    present_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
    limit = (present_kb << 10) + (additional_mb << 20)
    # RLIMIT_DATA counts private writable mappings (Linux 4.7), and not shared memory or files.
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def write_answer(file: BinaryIO, message: Any) -> None:
    """Write an answer and flush it."""
    file.write(frames.pack(message))
    file.flush()


def _pipes() -> tuple[BinaryIO, BinaryIO]:
    """Files of requests and answers. Standard output becomes the log of the parent, and standard
    input becomes empty."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Prints of the work, or of C libraries, would otherwise be read as answers.
    os.dup2(2, 1)
    with Path(os.devnull).open() as empty:
        os.dup2(empty.fileno(), 0)
    return requests, answers


def _end(code: int) -> NoReturn:
    """Exit without waiting for threads of libraries."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
