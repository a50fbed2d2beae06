"""Jail for untrusted programs: they run in namespaces or in a container, within limits.

A program sees the system's programs and its interpreter, read-only, and an empty folder in memory.
It has no network, and sees neither files nor processes of the user. When it ends, all processes
that it has started end, too. Its memory limits are described in docs/reference/rewards.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.rewards import jail_entry
from relax_hpc.rewards.jail_cgroup import limited_group
from relax_hpc.rewards.jail_filter import ARCHITECTURES, filter_program
from relax_hpc.rewards.jail_interpreter import Interpreter, find_interpreter
from relax_hpc.rewards.jail_memory import MemoryWatch, watched_memory

if TYPE_CHECKING:
    from relax_hpc.base.reward_settings import CodeSettings

_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
)
_FIRST_USER = 1 << 30
"""First of the user ids that own nothing. If this process is root, each program gets another user
id, so that the kernel counts its processes separately."""
_RUNS = itertools.count()
_MAX_OUTPUT = 16 << 20
_MAX_REASON = 500
_MAIN = "main.py"
_ATTEMPTS = 3
"""Attempts to run a program that cannot be started, or that is killed from outside of its jail."""
_EXIT_S = 0.5
"""Seconds for a program to exit after the exit of the judge has closed its input."""
_PAUSE_S = 0.2
"""Seconds before the second attempt; twice as long before the third. The process table or the disk
may be full for a moment."""
_TEMPORARY = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Errors of a system that lacks processes, memory or files for the moment."""
Files = Mapping[str, str]
"""Text of each file of a program by its path, which may have one folder; `main.py` is run."""
_PROBE, _PROBED = "import sys; print(sys.stdin.read()[::-1])", "well"
_PROBE_S = 60.0
"""Seconds for the first start of the interpreter, which may be on a shared filesystem."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Result of a program."""

    code: int
    """Exit code; if a signal ended the program, 128 + its number."""
    output: str
    """Output of the program, up to 16 MiB."""
    in_time: bool


Ran = ProgramResult  # Name in release 0.1.


