"""Writes into lock files the hashes of every wheel that the package index has of each pin, for
CPython 3.11 and 3.12.

Usage: hashes.py [--here NAME]... LOCK...

To change a pin, write ``name==version`` and call this with the environment's Python. The index is
the one that pip is set to, asked once for each pin. Hashes that a line has stay: files of a version
are added, never changed. ``--here NAME`` adds the build that pip takes on this machine too, such as
a CPU build of torch from a site's folder. Exit code 1: a pin has no wheel for Linux, x86_64, for
both Pythons (named); that lock stays as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version
from verify import entries

PYTHONS = ((3, 11), (3, 12))
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(40, 4, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"),
]
JSON = "application/vnd.pypi.simple.v1+json"


def pip(*words: str) -> str:
    """What pip prints; empty where it fails, as for a setting that is not set."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=600
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def index() -> str:
    """Address of the package index that pip is set to, without a closing slash."""
    from pip._internal.models.index import PyPI  # the one that it has where none is set

    set_to = os.environ.get("PIP_INDEX_URL") or pip("config", "get", "global.index-url")
    return (set_to or PyPI.simple_url).rstrip("/")


def wheels(name: str, version: str, simple: str) -> dict[str, frozenset[Tag]]:
    """SHA-256 -> tags, of each wheel that the index has of a version; none of a package that it
    does not know."""
    answer = requests.get(
        f"{simple}/{canonicalize_name(name)}/", headers={"Accept": JSON}, timeout=120
    )
    if answer.status_code == 404:
        return {}
    answer.raise_for_status()
    found = {}
    for one in answer.json()["files"]:
        try:
            _, of, _, tags = parse_wheel_filename(one["filename"])
        except InvalidWheelFilename:  # source archives, and what older tools made
            continue
        if of == Version(version):
            found[one["hashes"]["sha256"]] = tags
    return found


def installable(python: tuple[int, int]) -> set[Tag]:
    """All that a CPython takes on Linux, x86_64, however new its C library."""
    return {*cpython_tags(python, platforms=PLATFORMS), *compatible_tags(python, None, PLATFORMS)}


def here(name: str, version: str) -> str:
    """SHA-256 of the file that pip takes on this machine. SystemExit: it finds none."""
    report = pip(
        "install",
        "-q",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--report=-",
        f"{name}=={version}",
    )
    if not report:
        sys.exit(f"--here {name}: pip finds no {name}=={version} on this machine")
    return json.loads(report)["install"][0]["download_info"]["archive_info"]["hash"].removeprefix(
        "sha256="
    )


def renew(lock: Path, simple: str, also_here: set[str]) -> list[str]:
    """Write a lock anew; returns "name==version: what is missing" of pins that not both Pythons can
    install."""
    pins = entries(lock)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda pin: wheels(*pin[:2], simple), pins))
    problems, lines = [], []
    fitting = {python: installable(python) for python in PYTHONS}
    for (name, version, had), files in zip(pins, found, strict=True):
        locked = {
            sha for sha, tags in files.items() if any(tags & fits for fits in fitting.values())
        }
        lacking = [
            f"{a}.{b}"
            for (a, b), fits in fitting.items()
            if not any(tags & fits for tags in files.values())
        ]
        problems += [f"{name}=={version}: no wheel for Python {', '.join(lacking)}"] * bool(lacking)
        locked |= {here(name, version)} if canonicalize_name(name) in also_here else set()
        locked |= {one.removeprefix("--hash=sha256:") for one in had}
        lines.append(
            " \\\n    ".join(
                [f"{name}=={version}", *(f"--hash=sha256:{sha}" for sha in sorted(locked))]
            )
        )
    if not problems:
        comments = [
            line for line in lock.read_text(encoding="utf-8").splitlines() if line.startswith("#")
        ]
        lock.write_text("\n".join([*comments, *lines, ""]), encoding="utf-8")
    return problems


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("locks", nargs="+", type=Path, metavar="LOCK")
    parser.add_argument(
        "--here",
        action="append",
        default=[],
        metavar="NAME",
        help="add this machine's own build too",
    )
    given = parser.parse_args()
    simple, also_here = index(), {canonicalize_name(name) for name in given.here}
    problems = [
        f"{lock}: {line}" for lock in given.locks for line in renew(lock, simple, also_here)
    ]
    sys.exit("\n".join(problems) if problems else 0)


if __name__ == "__main__":
    main()
