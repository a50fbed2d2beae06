"""Programs that nobody trusts, run in namespaces of their own, or in a container, within limits.

A program sees the system's programs and its interpreter, read-only, and an empty folder in memory; no network, no
files of the user's, none of their processes. It is ended with all that it has started.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from relax_hpc.errors import ConfigError
from relax_hpc.rewards import jail_entry

if TYPE_CHECKING:
    from relax_hpc.reward_settings import CodeSettings

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_NOBODIES = 1 << 30
"""Users that nobody is: root's programs run as one of them, each as another, so that processes are counted."""
_RUNS = itertools.count()
_MOST_OUTPUT = 16 << 20
_SHOWN = 500
_MAIN = "main.py"
Files = Mapping[str, str]
"""Text of each file of a program by its name, which may be in one folder; `main.py` is run."""
_PROBE, _PROBED = "import sys; print(sys.stdin.read()[::-1])", "well"
_PROBE_S = 60.0
"""Seconds for the interpreter to be read from a shared filesystem, the first time."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of a program."""

    code: int
    """Exit code; 128 and a signal's number if that ended it."""
    output: str
    """Output that it printed, up to 16 MiB."""
    in_time: bool


class Jail:
    """Jail that runs one program after the other."""

    def __init__(self, settings: CodeSettings, key: str = "reward.code") -> None:
        """``key``: of the settings, in messages. ConfigError: programs cannot be kept apart on this machine."""
        self._settings, self._key = settings, key
        if settings.image and not shutil.which(settings.apptainer):
            raise ConfigError(f"{key}.apptainer: found {settings.apptainer!r}, which is no program on this node")
        self._probe()

    def run(self, program: str, given: str, timeout_s: float, with_errors: bool = False) -> Ran:
        """Run the Python ``program`` with ``given`` as its standard input; ``with_errors``: its standard error is
        output too. Threads may do so side by side. OSError: it could not begin."""
        with _memory() as question, _memory() as answer:
            question.write(given.encode(errors="replace"))
            question.seek(0)
            errors = subprocess.STDOUT if with_errors else subprocess.DEVNULL
            with self._start({_MAIN: program}, (question, answer, errors), timeout_s) as process:
                code = process.wait(timeout_s)
            return Ran(code or 0, _text_of(answer), code is not None)

    def run_pair(self, program: Files, judge: Files, timeout_s: float) -> Ran:
        """Run two programs, each in a jail; two pipes connect their standard inputs and outputs.

        The result is that of ``judge``: its exit code, and the text that it writes to standard error.
        When it ends, the other program is killed. OSError: a program could not begin.
        """
        with contextlib.ExitStack() as stack:
            verdict = stack.enter_context(_memory())
            to_program, from_judge = map(stack.enter_context, _pipe())
            to_judge, from_program = map(stack.enter_context, _pipe())
            pipes = (to_program, from_program, subprocess.DEVNULL)
            stack.enter_context(self._start(program, pipes, timeout_s))
            pipes = (to_judge, from_judge, verdict)
            judging = stack.enter_context(self._start(judge, pipes, timeout_s))
            # A program sees the end of its input only when no process holds the other end.
            for end in (to_program, from_judge, to_judge, from_program):
                end.close()
            code = judging.wait(timeout_s)
            return Ran(code or 0, _text_of(verdict), code is not None)

    @contextlib.contextmanager
    def _start(self, files: Files, streams: tuple[Any, Any, Any], timeout_s: float) -> Iterator[_Started]:
        """Start the program ``files`` with standard ``streams``; the end of the context kills it.

        OSError, also at the end of the context: it could not begin.
        """
        with tempfile.TemporaryDirectory(prefix="relax-program-") as folder:
            # Without namespaces the program itself reads this folder, as another user if root runs it.
            is_read_by_others = self._settings.weak or bool(self._settings.image)
            _write_files(Path(folder), files, is_read_by_others)
            failure_fd, telling = os.pipe()
            with os.fdopen(failure_fd) as failures:
                try:
                    process = subprocess.Popen(
                        self._words(folder, telling, timeout_s),
                        stdin=streams[0],
                        stdout=streams[1],
                        stderr=streams[2],
                        pass_fds=() if self._settings.image else (telling,),
                        start_new_session=True,
                        cwd="/",
                    )
                finally:
                    os.close(telling)
                with process:
                    started = _Started(process)
                    try:
                        yield started
                    finally:
                        started.kill()
                    if failure := failures.read():
                        raise OSError(failure)

    def _words(self, folder: str, telling: int, timeout_s: float) -> list[str]:
        settings = self._settings
        limits = {name: getattr(settings, name) for name in ("memory_mb", "disk_mb", "processes")}
        asked = {**limits, "cpu_s": timeout_s, "told": telling, "weak": settings.weak, "folder": folder}
        asked["nobody"] = _NOBODIES | next(_RUNS) % 256 << 22 | os.getpid()
        python = settings.python or ("python3" if settings.image else sys.executable)
        if settings.image:
            asked |= {"weak": True, "told": -1, "folder": jail_entry.BOX}
        asked["words"] = [python, "-I", _MAIN]
        asked["show"] = [*_SYSTEM, *_interpreter(python)]
        entry = [python, "-I", "-S", jail_entry.__file__, json.dumps(asked)]
        if not settings.image:
            return [sys.executable, *entry[1:]]
        binds = [f"--bind={folder}:{jail_entry.BOX}", f"--bind={jail_entry.__file__}:{jail_entry.__file__}:ro"]
        apart = ["--containall", "--no-home", "--net", "--network=none"]
        return [settings.apptainer, "exec", *apart, *binds, settings.image, *entry]

    def _probe(self) -> None:
        try:
            found = self.run(_PROBE, _PROBED[::-1], _PROBE_S)
            why = "" if found.output.strip() == _PROBED else f"a program that prints was ended by code {found.code}"
        except OSError as error:
            why = str(error)
        if why:
            raise ConfigError(
                f"{self._key}: no program can be kept apart on {os.uname().nodename}: {why[:_SHOWN]}; the site has to "
                "allow user namespaces (kernel.unprivileged_userns_clone, user.max_user_namespaces), or set "
                f"{self._key}.image, or {self._key}.weak: true"
            )


class _Started:
    """Program that was started in a jail."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def wait(self, timeout_s: float) -> int | None:
        """Exit code of the program; None if it does not end within ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill the program with all processes of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _write_files(folder: Path, files: Files, for_all: bool) -> None:
    """Write ``files``; ``for_all``: other users may read them."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")
        if for_all:
            path.chmod(0o644)
            path.parent.chmod(0o755)


def _pipe() -> tuple[BinaryIO, BinaryIO]:
    read_fd, write_fd = os.pipe()
    return os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb")


def _text_of(file: Any) -> str:
    file.seek(0)
    return file.read(_MOST_OUTPUT).decode(errors="replace")


def _memory() -> Any:
    """A file in memory, which a program may fill up to its limit."""
    return os.fdopen(os.memfd_create("relax-program"), "w+b")


def _interpreter(python: str) -> list[str]:
    """Folders that ``python`` is made of, outside of those that all have."""
    found = [sys.prefix, sys.base_prefix] if python == sys.executable else [str(Path(python).parent.parent)]
    return [path for path in dict.fromkeys(found) if not Path(path).is_relative_to("/usr")]