class Jail:
    """Jail that runs one program after the other."""

    def __init__(self, settings: CodeSettings, key: str = "reward.code") -> None:
        """``key``: name of the settings in messages. ConfigError: programs cannot be isolated on
        this machine. RelaxError: no program can be run at the moment: its processes were killed, or
        memory is short."""
        self._settings, self._key = settings, key
        if settings.image and not shutil.which(settings.apptainer):
            raise ConfigError(
                f"{key}.apptainer: found {settings.apptainer!r}, which is no program on this node"
            )
        self._architecture = ARCHITECTURES.get(platform.machine())
        if not (self._architecture or settings.weak):
            raise ConfigError(
                f"{key}: found a machine of {platform.machine()}, allowed: "
                f"{', '.join(ARCHITECTURES)}, for which there "
                f"is a filter of system calls; else set {key}.weak: true"
            )
        self._probe()

    def run(
        self, program: str, stdin: str, timeout_s: float, with_errors: bool = False
    ) -> ProgramResult:
        """Run the Python ``program`` with the text ``stdin`` as its standard input.

        ``with_errors``: the output includes standard error. Threads may share one object. OSError:
        in each of three attempts, the program could not be started, or was killed from outside of
        its jail.
        """

        def run() -> ProgramResult:
            with _sealed_file(stdin) as source, _memory_file() as output:
                errors = subprocess.STDOUT if with_errors else subprocess.DEVNULL
                with self._start({_MAIN: program}, (source, output, errors), timeout_s) as process:
                    code = process.wait(timeout_s)
                return ProgramResult(code or 0, _read_text(output), code is not None)

        return _attempt(run)

    def run_pair(self, program: Files, judge: Files, timeout_s: float) -> ProgramResult:
        """Run two programs, each in a jail. Two pipes connect their standard inputs and outputs.

        The result is that of ``judge``: its exit code, and the text that it writes to standard
        error. When it ends, the other program is killed. OSError: see `run`, for either program.
        """

        def run() -> ProgramResult:
            with contextlib.ExitStack() as stack:
                verdict = stack.enter_context(_memory_file())
                to_program, from_judge = map(stack.enter_context, _pipe())
                to_judge, from_program = map(stack.enter_context, _pipe())
                pipes = (to_program, from_program, subprocess.DEVNULL)
                running = stack.enter_context(self._start(program, pipes, timeout_s))
                pipes = (to_judge, from_judge, verdict)
                judging = stack.enter_context(self._start(judge, pipes, timeout_s))
                # A program sees the end of its input only if no process holds the other end open.
                for end in (to_program, from_judge, to_judge, from_program):
                    end.close()
                code = judging.wait(timeout_s)
                if code is not None:
                    # If the program was killed, the judge may have ended because of that, before
                    # the program's own exit is known here.
                    running.check(_EXIT_S)
                if code == 128 + signal.SIGKILL:
                    raise OSError("the process of the tests was killed")
                return ProgramResult(code or 0, _read_text(verdict), code is not None)

        return _attempt(run)

    @contextlib.contextmanager
    def _start(
        self, files: Files, streams: tuple[Any, Any, Any], timeout_s: float
    ) -> Iterator[_Started]:
        """Start the program ``files`` with standard ``streams``. At the end of the context it is
        killed.

        OSError, also at the end of the context: it could not be started.
        """
        settings, is_apart = self._settings, not (self._settings.weak or self._settings.image)
        # The program's files and its output are also in memory, each up to `disk_mb`.
        memory_mb = settings.memory_mb + 2 * settings.disk_mb
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="relax-program-"))
            _write_files(Path(folder), files)
            cgroup_fd = -1
            if not settings.image:
                cgroup_fd = stack.enter_context(limited_group(memory_mb, settings.processes))
            read_fd, failure_fd = os.pipe()
            failures = stack.enter_context(os.fdopen(read_fd))
            passed = [] if settings.image else [fd for fd in (failure_fd, cgroup_fd) if fd >= 0]
            try:
                # Not a worker of relax_hpc.net.workers: untrusted code has these three streams, and
                # could write messages of that protocol.
                process = subprocess.Popen(
                    self._command(folder, failure_fd, cgroup_fd, timeout_s),
                    stdin=streams[0],
                    stdout=streams[1],
                    stderr=streams[2],
                    pass_fds=passed,
                    start_new_session=True,
                    cwd="/",
                )
            finally:
                os.close(failure_fd)
            stack.enter_context(process)
            started = _Started(process, is_apart)
            if not (settings.image or cgroup_fd >= 0):
                levels = jail_entry.OWN_PROCESSES if is_apart else 0
                watch = watched_memory(process.pid, levels, memory_mb << 20, started.kill)
                started.memory = stack.enter_context(watch)
            try:
                yield started
            finally:
                started.kill()
            failure = failures.read()
            if failure:
                number, _, text = failure.partition(" ")
                raise NotStarted(int(number), text)

    def _command(self, folder: str, failure_fd: int, cgroup_fd: int, timeout_s: float) -> list[str]:
        """Command that starts a program, see `jail_entry`."""
        settings = self._settings
        if not settings.image:
            interpreter = find_interpreter(settings.python, f"{self._key}.python")
            order = self._order(interpreter, timeout_s)
            order |= {
                "weak": settings.weak,
                "folder": folder,
                "failure_fd": failure_fd,
                "cgroup_fd": cgroup_fd,
            }
            return [sys.executable, "-I", "-S", jail_entry.__file__, json.dumps(order)]
        python = settings.python or "python3"
        order = self._order(Interpreter(python, ()), timeout_s)
        order |= {"weak": True, "folder": jail_entry.BOX, "failure_fd": -1, "cgroup_fd": -1}
        binds = [
            f"--bind={folder}:{jail_entry.BOX}",
            f"--bind={jail_entry.__file__}:{jail_entry.__file__}:ro",
        ]
        apart = ["--containall", "--no-home", "--net", "--network=none"]
        entry = [python, "-I", "-S", jail_entry.__file__, json.dumps(order)]
        return [settings.apptainer, "exec", *apart, *binds, settings.image, *entry]

    def _order(self, interpreter: Interpreter, timeout_s: float) -> dict[str, Any]:
        """Settings for `jail_entry`, without the entries that depend on how it is started."""
        architecture = self._architecture
        return {
            "words": [interpreter.path, "-I", _MAIN],
            "show": [*_SYSTEM, *interpreter.parts],
            "user": _FIRST_USER | next(_RUNS) % 256 << 22 | os.getpid(),
            "cpu_s": timeout_s,
            "memory_mb": self._settings.memory_mb,
            "disk_mb": self._settings.disk_mb,
            "processes": self._settings.processes,
            "filter": filter_program(architecture).hex() if architecture else "",
            "keyctl": architecture.keyctl if architecture else 0,
        }

    def _probe(self) -> None:
        """Run a test program. ConfigError: this machine cannot run programs. RelaxError: it cannot
        run one at the moment."""
        try:
            problem = self._try_program()
        except OSError as error:
            problem = error.strerror or str(error)
            if not isinstance(error, NotStarted) or error.errno in _TEMPORARY:
                raise RelaxError(
                    f"{self._key}: no program could be run on {os.uname().nodename}: "
                    f"{problem[:_MAX_REASON]}"
                ) from error
        if problem:
            raise ConfigError(
                f"{self._key}: no program can be isolated on {os.uname().nodename}: "
                f"{problem[:_MAX_REASON]}; the site has to allow user namespaces "
                "(kernel.unprivileged_userns_clone, user.max_user_namespaces), or set "
                f"{self._key}.image, or {self._key}.weak: true"
            )

    def _try_program(self) -> str:
        """Reason why the test program does not print its output here; empty if it does.

        OSError: see `run`, or the program is too slow.
        """
        for _ in range(_ATTEMPTS):
            result = self.run(_PROBE, _PROBED[::-1], _PROBE_S)
            if result.in_time:
                if result.output.strip() == _PROBED:
                    return ""
                return f"a test program ended with exit code {result.code}"
        raise OSError(f"a test program did not end within {_PROBE_S:g} s")


