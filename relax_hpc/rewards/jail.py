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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        """Run the Python ``program`` with ``given`` as its standard input; ``with_errors``: what it writes there is
        output too. Threads may do so side by side. OSError: it could not begin."""
        with tempfile.TemporaryDirectory(prefix="relax-program-") as folder, contextlib.ExitStack() as stack:
            # Root's program is somebody else's.
            Path(folder).chmod(0o755)
            (Path(folder) / "main.py").write_text(program, errors="replace")
            (Path(folder) / "main.py").chmod(0o644)
            question, answer = (stack.enter_context(_memory()) for _ in range(2))
            question.write(given.encode(errors="replace"))
            question.seek(0)
            errors = subprocess.STDOUT if with_errors else subprocess.DEVNULL
            code = self._run(folder, question, answer, errors, timeout_s)
            answer.seek(0)
            output = answer.read(_MOST_OUTPUT).decode(errors="replace")
        return Ran(code or 0, output, code is not None)

    def _run(self, folder: str, question: Any, answer: Any, errors: int, timeout_s: float) -> int | None:
        """Run it in ``folder``; its exit code, None if it was not done in time."""
        told, telling = os.pipe()
        with os.fdopen(told) as told_file:
            try:
                process = subprocess.Popen(
                    self._words(folder, telling, timeout_s),
                    stdin=question,
                    stdout=answer,
                    stderr=errors,
                    pass_fds=() if self._settings.image else (telling,),
                    start_new_session=True,
                    cwd="/",
                )
            finally:
                os.close(telling)
            with process:
                try:
                    code = process.wait(timeout_s)
                except subprocess.TimeoutExpired:
                    return None
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                if why := told_file.read():
                    raise OSError(why)
                return code

    def _words(self, folder: str, telling: int, timeout_s: float) -> list[str]:
        settings = self._settings
        limits = {name: getattr(settings, name) for name in ("memory_mb", "disk_mb", "processes")}
        asked = {**limits, "cpu_s": timeout_s, "told": telling, "weak": settings.weak, "folder": folder}
        asked["nobody"] = _NOBODIES | next(_RUNS) % 256 << 22 | os.getpid()
        python = settings.python or ("python3" if settings.image else sys.executable)
        if settings.image:
            asked |= {"weak": True, "told": -1, "folder": jail_entry.BOX}
        asked["words"] = [python, "-I", "main.py"]
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


def _memory() -> Any:
    """A file in memory, which a program may fill up to its limit."""
    return os.fdopen(os.memfd_create("relax-program"), "w+b")


def _interpreter(python: str) -> list[str]:
    """Folders that ``python`` is made of, outside of those that all have."""
    found = [sys.prefix, sys.base_prefix] if python == sys.executable else [str(Path(python).parent.parent)]
    return [path for path in dict.fromkeys(found) if not Path(path).is_relative_to("/usr")]
