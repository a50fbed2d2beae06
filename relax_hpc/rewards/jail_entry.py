"""Start of a program in a jail. `jail` runs this file by its path; it only uses the standard
library.

Argument: JSON, see `jail.Jail._order`.

    jail --> this process --> init of the namespaces --> program

When init ends, the kernel kills all processes of its PID namespace. If the program cannot be
started, the reason is written to descriptor `failure_fd`, which is closed when the program starts.
"""

import contextlib
import ctypes
import errno
import json
import os
import re
import resource
import signal
import stat
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

BOX = "/box"
"""The program's folder."""
NOBODY = 65534
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_KEYCTL_JOIN_SESSION_KEYRING = 1
_NEW_USER = 0x10000000
_NEW = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Namespaces: mounts, host name, IPC, process numbers, network."""
_NOSUID, _NODEV, _RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 2, 4, 1, 32, 4096, 16384, 1 << 18
_LOCKED = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flag of statvfs -> flag of mount. A remount in a user namespace may not remove these flags."""
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_MOUNT_ATTRIBUTES = struct.pack("=4Q", _RDONLY | _NOSUID | _NODEV, 0, 0, 0)
"""`struct mount_attr`: attributes to set, attributes to clear, propagation, user namespace."""
_DETACH = 2
_MAX_LINKS = 40
"""Maximum number of symbolic links on the way to a file, the same as in the kernel."""
_DEVICES = ("null", "zero", "random", "urandom")
_WRITABLE = ("box", "tmp", "dev/shm")
"""Folders that the program may write to. They are in one file system of `disk_mb`."""
OWN_PROCESSES = 2
"""Number of processes around the program: this one and init. Unless root has started them, the
kernel counts them as processes of the program's user."""
_NAMESPACE_COUNTS = (5, 14)
"""First Linux in which a new user namespace counts processes from 0 (commit 21d1c5e386bc)."""


def main() -> None:
    """Exit with the program's exit code; if init was killed from outside, end by the same
    signal."""
    order = json.loads(sys.argv[1])
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.umask(0o022)
    try:
        if order["weak"]:
            os.chdir(order["folder"])
            _join_cgroup(order)
            _become_nobody(order, [Path(order["folder"]), *Path(order["folder"]).rglob("*")])
            start_program(order, order["processes"])
        processes = order["processes"] + _count_others()
        _enter_namespaces()
        # Only children are in the new PID namespace.
        init = os.fork()
        if init == 0:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _make_root(order)
            _run_as_init(order, processes)
    except Exception as error:
        _fail(order, error)
    _release(order)
    status = os.waitpid(init, 0)[1]
    if os.WIFSIGNALED(status):
        signal.raise_signal(signal.SIGKILL)
    os._exit(os.WEXITSTATUS(status))


def _count_others() -> int:
    """Number of other processes and threads that the kernel counts for the program's limit of
    processes."""
    if os.geteuid() == 0:
        # The program will have another user id.
        return 0
    if _kernel_version() >= _NAMESPACE_COUNTS:
        return OWN_PROCESSES
    # The threads of the user, including this process, and init, which does not exist yet.
    return count_threads(os.getuid()) + 1


def count_threads(user: int) -> int:
    """Number of threads of all processes of a user at this moment."""
    threads = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            # The process may end at any moment.
            with contextlib.suppress(OSError):
                if folder.stat().st_uid == user:
                    threads += sum(1 for _ in (folder / "task").iterdir())
    return threads


def _kernel_version() -> tuple[int, int]:
    numbers = re.findall(r"\d+", os.uname().release)
    return int(numbers[0]), int(numbers[1])


def _run_as_init(order: dict, processes: int) -> NoReturn:
    """Run the program, and exit with its exit code. Orphans of the program become children of this
    process."""
    # The kernel discards signals from the namespace to init, unless init handles them. Python
    # handles SIGINT by default, and would print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    program = os.fork()
    if program == 0:
        # In a new process group: `kill(0, SIGKILL)` of the program would otherwise end init and
        # the process above.
        os.setsid()
        _join_cgroup(order)
        _become_nobody(order)
        start_program(order, processes)
    _release(order)
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _join_cgroup(order: dict) -> None:
    """Move this process into the control group that limits the program's memory, if `jail` has made
    one."""
    if order["cgroup_fd"] >= 0:
        os.write(order["cgroup_fd"], b"0")


