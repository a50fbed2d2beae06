"""Stacks of all threads of one process of this node, by the best available tool.

1. py-spy reads the interpreter's memory from outside, so it shows processes that hang in C code,
   and programs that know nothing of relax_hpc, such as the processes of SGLang.
2. faulthandler: our processes write their stacks to their log on STACKS_SIGNAL. It is C code, so it
   works without the interpreter's lock.
3. The kernel knows for each thread its state and the kernel function in which it waits.

py-spy 0.4.3 (https://github.com/benfred/py-spy, read on 2026-11-27) needs the permission to trace
the process: kernel.yama.ptrace_scope 0, the capability SYS_PTRACE, or root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from relax_hpc.net.rendezvous.process import STACKS_SIGNAL, handles_stack_signal
from relax_hpc.ops.inspect.rank_processes import RankProcess, output_path

_TOOL_S, _NATIVE_S = 20.0, 60.0
"""Seconds for py-spy, without and with frames of C code. It stops the process meanwhile. gdb is not
used: it stops a process for a minute while it reads the symbols of torch's libraries."""
_DUMP_S = 5.0
"""Seconds for a process to write its stacks. A thread that the kernel cannot interrupt delays it,
unless another thread receives the signal."""
_QUIET_S = 0.2
"""Seconds without new text after which the text of faulthandler, which has no end mark, is
complete."""
_POLL_S = 0.02
_MAX_DUMP_BYTES = 4 << 20
_FIRST_WORDS = (b"Thread 0x", b"Current thread 0x")
"""Beginning of the text of faulthandler (CPython 3.11 to 3.14)."""


def describe_process(process: RankProcess, native: bool = False) -> str:
    """Text with the stacks of all threads of ``process``. ``native``: with frames of C code."""
    threads = describe_kernel_threads(process.pid)
    if not threads:
        return "has ended"
    text, reason = _read_by_tool(process.pid, native)
    reasons = [reason]
    if not text:
        text, reason = _read_by_signal(process.pid)
        reasons.append(reason)
    if text:
        return f"{text}\n{threads}"
    return f"no Python stacks: {'; '.join(reasons)}\n{threads}"


def _read_by_tool(pid: int, native: bool) -> tuple[str, str]:
    """(stacks by py-spy, reason why they are missing)."""
    tool = find_tool("py-spy")
    if not tool:
        return "", "py-spy is not installed (pip install py-spy)"
    options = ["--native"] if native else []
    return _run_tool([tool, "dump", *options, "--pid", str(pid)], _NATIVE_S if native else _TOOL_S)


def _read_by_signal(pid: int) -> tuple[str, str]:
    """(stacks that the process writes to its log, reason why they are missing)."""
    log = Path(output_path(pid) or os.devnull)
    # The signal would end a process without a handler.
    if not log.is_file() or not handles_stack_signal(pid):
        return "", "it is no process of relax_hpc that writes its stacks"
    offset = log.stat().st_size
    try:
        os.kill(pid, STACKS_SIGNAL)
    except OSError as error:
        return "", f"signal refused ({error.strerror})"
    deadline, quiet_since, text = time.monotonic() + _DUMP_S, time.monotonic(), b""
    while time.monotonic() < deadline:
        added = _read_after(log, offset)
        if len(added) != len(text):
            text, quiet_since = added, time.monotonic()
        elif _first_thread(text) >= 0 and time.monotonic() - quiet_since > _QUIET_S:
            break
        time.sleep(_POLL_S)
    start = _first_thread(text)
    if start < 0:
        return "", f"it wrote no stacks to {log} within {_DUMP_S:g} s"
    return text[start:].decode(errors="replace").rstrip(), ""


def _first_thread(text: bytes) -> int:
    """Position of the first line of faulthandler's text; -1: it is not written yet."""
    positions = [text.find(beginning) for beginning in _FIRST_WORDS]
    return min((position for position in positions if position >= 0), default=-1)


def _read_after(path: Path, offset: int) -> bytes:
    """Bytes of a log after ``offset``. A log that became shorter was rotated; then all of it."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < offset:
            offset = 0
        file.seek(offset)
        return file.read(_MAX_DUMP_BYTES)


def describe_kernel_threads(pid: int) -> str:
    """Line with the states of all threads of a process in the kernel, the most frequent first.
    Empty: it has ended.

    A state is `R` running, `S` waiting, or `D` waiting without reaction to signals, as for a
    filesystem or a driver. After it stands the kernel function, if the kernel shows it.
    """
    counts = Counter[str]()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            fields = (task / "stat").read_text(errors="replace").rpartition(")")[2].split()
            function = (task / "wchan").read_text().strip()
        except OSError:
            continue
        shown = "" if function in ("", "0") else f" {function}"
        counts[f"{fields[0]}{shown}"] += 1
    if not counts or set(counts) <= {"Z", "X"}:
        return ""
    states = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    return f"kernel: {sum(counts.values())} threads: {states}"


def find_tool(name: str) -> str:
    """Path of a program, on PATH or next to the interpreter; empty: it is not installed."""
    installed = Path(sys.executable).parent / name
    return shutil.which(name) or (str(installed) if os.access(installed, os.X_OK) else "")


def _run_tool(command: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """(output of a tool, reason why it is missing)."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", "") or f"no answer within {timeout_s:g} s"
        return "", f"{name}: {reason}"
    if done.returncode:
        return "", f"{name}: {_last_line(done.stderr) or f'exit code {done.returncode}'}"
    return done.stdout.strip(), ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
