"""Path of the bytes of another process under UCX: the kernel, a network card, or emulation.

Only the first two are one-sided reads, in which the other process takes no part. If neither works,
UCX falls back to TCP without a message. That is tens of times slower, and needs the other process.
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
"""Drivers of the cards that the libibverbs in NIXL's wheel (1.5.1) knows. A NIXL that was built
with the system's rdma-core knows all."""
_CMA_NAMES = ("all", "cma", "shm", "sm")
_VERBS_NAMES = ("all", "ib", "rc", "dc", "ud")


@dataclass(frozen=True, slots=True)
class Route:
    """Path of reads. ``kind``: `cma` (process_vm_readv, same node), `verbs`, or `tcp`, which is
    emulated. ``why``: reason why there is no better path."""

    kind: Literal["cma", "verbs", "tcp"]
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.why})" if self.why else self.kind


def route_facts() -> dict[str, Any]:
    """Facts of this process, by which others find their route to it. msgpack can encode them."""
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_ns": Path("/proc/self/ns/pid").stat().st_ino,
        "user_ns": Path("/proc/self/ns/user").stat().st_ino,
        "uid": os.getuid(),
        "pid": os.getpid(),
        "fabric": has_active_card(),
    }


def find_route(peer: dict[str, Any], address: int) -> Route:
    """Route to the memory at ``address`` of another process, as UCX chooses it.

    ``peer``: its `route_facts`.
    """
    why_not = _why_not_cma(peer, address)
    if not why_not:
        return Route("cma")
    if peer["fabric"] and has_active_card() and _allowed(_VERBS_NAMES):
        return Route("verbs")
    return Route("tcp", why_not)


def _why_not_cma(peer: dict[str, Any], address: int) -> str:
    """Reason why UCX cannot read by process_vm_readv; empty: it can."""
    this = route_facts()
    # The boot id is that of the kernel, so it is equal in all containers of a node.
    if this["boot"] != peer["boot"]:
        return "another node, and no InfiniBand card that NIXL knows on both"
    if not _allowed(_CMA_NAMES):
        return f"UCX_TLS={os.environ['UCX_TLS']}"
    # Pids of another pid namespace mean other processes here.
    if this["pid_ns"] != peer["pid_ns"]:
        return (
            "another pid namespace on the same node: start both in one container, or share the "
            "host's"
        )
    error = _read_byte(peer["pid"], address)
    # ESRCH: there is no such process. EPERM: the check of ptrace access has failed, for one of the
    # following reasons.
    if error == errno.ESRCH:
        return f"process {peer['pid']} has ended"
    if error != errno.EPERM:
        return ""
    if this["user_ns"] != peer["user_ns"]:
        return (
            "another user namespace on the same node: start both in one container, or share the "
            "host's"
        )
    if this["uid"] != peer["uid"]:
        return f"a process of user {peer['uid']}, this one is of {this['uid']}"
    return "ptrace between processes is not allowed (kernel.yama.ptrace_scope)"


def _allowed(names: tuple[str, ...]) -> bool:
    """Whether UCX_TLS lets UCX use a transport of ``names``."""
    setting = os.environ.get("UCX_TLS", "all").strip()
    listed = [name.strip().partition("_")[0] for name in setting.removeprefix("^").split(",")]
    # A list that begins with ^ excludes its transports.
    return any(name in listed for name in names) != setting.startswith("^")


def has_active_card() -> bool:
    """Whether this node has an active InfiniBand card that NIXL can use."""
    return any(_is_active(device) for device in _FABRIC.glob("*"))


def _is_active(device: Path) -> bool:
    driver = (device / "device" / "driver").resolve().name
    is_known = driver in _DRIVERS or knows_all_cards()
    return is_known and any("ACTIVE" in path.read_text() for path in device.glob("ports/*/state"))


class _Span(ctypes.Structure):
    """struct iovec of Linux."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _read_byte(pid: int, address: int) -> int:
    """Read one byte of another process. Returns 0, or the errno of the kernel's refusal."""
    # The permission depends on namespaces, user and kernel.yama.ptrace_scope. Trying is simpler
    # than computing it.
    libc = ctypes.CDLL(None, use_errno=True)
    byte = ctypes.create_string_buffer(1)
    target, source = _Span(ctypes.addressof(byte), 1), _Span(address, 1)
    read = libc.process_vm_readv
    read.restype = ctypes.c_ssize_t
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    read.argtypes = (ctypes.c_int, pointer, count, pointer, count, count)
    bytes_read = read(pid, ctypes.byref(target), 1, ctypes.byref(source), 1, 0)
    return 0 if bytes_read == 1 else ctypes.get_errno()