class NotStarted(OSError):
    """A program could not be started in its jail."""


class _Started:
    """A running program in a jail."""

    def __init__(self, process: subprocess.Popen[bytes], is_apart: bool) -> None:
        """``is_apart``: it runs in its own namespaces, in which it cannot kill the process that
        started it."""
        self._process, self._is_apart = process, is_apart
        self.memory = MemoryWatch()

    def wait(self, timeout_s: float) -> int | None:
        """Exit code of the program, or 128 + the number of the signal that ended it; None if it
        does not end within ``timeout_s``. OSError: see `check`."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self.check()
        return code if code >= 0 else 128 - code

    def check(self, wait_s: float = 0.0) -> None:
        """OSError: it was killed from outside of its jail, and not because of its memory.
        ``wait_s``: seconds to wait for its exit."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        code = self._process.poll()
        if self.memory.has_killed:
            return
        if self._is_apart and code is not None and code < 0:
            raise OSError(
                f"the program was killed from outside of its jail, by {signal.Signals(-code).name}"
            )

    def kill(self) -> None:
        """Kill the program with all processes of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _attempt(run: Callable[[], ProgramResult]) -> ProgramResult:
    """Result of ``run``, which is retried if it raises OSError. OSError: from the last attempt."""
    for number in range(1, _ATTEMPTS):
        try:
            return run()
        except OSError:
            time.sleep(_PAUSE_S * number)
    return run()


def _write_files(folder: Path, files: Files) -> None:
    """Write ``files`` so that other users cannot read them."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8", errors="replace")


def _pipe() -> tuple[BinaryIO, BinaryIO]:
    read_fd, write_fd = os.pipe()
    return os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb")


def _read_text(file: Any) -> str:
    file.seek(0)
    return file.read(_MAX_OUTPUT).decode(errors="replace")


def _memory_file() -> Any:
    """A file in memory, which a program may fill up to its limit."""
    return os.fdopen(os.memfd_create("relax-program"), "w+b")


def _sealed_file(text: str) -> Any:
    """A file in memory with ``text``, which cannot be changed."""
    file = os.fdopen(os.memfd_create("relax-program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")
    file.write(text.encode(errors="replace"))
    file.seek(0)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file
