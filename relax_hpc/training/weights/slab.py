"""A version in the memory of a node, as one mapped file. Reader processes take their tensors from
it by name.

The process that pulled the version compared every record with its journaled digest before it
renamed the folder. No process writes to the folder while another one holds it. So readers on the
same node compare only the layout of the file, not its bytes.
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
"""File in a node's folder of a version: the manifest of the records from which the slab was
built."""


# Files that stay mapped. The versions of a node alternate between the memory of two files (see
# `node_cache`). Mapping the pages of a file again takes longer than copying them.
_MAX_MAPPED = 2
# Mapped files by device, inode and size: a file descriptor and the bytes. The most recently used
# file is last.
_mapped: dict[tuple[int, ...], tuple[int, torch.Tensor]] = {}


def is_slab(folder: Path) -> bool:
    """Whether ``folder`` is for `open_slab`. If not, it is a model directory, such as a version
    that was copied from files."""
    return (folder / MARK).is_file()


def open_slab(folder: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of a version by name, as views of the mapped file. Bytes are read when they
    are used.

    WeightsError: other users may write to the folder, its name differs from its version, or its
    file does not match its manifest.
    """
    manifest = _read_slab_manifest(folder)
    path, (header, offsets) = folder / TENSORS, file_header(manifest.tensors)
    size = len(header) + sum(info.bytes for info in manifest.tensors.values())
    try:
        with path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            if file_size != size or file.read(len(header)) != header:
                raise WeightsError(
                    f"{path}: {file_size} bytes do not have the layout of {folder / MARK}"
                )
            memory = _map(file.fileno(), size)
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from error
    tensors = {}
    for name, info in manifest.tensors.items():
        data = memory[offsets[name] : offsets[name] + info.bytes]
        tensors[name] = data.view(torch_type(info.dtype)).view(info.shape)
    return tensors


def _map(fd: int, size: int) -> torch.Tensor:
    """The first ``size`` bytes of a file. An existing mapping of the file is reused."""
    import torch

    status = os.fstat(fd)
    # A renamed file keeps its inode, so the mapping of a reused file is found again.
    key = (status.st_dev, status.st_ino, size)
    mapping = _mapped.pop(key, None)
    if mapping is None:
        memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            # torch warns about a buffer that is not writable, which is intended here.
            warnings.simplefilter("ignore", UserWarning)
            mapping = os.dup(fd), torch.frombuffer(memory, dtype=torch.uint8)
    # Deleted files first: no other version can reuse their memory.
    deleted = [other for other, (file, _) in _mapped.items() if not os.fstat(file).st_nlink]
    for other in deleted or [*_mapped][: len(_mapped) + 1 - _MAX_MAPPED]:
        os.close(_mapped.pop(other)[0])
    _mapped[key] = mapping
    return mapping[1]


def _read_slab_manifest(folder: Path) -> Manifest:
    try:
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise WeightsError(
                f"{folder}: other users may write there, so its weights cannot be trusted"
            )
        manifest = Manifest.decode((folder / MARK).read_bytes())
    except OSError as error:
        raise WeightsError(f"{error.filename or folder}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WeightsError(f"{folder / MARK}: {error}") from error
    if manifest.version != folder.name:
        raise WeightsError(
            f"{folder / MARK}: found version {manifest.version}, expected that of its folder"
        )
    return manifest
