"""Reads the facts of this machine that decide whether an installation can work on it.

Everything is read from files and system calls within a second. Only the NVIDIA driver may hang, so
a child process asks it, and has a deadline.
"""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .compat_driver import CompatDriver, find_compat_driver

DRIVER_DEADLINE_S = 0.7
"""Seconds for the NVIDIA driver to answer. Its files answer in milliseconds; nvidia-smi, which is
needed for unknown models of GPUs only, takes seconds if the driver has to initialize them."""
UNKNOWN = -1
"""A number that could not be read."""
UNLIMITED = sys.maxsize
_NVIDIA_VENDOR = "0x10de"


class Disk(NamedTuple):
    """The filesystem of a folder. `free_bytes`: for users other than root."""

    path: str = ""
    device: int = UNKNOWN
    free_bytes: int = UNKNOWN


class Driver(NamedTuple):
    """The NVIDIA driver of a machine and its GPUs.

    `capabilities` has the compute capability of each GPU of a known model, such as `9.0`. If the
    driver did not answer within the deadline, `answers` is False.
    """

    version: str = ""
    gpus: "tuple[str, ...]" = ()
    capabilities: "tuple[str, ...]" = ()
    answers: bool = True


class Facts(NamedTuple):
    """Properties of a machine. An empty text or `UNKNOWN`: it has none, or it could not be read."""

    system: str = ""
    architecture: str = ""
    libc: str = ""
    """`glibc 2.36`, or the name alone of another C library."""
    python: str = ""
    """Version of the interpreter that runs this, such as `3.11.2`."""
    open_files: int = UNKNOWN
    """Hard limit of a process; `UNLIMITED`: none."""
    c_compiler: str = ""
    user_namespaces: str = ""
    """Reason why an ordinary user cannot create user namespaces; empty: nothing forbids it."""
    disk: Disk = Disk()
    """Filesystem of the installation."""
    temporary_disk: Disk = Disk()
    """Filesystem on which pip stores downloads."""
    driver: Driver = Driver()
    nvidia_devices: int = 0
    """Number of NVIDIA GPUs on the PCI bus, which are seen without a driver too."""
    compat_driver: CompatDriver = CompatDriver()
    """Libraries of a newer driver, from package cuda-compat."""


CAPABILITIES = {
    "B300": "10.3",
    "GB300": "10.3",
    "B200": "10.0",
    "GB200": "10.0",
    "H100": "9.0",
    "H200": "9.0",
    "H800": "9.0",
    "H20": "9.0",
    "GH200": "9.0",
    "L4": "8.9",
    "L40": "8.9",
    "L40S": "8.9",
    "A2": "8.6",
    "A10": "8.6",
    "A16": "8.6",
    "A40": "8.6",
    "A30": "8.0",
    "A100": "8.0",
    "A800": "8.0",
    "T4": "7.5",
    "V100": "7.0",
    "P100": "6.0",
    "P40": "6.1",
    "K80": "3.7",
}
"""Word in the name of a GPU in /proc/driver/nvidia/gpus/*/information -> compute capability.

Source: NVIDIA, "CUDA GPU Compute Capability" (developer.nvidia.com/cuda-gpus).
"""


def read_facts(
    disk: str = "",
    root: str = "/",
    environment: "Mapping[str, str]" = os.environ,
    with_driver: bool = True,
    driver_deadline_s: float = DRIVER_DEADLINE_S,
    user: int = os.geteuid(),
) -> Facts:
    """Facts of this machine.

    ``disk``: folder for an installation, which need not exist; empty: the disks are not read.
    ``root``: folder with /proc and /sys, for tests. ``with_driver``: whether to ask the NVIDIA
    driver. ``user``: id of the user; root needs no user namespaces.
    """
    temporary = environment.get("TMPDIR") or tempfile.gettempdir()
    return Facts(
        system=platform.system(),
        architecture=platform.machine(),
        libc=_libc(),
        python=platform.python_version(),
        open_files=_open_files(),
        c_compiler=_c_compiler(environment),
        user_namespaces=_user_namespaces(Path(root)) if user else "",
        disk=_disk(disk) if disk else Disk(),
        temporary_disk=_disk(temporary) if disk else Disk(),
        driver=ask_driver(root, driver_deadline_s) if with_driver else Driver(),
        nvidia_devices=_nvidia_devices(Path(root)),
        compat_driver=find_compat_driver(environment, root),
    )


def facts_from_json(text: str, facts: Facts) -> Facts:
    """``facts`` with the fields that ``text`` has. ValueError: it is not such JSON."""
    return _replace_fields(facts, json.loads(text))


def _replace_fields(record: "Any", fields: "Any") -> "Any":
    """A named tuple with other values, each of the type of the one that it replaces."""
    allowed = ", ".join(record._fields)
    if not isinstance(fields, dict) or set(fields) - set(record._fields):
        raise ValueError(f"facts: found {fields!r}, allowed: an object with {allowed}")
    values = {}
    for name, value in fields.items():
        old = getattr(record, name)
        if hasattr(old, "_fields"):
            value = _replace_fields(old, value)
        elif isinstance(value, list):
            value = tuple(map(str, value))
        if type(value) is not type(old):
            raise ValueError(f"facts: {name}: found {value!r}, allowed: as in {old!r}")
        values[name] = value
    return record._replace(**values)


