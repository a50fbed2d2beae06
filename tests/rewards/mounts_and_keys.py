"""Mounts below /usr, and a key of the user's: what a program in a jail gets of them, as JSON.

`python -m tests.rewards.mounts_and_keys [--old-kernel]`, in a new mount namespace. ``--old-kernel``:
without mount_setattr(2), as before Linux 5.12, and without the filter of system calls.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import json
import platform
import struct
import subprocess
import sys
import venv
from pathlib import Path

from relax_hpc.base.reward_settings import CodeSettings
from relax_hpc.rewards import jail, jail_filter
from relax_hpc.rewards.jail_entry import _install_filter

FOLDER = Path("/usr/local/src")
KEYRING = -3
"""KEY_SPEC_SESSION_KEYRING."""
LIBC = ctypes.CDLL(None, use_errno=True)
CALLS = jail_filter.ARCHITECTURES[platform.machine()]
PROGRAM = """
import ctypes, json, sys
attempts = {{}}
for path, mode in (({secret!r}, "r"), ({file!r}, "r"), ({outside!r}, "w"), ({sibling!r}, "w")):
    try:
        with open(path, mode) as file:
            attempts[path] = file.read() if mode == "r" else "written"
    except OSError as error:
        attempts[path] = error.strerror
libc = ctypes.CDLL(None)
attempts["key"] = libc.syscall({keyctl}, 10, {keyring}, b"user", b"relax-test", 0)
print(json.dumps([sys.prefix, *attempts.values()]))
"""


def main(is_old: bool) -> None:
    mount("tmpfs", FOLDER, "-t", "tmpfs", "-o", "mode=1777")
    (FOLDER / "secret").write_text("SECRET")
    mount("tmpfs", FOLDER / "within", "-t", "tmpfs")
    venv.create(FOLDER / "within" / "environment", symlinks=True)
    file = next(
        path
        for path in sorted(Path("/usr/bin").iterdir())
        if path.is_file() and not path.is_symlink()
    )
    mount(str(FOLDER / "secret"), file, "--bind")
    # What programs need may be mounted as well.
    mount("/usr/lib", Path("/usr/lib"), "--bind")
    # A new keyring, which ends with this process.
    LIBC.syscall(CALLS.keyctl, 1, None)
    has_key = LIBC.syscall(CALLS.keyctl - 2, b"user", b"relax-test", b"SECRET", 6, KEYRING) > 0
    if is_old:
        refuse_mount_setattr()
        jail.ARCHITECTURES = {platform.machine(): dataclasses.replace(CALLS, refused=())}
    paths = {
        "secret": FOLDER / "secret",
        "file": file,
        "outside": FOLDER / "new",
        "sibling": "/usr/new",
    }
    program = PROGRAM.format(
        **{name: str(path) for name, path in paths.items()}, keyctl=CALLS.keyctl, keyring=KEYRING
    )
    environment = FOLDER / "within" / "environment"
    runs = [
        json.loads(jail.Jail(CodeSettings(python=python)).run(program, "", 60.0).output)
        for python in ("", str(environment / "bin" / "python"))
    ]
    left = sorted(path.name for path in FOLDER.iterdir())
    print(
        json.dumps(
            {
                "runs": runs,
                "left": left,
                "has_key": has_key,
                "prefixes": [sys.prefix, str(environment)],
            }
        )
    )


def mount(source: str, point: Path, *options: str) -> None:
    if not point.exists():
        point.mkdir()
    subprocess.run(["mount", *options, source, point], check=True, timeout=30)


def refuse_mount_setattr() -> None:
    """Have the kernel answer as one that does not know the call."""
    instructions = [
        *jail_filter._load(jail_filter._NUMBER_AT),
        *jail_filter._refuse_if(jail_filter._EQUALS, 442, errno.ENOSYS),
        *jail_filter._answer(jail_filter._ALLOW),
    ]
    LIBC.prctl(38, 1, 0, 0, 0)
    _install_filter(b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions))


if __name__ == "__main__":
    main("--old-kernel" in sys.argv)
