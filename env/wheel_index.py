"""The wheels of pinned packages, as the package index that pip is set to lists them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import requests
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

PYTHONS = ((3, 11), (3, 12))
ARCHITECTURES = ("x86_64", "aarch64")
NEWEST_GLIBC = 40
"""Minor version of the newest glibc 2 whose wheels count."""
OLDEST_GLIBC = 5
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
"""Minor version of glibc 2 -> older name of its platform tag (PEP 600)."""
_JSON = "application/vnd.pypi.simple.v1+json"
_CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel of the index.

    `nbytes`: size of the file, 0 if the index does not give it. `requires_python`: versions that it
    accepts besides its tags, such as `>=3.12`; pip refuses others. `yanked`: its authors have
    withdrawn it.
    """

    filename: str
    sha256: str
    tags: frozenset[Tag]
    nbytes: int
    url: str
    requires_python: str = ""
    yanked: bool = False

    @property
    def version(self) -> Version:
        """Version of the package."""
        return parse_wheel_filename(self.filename)[1]

    def accepts(self, python: tuple[int, int]) -> bool:
        """Whether `requires_python` allows all releases of a Python."""
        return f"{python[0]}.{python[1]}.99" in SpecifierSet(self.requires_python)


def run_pip(*arguments: str) -> str:
    """Output of pip; empty if it fails, for example because a setting is not set."""
    command = [sys.executable, "-m", "pip", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return result.stdout.strip() if result.returncode == 0 else ""


def index_address() -> str:
    """Address of the package index that pip is set to, without a closing slash."""
    from pip._internal.models.index import PyPI  # the default of pip

    configured = os.environ.get("PIP_INDEX_URL") or run_pip("config", "get", "global.index-url")
    return (configured or PyPI.simple_url).rstrip("/")


def list_releases(name: str, index: str) -> list[Wheel]:
    """Wheels that the index has of all versions; none if it does not know the package."""
    address = f"{index}/{canonicalize_name(name)}/"
    answer = requests.get(address, headers={"Accept": _JSON}, timeout=120)
    if answer.status_code == 404:
        return []
    answer.raise_for_status()
    wheels = []
    for file in answer.json()["files"]:
        try:
            tags = parse_wheel_filename(file["filename"])[3]
        except InvalidWheelFilename:  # source archives, and files of older tools
            continue
        wheel = Wheel(
            filename=file["filename"],
            sha256=file["hashes"]["sha256"],
            tags=tags,
            nbytes=file.get("size", 0),
            url=file.get("url", ""),
            requires_python=file.get("requires-python") or "",
            yanked=bool(file.get("yanked")),
        )
        wheels.append(wheel)
    return wheels


def list_wheels(name: str, version: str, index: str) -> list[Wheel]:
    """Wheels that the index has of one version; none if it does not know the package."""
    return [wheel for wheel in list_releases(name, index) if wheel.version == Version(version)]


def list_all_wheels(pins: Sequence[tuple[str, str]], index: str) -> list[list[Wheel]]:
    """`list_wheels` of each (name, version), in their order."""
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        return list(pool.map(lambda pin: list_wheels(*pin, index), pins))


def platforms(architecture: str, newest_glibc: int = NEWEST_GLIBC) -> list[str]:
    """Platform tags that pip takes on Linux with glibc 2.``newest_glibc``, the best first."""
    tags = []
    for minor in range(newest_glibc, OLDEST_GLIBC - 1, -1):
        tags.append(f"manylinux_2_{minor}_{architecture}")
        if minor in _OLD_NAMES:
            tags.append(f"{_OLD_NAMES[minor]}_{architecture}")
    return [*tags, f"linux_{architecture}"]


def installable_tags(
    python: tuple[int, int], architecture: str, newest_glibc: int = NEWEST_GLIBC
) -> list[Tag]:
    """Tags that a CPython takes on Linux, the best first."""
    names = platforms(architecture, newest_glibc)
    interpreter = f"cp{python[0]}{python[1]}"
    own_tags = cpython_tags(python, platforms=names)
    return [*own_tags, *compatible_tags(python, interpreter, names)]
