"""Seccomp filter for programs in a jail: the system calls that they may not make.

Limits of a process (`setrlimit`) count its address space, its files and its processes. With other
calls a program can allocate memory that these limits do not count: memory files, System V segments,
message queues, pages in pipes, rings of io_uring. Some calls also reach beyond the namespaces of
the program: keyrings and sockets of virtual machines belong to no namespace. For such a call the
filter returns ENOSYS, like a kernel without the call, so that libraries fall back to another call.

See seccomp(2), and Documentation/userspace-api/seccomp_filter.rst of Linux. libseccomp could make
the same filter, but the interpreter of a container does not have its bindings.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_INSTRUCTION = struct.Struct("=HBBI")
"""`struct sock_filter`: operation, jumps if true and if false, constant."""
_LOAD, _EQUALS, _EXCEEDS, _HAS_BITS, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
"""BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ, BPF_JMP|BPF_JGT, BPF_JMP|BPF_JSET, BPF_RET."""
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
"""Offsets in `struct seccomp_data`; for an argument, the lower half on a little-endian machine."""
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
"""SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO, SECCOMP_RET_KILL_PROCESS."""
_MAX_NUMBER = 456
"""Newest call that was reviewed: futex_requeue, of Linux 6.7. Later calls are refused until they
are reviewed. Calls of the x32 ABI, whose numbers have bit 30 set, are refused, too."""
_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. `clone` takes no NEWTIME."""
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
"""Allowed families of sockets. They belong to network namespaces; AF_VSOCK, for one, does not."""
_REFUSED = {
    # Memory that no limit of a process counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "vmsplice": (278, 75),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Keyrings, which hold secrets of Kerberos, AFS and fscrypt.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Other namespaces and other mounts. The flags of clone3 are in memory, which a filter cannot
    # read.
    "clone3": (435, 435),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # Parts of the kernel that no test needs, and that have had many vulnerabilities.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "syslog": (103, 116),
    "modify_ldt": (154, None),
}
"""Refused calls -> their numbers on x86_64 and aarch64."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Numbers of system calls on one kind of processor."""

    audit: int
    """AUDIT_ARCH_... of linux/audit.h. A 32-bit call on the same processor has another value."""
    refused: tuple[int, ...]
    clone: int
    socket: int
    socketpair: int
    keyctl: int


ARCHITECTURES = {
    "x86_64": Architecture(
        audit=0xC000003E,
        refused=tuple(x86 for x86, _ in _REFUSED.values()),
        clone=56,
        socket=41,
        socketpair=53,
        keyctl=250,
    ),
    "aarch64": Architecture(
        audit=0xC00000B7,
        refused=tuple(arm for _, arm in _REFUSED.values() if arm is not None),
        clone=220,
        socket=198,
        socketpair=199,
        keyctl=219,
    ),
}
"""Architectures by `platform.machine()`."""


def filter_program(architecture: Architecture) -> bytes:
    """The filter for programs of one architecture, as an array of `struct sock_filter`."""
    program = [
        *_load(_ARCHITECTURE_AT),
        (_EQUALS, 1, 0, architecture.audit),
        *_answer(_KILL),
        *_load(_NUMBER_AT),
        *_refuse_if(_EXCEEDS, _MAX_NUMBER, errno.ENOSYS),
    ]
    for number in architecture.refused:
        program += _refuse_if(_EQUALS, number, errno.ENOSYS)
    new_namespace = [
        *_load(_FIRST_ARGUMENT_AT),
        *_refuse_if(_HAS_BITS, _NAMESPACES, errno.EPERM),
        *_answer(_ALLOW),
    ]
    program += [(_EQUALS, 0, len(new_namespace), architecture.clone), *new_namespace]
    known_families = [
        (_EQUALS, len(_FAMILIES) - index, 0, family) for index, family in enumerate(_FAMILIES)
    ]
    other_family = [
        *_load(_FIRST_ARGUMENT_AT),
        *known_families,
        *_answer(_ERROR | errno.EAFNOSUPPORT),
    ]
    program += [
        (_EQUALS, 1, 0, architecture.socket),
        (_EQUALS, 0, len(other_family), architecture.socketpair),
        *other_family,
        *_answer(_ALLOW),
    ]
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in program)


Instruction = tuple[int, int, int, int]


def _load(offset: int) -> Sequence[Instruction]:
    return [(_LOAD, 0, 0, offset)]


def _answer(action: int) -> Sequence[Instruction]:
    return [(_RETURN, 0, 0, action)]


def _refuse_if(test: int, constant: int, error: int) -> Sequence[Instruction]:
    """Fail the call with ``error`` if the loaded number meets the test; else continue after these
    instructions."""
    return [(test, 0, 1, constant), *_answer(_ERROR | error)]
