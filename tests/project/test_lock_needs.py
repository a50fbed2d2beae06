"""What the wheels of a lock need of a machine, and whether the lock was installed: derived from an
index, or stored by a nightly script, for the locks."""

from __future__ import annotations

import hashlib
import importlib
import json
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from packaging.version import Version

CLASHES = {
    "build_backend.py": "scripts that built two wheels, which nothing imports; env/verify.py "
    "accepts the size of either"
}
"""Path that wheels of a lock contain with different contents -> why that does no harm."""
ROOT = Path(__file__).resolve().parents[2]
ENV = ROOT / "env"


@pytest.fixture(scope="module", name="tools")
def tools_fixture() -> Iterator[tuple[ModuleType, ModuleType]]:
    """The modules `lock_needs` and `wheel_index` of the folder `env`."""
    sys.path.insert(0, str(ENV))
    try:
        yield importlib.import_module("lock_needs"), importlib.import_module("wheel_index")
    finally:
        sys.path.remove(str(ENV))


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_stored_needs_are_those_of_the_lock(
    tools: tuple[ModuleType, ModuleType], name: str
) -> None:
    lock_needs, wheel_index = tools
    stored = json.loads((ENV / f"requirements-{name}.json").read_text())
    assert stored["lock_sha256"] == lock_needs.lock_digest(name), (
        f"the lock has changed: call env/lock_needs.py {name}"
    )
    assert set(stored["architectures"]) == set(wheel_index.ARCHITECTURES)
    for needs in stored["architectures"].values():
        assert "missing" not in needs, "all pins have wheels for both architectures"
        assert needs["installed_bytes"] > needs["download_bytes"] > 10**9
        unexplained = needs["clashes"].keys() - CLASHES.keys()
        assert not unexplained, "wheels overwrite files of others, in the order of installation"
        packages = {pin.split()[0] for pin in needs.get("gpu_targets", {})}
        assert packages == (set(lock_needs.GPU_PACKAGES) if name == "gpu" else set())
        assert all(needs.get("gpu_targets", {}).values())
    assert bool(stored["cuda"]) == (name == "gpu")


def make_wheels(wheel_index: ModuleType, folder: Path, *names: str) -> list[object]:
    wheels = []
    for name in names:
        path = folder / name
        with zipfile.ZipFile(path, "w") as archive:
            package = name.partition("-")[0]
            archive.writestr("package/code.py", "x" * 10)
            archive.writestr(f"{package}-1.data/platlib/package/data.bin", package[:1] * 100)
            archive.writestr(f"{package}/own.bin", "")
        tags = parse_wheel_filename(name)[3]
        wheels.append(wheel_index.Wheel(name, name, tags, path.stat().st_size, str(path)))
    return wheels


