"""A version in the memory of a node, as one mapped file: what a reader's process takes its tensors
from by name.

Whoever pulled it has compared every record with its journaled digest, before the folder got its
name; then nothing writes to it until nobody holds it. So a reader on the same node compares what
says where the tensors lie, and no bytes.
"""

from __future__ import annotations

import mmap
import os
import stat
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.training.weights.manifest import Manifest, WeightsError
from relax_hpc.training.weights.tensors import file_header, torch_type
from relax_hpc.training.weights.version_files import TENSORS

if TYPE_CHECKING:
    import torch

MARK = "verified-manifest.json"
"""File in a node's folder of a version: the journaled manifest of the records that its slab was
made of."""


_KEPT = 2
"""Files that stay mapped. The memory of a node's versions goes to and fro between two of them, see
`node_cache`, and to map a file's pages anew takes longer than to copy them."""
_mapped: dict[tuple[int, ...], tuple[int, torch.Tensor]] = {}
"""Mapped files by device, inode and size: a descriptor and the bytes. Those used last come last."""


def is_slab(folder: Path) -> bool:
    """Whether `open_slab` is for ``folder``; else it is a model directory, such as a version that
    came as files."""
    return (folder / MARK).is_file()


def open_slab(folder: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of a version by name, as views of the mapped file: nothing is read before
    it is used.

    WeightsError: the folder is another user's, of another version than its name says, or its file
    is not as its manifest says.
    """
    manifest = _manifest_of(folder)
    path, (header, offsets) = folder / TENSORS, file_header(manifest.tensors)
    size = len(header) + sum(one.bytes for one in manifest.tensors.values())
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != size or file.read(len(header)) != header:
                raise WeightsError(
                    f"{path}: {found} bytes are not laid out as {folder / MARK} says"
                )
            whole = _map(file.fileno(), size)
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from error
    return {
        name: whole[offsets[name] : offsets[name] + one.bytes]
        .view(torch_type(one.dtype))
        .view(one.shape)
        for name, one in manifest.tensors.items()
    }


def _map(fd: int, size: int) -> torch.Tensor:
    """The first ``size`` bytes of a file, by a mapping of before if there is one."""
    import torch

    about = os.fstat(fd)
    key = (about.st_dev, about.st_ino, size)
    found = _mapped.pop(key, None)
    if found is None:
        memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            # That it cannot be written to is meant.
            warnings.simplefilter("ignore", UserWarning)
            found = os.dup(fd), torch.frombuffer(memory, dtype=torch.uint8)
    # A file without a name is memory that nobody else can use any more.
    gone = [other for other, (its, _) in _mapped.items() if not os.fstat(its).st_nlink]
    for other in gone or [*_mapped][: len(_mapped) + 1 - _KEPT]:
        os.close(_mapped.pop(other)[0])
    _mapped[key] = found
    return found[1]


def _manifest_of(folder: Path) -> Manifest:
    try:
        about = folder.stat()
        if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise WeightsError(
                f"{folder}: others may write there; found no memory of this node's own"
            )
        manifest = Manifest.decode((folder / MARK).read_bytes())
    except OSError as error:
        raise WeightsError(f"{error.filename or folder}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WeightsError(f"{folder / MARK}: {error}") from error
    if manifest.version != folder.name:
        raise WeightsError(
            f"{folder / MARK}: found version {manifest.version}, not that of its folder"
        )
    return manifest
