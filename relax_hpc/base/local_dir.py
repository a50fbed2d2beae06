"""Folders on a node's own disk, for this user alone: caches that its processes share, and scratch
of one process."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import psutil

from relax_hpc.base.rundir import private_folder

LOCAL_DIR = "RELAX_LOCAL_DIR"
"""Environment variable: the user's folder on this node's own disk, for caches and copies."""
BATCH_TMPDIR = "RELAX_TMPDIR"
"""Environment variable: what TMPDIR was where the batch script ran, which LOCAL_DIR and the caches
were made from."""
COMPILED = {
    "XDG_CACHE_HOME": "cache",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "CUTE_DSL_CACHE_DIR": "cute",
    "SGLANG_CACHE_DIR": "sglang",
}
"""Environment variables of libraries that compile for minutes -> folders below LOCAL_DIR where they
find that again."""
CACHES = COMPILED | {"HF_HOME": "huggingface"}
_SCRATCH = re.compile(r"scratch-([0-9a-f]{4})([0-9a-f]{4})([0-9a-f]{5})-(\d+)-.+")
"""Name of a scratch folder: marks of the host, of its boot, and of the namespace of the owner's
process id; the id."""
_OUTSIDE = ".outside"
_SHORT = 55
"""Longest path of the folder that scratch lies in: the path of a unix socket in it may have 107
bytes."""


def use_folders_of_this_node(environment: MutableMapping[str, str] = os.environ) -> None:
    """Put this node's TMPDIR in the place of the batch node's, in LOCAL_DIR and all that lies below
    it.

    Where each job has a folder of its own, the other components' nodes have others, and what was
    inherited is not there: then /tmp is taken.
    """
    former, local = environment.pop(BATCH_TMPDIR, ""), environment.get(LOCAL_DIR, "")
    if not former:
        return
    here = environment.get("TMPDIR", "")
    if not os.access(here, os.W_OK | os.X_OK):
        here = environment["TMPDIR"] = "/tmp"
    if not local.startswith(f"{former}/"):
        # The site's own environment names another place.
        return
    for name, value in environment.items():
        if value == local or value.startswith(f"{local}/"):
            environment[name] = here + value.removeprefix(former)


def local_folder() -> Path:
    """The folder of LOCAL_DIR, or one below the temporary folder; ConfigError unless it is this
    user's alone."""
    return private_folder(
        Path(os.environ.get(LOCAL_DIR) or f"{tempfile.gettempdir()}/relax-{os.getuid()}")
    )


def compile_caches() -> dict[str, str]:
    """Folders of caches in COMPILED that nobody has chosen: others could put code into one in a
    shared /tmp."""
    folder = local_folder()
    return {
        name: str(private_folder(folder / cache))
        for name, cache in COMPILED.items()
        if name not in os.environ
    }


class Scratch:
    """A folder of this process, gone with `close`; one whose process was killed goes when the next
    one is made.

    >>> with Scratch() as scratch:
    ...     characters = (scratch.path / "key").write_text("...")
    """

    def __init__(self) -> None:
        folder = local_folder()
        if len(str(folder)) > _SHORT:
            folder = private_folder(Path("/tmp") / f"relax-{os.getuid()}")
        remove_orphaned_scratch(folder)
        self.path = Path(
            tempfile.mkdtemp(dir=folder, prefix=f"scratch-{''.join(_here())}-{os.getpid()}-")
        )

    def remove_on_close(self, path: Path) -> None:
        """Remove ``path``, a file elsewhere, with the folder."""
        self.write(_OUTSIDE, f"{path}\n")

    def write(self, name: str, text: str) -> Path:
        """Add ``text`` to file ``name`` of the folder."""
        path = self.path / name
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as file:
            file.write(text)
        return path

    def close(self) -> None:
        """Remove the folder. Safe to call twice."""
        _remove(self.path)

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_orphaned_scratch(folder: Path) -> None:
    """Remove scratch in ``folder`` whose process has ended."""
    here = _here()
    for path in folder.iterdir():
        match = _SCRATCH.fullmatch(path.name)
        # Of another host that sees the folder too nothing is known here.
        if not match or match[1] != here[0]:
            continue
        if match[2] != here[1]:
            # What it had in memory went with that boot; the names may be somebody else's now.
            shutil.rmtree(path, ignore_errors=True)
        # A container may have processes of its own, which cannot be seen here.
        elif match[3] == here[2] and not psutil.pid_exists(int(match[4])):
            _remove(path)


def _here() -> tuple[str, str, str]:
    """Marks of this host, of its boot, and of what the ids of processes are unique in."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    host, booted = (
        hashlib.sha256(one.encode()).hexdigest()[:4] for one in (os.uname().nodename, boot)
    )
    return host, booted, f"{Path('/proc/self/ns/pid').stat().st_ino & 0xFFFFF:05x}"


def _remove(scratch: Path) -> None:
    # Another process may be at it as well, and what was killed may be writing its last.
    with contextlib.suppress(OSError):
        for path in (scratch / _OUTSIDE).read_text().splitlines():
            Path(path).unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
