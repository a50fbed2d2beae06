"""Paths of another process's bytes under UCX: copied by the kernel, by a network card, or emulated.

Only the first two are one-sided. Where neither works UCX falls back to TCP without a word, which is
tens of times slower and needs the other process to take part.
"""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from relax_hpc.net.transport.rdma_agent import knows_all_cards

_FABRIC = Path("/sys/class/infiniband")
_DRIVERS = ("mlx5_core",)
"""Drivers of the cards that the wheel's own libibverbs knows; NIXL built against the system's
rdma-core knows all."""
_CMA_NAMES = ("all", "cma", "shm", "sm")
_VERBS_NAMES = ("all", "ib", "rc", "dc", "ud")


@dataclass(frozen=True, slots=True)
class Route:
    """``kind``: `cma` (process_vm_readv, same node), `verbs`, or `tcp`, which is emulated; ``why``
    not a better one."""

    kind: Literal["cma", "verbs", "tcp"]
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.why})" if self.why else self.kind


def route_facts() -> dict[str, Any]:
    """Facts of this process by which others find their route to it; msgpack-able."""
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_ns": Path("/proc/self/ns/pid").stat().st_ino,
        "user_ns": Path("/proc/self/ns/user").stat().st_ino,
        "uid": os.getuid(),
        "pid": os.getpid(),
        "fabric": has_active_card(),
    }


def find_route(there: dict[str, Any], address: int) -> Route:
    """The way to the memory at ``address`` of the process whose `route_facts` is ``there``, as UCX
    chooses it."""
    why_not = _why_not_cma(there, address)
    if not why_not:
        return Route("cma")
    if there["fabric"] and has_active_card() and _allowed(_VERBS_NAMES):
        return Route("verbs")
    return Route("tcp", why_not)


def _why_not_cma(there: dict[str, Any], address: int) -> str:
    here = route_facts()
    if here["boot"] != there["boot"]:
        return "another node, and no InfiniBand card that NIXL knows on both"
    if not _allowed(_CMA_NAMES):
        return f"UCX_TLS={os.environ['UCX_TLS']}"
    if here["pid_ns"] != there["pid_ns"]:
        return (
            "another pid namespace on the same node: start both in one container, or share the "
            "host's"
        )
    error = _read_byte(there["pid"], address)
    if error == errno.ESRCH:
        return f"process {there['pid']} has ended"
    if error != errno.EPERM:
        return ""
    if here["user_ns"] != there["user_ns"]:
        return (
            "another user namespace on the same node: start both in one container, or share the "
            "host's"
        )
    if here["uid"] != there["uid"]:
        return f"a process of user {there['uid']}, this one is of {here['uid']}"
    return "ptrace between processes is not allowed (kernel.yama.ptrace_scope)"


def _allowed(names: tuple[str, ...]) -> bool:
    """Whether UCX_TLS lets UCX use a transport of ``names``."""
    words = os.environ.get("UCX_TLS", "all").strip()
    listed = [word.strip().partition("_")[0] for word in words.removeprefix("^").split(",")]
    return any(name in listed for name in names) != words.startswith("^")


def has_active_card() -> bool:
    return any(_is_active(device) for device in _FABRIC.glob("*"))


def _is_active(device: Path) -> bool:
    driver = (device / "device" / "driver").resolve().name
    known = driver in _DRIVERS or knows_all_cards()
    return known and any("ACTIVE" in path.read_text() for path in device.glob("ports/*/state"))


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _read_byte(pid: int, address: int) -> int:
    """0, or why the kernel refuses to copy a byte of that process (errno)."""
    libc = ctypes.CDLL(None, use_errno=True)
    byte = ctypes.create_string_buffer(1)
    mine, theirs = _Span(ctypes.addressof(byte), 1), _Span(address, 1)
    read = libc.process_vm_readv
    read.restype = ctypes.c_ssize_t
    read.argtypes = (ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong)
    done = read(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
    return 0 if done == 1 else ctypes.get_errno()
