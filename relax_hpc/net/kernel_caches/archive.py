"""Archive of compiled kernels: a tar file that zstd has compressed.

The file begins with a skippable frame of zstd (RFC 8878, section 3.1.2), which `tar --zstd` passes
over. The frame has the `Header` as JSON. The last member of the tar file is a manifest with the
digest of each file.

Kernels are code that this user's processes load. So an archive must belong to this user, and no
other user may have the right to write it.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
import struct
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import zstandard

from relax_hpc.base.foreign_files import parse_json
from relax_hpc.base.rundir import is_map, replace_when_written, sync_directory

SUFFIX = ".tar.zst"
_FORMAT = 1
_FRAME = struct.Struct("<II")
_FRAME_MAGIC = 0x184D2A57
"""One of the 16 numbers that begin a skippable frame. The size of its content follows."""
_HEADER_BYTES = 16384
"""Bytes of the content of that frame. It is filled with spaces."""
_MANIFEST = "manifest.json"
MAX_FILES = 200_000
MAX_BYTES = 16 << 30
"""Bytes of all files of an archive, before compression."""
MAX_FILE_BYTES = 1 << 30
_MANIFEST_BYTES = 256 << 20
_LEVEL = 3
_BLOCK_BYTES = 1 << 20


class ArchiveError(Exception):
    """An archive that is not used. ``reason``: one word, by which the queue counts it."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Header:
    """Description of an archive.

    ``key``: properties of the machine and its software. ``root``: folder that had the files.
    ``digest``: SHA-256 of the rest of the file and of the other fields.
    """

    key: dict[str, str]
    root: str
    file_count: int
    size_bytes: int
    digest: str = ""

    def to_json(self) -> bytes:
        """The header as JSON, with its format."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, sort_keys=True).encode()


@dataclass(frozen=True, slots=True)
class PackedFile:
    """Entry of the manifest: SHA-256 and time of the last change, in nanoseconds."""

    digest: str
    changed_ns: int


def pack(path: Path, root: Path, names: Iterable[str], key: Mapping[str, str]) -> Header:
    """Write the files ``names`` below ``root`` to the archive ``path``, which appears complete.

    Files that change meanwhile are left out. OSError: the disk is full or fails.
    """
    with replace_when_written(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(bytes(_FRAME.size + _HEADER_BYTES))
            payload = _HashedWriter(file)
            files, size = _write_payload(payload, root, names)
            draft = Header(dict(key), str(root), files, size)
            header = _with_digest(draft, payload.digest)
            file.seek(0)
            file.write(_FRAME.pack(_FRAME_MAGIC, _HEADER_BYTES))
            file.write(header.to_json().ljust(_HEADER_BYTES))
            file.flush()
            os.fsync(file.fileno())
    sync_directory(path.parent)
    return header


def unpack(path: Path, key: Mapping[str, str], target: Path) -> Header:
    """Extract the archive ``path`` into the empty folder ``target``.

    The file is read once. ArchiveError: it is damaged, unsafe, or made for another ``key``; what
    ``target`` then has must not be used. OSError: a disk is full or fails.
    """
    with open_archive(path) as file:
        header = read_header(file, path)
        if header.key != dict(key):
            raise ArchiveError("foreign", f"made for {describe_difference(header.key, key)}")
        payload = _HashedReader(file)
        # The digest is known only at the end. A second read to verify it before would double the
        # load on the shared filesystem, so the files go to a folder that nothing uses yet.
        try:
            _extract(payload, header, target)
            payload.read_to_end()
        except (tarfile.TarError, zstandard.ZstdError, ValueError, EOFError) as error:
            raise ArchiveError("damaged", f"damaged ({error})") from error
        if _with_digest(header, payload.digest) != header:
            raise ArchiveError("damaged", "damaged (its digest differs)")
    return header


def open_archive(path: Path) -> BinaryIO:
    """Open an archive. ArchiveError: another user owns it or can write it. FileNotFoundError."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        file = os.fdopen(os.open(path, flags), "rb")
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise ArchiveError("unsafe", "not a regular file") from error
        raise
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ArchiveError("unsafe", "not a regular file")
        if status.st_uid != os.geteuid():
            raise ArchiveError("unsafe", f"a file of user {status.st_uid}, allowed: one of yours")
        if status.st_mode & 0o022:
            raise ArchiveError("unsafe", "a file that others can write (chmod 600)")
        return file
    except BaseException:
        file.close()
        raise


def read_header(file: BinaryIO, path: Path) -> Header:
    """Header of the archive ``path``, which is open as ``file``. ArchiveError: it has none."""
    data = file.read(_FRAME.size + _HEADER_BYTES)
    expected = _FRAME.pack(_FRAME_MAGIC, _HEADER_BYTES)
    if len(data) != len(expected) + _HEADER_BYTES or not data.startswith(expected):
        raise ArchiveError("damaged", "not an archive of kernels")
    try:
        fields = parse_json(data[_FRAME.size :])
    except ValueError as error:
        raise ArchiveError("damaged", f"damaged ({error})") from error
    if is_map(fields, format=int) and fields["format"] != _FORMAT:
        raise ArchiveError("foreign", f"of format {fields['format']}, not {_FORMAT}")
    if not is_map(fields, key=dict, root=str, file_count=int, size_bytes=int, digest=str):
        raise ArchiveError("damaged", "damaged (its header lacks fields)")
    key = {str(name): str(value) for name, value in fields["key"].items()}
    header = Header(key, *(fields[name] for name in ("root", "file_count", "size_bytes", "digest")))
    if not (0 <= header.file_count <= MAX_FILES and 0 <= header.size_bytes <= MAX_BYTES):
        raise ArchiveError(
            "too_large",
            f"of {header.file_count} files and {header.size_bytes} bytes, allowed: {MAX_FILES} and "
            f"{MAX_BYTES}; remove {path}",
        )
    return header


