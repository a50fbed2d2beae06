"""Reads the facts of this machine that decide whether an installation can work on it.

Everything is read from files and system calls within a second. Only the GPU driver may hang, so a
child process asks it, and has a deadline.
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

from .gpu_vendors import (
    VENDORS,
    CompatDriver,
    Driver,
    end_session,
    find_compat_driver,
    find_vendor,
    read_text,
)

DRIVER_DEADLINE_S = 0.7
"""Seconds for the GPU driver to answer. Its files answer in milliseconds; the vendor's tool, which
is needed for unknown models of GPUs only, takes seconds if the driver has to initialize them."""
UNKNOWN = -1
"""A number that could not be read."""
UNLIMITED = sys.maxsize
_READ_DRIVER = """
import json, sys
from pathlib import Path
sys.path.append(sys.argv[1])
from machine.gpu_vendors import VENDORS
driver = VENDORS[sys.argv[2]].read_driver(Path(sys.argv[3]))
print(json.dumps(dict(driver._asdict())))
"""
"""Program of the child process. Arguments: folder of this package, vendor, root of the files."""
_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[1])


class Disk(NamedTuple):
    """The filesystem of a folder. `free_bytes`: for users other than root."""

    path: str = ""
    device: int = UNKNOWN
    free_bytes: int = UNKNOWN


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
    gpus_on_bus: "tuple[str, ...]" = ()
    """Vendor of each GPU on the PCI bus, as in `VENDORS`. They are seen without a driver too."""
    compat_driver: CompatDriver = CompatDriver()
    """Libraries of a newer driver, from package cuda-compat."""


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
    ``root``: folder with /proc and /sys, for tests. ``with_driver``: whether to ask the GPU
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
        gpus_on_bus=_gpus_on_bus(Path(root)),
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
        if read_text(root / name) == forbidden:
            return f"{name[len('proc/sys/') :].replace('/', '.')} is {forbidden}"
    return "" if (root / "proc/self/ns/user").exists() else "the kernel has none"


def _gpus_on_bus(root: Path) -> "tuple[str, ...]":
    names = []
    for vendor in VENDORS.values():
        names += [vendor.name] * vendor.count_on_bus(root)
    return tuple(names)


def ask_driver(root: str = "/", deadline_s: float = DRIVER_DEADLINE_S) -> Driver:
    """The GPU driver of this machine; `Driver()` if there is none.

    A driver in trouble blocks even reads of its files. A blocked process cannot be killed, so
    nothing waits for its end.
    """
    vendor = find_vendor(root)
    if vendor is None or not vendor.has_driver(Path(root)):
        return Driver()
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _READ_DRIVER, _PACKAGE_FOLDER, vendor.name, root],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    silent = Driver(answers=False, vendor=vendor.name)
    try:
        output = process.communicate(timeout=deadline_s)[0]
        fields = json.loads(output.decode("utf-8", "replace"))
        gpus, capabilities = tuple(fields["gpus"]), tuple(fields["capabilities"])
        return Driver(fields["version"], gpus, capabilities, vendor=vendor.name)
    except subprocess.TimeoutExpired:
        end_session(process)
        return silent
    except (ValueError, KeyError):
        return silent
