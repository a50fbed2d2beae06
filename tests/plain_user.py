"""A user without rights, for tests that root runs; `python -m tests.plain_user WORDS...` runs
Python so."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.guardian import USERS, register, session_folder

ROOT = Path(__file__).resolve().parent.parent
SYSTEM_PYTHON = "/usr/bin/python3"


@dataclass(frozen=True, slots=True)
class PlainUser:
    """`home` is an empty folder of the user's own; `python` has this project and its packages."""

    entry: pwd.struct_passwd
    home: Path
    python: Path

    @property
    def name(self) -> str:
        return self.entry.pw_name

    def run(
        self,
        *argv: str | Path,
        slurm: Path | None = None,
        timeout: float | None = 90.0,
        input: str | None = None,
    ) -> CompletedProcess:
        """Run a command as the user. ``slurm``: configuration of the Slurm that it uses. ``input``:
        text for its standard input. Without a timeout its output is not kept but shown."""
        uid, gid = self.entry.pw_uid, self.entry.pw_gid
        ids = {} if os.getuid() == uid else {"user": uid, "group": gid, "extra_groups": []}
        own = {
            "HOME": str(self.home),
            "TMPDIR": str(self.home),
            "USER": self.name,
            "LOGNAME": self.name,
        }
        own |= {"SLURM_CONF": str(slurm)} if slurm else {}
        env = {**os.environ, **own, "PYTHONDONTWRITEBYTECODE": "1"}
        options = {
            "capture_output": bool(timeout),
            "text": True,
            "timeout": timeout,
            "input": input,
        }
        return subprocess.run(argv, **ids, env=env, cwd=ROOT, **options)


@contextmanager
def plain_user(small: bool = False) -> Iterator[PlainUser]:
    """A user made for the block; ourselves if we are no root.

    ``small``: with an environment of links to our packages, which is soon copied, where the system
    has our Python.
    """
    if os.getuid():
        with _home() as home:
            yield PlainUser(pwd.getpwuid(os.getuid()), home, Path(sys.executable))
        return
    name = f"relax-test-{os.getpid()}"
    register(USERS, name)
    subprocess.run(
        ["useradd", "--no-create-home", "--system", name],
        check=True,
        capture_output=True,
        timeout=30,
    )
    try:
        entry = pwd.getpwnam(name)
        with _home() as home:
            os.chown(home, entry.pw_uid, entry.pw_gid)
            user = PlainUser(entry, home, Path(sys.executable))
            linked = small and Path(SYSTEM_PYTHON).resolve() == Path(sys.executable).resolve()
            yield (
                user if not linked and _works(user) else PlainUser(entry, home, _environment(home))
            )
    finally:
        subprocess.run(["userdel", name], check=True, capture_output=True, timeout=30)


@contextmanager
def _home() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="user-", dir=session_folder()))
    try:
        yield home
    finally:
        shutil.rmtree(home)


def _works(user: PlainUser) -> bool:
    """Whether the user may run our Python, which may lie in somebody's home."""
    with suppress(OSError):
        return user.run(user.python, "-c", "import relax_hpc").returncode == 0
    return False


def _environment(home: Path) -> Path:
    """The system's Python with the packages of ours."""
    folder = home / "venv"
    subprocess.run([SYSTEM_PYTHON, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    packages = next(folder.glob("lib/python3.*/site-packages"))
    if packages.parent.name != f"python3.{sys.version_info.minor}":
        pytest.skip(
            f"a plain user can run neither {sys.executable} nor, being another version, "
            f"{SYSTEM_PYTHON}"
        )
    (packages / "relax.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    # The MPI wheel lies beside the packages.
    for path in (Path(sys.prefix) / "bin" / "mpiexec", *Path(sys.prefix).glob("lib/*mpi*")):
        (folder / path.parent.name / path.name).symlink_to(path)
    return folder / "bin" / "python"


if __name__ == "__main__":
    with plain_user() as somebody:
        sys.exit(somebody.run(somebody.python, *sys.argv[1:], timeout=None).returncode)
