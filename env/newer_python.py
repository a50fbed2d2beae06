"""Writes into README.md what a GPU lock for Python 3.12 alone could have newer than this one.

Usage: newer_python.py

For each pin it compares the newest releases that the package index has for both Pythons. Where they
differ, it replaces the pin by that for 3.12, and reads from the metadata of all pins which of their
requirements are then not met. Only those that are met by the lock itself count. It makes two
requests for each pin.
"""

from __future__ import annotations

import re
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from lock_needs import RemoteFile
from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from verify import entries
from wheel_index import PYTHONS, Wheel, index_address, installable_tags, list_releases

FOLDER = Path(__file__).resolve().parent
LOCK = FOLDER / "requirements-gpu.txt"
README = FOLDER / "README.md"
BEGIN, END = "<!-- env/newer_python.py -->\n", "<!-- end -->\n"
OLD, NEW = PYTHONS
METADATA = re.compile(r"[^/]+\.dist-info/METADATA")
_ARCHITECTURE = "x86_64"
_CONNECTIONS = 8
Requirements = Mapping[str, Sequence[Requirement]]
"""Canonical name of a package -> its requirements."""


def best_release(wheels: Sequence[Wheel], python: tuple[int, int]) -> Wheel | None:
    """A wheel of the newest final release that a Python can install."""
    tags = set(installable_tags(python, _ARCHITECTURE))
    fitting = [
        wheel
        for wheel in wheels
        if not (wheel.yanked or wheel.version.is_prerelease or wheel.tags.isdisjoint(tags))
        and wheel.accepts(python)
    ]
    return max(fitting, key=lambda wheel: wheel.version, default=None)


def read_metadata(wheel: Wheel) -> bytes:
    """Metadata of a wheel: a file of the index (PEP 658), or the one in the wheel."""
    answer = requests.get(wheel.url + ".metadata", timeout=120)
    if answer.status_code != 404:
        answer.raise_for_status()
        return answer.content
    with zipfile.ZipFile(RemoteFile(wheel.url, wheel.nbytes)) as archive:  # type: ignore[arg-type]
        (name,) = (name for name in archive.namelist() if METADATA.fullmatch(name))
        return archive.read(name)


def read_requirements(wheel: Wheel) -> list[Requirement]:
    """Requirements in a wheel's metadata that apply to Python 3.12 on Linux, without extras."""
    lines = parse_email(read_metadata(wheel))[0].get("requires_dist", [])
    environment = {
        "python_version": "3.12",
        "python_full_version": "3.12.11",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": _ARCHITECTURE,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    applying = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if not requirement.marker or requirement.marker.evaluate(environment):
            applying.append(requirement)
    return applying


def find_conflicts(pins: Mapping[str, Version], requirements: Requirements) -> set[str]:
    """A line for each requirement that the pins, by canonical name, do not meet."""
    conflicts = set()
    for package, needed in requirements.items():
        for requirement in needed:
            version = pins.get(canonicalize_name(requirement.name))
            if version is None:
                conflicts.add(f"{package} needs {requirement.name}")
            elif not requirement.specifier.contains(version, prereleases=True):
                conflicts.add(f"{package} needs {requirement.name}{requirement.specifier}")
    return conflicts


def newer_releases(
    pins: Mapping[str, Version], releases: Mapping[str, Sequence[Wheel]]
) -> dict[str, tuple[Version, Wheel]]:
    """Canonical name -> newest release for the old Python, and newest wheel for the new one, of
    each pin for which these differ."""
    newer = {}
    for name in pins:
        old, new = (best_release(releases[name], python) for python in PYTHONS)
        if old and new and new.version > old.version:
            newer[name] = (old.version, new)
    return newer


def make_table() -> list[str]:
    """Lines of the table."""
    pins = {canonicalize_name(name): Version(version) for name, version, _ in entries(LOCK)}
    index = index_address()
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        releases = dict(
            zip(pins, pool.map(lambda name: list_releases(name, index), pins), strict=True)
        )
        wheels = [
            next(wheel for wheel in releases[name] if wheel.version == version)
            for name, version in pins.items()
        ]
        requirements = dict(zip(pins, pool.map(read_requirements, wheels), strict=True))
    known = find_conflicts(pins, requirements)
    lines = [
        f"Newest releases in the package index on {time.strftime('%Y-%m-%d')}, by "
        "`python env/newer_python.py`:",
        "",
        "| package | lock | newest for 3.11 | newest for 3.12 | what the newest needs changed |",
        "|---|---|---|---|---|",
    ]
    for name, (old, wheel) in sorted(newer_releases(pins, releases).items()):
        changed = pins | {name: wheel.version}
        needed = requirements | {name: read_requirements(wheel)}
        conflicts = sorted(find_conflicts(changed, needed) - known)
        text = "; ".join(conflicts) or "nothing"
        lines.append(f"| {name} | {pins[name]} | {old} | {wheel.version} | {text} |")
    return lines


def main() -> None:
    """See the module."""
    text = README.read_text(encoding="utf-8")
    before, _, others = text.partition(BEGIN)
    _, mark, after = others.partition(END)
    if not mark:
        sys.exit(f"{README}: has no lines {BEGIN.strip()} and {END.strip()}")
    table = "\n".join(make_table())
    README.write_text(f"{before}{BEGIN}{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