def test_needs_of_an_architecture(
    tools: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_needs, wheel_index = tools

    def fetch(self: object, start: int, end: int) -> bytes:
        return Path(self._url).read_bytes()[start:end]  # type: ignore[attr-defined]

    monkeypatch.setattr(lock_needs.RemoteFile, "_fetch", fetch)
    pure = make_wheels(wheel_index, tmp_path, "pure-1-py3-none-any.whl")
    # The older tag decides: any glibc from 2.17 on is enough.
    old = make_wheels(
        wheel_index,
        tmp_path,
        "old-1-cp310-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "old-1-cp310-abi3-manylinux_2_28_x86_64.whl",
        "old-1-cp310-abi3-manylinux_2_28_aarch64.whl",
    )
    # One Python has no wheel for the older glibc.
    new = make_wheels(
        wheel_index,
        tmp_path,
        "new-1-cp311-cp311-manylinux_2_17_x86_64.whl",
        "new-1-cp312-cp312-manylinux_2_31_x86_64.whl",
    )
    pins = {"pure 1": pure, "old 1": old, "new 1": new}
    needs = lock_needs.architecture_needs("x86_64", pins)
    assert (needs["glibc"], needs["glibc_package"]) == ("2.31", "new 1")
    assert needs["clashes"] == {"package/data.bin": ["new 1", "old 1", "pure 1"]}
    # Sources count twice, for bytecode.
    assert needs["installed_bytes"] == 3 * 120
    assert lock_needs.architecture_needs("aarch64", pins) == {"missing": ["new 1"]}
    del pins["new 1"]
    needs = lock_needs.architecture_needs("aarch64", pins)
    assert (needs["glibc"], needs["glibc_package"]) == ("2.28", "old 1")
    sizes = [(tmp_path / wheel.filename).stat().st_size for wheel in (pure[0], old[2])]  # type: ignore[attr-defined]
    assert needs["download_bytes"] == sum(sizes)


def fatbin(*entries: tuple[int, int]) -> bytes:
    """A fatbin with (kind, compute capability times 10) of each piece of code."""
    body = b""
    for kind, number in entries:
        code = b"\x7f" * 24
        body += struct.pack("<HHIQ", kind, 0x101, 64, len(code)) + bytes(12)
        body += struct.pack("<I", number) + bytes(32) + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_targets_are_read_from_libraries(
    tools: tuple[ModuleType, ModuleType], tmp_path: Path
) -> None:
    read_targets = tools[0].read_targets
    library = tmp_path / "lib.so"
    magic = struct.pack("<I", 0xBA55ED50)
    library.write_bytes(
        b"\x7fELF" + magic + b"by chance" + fatbin((2, 80), (2, 90)) + b"..." + fatbin((1, 120))
        + magic
    )  # fmt: skip
    assert set(read_targets(library)) == {(80, False), (90, False), (120, True)}
    library.write_bytes(b"")
    assert list(read_targets(library)) == []


def digest(name: str) -> str:
    """SHA-256 of a file of the folder `env`."""
    return hashlib.sha256((ENV / name).read_bytes()).hexdigest()


def test_the_gpu_lock_was_installed_and_imported_without_a_gpu() -> None:
    stored = json.loads((ROOT / "tools/docs/results/gpu_lock.json").read_text())
    assert stored["lock_sha256"] == digest("requirements-gpu.txt"), (
        "the lock has changed: call tools/nightly/gpu_lock.sh"
    )
    assert stored["modules"] > 500 and stored["packages"] > 200
    assert not stored["errors"].keys() - stored["exceptions"].keys()


def test_the_image_was_built_in_a_debian_root() -> None:
    stored = json.loads((ROOT / "tools/docs/results/image.json").read_text())
    changed = "{} has changed: call tools/nightly/image.sh"
    definition, lock = "relax_hpc.def", f"requirements-{stored['lock']}.txt"
    assert stored["definition_sha256"] == digest(definition), changed.format(definition)
    assert stored["lock_sha256"] == digest(lock), changed.format(lock)


def test_newer_releases_for_a_newer_python(tools: tuple[ModuleType, ModuleType]) -> None:
    newer_python, wheel_index = importlib.import_module("newer_python"), tools[1]

    def wheel(name: str, **values: object) -> object:
        return wheel_index.Wheel(name, "", parse_wheel_filename(name)[3], 0, "", **values)

    releases = {
        "both": [wheel("both-1-py3-none-any.whl")],
        "newer": [
            wheel("newer-1-cp311-cp311-manylinux_2_28_x86_64.whl"),
            wheel("newer-2-cp312-cp312-manylinux_2_28_x86_64.whl"),
            wheel("newer-3-cp312-cp312-manylinux_2_28_aarch64.whl"),
            wheel("newer-4-py3-none-any.whl", yanked=True),
            wheel("newer-5rc1-py3-none-any.whl"),
        ],
        "declared": [
            wheel("declared-1-py3-none-any.whl"),
            wheel("declared-1.1-py3-none-any.whl", requires_python=">=3.12"),
        ],
    }
    pins = dict.fromkeys(releases, Version("1"))
    newer = newer_python.newer_releases(pins, releases)
    versions = {name: (str(old), str(new.version)) for name, (old, new) in newer.items()}
    assert versions == {"newer": ("1", "2"), "declared": ("1", "1.1")}
    needed = {"both": [Requirement("newer<2"), Requirement("absent")], "newer": []}
    known = newer_python.find_conflicts(pins, needed)
    assert known == {"both needs absent"}
    conflicts = newer_python.find_conflicts(pins | {"newer": Version("2")}, needed)
    assert conflicts - known == {"both needs newer<2"}
