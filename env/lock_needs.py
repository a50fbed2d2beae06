"""Writes beside a lock what its wheels need of a machine: `requirements-cpu.json` and
`requirements-gpu.json`, which `setup.sh`, the doctor and the check of nodes read.

Usage: lock_needs.py [cpu|gpu]...  (default: both; after each change of a lock, after `hashes.py`)

Only wheels whose hashes the lock has count. By architecture the file has:
- `glibc`, and the package that needs it: the newest among the oldest that each pin's wheels accept
- `download_bytes`, and `installed_bytes`: all files and, for bytecode, Python's sources once more
- `gpu_targets`: compute capabilities that the kernels of `GPU_PACKAGES` are compiled for, read from
  their wheels; `9.0+PTX` is code that newer GPUs can compile
- `clashes`: paths that several wheels contain with different contents, and the packages
- in place of all these `missing`: the pins without a wheel for it

It reads the list of files of each wheel from the end of the file, with HTTP range requests, and
downloads the wheels of `GPU_PACKAGES` (about 2 GB for both architectures).
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import mmap
import re
import struct
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import requests
from verify import canonical, entries
from wheel_index import (
    ARCHITECTURES,
    NEWEST_GLIBC,
    OLDEST_GLIBC,
    PYTHONS,
    Wheel,
    index_address,
    installable_tags,
    list_all_wheels,
)

FOLDER = Path(__file__).resolve().parent
LOCKS = {"cpu": ("cpu", "cuda"), "gpu": ("gpu",)}
"""Name of a lock -> files that are installed for it. PyPI has only the CUDA build of torch, so a
CPU installation needs the libraries of requirements-cuda.txt too."""
GPU_PACKAGES = ("torch", "sglang-kernel")
"""Packages of the GPU lock with kernels that everything else depends on."""
CUDA_PIN = "nvidia-cuda-runtime"
_TAIL_BYTES = 1 << 20
_CONNECTIONS = 8
_FATBIN = struct.pack("<I", 0xBA55ED50)
"""Magic number of a fatbin, the container in which nvcc embeds code for several GPUs. NVIDIA does
not document its format."""
_PTX = 1
Needs = dict[str, Any]


class RemoteFile(io.RawIOBase):
    """A file on a web server, read by ranges; its last ``_TAIL_BYTES`` are read at once."""

    def __init__(self, url: str, nbytes: int) -> None:
        self._url, self._nbytes, self._position = url, nbytes, 0
        self._tail_start = max(0, nbytes - _TAIL_BYTES)
        self._tail = self._fetch(self._tail_start, nbytes)

    def _fetch(self, start: int, end: int) -> bytes:
        headers = {"Range": f"bytes={start}-{end - 1}"}
        for attempt in range(3):
            try:
                answer = requests.get(self._url, headers=headers, timeout=120)
                answer.raise_for_status()
                return answer.content[: end - start]
            except requests.RequestException:
                if attempt == 2:
                    raise
        raise AssertionError

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}
        self._position = starts[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        end = self._nbytes if size < 0 else min(self._nbytes, self._position + size)
        start, self._position = self._position, end
        if start >= end:
            return b""
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : end - self._tail_start]
        return self._fetch(start, end)


def lock_digest(name: str, folder: Path = FOLDER) -> str:
    """SHA-256 over the files of a lock, as `sha256sum` of their concatenation."""
    digest = hashlib.sha256()
    for part in LOCKS[name]:
        digest.update((folder / f"requirements-{part}.txt").read_bytes())
    return digest.hexdigest()


@functools.cache
def list_files(wheel: Wheel) -> list[zipfile.ZipInfo]:
    """Files of a wheel."""
    with zipfile.ZipFile(RemoteFile(wheel.url, wheel.nbytes)) as archive:  # type: ignore[arg-type]
        return [file for file in archive.infolist() if not file.is_dir()]


def installed_bytes(wheel: Wheel) -> int:
    """Bytes of a wheel's files on disk, with an estimate for bytecode: as large as its source."""
    files = list_files(wheel)
    sources = (file.file_size for file in files if file.filename.endswith(".py"))
    return sum(file.file_size for file in files) + sum(sources)