def facts_to_json(facts: Facts) -> str:
    """Facts of a machine as JSON, in the form that `facts_from_json` reads. Interpreter and disks
    are left out: they are those of an installation, which may be made on another machine."""
    fields = dict(facts._asdict())
    fields["driver"] = dict(facts.driver._asdict())
    fields["compat_driver"] = dict(facts.compat_driver._asdict())
    for name in ("python", "disk", "temporary_disk"):
        del fields[name]
    return json.dumps(fields, indent=1)


def _c_compiler(environment: "Mapping[str, str]") -> str:
    """Path of the compiler that Triton uses: CC, gcc or cc (clang too, which few systems have)."""
    names = environment.get("CC", "").split()[:1] or ["gcc", "clang", "cc"]
    for name in names:
        path = shutil.which(name, path=environment.get("PATH"))
        if path:
            return path
    return ""


def _libc() -> str:
    # Of the libc that has loaded this interpreter, as pip reads it (PEP 600).
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        text = None
    if text:
        return text
    return "musl" if list(Path("/lib").glob("ld-musl-*")) else ""


def _open_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return UNLIMITED if hard == resource.RLIM_INFINITY else hard


def _disk(folder: str) -> Disk:
    path = Path(os.path.abspath(folder))  # noqa: PTH100 - keeps symbolic links
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        status = os.statvfs(str(existing))
        return Disk(str(existing), existing.stat().st_dev, status.f_bavail * status.f_frsize)
    except OSError:
        return Disk(str(existing))


def _user_namespaces(root: Path) -> str:
    """Reason why they are forbidden, from the kernel's settings; empty: none."""
    for name, forbidden in (
        ("proc/sys/user/max_user_namespaces", "0"),
        # Debian's and Ubuntu's kernels.
        ("proc/sys/kernel/unprivileged_userns_clone", "0"),
        ("proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1"),
    ):
        if _read(root / name) == forbidden:
            return f"{name[len('proc/sys/') :].replace('/', '.')} is {forbidden}"
    return "" if (root / "proc/self/ns/user").exists() else "the kernel has none"


def _nvidia_devices(root: Path) -> int:
    count = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        # Class 0x03: display controllers. NVIDIA's bridges and audio devices have others.
        is_display = _read(device / "class").startswith("0x03")
        count += is_display and _read(device / "vendor") == _NVIDIA_VENDOR
    return count


def ask_driver(root: str = "/", deadline_s: float = DRIVER_DEADLINE_S) -> Driver:
    """The NVIDIA driver of this machine; `Driver()` if there is none.

    A driver in trouble blocks even reads of its files. A blocked process cannot be killed, so
    nothing waits for its end.
    """
    if not _path_exists(Path(root, "proc/driver/nvidia")):
        return Driver()
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", "-m", "machine.facts", str(Path(root).absolute())],
        cwd=str(Path(__file__).resolve().parents[1]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=deadline_s)[0]
        fields = json.loads(output.decode("utf-8", "replace"))
        return Driver(fields["version"], tuple(fields["gpus"]), tuple(fields["capabilities"]))
    except subprocess.TimeoutExpired:
        process.kill()
        return Driver(answers=False)
    except (ValueError, KeyError):
        return Driver(answers=False)


def read_driver(root: Path) -> Driver:
    """The NVIDIA driver by its own files. It may hang."""
    version = ""
    for word in _read(root / "proc/driver/nvidia/version").split():
        # The first line ends in `NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 ...`.
        if word[:1].isdigit() and word.count(".") >= 1 and word.replace(".", "").isdigit():
            version = word
            break
    names = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        for line in _read(path).splitlines():
            if line.startswith("Model:"):
                names.append(line.partition(":")[2].strip())
    capabilities = [gpu_capability(name) for name in names]
    if names and not all(capabilities):
        capabilities = _ask_nvidia_smi() or capabilities
    return Driver(version, tuple(names), tuple(text for text in capabilities if text))


def gpu_capability(name: str) -> str:
    """Compute capability of a GPU by its name; empty if the name is unknown."""
    for word in name.replace("-", " ").split():
        # Names of desktop GPUs have such words too (`Quadro P40`, `RTX A10`), of the same chips.
        if word in CAPABILITIES:
            return CAPABILITIES[word]
    return ""


def _ask_nvidia_smi() -> "list[str]":
    """Compute capabilities of all GPUs; empty if nvidia-smi fails."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        output = subprocess.check_output(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return [line.strip() for line in output.decode().splitlines() if line.strip()]


def _read(path: Path) -> str:
    """Text of a small file without surrounding spaces; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _path_exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


if __name__ == "__main__":
    print(json.dumps(dict(read_driver(Path(sys.argv[1]))._asdict())))
