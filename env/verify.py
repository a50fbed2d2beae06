"""Prints the pins of lock files that this Python does not have, or has only in part; nothing means all is well.

Usage: verify.py LOCK... . A pin is printed on one line, with its hashes, as pip takes it. A package counts when its
version is the pinned one (a local tag such as +cpu is accepted) and every file of its RECORD is there. Standard library
only: it runs before anything is installed.
"""

from __future__ import annotations

import csv
import re
import shutil
import sys
import sysconfig
from importlib.metadata import Distribution, distributions
from pathlib import Path


def canonical(name: str) -> str:
    """The PEP 503 form of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def entries(lock: Path) -> list[tuple[str, str, list[str]]]:
    """(name, version, pip's options such as ``--hash=sha256:...``) of every pin of a lock, in its order."""
    lines = lock.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    pinned = (line.split() for line in lines if line.strip() and not line.startswith("#"))
    return [(*pin.split("=="), rest) for pin, *rest in pinned]


def whole(dist: Distribution) -> bool:
    """Whether every installed file is there at its recorded size; bytecode may come and go, metadata sizes lie."""
    # Not `dist.files`: from Python 3.12 on it leaves out what is missing.
    files = list(csv.reader((dist.read_text("RECORD") or "").splitlines()))
    for name, _, size in files:
        if name.endswith(".pyc"):
            continue
        path = Path(str(dist.locate_file(name)))
        sized = size and not name.split("/")[0].endswith(".dist-info")
        if not path.is_file() or (sized and path.stat().st_size != int(size)):
            return False
    return bool(files)


def installed() -> dict[str, Distribution]:
    """Canonical name -> package, after removing metadata that an interrupted installation left unfinished."""
    site = Path(sysconfig.get_path("purelib"))
    for info in site.glob("*.dist-info"):
        if not all((info / name).is_file() for name in ("METADATA", "RECORD")):
            shutil.rmtree(info)
    return {canonical(dist.metadata["Name"]): dist for dist in distributions(path=[str(site)])}


def main(locks: list[str]) -> None:
    """Print what has to be installed to make this environment match `locks`."""
    present = installed()
    for name, version, options in (pin for lock in locks for pin in entries(Path(lock))):
        dist = present.get(canonical(name))
        if dist is None or dist.version.split("+")[0] != version or not whole(dist):
            print(f"{name}=={version}", *options)


if __name__ == "__main__":
    main(sys.argv[1:])