def installed_path(name: str) -> str:
    """Path in the environment of the file ``name`` of a wheel, relative to site-packages.

    >>> installed_path("torch-2.data/purelib/torch/x.py"), installed_path("torch-2.data/scripts/x")
    ('torch/x.py', 'scripts:x')
    """
    match = re.fullmatch(r"[^/]+\.data/([a-z]+)/(.*)", name)
    if not match:
        return name
    scheme, path = match.groups()
    return path if scheme in ("purelib", "platlib") else f"{scheme}:{path}"


def find_clashes(wheels: Mapping[str, Wheel]) -> dict[str, list[str]]:
    """Paths that several of ``wheels``, by pin, contain with different contents -> their pins."""
    contents: dict[str, dict[str, int]] = {}
    for pin, wheel in wheels.items():
        for file in list_files(wheel):
            contents.setdefault(installed_path(file.filename), {})[pin] = file.CRC
    clashes = {}
    for path, checksums in contents.items():
        if len(set(checksums.values())) > 1:
            clashes[path] = sorted(checksums)
    return dict(sorted(clashes.items()))


def oldest_glibc(wheels: Sequence[Wheel], python: tuple[int, int], architecture: str) -> int:
    """Minor version of the oldest glibc 2 that one of ``wheels`` accepts. 0: any, because a wheel
    has no compiled code. -1: there is no wheel."""
    if not best_wheel(wheels, python, architecture):
        return -1
    for minor in (0, *range(OLDEST_GLIBC, NEWEST_GLIBC + 1)):
        # Without a platform tag only wheels of pure Python remain.
        if best_wheel(wheels, python, architecture, minor):
            return minor
    raise AssertionError(wheels)


def best_wheel(
    wheels: Sequence[Wheel],
    python: tuple[int, int],
    architecture: str,
    newest_glibc: int = NEWEST_GLIBC,
) -> Wheel | None:
    """The wheel that pip would take."""
    accepted = [wheel for wheel in wheels if wheel.accepts(python)]
    for tag in installable_tags(python, architecture, newest_glibc):
        for wheel in accepted:
            if tag in wheel.tags:
                return wheel
    return None


def architecture_needs(architecture: str, wheels_by_pin: Mapping[str, Sequence[Wheel]]) -> Needs:
    """What the pins need on one architecture, GPU targets excluded. Sizes are those of the first
    Python, clashes of all."""
    floors: dict[str, int] = {}
    missing = []
    for pin, wheels in wheels_by_pin.items():
        minors = [oldest_glibc(wheels, python, architecture) for python in PYTHONS]
        if -1 in minors:
            missing.append(pin)
        floors[pin] = max(minors)
    if missing:
        return {"missing": missing}
    package = max(floors, key=lambda pin: floors[pin])
    chosen = {python: choose_wheels(wheels_by_pin, python, architecture) for python in PYTHONS}
    clashes: dict[str, list[str]] = {}
    for wheels in chosen.values():
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            list(pool.map(list_files, wheels.values()))
        clashes |= find_clashes(wheels)
    installed = chosen[PYTHONS[0]].values()
    return {
        "glibc": f"2.{floors[package]}",
        "glibc_package": package,
        "download_bytes": sum(wheel.nbytes for wheel in installed),
        "installed_bytes": sum(installed_bytes(wheel) for wheel in installed),
        "clashes": clashes,
    }


def choose_wheels(
    wheels_by_pin: Mapping[str, Sequence[Wheel]], python: tuple[int, int], architecture: str
) -> dict[str, Wheel]:
    """Pin -> the wheel that pip would take; each pin has one."""
    chosen = {}
    for pin, wheels in wheels_by_pin.items():
        wheel = best_wheel(wheels, python, architecture)
        assert wheel is not None
        chosen[pin] = wheel
    return chosen


