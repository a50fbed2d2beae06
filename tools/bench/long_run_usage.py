"""Samples of the resources of all processes of a run, and of its directory, over its whole life."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

PERIOD_S = 5.0
_DISK_PERIOD_S = 60.0
_TAIL_BYTES = 1 << 16
MEASURES = ("memory_bytes", "descriptors", "threads", "shm_bytes")
"""What is sampled of each process."""


def record(root: Path, supervisor: psutil.Process, output: Path, limit_s: float = 0) -> None:
    """Append a line every `PERIOD_S` seconds to ``output``, until ``supervisor`` has ended, or for
    ``limit_s`` seconds (0: no limit).

    A line: {"time", "step", "processes": {name: {"pid", ...MEASURES}}, "disk": {folder: bytes}}.
    ``root``: the run directory. The disk is looked at once a minute.
    """
    disk_at, ends_at = 0.0, time.monotonic() + (limit_s or math.inf)
    with output.open("a") as file:
        while time.monotonic() < ends_at and _lives(supervisor):
            line: dict[str, Any] = {"time": time.time(), "step": newest_step(root)}
            line["processes"] = dict(_processes(supervisor))
            if time.monotonic() >= disk_at:
                disk_at = time.monotonic() + _DISK_PERIOD_S
                line["disk"] = disk_by_folder(root)
            file.write(json.dumps(line) + "\n")
            file.flush()
            time.sleep(PERIOD_S)


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def newest_step(root: Path) -> int:
    """Newest trained step of a run; -1: none."""
    path = root / "metrics.jsonl"
    if not path.exists():
        return -1
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().split(b"\n")
    for text in reversed(lines[:-1]):
        if b'"perf/step_s"' in text:
            return int(json.loads(text)["step"])
    return -1


def _processes(supervisor: psutil.Process) -> Iterator[tuple[str, dict[str, int]]]:
    """Name and use of each process. Processes of a role that have the same name are numbered.
    Those that live for moments only (preparation, summaries, compilers) are left out by the
    evaluation, because they have few samples."""
    names: Counter[str] = Counter()
    try:
        children = supervisor.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for process in [supervisor, *children]:
        try:
            name = _name(process, supervisor)
            use = {
                "pid": process.pid,
                "memory_bytes": process.memory_info().rss,
                "descriptors": process.num_fds(),
                "threads": process.num_threads(),
                "shm_bytes": _shared_memory(process.pid),
            }
        except (psutil.Error, OSError):
            continue
        names[name] += 1
        yield f"{name} {names[name]}" if names[name] > 1 else name, use


def _name(process: psutil.Process, supervisor: psutil.Process) -> str:
    """Role of a process, or the name of its program."""
    if process.pid == supervisor.pid:
        return "supervisor"
    words = process.cmdline()
    if "--role" in words[:-1]:
        return words[words.index("--role") + 1]
    modules = [word.rpartition(".")[2] for word in words if word.startswith("relax_hpc.")]
    return modules[0] if modules else process.name()


def _shared_memory(pid: int) -> int:
    """Bytes of the files of /dev/shm that a process has mapped."""
    files: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        path = line.partition("/dev/shm/")[2]
        if path and path not in files:
            try:
                files[path] = Path("/dev/shm", path).stat().st_size
            except OSError:
                # Its name was removed. The range of the mapping is the size.
                start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
                files[path] = end - start
    return sum(files.values())


def disk_by_folder(root: Path) -> dict[str, int]:
    """Bytes on disk by the first component of the path, and the number of all files."""
    sizes: Counter[str] = Counter()
    for folder, _, files in os.walk(root):
        first = Path(folder).relative_to(root).parts[:2]
        for name in files:
            try:
                sizes["/".join(first) or name] += Path(folder, name).stat().st_size
                sizes["files"] += 1
            except OSError:
                continue
    return dict(sizes)
