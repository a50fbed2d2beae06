"""Compiled kernels on a node's own disk: unpacked once from the archive of the shared filesystem,
before any process of the node compiles.

Nothing here ends a run. Without a usable archive, libraries compile as they would without this
package.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.foreign_files import parse_json
from relax_hpc.base.local_dir import KERNEL_FOLDERS, compile_caches, local_folder
from relax_hpc.base.rundir import is_map, private_folder, read_map, write_json
from relax_hpc.base.terminal_text import log_entry
from relax_hpc.config.schema import Config
from relax_hpc.net.kernel_caches.archive import (
    SUFFIX,
    ArchiveError,
    Header,
    open_archive,
    pack,
    read_header,
    unpack,
)
from relax_hpc.net.kernel_caches.key import archive_name, read_key
from relax_hpc.net.node_files import is_abandoned, take_claim

PATIENCE_S = 300.0
"""Seconds for which processes of a node wait until one of them has unpacked the archive."""
LEASE_S = 900.0
"""Seconds for which one writer has an archive for itself."""
FINISH_S = 120.0
"""Seconds for which a process that is done waits until its kernels are in the archive."""
_CHECK_S = 0.2
_TEMPORARY = re.compile(r"tmp\.pid_.*|\.staging-.*|locks|.*\.lock|.*\.tmp")
"""Names of files and folders that a library is writing: Triton, SGLang, DeepGEMM, FlashInfer and
inductor, in this order."""
_GROUP_PREFIX = "__grp__"
"""Beginning of the names of Triton's files that list the files of a kernel by absolute paths."""


@dataclass(frozen=True, slots=True)
class KernelCaches:
    """Caches of compiled kernels below ``root`` on this node, and their ``archive`` for ``key``."""

    archive: Path
    root: Path
    key: dict[str, str]

    @property
    def marker(self) -> Path:
        """File of this node: digest and file names of the archive that it has unpacked, or the
        archive that it ignores."""
        return self.root / f"{self._name}.json"

    @property
    def refusal(self) -> Path:
        """File of this node: reason why it has ignored the archive, until a role reports it."""
        return self.root / f"{self._name}.ignored"

    @property
    def unpacking(self) -> Path:
        """Folder of files that are being unpacked."""
        return self.root / f".{self._name}.unpacking"

    def claim(self, task: str) -> Path:
        """File of the process of this node that has a ``task``: `unpack` or `keep`."""
        return self.root / f".{self._name}.{task}"

    @property
    def _name(self) -> str:
        return f"kernels-{self.archive.name.removesuffix(SUFFIX)}"


def open_kernel_caches(config: Config, model: Path) -> KernelCaches | None:
    """Unpack the archive of `site.kernel_cache` on this node, unless another process has done so.

    Sets the variables by which libraries find their caches. None: no archive is configured, or none
    can be used on this machine, which one line explains.
    """
    if not config.site.kernel_cache:
        return None
    try:
        folder = archive_folder(config.site.kernel_cache)
        # Also for trainers, whose Triton would otherwise use $HOME, with a quota and slow for many
        # small files.
        os.environ.update(compile_caches())
        key = read_key(model)
        caches = KernelCaches(folder / archive_name(key), local_folder(), key)
        unpack_once(caches)
        return caches
    except (RelaxError, OSError) as error:
        say(f"not used, kernels are compiled again: {error}")
        return None


def archive_folder(path: str) -> Path:
    """The folder of all archives, which is created if needed. ConfigError: others can write it."""
    folder = Path(path)
    if not folder.is_absolute():
        raise ConfigError(f"site.kernel_cache: found {path!r}, allowed: an absolute path")
    try:
        return private_folder(folder)
    except ConfigError as error:
        raise ConfigError(
            f"site.kernel_cache: found {folder}, where other users could put code; allowed: a "
            "folder that only you can write"
        ) from error


def unpack_once(caches: KernelCaches) -> None:
    """Unpack the archive if this node does not have its content yet. One process of the node
    unpacks, and the others wait. OSError: a disk fails."""
    deadline = time.monotonic() + PATIENCE_S
    claim = caches.claim("unpack")
    while True:
        if take_claim(claim):
            try:
                _unpack_archive(caches)
                return
            finally:
                claim.unlink(missing_ok=True)
        if is_abandoned(claim):
            claim.unlink(missing_ok=True)
        elif time.monotonic() > deadline:
            say(f"not used: {claim} was not removed within {PATIENCE_S:.0f} s")
            return
        else:
            time.sleep(_CHECK_S)


