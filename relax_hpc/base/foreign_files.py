"""Reading of files that another user may have written: a run, a model or a data set.

Opening a FIFO blocks, a device may never end, and a link may lead to a private file of the reader.
Therefore only regular files are opened, and only a bounded number of bytes is read.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from relax_hpc.base.errors import ConfigError

JSON_BYTES = 16 << 20
"""Default bound of the bytes of a JSON file. The parsed value takes up to 20 times as much
memory."""
INDEX_BYTES = 256 << 20
"""Bytes of a JSON file that names all tensors of a model; mixtures of experts have hundreds of
thousands."""
LINE_BYTES = 4 << 20
"""Bytes of one line of a file of JSON lines."""
MAX_DEPTH = 100
"""Levels of nesting of a JSON file."""
_NAME_SHOWN = 40
"""Characters of a member's name that an error shows."""
_BLOCK_BYTES = 1 << 20
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}
_GZIP_WINDOW = zlib.MAX_WBITS | 16


class ForeignFileError(OSError):
    """Error of a file that is not read, because of its kind, its size, or the target of its
    link."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file. Links are followed. ForeignFileError: it has another kind. OSError: see
    `open`."""
    # Opening a device can have side effects, so the kind is checked before. It is checked again
    # after, because the file may have been replaced.
    _check_kind(path, path.stat().st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_kind(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def open_in_run(path: Path) -> BinaryIO:
    """Open a regular file of a run directory. A link that leaves the directory is not followed:
    ForeignFileError."""
    check_link(path)
    return open_regular(path)


def read_regular(path: Path, most_bytes: int = JSON_BYTES) -> bytes:
    """Content of a regular file of at most ``most_bytes``. ForeignFileError, OSError."""
    with open_regular(path) as file:
        return read_bounded(file, path, most_bytes)


def read_in_run(path: Path, most_bytes: int = JSON_BYTES) -> bytes:
    """Content of a file in a run directory, see `open_in_run` and `read_regular`."""
    check_link(path)
    return read_regular(path, most_bytes)


def copy_regular(source: Path, target: Path) -> None:
    """Copy the content of a regular file. ForeignFileError, OSError: see `open_regular`."""
    with open_regular(source) as file, target.open("wb") as copy:
        shutil.copyfileobj(file, copy, _BLOCK_BYTES)


def read_bounded(file: BinaryIO, path: Path, most_bytes: int) -> bytes:
    """Remaining bytes of ``file``, whose name is ``path``. ForeignFileError: more than
    ``most_bytes``."""
    data = bytearray()
    # In blocks, because CPython 3.11 allocates all bytes that `read` may return before it reads.
    while block := file.read(_BLOCK_BYTES):
        data += block
        if len(data) > most_bytes:
            raise ForeignFileError(
                errno.EFBIG, f"more than {most_bytes} bytes, allowed: at most that", str(path)
            )
    return bytes(data)


def read_json_object(
    path: Path,
    fix: str = "name a complete Hugging Face directory, or download it again",
    *,
    is_optional: bool = False,
    most_bytes: int = JSON_BYTES,
) -> dict[str, Any]:
    """The JSON object in a regular file, see `read_json`.

    ``fix``: what the user can do about a bad file. ``is_optional``: a missing file counts as an
    empty object. ConfigError: it names the file, the found content, and
    ``fix``.
    """
    try:
        value = read_json(path, most_bytes)
    except FileNotFoundError:
        if is_optional:
            return {}
        raise ConfigError(f"found no {path.name} in {path.parent}; {fix}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}; {fix}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}; {fix}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: found {type(value).__name__}, expected a JSON object; {fix}")
    return value


def read_json(path: Path, most_bytes: int = JSON_BYTES) -> Any:
    """JSON value in a regular file.

    It is nested at most `MAX_DEPTH` levels deep, so that recursive functions can process it.
    OSError: see `read_regular`. ValueError: the file is not JSON, is nested deeper, or an object in
    it has two members with the same name.
    """
    value = parse_json(read_regular(path, most_bytes), is_unique=True)
    level = [value]
    for _ in range(MAX_DEPTH):
        level = list(_containers(level))
        if not level:
            return value
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def _containers(values: Iterable[Any]) -> Iterator[dict[str, Any] | list[Any]]:
    """Objects and lists that are items of ``values``."""
    for value in values:
        items = list(value.values()) if isinstance(value, dict) else value
        if isinstance(items, list):
            yield from (item for item in items if isinstance(item, dict | list))


def parse_json(text: bytes | str, is_unique: bool = False) -> Any:
    """JSON value. ValueError: ``text`` is not JSON, or nested deeper than Python's parser permits.

    ``is_unique``: also refuse objects that have two members with the same name.
    """
    try:
        return json.loads(text, object_pairs_hook=unique_members if is_unique else None)
    except RecursionError:
        raise ValueError("nested too deep") from None


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Object with the members ``pairs``, a hook for `json.loads`. ValueError: two members have the
    same name.

    Parsers differ in which of the two they keep, so such a file can mean different things to
    different programs.
    """
    members = dict(pairs)
    if len(members) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"found {repeated[:_NAME_SHOWN]!r} twice in one object, allowed: once")
    return members


def read_lines(file: BinaryIO, most_bytes: int = LINE_BYTES) -> Iterator[bytes]:
    """Lines of ``file`` with their line ends. A line of more than ``most_bytes`` becomes empty."""
    while line := file.readline(most_bytes):
        if len(line) < most_bytes or line.endswith(b"\n"):
            yield line
            continue
        while (piece := file.readline(most_bytes)) and not piece.endswith(b"\n"):
            pass
        yield b"\n"


def unpack_gzip(data: bytes, path: Path, most_bytes: int) -> bytes:
    """Content of gzip ``data``, which may have several members.

    ``path``: the name of the file in errors. ForeignFileError: the content has more than
    ``most_bytes``. EOFError: a member is incomplete. zlib.error: a member is damaged.
    """
    blocks, size, remaining = list[bytes](), 0, data
    while remaining:
        stream = zlib.decompressobj(_GZIP_WINDOW)
        while not stream.eof:
            block = stream.decompress(remaining, min(_BLOCK_BYTES, most_bytes + 1 - size))
            remaining = stream.unconsumed_tail
            size += len(block)
            if size > most_bytes:
                raise ForeignFileError(
                    errno.EFBIG, f"unpacks to more than {most_bytes} bytes", str(path)
                )
            if not block and not remaining and not stream.eof:
                raise EOFError(f"{path}: ends within a gzip member")
            blocks.append(block)
        remaining = stream.unused_data
    return b"".join(blocks)


def check_link(path: Path) -> None:
    """Raise ForeignFileError if ``path`` is a link that leaves its run directory and its folder.

    The run directory is the nearest parent folder that has a config.yaml. Folders may be links,
    because users keep checkpoints on another file system.
    """
    if not path.is_symlink():
        return
    root = next(
        (folder for folder in path.parents if (folder / "config.yaml").exists()), path.parent
    )
    target = os.path.realpath(path)
    if not any(_is_below(target, folder) for folder in (root, path.parent)):
        raise ForeignFileError(
            errno.EINVAL, f"a link that leads out of {root}; replace it by the file", str(path)
        )


def _is_below(target: str, folder: Path) -> bool:
    return Path(target).is_relative_to(os.path.realpath(folder))


def _check_kind(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise ForeignFileError(errno.EINVAL, f"{kind}, expected a regular file", str(path))
