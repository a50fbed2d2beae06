"""Programs that are compared take turns on the machine: what else runs there slows all of them
alike.

Only one runs at a time; the others, with all their processes, are stopped by SIGSTOP.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

from relax_hpc.cluster.supervise.processes import process_tree
from relax_hpc.net.rendezvous.process import die_with_parent

_SAMPLE_S = 5.0


class Program:
    """A process tree that prints a line a step. Use it as a context manager: nothing of it outlives
    the block.

    >>> with Program(["plain_loop", ...], step_of) as program:                   # doctest: +SKIP
    ...     program.turn(until=10, timeout_s=600)
    """

    def __init__(
        self,
        words: Sequence[str],
        step_of: Callable[[str], int | None],
        environment: Mapping[str, str],
    ) -> None:
        """Start ``words``; ``step_of`` finds the number of a finished step in a line of output, or
        None."""
        self._step_of = step_of
        self.started = time.time()
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            preexec_fn=die_with_parent,
        )
        self.lines: list[str] = []
        self.windows: list[tuple[float, float]] = []
        """Wall-clock seconds in which it had the machine."""
        self.last_step = -1
        self.ended = False
        self.peak_bytes = 0
        """Largest proportional set size (PSS) of all its processes together that was seen."""
        self._tail = b""

    def turn(self, until: int, timeout_s: float) -> None:
        """Let it run until it has finished step ``until``, or ended. TimeoutError: neither came."""
        deadline = time.monotonic() + timeout_s
        self._signal(signal.SIGCONT)
        start = time.time()
        while self.last_step < until and not self.ended:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"step {until} did not end in {timeout_s} s; the output ends: {self.lines[-3:]}"
                )
            self._read()
            if (
                not self.windows
            ):  # Later it is enough to look while it stands still, which costs it nothing.
                self._sample_memory()
        self.windows.append((start, time.time()))
        self._signal(signal.SIGSTOP)
        self._sample_memory()

    def had_machine(self, start: float, end: float) -> bool:
        """Whether it ran all the time from ``start`` to ``end``."""
        return any(low <= start and end <= high for low, high in self.windows)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(_SAMPLE_S):
                return
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        self.ended = not data
        *whole, self._tail = (self._tail + data).split(b"\n")
        for line in (text.decode(errors="replace") for text in whole):
            self.lines.append(line)
            step = self._step_of(line)
            self.last_step = self.last_step if step is None else step

    def _sample_memory(self) -> None:
        total = 0
        for process in process_tree(self._process.pid):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss
        self.peak_bytes = max(self.peak_bytes, total)

    def _signal(self, number: int) -> None:
        # Parents first: a parent that runs would see its stopped children as hung.
        for process in process_tree(self._process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def returncode(self, timeout_s: float) -> int:
        """Its exit status once it has ended."""
        return self._process.wait(timeout_s)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        processes = process_tree(self._process.pid)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(30)
        psutil.wait_procs(processes, timeout=30)
        assert self._process.stdout is not None
        self._process.stdout.close()
