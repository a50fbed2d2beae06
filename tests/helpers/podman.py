"""Podman for tests, with an image that has this machine's programs and one interpreter.

`podman-hpc` is in no package registry. It calls podman with the same arguments, adds its own, and
hands on the file descriptor of PMI2; the program here does the latter and nothing else.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

PYTHON = "/opt/toolkit/bin/python"
"""Interpreter of the image; there is no such program outside."""
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_FOLDERS = ("dev", "etc", "opt", "proc", "run", "sys", "tmp", "usr")
_FILES = ("passwd", "group", "nsswitch.conf", "ld.so.cache")
_CONTAINERS = """
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
# crun 1.8 refuses the hybrid cgroups of some machines.
runtime = "runc"

[containers]
default_ulimits = []
"""
_PROGRAM = """#!{python}
import json, os, sys

arguments = sys.argv[1:]
with open({calls}, "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
os.environ.update({environment})
if not os.path.isdir("/dev/mqueue"):
    # Podman cannot mount what this machine does not have.
    arguments = ["--volume=/dev/shm:/dev/shm" if a == "--ipc=host" else a for a in arguments]
if "PMI_FD" in os.environ and arguments[0] == "run":
    os.dup2(int(os.environ["PMI_FD"]), 3)
    os.set_inheritable(3, True)
    os.environ["PMI_FD"] = "3"
    arguments[1:1] = ["--preserve-fds=1"]
os.execv({podman}, ["podman", *{storage}, *arguments])
"""


class Podman:
    """Storage of podman in a folder, and a program `podman-hpc` that uses it."""

    image = "localhost/relax_hpc:1"
    empty_image = "localhost/empty:1"
    """An image without Python."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder, self.program = folder, folder / "podman-hpc"
        podman = shutil.which("podman")
        if podman is None:
            raise FileNotFoundError("podman")
        (folder / "containers.conf").write_text(_CONTAINERS)
        (folder / "runtime").mkdir(mode=0o700)
        environment = {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "XDG_RUNTIME_DIR": str(folder / "runtime"),
        }
        text = _PROGRAM.format(
            python=sys.executable,
            calls=repr(str(folder / "calls")),
            environment=environment,
            storage=[
                f"--root={folder / 'graph'}",
                f"--runroot={folder / 'run'}",
                "--storage-driver=vfs",
            ],
            podman=repr(podman),
        )
        self.program.write_text(text)
        self.program.chmod(0o755)
        self._import(self.image)
        self._import(self.empty_image)

    @property
    def mounts(self) -> list[str]:
        """Mounts that give the image this machine's programs and interpreter."""
        inside = {sys.prefix: str(Path(PYTHON).parents[1]), "/usr": "/usr"}
        if not sys.base_prefix.startswith("/usr"):
            inside[sys.base_prefix] = sys.base_prefix
        return [f"{here}:{there}:ro" for here, there in inside.items()]

    def calls(self) -> list[list[str]]:
        """Arguments of each call of the program."""
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    def close(self) -> None:
        """End the process that keeps the namespace of a user without rights."""
        if os.getuid() != 0:
            self._run("system", "migrate")

    def _import(self, name: str) -> None:
        archive = self.folder / "image.tar"
        with tarfile.open(archive, "w") as tar:
            for folder in _FOLDERS:
                entry = tarfile.TarInfo(folder)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
            for link, target in _LINKS.items():
                entry = tarfile.TarInfo(link)
                entry.type, entry.linkname = tarfile.SYMTYPE, target
                tar.addfile(entry)
            for file in _FILES:
                content = Path("/etc", file).read_bytes()
                entry = tarfile.TarInfo(f"etc/{file}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        self._run("import", "--quiet", str(archive), name)

    def _run(self, *arguments: str) -> None:
        result = subprocess.run(
            [str(self.program), *arguments], capture_output=True, text=True, timeout=60
        )
        if result.returncode:
            raise RuntimeError(f"podman {' '.join(arguments)}: {result.stderr}")
