"""Life signs of processes in files: identity of the writer, whether it runs, and its activity."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from relax_hpc.base.rundir import read_map, write_json

_ENDED = "ZXx"
"""States of an ended process in /proc/<pid>/stat: zombie or dead."""


def process_identity() -> dict[str, Any]:
    """Identity of this process, for `has_ended` on the same machine."""
    return {"pid": os.getpid(), "born": _born(os.getpid()), "space": _space()}


def has_ended(sign: Mapping[str, Any]) -> bool:
    """Whether the process that wrote ``sign`` has certainly ended.

    False also for processes of another machine or container, which cannot be checked.

    >>> sign = process_identity()
    >>> has_ended(sign), has_ended(sign | {"born": 1}), has_ended({"pid": 1})
    (False, True, False)
    """
    return _is_here(sign) and _born(sign["pid"]) != sign.get("born")


def is_running(sign: Mapping[str, Any]) -> bool:
    """Whether the process that wrote ``sign`` certainly runs, on this machine. Its age is ignored.

    >>> sign = process_identity()
    >>> is_running(sign), is_running(sign | {"born": 1}), is_running({"pid": 1})
    (True, False, False)
    """
    return _is_here(sign) and _born(sign["pid"]) == sign.get("born")


def _is_here(sign: Mapping[str, Any]) -> bool:
    return bool(_space()) and sign.get("space") == _space() and type(sign.get("pid")) is int


@cache
def _space() -> str:
    """Boot and pid namespace, within which a pid belongs to one process at a time."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    return ""


def _born(pid: int) -> int:
    """Start time of a process, in ticks since the boot; 0: it does not run."""
    try:
        # The name of the process, in parentheses, may contain blanks and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    # Fields 3 (state) and 22 (starttime) of proc(5); the first two are cut off.
    return 0 if fields[0] in _ENDED else int(fields[19])


def write_activity(path: Path, doing: str) -> None:
    """Write the present activity of this process to ``path``; empty: none. Errors are ignored, so
    that a full disk does not stop the process."""
    with contextlib.suppress(OSError):
        write_json(path, {"doing": doing, "since": time.time(), **process_identity()})


def read_activity(path: Path) -> str:
    """Activity in ``path``, with its duration in seconds. Empty: its process has ended."""
    sign = read_map(path, doing=str, since=(int, float))
    if not sign or not sign["doing"] or has_ended(sign):
        return ""
    return f"{sign['doing']} ({max(0.0, time.time() - sign['since']):.0f} s)"
