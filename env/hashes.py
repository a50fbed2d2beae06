"""Writes into lock files the hashes of every wheel that the package index has of each pin, for
CPython 3.11 and 3.12 on Linux, x86_64 and aarch64.

Usage: hashes.py [--here NAME]... LOCK...

To change a pin, write ``name==version`` and call this with the environment's Python. The index is
the one that pip is set to, and it gets one request for each pin. Hashes that a line has stay: files
of a version are added, never changed. ``--here NAME`` adds the build that pip takes on this machine
too, such as a CPU build of torch from a site's folder. Exit code 1: a pin has no wheel for x86_64
and one of the Pythons (named); that lock stays as it was. A pin without a wheel for aarch64 is
printed. Afterwards call `lock_needs.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.utils import canonicalize_name
from verify import entries
from wheel_index import (
    ARCHITECTURES,
    PYTHONS,
    Wheel,
    index_address,
    installable_tags,
    list_all_wheels,
    run_pip,
)

REQUIRED = "x86_64"
"""Architecture for which each pin must have wheels."""


def local_build(name: str, version: str) -> str:
    """SHA-256 of the file that pip takes on this machine. SystemExit: it finds none."""
    options = ("-q", "--dry-run", "--ignore-installed", "--no-deps", "--report=-")
    report = run_pip("install", *options, f"{name}=={version}")
    if not report:
        sys.exit(f"--here {name}: pip finds no {name}=={version} on this machine")
    archive = json.loads(report)["install"][0]["download_info"]["archive_info"]
    return archive["hash"].removeprefix("sha256=")


def installable_hashes(wheels: Sequence[Wheel]) -> tuple[set[str], dict[str, list[str]]]:
    """SHA-256 of the wheels that a supported machine can install, and by architecture the Pythons
    that have none."""
    hashes: set[str] = set()
    missing: dict[str, list[str]] = {}
    for architecture in ARCHITECTURES:
        for python in PYTHONS:
            tags = set(installable_tags(python, architecture))
            accepted = [wheel for wheel in wheels if wheel.accepts(python)]
            fitting = {wheel.sha256 for wheel in accepted if wheel.tags & tags}
            hashes |= fitting
            if not fitting:
                missing.setdefault(architecture, []).append(f"{python[0]}.{python[1]}")
    return hashes, missing


def rewrite_lock(lock: Path, index: str, local_names: set[str]) -> list[str]:
    """Write a lock anew; returns a line for each pin that not both Pythons can install."""
    pins = entries(lock)
    all_wheels = list_all_wheels([(name, version) for name, version, _ in pins], index)
    problems, lines = [], []
    for (name, version, options), wheels in zip(pins, all_wheels, strict=True):
        hashes, missing = installable_hashes(wheels)
        for architecture, pythons in missing.items():
            text = f"{name}=={version}: no wheel for Python {', '.join(pythons)}"
            if architecture == REQUIRED:
                problems.append(text)
            elif REQUIRED not in missing:
                print(f"{lock}: {text} on {architecture}")
        if canonicalize_name(name) in local_names:
            hashes.add(local_build(name, version))
        hashes |= {option.removeprefix("--hash=sha256:") for option in options}
        parts = [f"{name}=={version}", *(f"--hash=sha256:{sha256}" for sha256 in sorted(hashes))]
        lines.append(" \\\n    ".join(parts))
    if not problems:
        text_lines = lock.read_text(encoding="utf-8").splitlines()
        comments = [line for line in text_lines if line.startswith("#")]
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
    arguments = parser.parse_args()
    index = index_address()
    local_names = {canonicalize_name(name) for name in arguments.here}
    problems = []
    for lock in arguments.locks:
        problems += [f"{lock}: {line}" for line in rewrite_lock(lock, index, local_names)]
    sys.exit("\n".join(problems) if problems else 0)


if __name__ == "__main__":
    main()
