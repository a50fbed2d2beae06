"""Small signs of life that processes leave in files: who wrote one, whether that process is gone,
and what it is at."""

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
"""States of a process that runs no more."""


def process_identity() -> dict[str, Any]:
    """Identity of this process, for `has_ended` on the same machine."""
    return {"pid": os.getpid(), "born": _born(os.getpid()), "space": _space()}


def has_ended(sign: Mapping[str, Any]) -> bool:
    """Whether the process that left ``sign`` has certainly ended; of another machine, or container,
    nobody here knows.

    >>> sign = process_identity()
    >>> has_ended(sign), has_ended(sign | {"born": 1}), has_ended({"pid": 1})
    (False, True, False)
    """
    return _is_here(sign) and _born(sign["pid"]) != sign.get("born")


def is_running(sign: Mapping[str, Any]) -> bool:
    """Whether the process that left ``sign`` certainly runs, as it does here, however old the sign
    is.

    >>> sign = process_identity()
    >>> is_running(sign), is_running(sign | {"born": 1}), is_running({"pid": 1})
    (True, False, False)
    """
    return _is_here(sign) and _born(sign["pid"]) == sign.get("born")


def _is_here(sign: Mapping[str, Any]) -> bool:
    return bool(_space()) and sign.get("space") == _space() and type(sign.get("pid")) is int


@cache
def _space() -> str:
    """Space in which a pid means the same process: this boot of the machine, and the namespace of
    pids."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    return ""


def _born(pid: int) -> int:
    """Time at which a process was started, in ticks since the boot; 0: there is none."""
    try:
        # Behind the name, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in _ENDED else int(fields[19])


def write_activity(path: Path, doing: str) -> None:
    """Tell who looks at ``path`` what this process is at from now on; empty: nothing any more. A
    full disk must not keep it from its work."""
    with contextlib.suppress(OSError):
        write_json(path, {"doing": doing, "since": time.time(), **process_identity()})


def read_activity(path: Path) -> str:
    """Words of the sign at ``path``, and since when it stands; empty if its process is gone."""
    sign = read_map(path, doing=str, since=(int, float))
    if not sign or not sign["doing"] or has_ended(sign):
        return ""
    return f"{sign['doing']} ({max(0.0, time.time() - sign['since']):.0f} s)"