def _unpack_archive(caches: KernelCaches) -> None:
    start = time.monotonic()
    ignored = read_map(caches.marker).get("ignored")
    identity = _identity(caches.archive)
    if identity and ignored == identity:
        # Another process of this node has read it and given the reason.
        return
    try:
        header = merge_archive(caches)
    except FileNotFoundError:
        caches.marker.unlink(missing_ok=True)
        say(f"no {caches.archive} yet: kernels are compiled, and kept there")
        return
    except ArchiveError as error:
        say(f"{caches.archive} is ignored: {error}; kernels are compiled again and replace it")
        write_json(caches.marker, {"ignored": identity})
        caches.refusal.write_text(error.reason)
        return
    if header:
        size, seconds = f"{header.size_bytes / 1e6:.1f} MB", time.monotonic() - start
        say(f"{header.file_count} files ({size}) of {caches.archive} in {seconds:.1f} s")


def _identity(path: Path) -> list[int] | None:
    """Numbers that change when another file gets the name ``path``, or its mode changes. None: no
    file has it."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def merge_archive(caches: KernelCaches) -> Header | None:
    """Add the files of the archive that this node lacks. None: it has them already.

    The caller has the claim `unpack`. FileNotFoundError: no archive. ArchiveError: see `unpack`.
    """
    with open_archive(caches.archive) as file:
        digest = read_header(file, caches.archive).digest
    if read_map(caches.marker).get("digest") == digest:
        return None
    # A process that was killed has left it.
    shutil.rmtree(caches.unpacking, ignore_errors=True)
    caches.unpacking.mkdir(mode=0o700)
    try:
        header = unpack(caches.archive, caches.key, caches.unpacking)
        names = sorted(list_files(caches.unpacking))
        _relocate(caches.unpacking, header.root, caches.root)
        for name in names:
            _move_if_missing(caches.unpacking / name, caches.root / name)
        write_json(caches.marker, {"digest": header.digest, "names": names})
    finally:
        shutil.rmtree(caches.unpacking, ignore_errors=True)
    return header


def _move_if_missing(source: Path, target: Path) -> None:
    """Move a file. A process may use the file that exists, so it stays."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not target.exists():
        source.rename(target)


def _relocate(folder: Path, former_root: str, root: Path) -> None:
    """Replace ``former_root`` by ``root`` in files of Triton 3.7.1 that name files absolutely
    (`FileCacheManager.put_group`). Without that it compiles again."""
    if former_root == str(root):
        return
    for path in (folder / "triton").glob(f"*/{_GROUP_PREFIX}*"):
        with suppress(ValueError):
            group = parse_json(path.read_bytes())
            if not is_map(group, child_paths=dict):
                continue
            children = {
                name: str(child).replace(f"{former_root}/", f"{root}/", 1)
                for name, child in group["child_paths"].items()
            }
            path.write_text(json.dumps(group | {"child_paths": children}))


def list_files(root: Path) -> dict[str, tuple[int, int]]:
    """Files with compiled kernels below ``root`` by their relative names: bytes, and time of the
    last change in nanoseconds. Links and temporary files are left out."""
    files: dict[str, tuple[int, int]] = {}
    for kernel_folder in KERNEL_FOLDERS:
        for folder, subfolders, names in os.walk(root / kernel_folder):
            subfolders[:] = sorted(filter(_is_lasting, subfolders))
            for name in sorted(filter(_is_lasting, names)):
                path = Path(folder, name)
                with suppress(FileNotFoundError):
                    status = path.lstat()
                    if path.is_file() and not path.is_symlink():
                        relative = path.relative_to(root).as_posix()
                        files[relative] = (status.st_size, status.st_mtime_ns)
    return files


def _is_lasting(name: str) -> bool:
    return not _TEMPORARY.fullmatch(name)


def keep_new_files(caches: KernelCaches) -> str | None:
    """Add files that the archive lacks.

    Returns a line for people; empty: it lacks none. None: another process has the archive; try
    again later. OSError: a disk is full or fails.
    """
    if not _new_files(caches):
        return ""
    claim = caches.claim("unpack")
    with lease(caches.archive) as has_lease:
        if not has_lease or not take_claim(claim):
            return None
        try:
            return _add_new_files(caches)
        finally:
            claim.unlink(missing_ok=True)


