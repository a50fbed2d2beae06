"""A worker's own side: requests come by its standard input, answers go by its standard output."""

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
"""OOM score by which this process ends where memory runs out, and not its parent, or an engine."""


def serve(work: Callable[[BinaryIO, BinaryIO], None], dies_with_thread: bool = True) -> NoReturn:
    """Do ``work``, which reads requests and writes answers, until there are no more, and end.

    ``dies_with_thread``: end at once when the thread that started this process ends, however it
    ends, see PR_SET_PDEATHSIG in prctl(2). Otherwise the end of the requests ends this process.
    """
    if dies_with_thread:
        die_with_parent()
    try:
        with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
            work(*_pipes())
    except BaseException:  # a user's function may raise what no `except Exception` catches
        print(log_entry(traceback.format_exc().rstrip()), file=sys.stderr, flush=True)
        # While the pipe is open: the parent kills who has closed it, and would say that it was
        # killed.
        _end(1)
    _end(0)


async def read_requests(asked: BinaryIO) -> AsyncIterator[Any]:
    """Requests as they come, for one event loop, until there are no more."""
    reader = asyncio.StreamReader(limit=frames.MOST_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, asked)
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            head = await reader.readexactly(frames.HEAD.size)
            yield json.loads(await reader.readexactly(frames.read_size(head)))


def bound_memory(most_mb: int) -> None:
    """Let this process have so much more memory of its own than it has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    now_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
    most = (now_kb << 10) + (most_mb << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def write_answer(file: BinaryIO, message: Any) -> None:
    """Write an answer at once."""
    file.write(frames.pack(message))
    file.flush()


def _pipes() -> tuple[BinaryIO, BinaryIO]:
    """Files of requests and answers. What the work prints goes to the log of the parent, and it has
    nothing to read."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with open(os.devnull) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    return asked, answers


def _end(code: int) -> NoReturn:
    """End at once: threads of libraries must not keep this process alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
