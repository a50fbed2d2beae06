"""Private folders on a node's own disk: caches of all processes, and scratch of one process."""

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
"""Environment variable: TMPDIR of the node of the batch script. LOCAL_DIR and the caches are below
it."""
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
    # Not below SGLANG_CACHE_DIR by default, but in $HOME (SGLang 0.5.21, kernels/jit).
    "SGLANG_JIT_CACHE_DIR": "sglang/jit",
    "TILELANG_CACHE_DIR": "tilelang",
    # By default in TMPDIR, which is the scratch folder of an engine (quack-kernels 0.6.4).
    "QUACK_CACHE_DIR": "quack",
    "HUMMING_CACHE_DIR": "humming",
}
"""Environment variable of a library that compiles for minutes -> folder below LOCAL_DIR of its
cache."""
KERNEL_FOLDERS = (
    "triton",
    "inductor",
    "cuda",
    "flashinfer",
    "tvm-ffi",
    "cute",
    "tilelang",
    "quack",
    "humming",
    "sglang/jit",
    "sglang/deep_gemm",
    "sglang/cute_aot",
    "sglang/torch_compile_cache",
    "sglang/flashinfer",
    "sglang/rust_extensions",
)
"""Folders below LOCAL_DIR with compiled kernels. Others hold facts of one node, such as which of
its GPUs reach each other (SGLang), or downloads."""
CACHES = COMPILED | {"HF_HOME": "huggingface"}
_SCRATCH = re.compile(r"scratch-([0-9a-f]{4})([0-9a-f]{4})([0-9a-f]{5})-(\d+)-.+")
"""Name of a scratch folder: marks of the host, of its boot and of the pid namespace of the owner,
then the pid of the owner."""
_OUTSIDE = ".outside"
"""File of a scratch folder that lists the paths of `Scratch.remove_on_close`."""
_MAX_PATH_CHARS = 55
"""Characters of the path of the folder that has scratch folders, at most. Linux limits the path of
a unix socket, which may be in a scratch folder, to 107 bytes."""


def use_folders_of_this_node(environment: MutableMapping[str, str] = os.environ) -> None:
    """Replace the batch node's TMPDIR by this node's, in LOCAL_DIR and in all paths below it.

    A site may create a TMPDIR for each job and node. The path that this process has inherited then
    does not exist on other nodes; if TMPDIR is not writable here, it becomes /tmp.
    """
    batch_folder, local = environment.pop(BATCH_TMPDIR, ""), environment.get(LOCAL_DIR, "")
    if not batch_folder:
        return
    folder = environment.get("TMPDIR", "")
    if not os.access(folder, os.W_OK | os.X_OK):
        folder = environment["TMPDIR"] = "/tmp"
    if not local.startswith(f"{batch_folder}/"):
        # The site's environment sets LOCAL_DIR to another folder.
        return
    for name, value in environment.items():
        if value == local or value.startswith(f"{local}/"):
            environment[name] = folder + value.removeprefix(batch_folder)


def local_folder() -> Path:
    """Folder LOCAL_DIR, or one below the temporary folder. ConfigError: others can write to it."""
    return private_folder(
        Path(os.environ.get(LOCAL_DIR) or f"{tempfile.gettempdir()}/relax-{os.getuid()}")
    )


def compile_caches() -> dict[str, str]:
    """Values of the variables in COMPILED that the environment does not set.

    Without them, libraries would use folders in a shared /tmp, where other users could put code.
    """
    folder = local_folder()
    return {
        name: str(private_folder(folder / cache))
        for name, cache in COMPILED.items()
        if name not in os.environ
    }


class Scratch:
    """A folder of this process, which `close` removes.

    If a process was killed, the next process that creates a scratch folder removes its folder.

    >>> with Scratch() as scratch:
    ...     characters = (scratch.path / "key").write_text("...")
    """

    def __init__(self) -> None:
        folder = local_folder()
        if len(str(folder)) > _MAX_PATH_CHARS:
            folder = private_folder(Path("/tmp") / f"relax-{os.getuid()}")
        remove_orphaned_scratch(folder)
        self.path = Path(
            tempfile.mkdtemp(dir=folder, prefix=f"scratch-{''.join(_marks())}-{os.getpid()}-")
        )

    def remove_on_close(self, path: Path) -> None:
        """Remove ``path``, a file outside of the folder, together with the folder."""
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
    host, boot, namespace = _marks()
    for path in folder.iterdir():
        match = _SCRATCH.fullmatch(path.name)
        # Processes of another host that shares the folder cannot be checked.
        if not match or match[1] != host:
            continue
        if match[2] != boot:
            # Files in memory are lost in a reboot; others may have created files of their names.
            shutil.rmtree(path, ignore_errors=True)
        # Processes of another pid namespace, such as of a container, cannot be checked either.
        elif match[3] == namespace and not psutil.pid_exists(int(match[4])):
            _remove(path)


def _marks() -> tuple[str, str, str]:
    """Marks of this host, of its boot, and of the pid namespace of this process."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
    host, boot = (
        hashlib.sha256(text.encode()).hexdigest()[:4] for text in (os.uname().nodename, boot_id)
    )
    return host, boot, f"{Path('/proc/self/ns/pid').stat().st_ino & 0xFFFFF:05x}"


def _remove(scratch: Path) -> None:
    # Another process may remove it too, and children of the killed process may still write.
    with contextlib.suppress(OSError):
        for path in (scratch / _OUTSIDE).read_text().splitlines():
            Path(path).unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
