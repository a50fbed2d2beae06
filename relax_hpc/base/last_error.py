"""The error that ended a program, read from its log: the last line of its last traceback."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_MAX_BYTES, _MAX_LINE_BYTES = 1 << 20, 1 << 14
_MAX_CHARS = 600
_TRACEBACK = "Traceback (most recent call last):"
_GROUP_MARGIN = re.compile(r"^\s*[|+]\s?")
"""Margin of the traceback of an exception group."""
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:: .*)?$")
_FRAME = re.compile(r'  File "([^"]+)", line \d+')
_OTHER_ENDS = re.compile(
    r"(?:^|\s)(what\(\): .+|Fatal Python error: .+|error while loading shared libraries: .+"
    r"|(?:Syntax|Indentation)Error: .+)"
)
"""Last messages of C++ programs, of the interpreter, and of the dynamic loader. A syntax error in
the main program has no traceback either."""
_CONSEQUENCES = (
    "EOFError",
    "KeyboardInterrupt",
    "SystemExit",
    "BrokenPipeError",
    "ConnectionResetError",
    "asyncio.exceptions.CancelledError",
    "concurrent.futures.process.BrokenProcessPool",
    "torch.multiprocessing.spawn.ProcessExitedException",
)
"""Exceptions of a process whose peer has failed. The exception of the peer is the cause."""


_ABORTED = "Fatal Python error: Aborted"
"""Line that faulthandler prints for every abort, behind the message of the program that aborted."""
_LATE_COLLECTIVE = re.compile(r"Watchdog caught collective operation timeout: (.*? milliseconds)")
"""Message of the NCCL watchdog of torch (2.13) when a collective has reached its timeout."""
_TRANSIENT = re.compile(
    r"(?i)address already in use|connection (?:refused|reset|timed out|aborted)|\btimed "
    r"out|\btime-?out"
    r"|temporarily unavailable|stale file handle|input/output error|no space left|quota exceeded"
    r"|too many open files|host is unreachable|name resolution"
)
"""Texts of errors that another process, the network or a disk causes, and that may be temporary."""


@dataclass(frozen=True, slots=True)
class LastError:
    """The error that ended a program."""

    text: str = ""
    """Type and text of the exception, in one line; empty: the log has none."""
    files: tuple[str, ...] = ()
    """Files in its traceback, the outermost first."""


def is_temporary(text: str) -> bool:
    """Whether the error ``text`` may disappear without any change by the user.

    >>> is_temporary("OSError: [Errno 98] Address already in use")
    True
    >>> is_temporary("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    False
    """
    return _TRANSIENT.search(text) is not None


def read_last_error(log: Path, start: int = 0) -> LastError:
    """The error in ``log`` behind byte ``start``; none if the log cannot be read."""
    return find_last_error(_read_end(log, start, _MAX_BYTES))


def read_last_line(log: Path, start: int = 0) -> str:
    """Last line of ``log`` behind byte ``start``, for a program that has printed no error."""
    text = _read_end(log, start, _MAX_LINE_BYTES).rstrip()
    return _one_line(text.rpartition("\n")[2])


def find_late_collective(log: Path) -> str:
    """The collective for whose timeout NCCL's watchdog has aborted the process that wrote ``log``.
    Empty: it was not aborted by the watchdog."""
    matches = _LATE_COLLECTIVE.findall(_read_end(log, 0, _MAX_BYTES))
    return _one_line(matches[-1]) if matches else ""


def _read_end(log: Path, start: int, max_bytes: int) -> str:
    """Text at the end of ``log``, behind byte ``start``; empty if the log cannot be read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            # A log that is shorter than it was has been cut, see `relax_hpc.base.log_rotation`.
            start = start if start <= size else 0
            file.seek(max(start, size - max_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def find_last_error(text: str) -> LastError:
    """The error that ended the program that has printed ``text``.

    If there are several tracebacks, it is the last one whose exception is not a consequence of the
    end of another process.

    >>> find_last_error('[12:00] Traceback (most recent call last):\\n  File "a.py", line 1\\n'
    ...     'ValueError: too small\\nReceived sigquit from a child process.').text
    'ValueError: too small'
    """
    lines = text.splitlines()
    errors = [
        _error_behind(lines, number) for number, line in enumerate(lines) if _TRACEBACK in line
    ]
    errors = [error for error in errors if error.text]
    causes = [error for error in errors if not error.text.startswith(_CONSEQUENCES)]
    if causes:
        return causes[-1]
    other_ends = [match[1] for match in map(_OTHER_ENDS.search, lines) if match]
    messages = [text for text in other_ends if text != _ABORTED] or other_ends
    if messages:
        return LastError(_one_line(messages[-1]))
    return errors[-1] if errors else LastError()


def _error_behind(lines: list[str], start: int) -> LastError:
    """The error of the traceback that begins in line ``start``."""
    in_group = bool(_GROUP_MARGIN.match(lines[start]))
    files = list[str]()
    for number in range(start + 1, len(lines)):
        if _TRACEBACK in lines[number]:
            # The caller searches the next traceback itself. A search to the end from each of them
            # would take quadratic time.
            break
        line = _GROUP_MARGIN.sub("", lines[number], count=1) if in_group else lines[number]
        if frame := _FRAME.match(line):
            files.append(frame[1])
        elif line.startswith(" ") or not line:
            continue
        elif _EXCEPTION.match(line):
            return LastError(_one_line(_with_continuation(lines, number, line)), tuple(files))
        elif files:
            break
    return LastError()


def _with_continuation(lines: list[str], number: int, line: str) -> str:
    """``line``, with the next line if it ends with a colon: the text then continues there."""
    if line.endswith(":") and number + 1 < len(lines):
        return f"{line} {lines[number + 1].strip()}"
    return line


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_CHARS]


def mask_numbers(text: str) -> str:
    """``text`` with each number replaced by `#`.

    Errors that differ only in sizes, ports or folders of incarnations then compare equal.

    >>> mask_numbers("needs 0.146 of /logs/inc-000003")
    'needs # of /logs/inc-#'
    """
    return re.sub(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", "#", text)