def start_program(order: dict, processes: int) -> NoReturn:
    """Set the limits, and replace this process by the program.

    ``processes``: limit of the processes of the program's user. The limits are set only here,
    because the processes above would exceed them.
    """
    megabyte = 1 << 20
    for name, limit in (
        ("CPU", int(order["cpu_s"]) + 1),
        ("AS", order["memory_mb"] * megabyte),
        ("FSIZE", order["disk_mb"] * megabyte),
        ("NPROC", processes),
        ("NOFILE", 256),
        ("CORE", 0),
    ):
        number = getattr(resource, f"RLIMIT_{name}")
        hard_limit = resource.getrlimit(number)[1]
        if hard_limit != resource.RLIM_INFINITY:
            limit = min(limit, hard_limit)
        resource.setrlimit(number, (limit, limit))
    for descriptor in (order["failure_fd"], order["cgroup_fd"]):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(Path.cwd()),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    }
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if order["filter"]:
        # Join a new, empty keyring. This may fail for lack of quota. The filter refuses all calls
        # for keys in any case.
        _LIBC.syscall(order["keyctl"], _KEYCTL_JOIN_SESSION_KEYRING, None)
        _install_filter(bytes.fromhex(order["filter"]))
    os.execve(order["words"][0], order["words"], environment)


