"""Prints the pins of lock files that this Python does not have, or has only in part; nothing means
all is well.

Usage: verify.py LOCK... . A pin is printed on one line, with its hashes, as pip takes it. A package
counts when its version is the pinned one (a local tag such as +cpu is accepted) and every file of
its RECORD is there. Where several packages own one file, such as a `build_backend.py` that two
wheels ship by mistake, the one that pip installed last is there: the size that any of them records
is accepted. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path


def canonical(name: str) -> str:
    """The PEP 503 form of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def entries(lock: Path) -> list[tuple[str, str, list[str]]]:
    """(name, version, pip's options such as ``--hash=sha256:...``) of every pin of a lock, in its
    order."""
    lines = lock.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    pinned = (line.split() for line in lines if line.strip() and not line.startswith("#"))
    return [(*pin.split("=="), rest) for pin, *rest in pinned]


def recorded_files(dist: Distribution) -> Iterator[tuple[Path, int | None]]:
    """Path and size in bytes of every file in a package's RECORD. None: the size is not known, or
    is not reliable.

    Bytecode is left out, because it may come and go. The recorded sizes of metadata are often
    wrong.
    """
    # Not `dist.files`: from Python 3.12 on it leaves out the files that are missing.
    for name, _, size in csv.reader((dist.read_text("RECORD") or "").splitlines()):
        if not name.endswith(".pyc"):
            is_metadata = name.split("/")[0].endswith(".dist-info")
            # Scripts are recorded as `../../../bin/NAME`.
            path = Path(os.path.normpath(str(dist.locate_file(name))))
            yield path, None if is_metadata or not size else int(size)


def recorded_sizes(packages: Mapping[str, Distribution]) -> dict[Path, set[int | None]]:
    """Path of each file -> the sizes in bytes that the packages record which own it."""
    sizes: dict[Path, set[int | None]] = {}
    for dist in packages.values():
        for path, size in recorded_files(dist):
            sizes.setdefault(path, set()).add(size)
    return sizes


def is_whole(dist: Distribution, sizes: Mapping[Path, set[int | None]]) -> bool:
    """Whether every file of a package is there, at a size of ``sizes``, those that `recorded_sizes`
    gives."""
    paths = [path for path, _ in recorded_files(dist)]
    for path in paths:
        if not path.is_file() or not sizes[path] & {None, path.stat().st_size}:
            return False
    return bool(paths)


def installed() -> dict[str, Distribution]:
    """Canonical name -> package, after removing metadata that an interrupted installation left
    unfinished."""
    site = Path(sysconfig.get_path("purelib"))
    for info in site.glob("*.dist-info"):
        if not all((info / name).is_file() for name in ("METADATA", "RECORD")):
            shutil.rmtree(info)
    return {canonical(dist.metadata["Name"]): dist for dist in distributions(path=[str(site)])}


def main(locks: list[str]) -> None:
    """Print what has to be installed to make this environment match `locks`."""
    present = installed()
    sizes = recorded_sizes(present)
    for name, version, options in (pin for lock in locks for pin in entries(Path(lock))):
        dist = present.get(canonical(name))
        if dist is None or dist.version.split("+")[0] != version or not is_whole(dist, sizes):
            print(f"{name}=={version}", *options)


if __name__ == "__main__":
    main(sys.argv[1:])
