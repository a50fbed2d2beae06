"""Beginning of a program that nobody trusts, as `jail` asks: run by its path, with the standard library alone.

Argument: JSON, see `jail.Jail`. It becomes the program's parent, and the first process of the namespaces that the
program is in, with whose end the kernel ends all others there. What keeps the program from beginning goes to descriptor
`told`, which is closed when it begins.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path

BOX = "/box"
"""The folder in which the program finds itself."""
NOBODY = 65534
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_NEW_USER = 0x10000000
_NEW = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Namespaces: mounts, host name, IPC, process numbers, network."""
_NOSUID, _NODEV, _NOEXEC, _RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 2, 4, 8, 1, 32, 4096, 16384, 1 << 18
_LOCKED = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flag of statvfs -> of mount: whoever makes a mount anew in a user namespace has to leave them."""
_DETACH = 2
_DEVICES = ("null", "zero", "random", "urandom")


def main() -> None:
    """End as the program does."""
    asked = json.loads(sys.argv[1])
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.umask(0o022)
    try:
        if asked["weak"]:
            os.chdir(asked["folder"])
            # A container's root may not, and is little.
            with contextlib.suppress(PermissionError):
                _become_nobody(asked)
            begin(asked)
        _enter_namespaces()
        # Only children are in the new namespace of process numbers.
        first = os.fork()
        if first == 0:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _make_root(asked)
            _be_first(asked)
    except OSError as error:
        _tell(asked, f"{error.strerror}: {error.filename or ''}")
    os.close(asked["told"])
    _end_as(os.waitpid(first, 0)[1])


def _be_first(asked: dict) -> None:
    program = os.fork()
    if program == 0:
        _become_nobody(asked)
        begin(asked)
    os.close(asked["told"])
    while True:
        pid, status = os.wait()
        if pid == program:
            _end_as(status)


def begin(asked: dict) -> None:
    """Become the program, within its limits. They come last: of new namespaces processes count anew."""
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    megabyte = 1 << 20
    for name, most in (
        ("CPU", int(asked["cpu_s"]) + 1),
        ("AS", asked["memory_mb"] * megabyte),
        ("FSIZE", asked["disk_mb"] * megabyte),
        ("NPROC", asked["processes"]),
        ("NOFILE", 256),
        ("CORE", 0),
    ):
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (most, most))
    if asked["told"] >= 0:
        os.set_inheritable(asked["told"], False)
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(Path.cwd()),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    }
    os.execve(asked["words"][0], asked["words"], environment)


def _enter_namespaces() -> None:
    user, group = os.geteuid(), os.getegid()
    # Root needs no namespace of users, and becomes another one later.
    _check(_LIBC.unshare(_NEW | (_NEW_USER if user else 0)), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")
        Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")


def _become_nobody(asked: dict) -> None:
    """Become, if root, a user whom nothing belongs to, and whose processes are counted by themselves."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        try:
            os.setresuid(*[asked["nobody"]] * 3)
        except OSError:  # a container's root, which has not all users
            os.setresuid(NOBODY, NOBODY, NOBODY)


def _make_root(asked: dict) -> None:
    """A file system in memory: what ``show`` names, to be read, and an empty folder for the program."""
    root = Path(asked["folder"])
    files = {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, f"size={asked['disk_mb']}m,nr_inodes=4096,mode=755")
    for path in map(Path, asked["show"]):
        _show(path, root / path.relative_to("/"))
    # There already if the interpreter lies below them.
    for name in ("dev", "box", "tmp"):
        (root / name).mkdir(exist_ok=True)
    for name in _DEVICES:
        (root / "dev" / name).touch()
        _mount(f"/dev/{name}", root / "dev" / name, None, _BIND)
    for name in ("box", "tmp"):
        (root / name).chmod(0o777)
    for path, content in files.items():
        (root / "box" / path).parent.mkdir(exist_ok=True)
        (root / "box" / path).write_bytes(content)
    os.chdir(root)
    _check(_LIBC.pivot_root(b".", b"."), "pivot_root")
    _check(_LIBC.umount2(b".", _DETACH), "umount2")
    os.chdir(BOX)


def _show(path: Path, inside: Path) -> None:
    inside.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        with contextlib.suppress(FileExistsError):
            inside.symlink_to(path.readlink())
    elif path.is_dir():
        inside.mkdir(exist_ok=True)
        _mount(path, inside, None, _BIND | _REC)
        locked = sum(flag for found, flag in _LOCKED.items() if os.statvfs(inside).f_flag & found)
        _mount(None, inside, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | locked)
    elif path.is_file():
        inside.write_bytes(path.read_bytes())


def _mount(what: str | Path | None, where: str | Path, kind: str | None, flags: int, data: str = "") -> None:
    words = [None if word is None else os.fsencode(word) for word in (what, where, kind)]
    _check(_LIBC.mount(*words, ctypes.c_ulong(flags), data.encode() or None), f"mount {where}")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _end_as(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _tell(asked: dict, why: str) -> None:
    os.write(asked["told"] if asked["told"] >= 0 else 2, why.encode())
    os._exit(1)


if __name__ == "__main__":
    main()