def _install_filter(program: bytes) -> None:
    """Install the filter for all system calls of this process and of its children."""

    class Program(ctypes.Structure):
        _fields_ = (("count", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    pointer = ctypes.byref(Program(len(program) // 8, program))
    _check(_LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, pointer, 0, 0), "seccomp")


def _enter_namespaces() -> None:
    user, group = os.geteuid(), os.getegid()
    # Root needs no user namespace. It changes its user id later.
    _check(_LIBC.unshare(_NEW | (_NEW_USER if user else 0)), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")
        Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")


def _become_nobody(order: dict, files: Sequence[Path] = ()) -> None:
    """If this is root, change to a user id that owns only ``files``, and whose processes the kernel
    counts separately."""
    if os.geteuid() != 0:
        return
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
    except PermissionError:
        if order["weak"]:
            # Root in a container without the right to change ids.
            return
        raise
    for user in (order["user"], NOBODY):
        try:
            for path in files:
                os.chown(path, user, -1)
            os.setresuid(user, user, user)
            return
        except OSError as error:
            # A container may map only some user ids.
            failure = error
    raise failure


def _make_root(order: dict) -> None:
    """Make the program's file system, in memory, and enter it."""
    root = Path(order["folder"]).resolve()
    files = {
        path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount(
        "tmpfs",
        root,
        "tmpfs",
        _NOSUID | _NODEV,
        f"size={order['disk_mb']}m,nr_inodes=4096,mode=755",
    )
    shown = _show([Path(path) for path in order["show"]], root)
    # After `_show`, because the interpreter may be below one of these folders.
    for name in _WRITABLE:
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(0o1777)
    for name in _DEVICES:
        (root / "dev" / name).touch()
        _mount(f"/dev/{name}", root / "dev" / name, None, _BIND)
    _show_input(root / "dev" / "stdin", order["disk_mb"] << 20)
    for path in shown:
        _make_read_only(path)
    for path, content in files.items():
        (root / "box" / path).parent.mkdir(exist_ok=True)
        (root / "box" / path).write_bytes(content)
    os.chdir(root)
    _check(_LIBC.pivot_root(b".", b"."), "pivot_root")
    _check(_LIBC.umount2(b".", _DETACH), "umount2")
    os.chdir(BOX)


def _show_input(path: Path, disk_bytes: int) -> None:
    """Copy standard input to ``path`` if it is a file of at most a quarter of ``disk_bytes``.

    Some programs read /dev/stdin. It is usually a link into /proc, which does not exist here.
    """
    status = os.fstat(0)
    if stat.S_ISREG(status.st_mode) and status.st_size <= disk_bytes // 4:
        path.write_bytes(os.pread(0, status.st_size, 0))
        path.chmod(0o444)


def _show(paths: list[Path], root: Path) -> list[Path]:
    """Bind files and folders below ``root``, at their original paths. Returns the mount points.

    Symbolic links on the way to them stay links. File systems that are mounted below them are
    hidden: they may contain files of the user, which the program could read.
    """
    links: dict[Path, Path] = {}
    targets = {_follow_links(path, links) for path in paths}
    shown, covered = list[Path](), list[Path]()
    for path in sorted(targets, key=lambda path: len(path.parts)):
        point = root / path.relative_to("/")
        if not path.exists() or _depth(shown, point) > _depth(covered, point):
            continue
        point.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            point.mkdir(exist_ok=True)
        elif not point.exists():
            point.touch()
        _mount(path, point, None, _BIND | _REC)
        shown.append(point)
        covered += _hide_mounts_below(point)
    for link, target in links.items():
        inside = root / link.relative_to("/")
        if not os.path.lexists(inside):
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.symlink_to(target)
    return shown


def _depth(folders: list[Path], path: Path) -> int:
    """Depth of the deepest of ``folders`` that ``path`` is in; 0 if it is in none."""
    return max((len(folder.parts) for folder in folders if path.is_relative_to(folder)), default=0)


def _follow_links(path: Path, links: dict[Path, Path]) -> Path:
    """The path without symbolic links. Each link on the way, with its target, is added to
    ``links``."""
    pending, real = list(reversed(path.parts[1:])), Path("/")
    for _ in range(_MAX_LINKS + 1):
        while pending:
            name = pending.pop()
            step = real.parent if name == ".." else real / name
            if step.is_symlink():
                break
            real = step
        else:
            return real
        target = links[step] = step.readlink()
        if target.is_absolute():
            real = Path("/")
        pending += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _hide_mounts_below(folder: Path) -> list[Path]:
    """Cover each file system that is mounted below ``folder`` by an empty one, and each mounted
    file by an empty file. Returns the mount points.

    They cannot be unmounted in a user namespace, where they are locked to the mount above, see
    mount_namespaces(7).
    """
    covered = list[Path]()
    for point in _mount_points_below(folder):
        if not any(point.is_relative_to(other) for other in covered):
            _cover(point)
            covered.append(point)
    return covered


def _cover(point: Path) -> None:
    try:
        # The size suffices for the folders above an interpreter that is shown there.
        _mount("tmpfs", point, "tmpfs", _NOSUID | _NODEV, "size=64k,nr_inodes=1024,mode=755")
    except NotADirectoryError:
        _mount("/dev/null", point, None, _BIND)
    except PermissionError as error:
        # A folder on the way there cannot be entered. The program cannot enter it either.
        if error.errno != errno.EACCES:
            raise


def _make_read_only(folder: Path) -> None:
    """Make a mount and all mounts below it read-only."""
    arguments = (
        _AT_FDCWD,
        os.fsencode(folder),
        _AT_RECURSIVE,
        _MOUNT_ATTRIBUTES,
        len(_MOUNT_ATTRIBUTES),
    )
    if _LIBC.syscall(_MOUNT_SETATTR, *arguments) == 0:
        return
    # Linux before 5.12 has no mount_setattr(2). A remount changes only one mount, so that each
    # mount below is remounted, too.
    for point in [folder, *_mount_points_below(folder)]:
        with _unless_unreachable():
            flags = os.statvfs(point).f_flag
            locked = sum(flag for shown_flag, flag in _LOCKED.items() if flags & shown_flag)
            _mount(None, point, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV | locked)


def _mount_points_below(folder: Path) -> list[Path]:
    """Mount points below ``folder``, outer ones first."""
    points = set[Path]()
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        # The kernel writes blanks, line breaks and backslashes as \040, \012 and \134.
        name = re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), line.split()[4])
        points.add(Path(os.fsdecode(name)))
    return sorted(point for point in points if point != folder and point.is_relative_to(folder))


@contextlib.contextmanager
def _unless_unreachable() -> Iterator[None]:
    """Ignore the error if a mount is hidden by another one, or is in a folder that this user may
    not enter. The program cannot reach such a mount.

    ENOENT, EINVAL: at the path of a hidden mount is nothing, or no mount.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EINVAL, errno.EACCES):
            raise


def _mount(
    source: str | Path | None, point: str | Path, kind: str | None, flags: int, data: str = ""
) -> None:
    names = [None if name is None else os.fsencode(name) for name in (source, point, kind)]
    _check(_LIBC.mount(*names, ctypes.c_ulong(flags), data.encode() or None), f"mount {point}")


def _check(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), call)


def _release(order: dict) -> None:
    """Close the program's streams in this process. They are then closed when the program ends, and
    no traceback of this process is written to them."""
    for descriptor in (0, 1, 2, order["failure_fd"], order["cgroup_fd"]):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _fail(order: dict, error: Exception) -> NoReturn:
    """Write the number of the error, or 0, and its text to `failure_fd`, and exit."""
    text = f"0 {type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.errno} {error.strerror}: {error.filename or ''}"
    os.write(order["failure_fd"] if order["failure_fd"] >= 0 else 2, text.encode(errors="replace"))
    os._exit(1)


if __name__ == "__main__":
    main()
