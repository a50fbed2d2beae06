"""Untrained tensors of a run's model, such as the talker of Qwen3-Omni. They are written once for
all versions.

Each version with files has a hard link to that file, so that its directory is a whole model.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.weight_files import (
    TYPE_BYTES,
    StoredTensor,
    read_header,
    read_pieces,
    weight_files,
)
from relax_hpc.training.weights.manifest import FileSums, WeightsError
from relax_hpc.training.weights.summed_files import write_summed
from relax_hpc.training.weights.tensors import TensorInfo, file_header

FILE = "untrained.safetensors"
"""Name of the file in a run's folder of weights."""


class UntrainedTensors:
    """Tensors of a Hugging Face directory ``model`` whose names begin with one of ``prefixes``.

    They are written to ``path`` when a version first needs them. WeightsError: a file of the model
    cannot be read.
    """

    def __init__(self, model: Path, prefixes: Sequence[str], path: Path) -> None:
        paths = weight_files(model) if prefixes else []
        stored: dict[str, tuple[Path, StoredTensor]] = {}
        for file in paths:
            tensors = _read_tensors(file)
            names = [name for name in tensors if name.startswith(tuple(prefixes))]
            stored |= {name: (file, tensors[name]) for name in names}
        whole = {name: TensorInfo(entry.dtype, entry.shape) for name, (_, entry) in stored.items()}
        self._header, order = file_header(whole)
        self._stored = {name: stored[name] for name in order}
        self._path = path
        self._sums: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def total_bytes(self) -> int:
        return sum(stored.bytes for _, stored in self._stored.values())

    def weight_map(self, file: str) -> dict[str, str]:
        """Name of each tensor -> ``file``, the name of its file."""
        return dict.fromkeys(self._stored, file)

    def link(self, target: Path) -> FileSums:
        """Link the file to ``target``, and return its sums. OSError: the disk is full, or it cannot
        be written."""
        # Written only once per run and process; later versions link to it.
        if not self._sums:
            partial = self._path.with_name(f".{self._path.name}")
            self._sums = write_summed(self._pieces(), partial, sync=True)
            partial.rename(self._path)
        target.unlink(missing_ok=True)
        try:
            target.hardlink_to(self._path)
        except OSError:
            # Some file systems do not support hard links. A full disk fails here again.
            shutil.copyfile(self._path, target)
        return {target.name: self._sums}

    def _pieces(self) -> Iterator[bytes]:
        yield self._header
        try:
            for path, stored in self._stored.values():
                yield from read_pieces(path, stored)
        except ConfigError as error:
            raise WeightsError(str(error)) from error


def _read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Tensors in the header of a file. WeightsError: it is not a complete safetensors file."""
    try:
        return read_header(path, TYPE_BYTES).tensors
    except ConfigError as error:
        raise WeightsError(str(error)) from error