def gpu_targets(wheel: Wheel) -> list[str]:
    """Compute capabilities of all kernels in a wheel, such as `9.0`, and `9.0+PTX` for PTX."""
    targets: set[tuple[int, bool]] = set()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / wheel.filename
        with requests.get(wheel.url, stream=True, timeout=120) as answer, path.open("wb") as file:
            answer.raise_for_status()
            for chunk in answer.iter_content(1 << 20):
                file.write(chunk)
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if re.search(r"\.so(\.|$)", name):
                    targets |= set(read_targets(Path(archive.extract(name, folder))))
    return [
        f"{number // 10}.{number % 10}{'+PTX' if is_ptx else ''}"
        for number, is_ptx in sorted(targets)
    ]


def read_targets(library: Path) -> Iterator[tuple[int, bool]]:
    """(compute capability times 10, whether it is PTX) of each piece of code in a library."""
    if not library.stat().st_size:
        return
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(_FATBIN)
        while start >= 0:
            yield from _fatbin_targets(data, start)
            start = data.find(_FATBIN, start + 4)


def _fatbin_targets(data: mmap.mmap, start: int) -> Iterator[tuple[int, bool]]:
    """Targets of the fatbin at ``start``. The magic number may also occur by chance."""
    if start + 16 > len(data):
        return
    version, header_bytes, nbytes = struct.unpack_from("<HHQ", data, start + 4)
    position, end = start + header_bytes, start + header_bytes + nbytes
    if version != 1 or header_bytes != 16 or end > len(data):
        return
    while position + 32 <= end:
        kind, _, header_bytes, nbytes = struct.unpack_from("<HHIQ", data, position)
        (number,) = struct.unpack_from("<I", data, position + 28)
        if kind not in (_PTX, 2) or not 50 <= number < 200:
            return
        yield number, kind == _PTX
        position += header_bytes + nbytes


def lock_needs(name: str, index: str) -> Needs:
    """Content of the file for the lock ``name``."""
    pins: dict[str, tuple[str, str, set[str]]] = {}
    for part in LOCKS[name]:
        for package, version, options in entries(FOLDER / f"requirements-{part}.txt"):
            hashes = {option.removeprefix("--hash=sha256:") for option in options}
            pins[f"{package} {version}"] = (package, version, hashes)
    listed = list_all_wheels([pin[:2] for pin in pins.values()], index)
    wheels_by_pin: dict[str, list[Wheel]] = {}
    for (pin, (_, _, hashes)), wheels in zip(pins.items(), listed, strict=True):
        wheels_by_pin[pin] = [wheel for wheel in wheels if wheel.sha256 in hashes]
    architectures = {arch: architecture_needs(arch, wheels_by_pin) for arch in ARCHITECTURES}
    cuda = ""
    if name == "gpu":
        (runtime,) = (version for package, version, _ in pins.values() if package == CUDA_PIN)
        cuda = ".".join(runtime.split(".")[:2])
        for architecture, needs in architectures.items():
            if "missing" not in needs:
                needs["gpu_targets"] = dict(package_targets(architecture, wheels_by_pin))
    return {
        "lock_sha256": lock_digest(name),
        "pythons": [f"{major}.{minor}" for major, minor in PYTHONS],
        "cuda": cuda,
        "architectures": architectures,
    }


def package_targets(
    architecture: str, wheels_by_pin: Mapping[str, Sequence[Wheel]]
) -> Iterator[tuple[str, list[str]]]:
    """Pin and `gpu_targets` of each of `GPU_PACKAGES`."""
    for pin, wheel in choose_wheels(wheels_by_pin, PYTHONS[0], architecture).items():
        if canonical(pin.split()[0]) in GPU_PACKAGES:
            yield pin, gpu_targets(wheel)


def main(names: Sequence[str]) -> None:
    """See the module."""
    write = partial(json.dumps, indent=1)
    index = index_address()
    for name in names or LOCKS:
        path = FOLDER / f"requirements-{name}.json"
        path.write_text(write(lock_needs(name, index)) + "\n", encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
