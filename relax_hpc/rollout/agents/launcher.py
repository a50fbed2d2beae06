"""Start of an agent program, and the end of all processes that the program has started.

`program` runs this file by its path, with the standard library alone: `python -I -S launcher.py
ORDER`. ORDER is JSON: `words` of the command, `memory_bytes` of each of its processes,
`pid_namespace` (whether to try one), and two sockets: `control`, for reports, at whose end
everything is killed, and `result`, which the program gets.

    rollout process --> keeper (this process) --> init of a PID namespace --> program

The kernel kills a PID namespace together with its first process. Without a namespace, the keeper
starts the program itself. It is a child subreaper then: orphans become its children, so that it
finds and kills them (prctl(2), Linux 3.4).
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_SLAVE = 2, 4, 8, 1 << 14, 1 << 19
_NOT_STARTED = 127
_RESULT_FD = 3
"""Descriptor over which the program sends its result; the variable RELAX_RESULT_FD has its
number."""
_KILL_S = 10.0
"""Seconds for killed processes to end."""
_PAUSE_S = 0.005


def main() -> None:
    """Run the program, report its end, and kill the processes that it leaves."""
    order = json.loads(sys.argv[1])
    os.set_inheritable(order["control"], False)
    _check(_LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
    reason = (
        _start_init(order)
        if order["pid_namespace"]
        else "environment.options.pid_namespace is false"
    )
    if not reason:
        _release(order)
        _wait_for_all()
        return
    _report(order, no_namespace=reason)
    _supervise(order)
    _kill_descendants()


def _start_init(order: dict) -> str:
    """Start the init process of a PID namespace. Returns the reason if that is not possible."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            _enter_namespaces()
            # Only children of the process that calls unshare() are in the new PID namespace.
            if os.fork():
                os._exit(0)
            flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
            _check(_LIBC.mount(b"proc", b"/proc", b"proc", flags, None), "mount /proc")
        except OSError as error:
            os.write(writer, f"{error.filename}: {error.strerror}".encode())
            os._exit(1)
        os.close(writer)
        _supervise(order)
        # The kernel kills all other processes of the namespace now.
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        reason = answer.read()
    os.waitpid(middle, 0)
    return reason


def _enter_namespaces() -> None:
    user, group = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNS | _CLONE_NEWPID
    # Root in a container may lack the capability for this, and then needs a user namespace.
    if user or _LIBC.unshare(flags):
        _check(_LIBC.unshare(flags | _CLONE_NEWUSER), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    # Slave propagation: later mounts of the host, such as homes by autofs, appear here too.
    _check(_LIBC.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None), "mount /")


def _supervise(order: dict) -> None:
    """Start the program and report its end. Returns when it has ended, or when the rollout process
    has closed the control socket."""
    # The program's processes must not attach to this process or open its descriptors. The exec of
    # the program makes the program itself dumpable again.
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    # Before the program starts: it may end quickly.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    program = _start_program(order)
    _release(order)
    while True:
        readable, _, _ = select.select([reader, order["control"]], [], [])
        # The rollout process never sends anything, so the other end was closed.
        if order["control"] in readable:
            return
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 4096)
        # WNOWAIT: the program is not reaped, so that no other process gets its number before all of
        # its processes are killed.
        ended = os.waitid(os.P_PID, program, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended:
            was_killed = ended.si_code != os.CLD_EXITED
            _report(order, ended=-ended.si_status if was_killed else ended.si_status)
            return
        while (
            ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ) and ended.si_pid != program:
            os.waitpid(ended.si_pid, 0)


def _start_program(order: dict) -> int:
    program = os.fork()
    if program:
        return program
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        signal.set_wakeup_fd(-1)
        # Python ignores these signals, and a new program inherits that.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        limit, hard_limit = order["memory_bytes"], resource.getrlimit(resource.RLIMIT_DATA)[1]
        if hard_limit != resource.RLIM_INFINITY:
            limit = min(limit, hard_limit)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        # The sender of this byte is the process that may send the result: exec keeps the number of
        # the process.
        os.write(order["result"], b"\n")
        # Descriptor 3, because `sh` of Debian supports only descriptors with one digit.
        order["control"] = fcntl.fcntl(order["control"], fcntl.F_DUPFD_CLOEXEC, _RESULT_FD + 1)
        os.dup2(order["result"], _RESULT_FD)
        if order["result"] != _RESULT_FD:
            os.close(order["result"])
        os.environ["RELAX_RESULT_FD"] = str(_RESULT_FD)
        os.execvp(order["words"][0], order["words"])
    except OSError as error:
        _report(order, error=f"{order['words'][0]}: {error.strerror}")
    os._exit(_NOT_STARTED)


def _release(order: dict) -> None:
    """Close the program's streams in this process, so that they end with the program's
    processes."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2, order["result"]):
        os.dup2(null, stream)
    os.close(null)


def _report(order: dict, **fact: object) -> None:
    # OSError: the rollout process has ended.
    with contextlib.suppress(OSError):
        os.write(order["control"], json.dumps(fact).encode() + b"\n")


def _wait_for_all() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _kill_descendants() -> None:
    """Kill all descendants of this process, including those that are started meanwhile."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            # Every orphan becomes a child of this process, so no descendant is left.
            return
        time.sleep(_PAUSE_S)


def _descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                # "pid (name) state parent ...", where the name may contain blanks and brackets.
                parent = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    descendants, pending = list[int](), [ancestor]
    while pending:
        below = children.pop(pending.pop(), [])
        descendants += below
        pending += below
    return descendants


def _check(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), call)


if __name__ == "__main__":
    main()
