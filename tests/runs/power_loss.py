"""A power loss without pulling a plug: what no process has synced is gone afterwards.

Every Python process of a run is started with `environment`'s variables, which make it note what it
syncs. Of a file that is its length, and a second name keeps the file from being lost; of a
directory that is its list of names. `lose_power` then makes a run directory of nothing but that: no
file is longer than it was when it was last synced, and a name that was made, renamed or deleted
since its directory was last synced is as it was.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DISK = "RELAX_TEST_DISK"
"""Environment variable: folder that stands for the disk. It must be on the run directory's
filesystem."""
HOOK = "from tests.runs.power_loss import note_what_is_synced; note_what_is_synced()\n"
LOG = "synced.jsonl"


def environment(disk: Path) -> dict[str, str]:
    """Variables for all processes of a run; Python imports `sitecustomize` before anything else.
    Makes `disk`."""
    (disk / "hook").mkdir(parents=True)
    (disk / "hook" / "sitecustomize.py").write_text(HOOK)
    folders = [
        str(disk / "hook"),
        str(Path(__file__).resolve().parents[2]),
        os.environ.get("PYTHONPATH", ""),
    ]
    return {DISK: str(disk), "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def note_what_is_synced() -> None:
    """Wrap this process's fsync and fdatasync."""
    os.fsync, os.fdatasync = _noting(os.fsync), _noting(os.fdatasync)


def _noting(sync: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(sync)
    def noting(file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        # Taken before: what comes while the disk is written may not be on it.
        line = _describe(descriptor)
        sync(file)
        log = os.open(Path(os.environ[DISK], LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(log, line)
        os.close(log)

    return noting


def _describe(descriptor: int) -> bytes:
    """A line about an open file or directory, as it is now."""
    found, now = os.fstat(descriptor), time.monotonic_ns()
    line: dict[str, Any] = {"at": now, "inode": found.st_ino, "mode": stat.S_IMODE(found.st_mode)}
    if stat.S_ISDIR(found.st_mode):
        with os.scandir(descriptor) as entries:
            line["names"] = {entry.name: _entry(entry, descriptor) for entry in entries}
    else:
        line["size"] = found.st_size
        with contextlib.suppress(FileExistsError):
            os.link(
                Path(f"/proc/self/fd/{descriptor}").readlink(),
                Path(os.environ[DISK], str(found.st_ino)),
            )
    return json.dumps(line).encode() + b"\n"


def _entry(entry: os.DirEntry, folder: int) -> dict[str, Any]:
    if entry.is_symlink():
        return {"link": os.readlink(entry.name, dir_fd=folder)}
    return {"inode": entry.inode(), "folder": entry.is_dir()}


def lose_power(root: Path, disk: Path) -> Path:
    """Put in place of `root`, a directory that no process uses any more, what of it was synced;
    where the other is."""
    lines = [json.loads(line) for line in (disk / LOG).read_text().splitlines()]
    synced = {line["inode"]: line for line in sorted(lines, key=lambda line: line["at"])}
    before = root.with_name(f"{root.name}.before")
    inode, mode = root.stat().st_ino, stat.S_IMODE(root.stat().st_mode)
    root.rename(before)
    _restore(root, inode, mode, synced, disk)
    return before


def _restore(
    folder: Path, inode: int, mode: int, synced: dict[int, dict[str, Any]], disk: Path
) -> None:
    folder.mkdir(mode=mode)
    for name, entry in synced.get(inode, {}).get("names", {}).items():
        path = folder / name
        found = synced.get(entry.get("inode"), {"size": 0, "mode": 0o600})
        if "link" in entry:
            path.symlink_to(entry["link"])
        elif entry["folder"]:
            _restore(path, entry["inode"], found["mode"] | 0o700, synced, disk)
        else:
            path.touch(found["mode"])
            if found.get("size"):
                shutil.copyfile(disk / str(entry["inode"]), path)
                os.truncate(path, found["size"])
