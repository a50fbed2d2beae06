"""The files that a Python interpreter needs.

The prefix of an interpreter may be a home directory: `~/bin/python3` is a link there, or a Python
was installed with `--prefix=$HOME`. A jail therefore shows some folders of a prefix, never the
whole prefix.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.base.errors import ConfigError

_PARTS = ("pyvenv.cfg", "lib", "lib64", "share/zoneinfo")
"""Files and folders of a prefix: packages, shared libraries, and time zones of conda's
interpreters."""
_PARTS_OF_HOME = ("pyvenv.cfg", "lib*/python3*", "lib*/lib*.so*")
"""The same if the prefix is the user's home, whose `lib` may contain other files of the user."""
_QUESTION = """
import json, sys
prefixes = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
print(json.dumps([sys.executable, prefixes]))
"""
_START_S = 60.0
"""Seconds for the first start of an interpreter, which may be on a shared filesystem."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter."""

    path: str
    parts: tuple[str, ...]
    """Paths that it needs, including its own. They may be symbolic links, or contain some."""


@functools.cache
def find_interpreter(python: str, key: str) -> Interpreter:
    """The interpreter that ``python`` names: a path, a name on PATH, or empty for the interpreter
    of this process.

    ``key``: name of the setting in messages. ConfigError: the interpreter does not exist, or does
    not work. OSError: it does not start in time.
    """
    if not python:
        return _interpreter(
            sys.executable, [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
        )
    path = shutil.which(Path(python).expanduser())
    if not path:
        raise ConfigError(
            f"{key}: found {python!r}, which is no program on this node; name a Python interpreter"
        )
    # Without environment variables, like the program will be started.
    command = [str(Path(path).absolute()), "-I", "-c", _QUESTION]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=_START_S, cwd="/", env={})
        executable, prefixes = json.loads(answer.stdout)
    except subprocess.TimeoutExpired:
        raise OSError(f"{python} did not start within {_START_S:g} s") from None
    except (ValueError, TypeError):
        last_line = answer.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(
            f"{key}: found {python!r}, which is no Python that starts: {last_line}"
        ) from None
    return _interpreter(executable, prefixes)


def _interpreter(executable: str, prefixes: Sequence[str]) -> Interpreter:
    real = Path(executable).resolve()
    paths = [Path(executable), *sorted(real.parent.glob("lib*.so*"))]
    for prefix in dict.fromkeys(map(Path, prefixes)):
        is_home = prefix.resolve() == Path.home().resolve()
        for pattern in _PARTS_OF_HOME if is_home else _PARTS:
            paths += sorted(prefix.glob(pattern))
    return Interpreter(executable, tuple(str(path) for path in paths if path.exists()))