def describe_difference(key: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """The first property in which two keys differ, for people."""
    for name in sorted({*key, *expected}):
        if key.get(name) != expected.get(name):
            return f"{name} {key.get(name)!r}, here it is {expected.get(name)!r}"
    return "the same machine"


def _write_payload(target: _HashedWriter, root: Path, names: Iterable[str]) -> tuple[int, int]:
    """Write the compressed tar file. Returns the number of files and their bytes."""
    manifest: dict[str, PackedFile] = {}
    size = 0
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    with (
        compressor.stream_writer(cast(BinaryIO, target), closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, data, status in _read_stable(root, names):
            size += len(data)
            if len(manifest) == MAX_FILES or size > MAX_BYTES:
                raise OSError(errno.EFBIG, f"more than {MAX_FILES} files or {MAX_BYTES} bytes")
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o600 | status.st_mode & 0o100
            tar.addfile(member, io.BytesIO(data))
            manifest[name] = PackedFile(hashlib.sha256(data).hexdigest(), status.st_mtime_ns)
        text = json.dumps({name: asdict(entry) for name, entry in manifest.items()}).encode()
        member = tarfile.TarInfo(_MANIFEST)
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    return len(manifest), size


def _read_stable(root: Path, names: Iterable[str]) -> Iterator[tuple[str, bytes, os.stat_result]]:
    """Name, content and status of each file that does not change while it is read."""
    for name in names:
        path = root / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            # A library has removed it, or it is a link.
            continue
        with os.fdopen(descriptor, "rb") as file:
            before = os.fstat(file.fileno())
            if not stat.S_ISREG(before.st_mode) or before.st_size > MAX_FILE_BYTES:
                continue
            data = file.read(before.st_size + 1)
            after = os.fstat(file.fileno())
        unchanged = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
        if unchanged and len(data) == before.st_size:
            yield name, data, before


def _extract(source: _HashedReader, header: Header, target: Path) -> None:
    """Write the files of an archive below ``target``, and compare them with its manifest.

    Only regular files with plain relative names are written. `tarfile.data_filter` would also allow
    links, and Python 3.11.2 lacks it.
    """
    digests: dict[str, str] = {}
    size = 0
    manifest: dict[str, Any] | None = None
    decompressor = zstandard.ZstdDecompressor()
    stream = decompressor.stream_reader(cast(BinaryIO, source), closefd=False)
    with stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isreg() else None
            if content is None or manifest is not None:
                raise ArchiveError("unsafe", f"has {member.name!r}, which is not a file")
            if member.name == _MANIFEST:
                manifest = _read_manifest(content, member.size)
                continue
            size += member.size
            if len(digests) >= header.file_count or size > header.size_bytes:
                raise ArchiveError("damaged", "damaged (it has more than its header says)")
            check_name(member.name)
            if member.name in digests:
                raise ArchiveError("damaged", f"damaged (has {member.name!r} twice)")
            is_program = bool(member.mode & 0o100)
            digests[member.name] = _write_file(target / member.name, content, is_program)
    if manifest is None or digests != {name: entry["digest"] for name, entry in manifest.items()}:
        raise ArchiveError("damaged", "damaged (files differ from its manifest)")
    for name, entry in manifest.items():
        # ninja, which builds kernels of FlashInfer, compares these times.
        os.utime(target / name, ns=(entry["changed_ns"], entry["changed_ns"]))


def check_name(name: str) -> None:
    """ArchiveError: ``name`` is not a plain path below a folder.

    >>> check_name("triton/AB/kernel.cubin")
    """
    path = PurePosixPath(name)
    is_plain = str(path) == name and "\0" not in name and ".." not in path.parts
    if path.is_absolute() or not is_plain or len(path.parts) < 2:
        raise ArchiveError("unsafe", f"has {name!r}, which is not a path below a cache")


def _read_manifest(content: Any, size: int) -> dict[str, Any]:
    if size > _MANIFEST_BYTES:
        raise ArchiveError("damaged", "damaged (its manifest is too large)")
    manifest = json.loads(content.read())
    entries = manifest.values() if isinstance(manifest, dict) else [None]
    if not all(is_map(entry, digest=str, changed_ns=int) for entry in entries):
        raise ArchiveError("damaged", "damaged (its manifest lacks fields)")
    return manifest


def _write_file(path: Path, content: Any, is_program: bool) -> str:
    """Write ``content`` to the new file ``path``. Returns its SHA-256."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest = hashlib.sha256()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o700 if is_program else 0o600), "wb") as file:
        while block := content.read(_BLOCK_BYTES):
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def _with_digest(header: Header, payload: Any) -> Header:
    """``header`` with the digest of ``payload``, a hash object, and of the other fields."""
    fields = Header(header.key, header.root, header.file_count, header.size_bytes)
    digest = payload.copy()
    digest.update(fields.to_json())
    return Header(header.key, header.root, header.file_count, header.size_bytes, digest.hexdigest())


class _HashedWriter:
    """Writer with the digest of the written bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write ``data``."""
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Do nothing: the file is flushed when it is complete."""


class _HashedReader:
    """Reader with the digest of the read bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """At most ``size`` bytes; empty at the end."""
        data = self._file.read(size)
        self.digest.update(data)
        return data

    def read_to_end(self) -> None:
        """Read the remaining bytes."""
        while self.read(_BLOCK_BYTES):
            pass