def _add_new_files(caches: KernelCaches) -> str:
    """See `keep_new_files`. The caller has the lease, and the claim `unpack`."""
    try:
        # Another node may have added files since this one has read the archive.
        merge_archive(caches)
    except (ArchiveError, FileNotFoundError):
        # The files of this node replace an archive that cannot be used.
        caches.marker.unlink(missing_ok=True)
    new_count = len(_new_files(caches))
    if not new_count:
        return ""
    names = sorted(list_files(caches.root))
    header = pack(caches.archive, caches.root, names, caches.key)
    write_json(caches.marker, {"digest": header.digest, "names": names})
    size = f"{header.size_bytes / 1e6:.1f} MB"
    return f"{new_count} new files, now {header.file_count} ({size}) in {caches.archive}"


def _new_files(caches: KernelCaches) -> set[str]:
    """Files of this node that its archive lacked when it was last read or written."""
    archived_names = read_map(caches.marker, names=list).get("names", [])
    return set(list_files(caches.root)).difference(map(str, archived_names))


@contextmanager
def lease(archive: Path) -> Iterator[bool]:
    """Whether this process is the only writer of ``archive`` during the block, for `LEASE_S`.

    It only saves work: two writers are harmless, because each of them renames a complete file.
    """
    path = archive.with_name(f"{archive.name}.lease")
    content = json.dumps(
        {"host": socket.gethostname(), "pid": os.getpid(), "until": time.time() + LEASE_S}
    )
    has_lease = _write_new(path, content)
    if not has_lease and time.time() > _end_of_lease(path):
        # A writer that was killed has left it.
        path.unlink(missing_ok=True)
        has_lease = _write_new(path, content)
    try:
        yield has_lease
    finally:
        with suppress(OSError):
            if has_lease and path.read_text() == content:
                path.unlink()


def _end_of_lease(path: Path) -> float:
    """Seconds since 1970 at which the lease in ``path`` ends."""
    until = read_map(path, until=float).get("until")
    if until is not None:
        return until
    # Its writer has just created it, or the disk was full.
    with suppress(OSError):
        return path.stat().st_mtime + LEASE_S
    return 0.0


def _write_new(path: Path, content: str) -> bool:
    """Create ``path``. Returns whether it did not exist."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    # Without space the file exists and is empty, and would stop all writers for `LEASE_S`.
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def take_refusal(caches: KernelCaches) -> str:
    """Reason why this node has ignored the archive, once; empty: it has not."""
    with suppress(OSError):
        reason = caches.refusal.read_text()
        caches.refusal.unlink()
        return reason
    return ""


class Keeper:
    """The process of this node that adds new kernels to the archive, see `keeper`."""

    def __init__(self, caches: KernelCaches) -> None:
        """Start it, unless another process of this node has one. It ends with this process."""
        self._caches, self._claim = caches, caches.claim("keep")
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def finish(self) -> None:
        """Add new files, wait for that `FINISH_S` at most, and end the process."""
        if self._process is None:
            # The role that had one may have been killed.
            self._start()
        process = self._process
        if process is None or process.stdin is None:
            return
        with suppress(OSError):
            process.stdin.write(b"finish\n")
            process.stdin.close()
        try:
            process.wait(FINISH_S)
        except subprocess.TimeoutExpired:
            process.kill()
        self._claim.unlink(missing_ok=True)

    def _start(self) -> None:
        if is_abandoned(self._claim):
            self._claim.unlink(missing_ok=True)
        if not take_claim(self._claim):
            return
        caches = self._caches
        settings = {"archive": str(caches.archive), "root": str(caches.root), "key": caches.key}
        module = "relax_hpc.net.kernel_caches.keeper"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(settings)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )


def start_keeper(caches: KernelCaches | None) -> Keeper | None:
    """Start the process that keeps new kernels. None: there is nothing to keep, or it cannot be
    started, which one line explains."""
    if caches is None:
        return None
    try:
        return Keeper(caches)
    except OSError as error:
        say(f"new kernels are not kept: {error}")
        return None


def say(text: str) -> None:
    """Print one line about the caches into the log of this process."""
    print(log_entry(f"kernel caches: {text}"), flush=True)
