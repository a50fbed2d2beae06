"""The peer in a process of its own, or nobody where no Python that has it was given."""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ANSWER_S = 600.0
"""The peer starts Ray, and fills partitions of many rows."""


class Peer:
    """Asks `peer_side.py`, one thing at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer()

    def ask(self, what: str, *args: Any) -> Any:
        """RuntimeError if it ended, TimeoutError if it says nothing."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps([what, args]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            raise TimeoutError(f"the peer has been silent for {ANSWER_S:.0f} s")
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("the peer has ended; what it printed last says why")
        return json.loads(line)


@contextmanager
def peer_of(python: Path | None) -> Iterator[Peer | None]:
    """The peer that ``python`` has, until the end; None without it."""
    if python is None:
        yield None
        return
    words = [str(python), str(Path(__file__).with_name("peer_side.py"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as process:
        try:
            yield Peer(process)
            assert process.stdin
            process.stdin.close()
            process.wait(60.0)
        finally:
            process.kill()
