"""Guardian of a test session: cleans up after the session, however the session ends.

`python -m tests.guardian PID` is a child of process PID, which is pytest's controller. It reads one
line of JSON from standard input, see `Order`. When standard input is closed or the controller has
ended, it

1. kills every process whose environment has the session's mark or names its folder, and their
  descendants,
2. removes what these processes leave in /dev/shm,
3. removes the users that root made for tests, and the session's folder.

The guardian leads another session of processes, so that Ctrl-C, a closed terminal or a kill of
pytest's process group does not end it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import select
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from relax_hpc.base.rundir import RunDir
from relax_hpc.training.weights.node_cache import staging_root

MARK = "RELAX_TEST_SESSION"
"""Environment variable that every process of a session inherits. A worker's value begins with its
controller's."""
FOLDER = "RELAX_TEST_FOLDER"
"""Environment variable: the session's folder, where its temporary files are."""
MEMORY = Path("/dev/shm")
LIBRARIES = ("sglang_", "sgl_", "psm_", "nccl-", "mpich_", "torch_", "ucx_", "sem.")
"""Beginnings of the names of files that libraries make in /dev/shm, and keep open while they use
them."""
USERS = "session.users"
"""File in a session's folder with the names of users that root made."""
RUNS = "session.runs"
"""File in a session's folder with the paths of folders that have the run directories of tests."""
END_S = 30.0
"""Seconds that processes have to end after they were killed."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Order:
    """What a guardian needs to know of its session: mark, folder, and names in /dev/shm before the
    session."""

    mark: str
    folder: str
    memory_before: list[str]


class Session:
    """A test session of this process, with its guardian."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Mark this process's environment, make the session's folder and start the guardian."""
        outer = dict(environment)
        # A session that a test starts is a part of that test's session.
        environment[MARK] = new_mark(environment.get(MARK, ""))
        folder = Path(tempfile.mkdtemp(prefix="relax-", dir=outer.get(FOLDER, "/tmp"))).resolve()
        # The homes of users that root makes are in it.
        folder.chmod(0o711)
        self.guardian = subprocess.Popen(
            [sys.executable, "-m", "tests.guardian", str(os.getpid())],
            cwd=Path(__file__).resolve().parents[1],
            env=outer,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        order = Order(environment[MARK], str(folder), [path.name for path in MEMORY.iterdir()])
        self.guardian.stdin.write(f"{json.dumps(asdict(order))}\n".encode())
        self.guardian.stdin.flush()
        # pytest keeps the folders of the last three sessions there.
        environment.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        environment[FOLDER] = environment["TMPDIR"] = str(folder)
        tempfile.tempdir = None

    def end(self) -> None:
        """Make the guardian clean up, and wait for its end."""
        with contextlib.suppress(BrokenPipeError):
            self.guardian.stdin.close()
        self.guardian.wait(3 * END_S)


def new_mark(parent: str) -> str:
    """A new mark for a process of the session with mark ``parent``."""
    return f"{parent}/{uuid.uuid4().hex}".lstrip("/")


def session_folder() -> Path:
    """Folder for files of this session. Its path is short: tests have unix sockets below it."""
    return Path(os.environ.get(FOLDER, "/tmp"))


def memory_prefix() -> str:
    """Beginning of the names of folders that this session's tests make in /dev/shm."""
    return f"{session_folder().name}-"


def register(listing: str, line: str) -> None:
    """Add ``line`` to the session's file USERS or RUNS, for the guardian."""
    if FOLDER in os.environ:
        with (session_folder() / listing).open("a") as file:
            file.write(f"{line}\n")


def _registered(folder: Path, listing: str) -> list[str]:
    # A session that a test starts has its folder in this one.
    lines: list[str] = []
    for path in sorted(folder.rglob(listing)):
        lines += path.read_text().splitlines()
    return lines


def has_mark(value: str, mark: str) -> bool:
    """Whether ``value``, a process's mark, is ``mark`` or that of a part of its session."""
    return value == mark or value.startswith(f"{mark}/")


def session_processes(mark: str, folder: str = "") -> list[psutil.Process]:
    """Living processes of the session with ``mark`` and those whose environment names ``folder``,
    with descendants."""
    processes: dict[int, psutil.Process] = {}
    children: dict[int, list[int]] = {}
    pending = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            processes[process.pid] = process
            children.setdefault(process.ppid(), []).append(process.pid)
            variables = _environment(process.pid)
            if has_mark(variables.get(MARK, ""), mark) or any(
                folder and folder in value for value in variables.values()
            ):
                pending.append(process.pid)
    pids: set[int] = set()
    while pending:
        pid = pending.pop()
        if pid not in pids:
            pids.add(pid)
            pending += children.get(pid, ())
    return [processes[pid] for pid in sorted(pids)]


def _environment(pid: int) -> dict[str, str]:
    """Environment of a process. psutil 7 stops at an empty variable; slurmstepd has its title in
    place of the first."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(variable.split("=", 1) for variable in variables if "=" in variable)


def end_processes(mark: str, folder: str) -> None:
    """Kill all processes of a session, also those that they start meanwhile, for at most
    `END_S`."""

    def kill_all() -> bool:
        living = session_processes(mark, folder)
        for process in living:
            _kill(process)
        return not living

    _repeat_until_true(kill_all)


def remove_users(names: list[str]) -> None:
    """Remove users, and end their processes."""
    for name in names:
        with contextlib.suppress(KeyError):
            uid = pwd.getpwnam(name).pw_uid
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if uid in process.uids():
                        _kill(process)
            subprocess.run(
                ["userdel", "--force", name], capture_output=True, timeout=END_S, check=False
            )


def remove_folder(folder: Path) -> None:
    """Remove ``folder``, also parts of it that their owner may not change."""

    def remove() -> bool:
        subprocess.run(
            ["chmod", "-R", "u+rwX", folder], capture_output=True, timeout=END_S, check=False
        )
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    # A process that has just been killed may still write.
    _repeat_until_true(remove)


def remove_memory(order: Order) -> None:
    """Remove what the session's ended processes have left in /dev/shm.

    Other sessions and runs of this user may be active. So a folder of weights is removed only if
    its name is that of a run below the session's folders, and a library's file only if it is new
    and no process has it open.
    """
    folder = Path(order.folder)
    staging = {
        _without_user(staging_root(RunDir(run)).name)
        for run in _folders_below([folder, *map(Path, _registered(folder, RUNS))])
    }
    # The list comes first, so that a file which is made meanwhile is not in it.
    paths = list(MEMORY.iterdir())
    in_use = set(_open_in_memory())
    for path in paths:
        is_new = path.name not in order.memory_before
        unused = (
            path.name.startswith(LIBRARIES)
            and is_new
            and path.name not in in_use
            and _is_ours(path)
        )
        if unused or path.name.startswith(f"{folder.name}-") or _without_user(path.name) in staging:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _without_user(name: str) -> str:
    """Name of a folder of weights, relax-UID-HASH, without its user: tests have runs of several
    users."""
    return name.rpartition("-")[2] if name.startswith("relax-") else ""


def _folders_below(roots: list[Path]) -> Iterator[Path]:
    for root in roots:
        for folder, _, _ in os.walk(root):
            yield Path(folder)


def _is_ours(path: Path) -> bool:
    """Whether ``path`` belongs to this user, or is root's to remove."""
    with contextlib.suppress(OSError):
        return os.getuid() in (0, path.lstat().st_uid)
    return False


def _open_in_memory() -> Iterator[str]:
    """Names of the files in /dev/shm that a process has open or mapped."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            folder = Path(f"/proc/{process.pid}")
            paths = [
                line.split(maxsplit=5)[-1] for line in (folder / "maps").read_text().splitlines()
            ]
            for descriptor in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    paths.append(str(descriptor.readlink()))
            for path in paths:
                if path.startswith(f"{MEMORY}/"):
                    yield Path(path).relative_to(MEMORY).parts[0].removesuffix(" (deleted)")


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill()


def _repeat_until_true(attempt: Callable[[], bool]) -> None:
    """Call ``attempt`` until it returns True, for at most `END_S`."""
    deadline = time.monotonic() + END_S
    while not attempt() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def main(controller: int) -> None:
    """Wait for the end of a session, then clean up. ``controller``: pytest's process, this one's
    parent."""
    # Unbuffered, because `select` does not see lines in a buffer.
    line = sys.stdin.buffer.raw.readline()
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(controller)
        # If the controller has ended before, its number may be another process's.
        if os.getppid() == controller:
            select.select([0, ended], [], [])
    if line:
        order = Order(**json.loads(line))
        folder = Path(order.folder)
        end_processes(order.mark, order.folder)
        remove_memory(order)
        remove_users(_registered(folder, USERS))
        remove_folder(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]))
