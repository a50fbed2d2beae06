"""Tensors of a run's model that are not trained, such as what makes speech of thoughts: written once for all versions.

Each version with files has that file too, by a hard link, so that its directory holds a whole model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_hpc.weight_files import weight_files
from relax_hpc.weights.manifest import FileSums, WeightsError
from relax_hpc.weights.tensors import ITEM_BYTES
from relax_hpc.weights.version_files import write_summed

FILE = "untrained.safetensors"
"""Name of the file in a run's folder of weights."""
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Stored:
    """Place of a tensor's bytes."""

    path: Path
    start: int
    about: dict[str, Any]
    """Entry of its file's header."""

    @property
    def bytes(self) -> int:
        first, end = self.about["data_offsets"]
        return end - first


class Untrained:
    """Untrained tensors of a ``model``, a Hugging Face directory: those whose names have such ``beginnings``.

    They are written to ``path`` when a version first needs them. WeightsError: a file of the model cannot be read.
    """

    def __init__(self, model: Path, beginnings: Sequence[str], path: Path) -> None:
        paths = weight_files(model) if beginnings else []
        found = [one for file in paths for one in _tensors(file, tuple(beginnings))]
        # Wide types come first, so that all are aligned.
        found.sort(key=lambda item: (-ITEM_BYTES.get(item[1].about["dtype"], 1), item[0]))
        self._stored, self._path, self._sums = dict(found), path, {}

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self._stored.values())

    def files(self, name: str) -> dict[str, str]:
        """Name of each tensor -> ``name``, that of the file."""
        return dict.fromkeys(self._stored, name)

    def put(self, target: Path) -> FileSums:
        """Have the file as ``target`` too; its sums. OSError: no room, or it cannot be written."""
        if not self._sums:
            partial = self._path.with_name(f".{self._path.name}")
            self._sums = write_summed(self._pieces(), partial, sync=True)
            partial.rename(self._path)
        target.unlink(missing_ok=True)
        try:
            target.hardlink_to(self._path)
        except OSError:
            # Some filesystems have no links; where there is no room, this says so.
            shutil.copyfile(self._path, target)
        return {target.name: self._sums}

    def _pieces(self) -> Iterator[bytes]:
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for name, one in self._stored.items():
            header[name] = one.about | {"data_offsets": [at, at := at + one.bytes]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        yield len(text).to_bytes(8, "little") + text
        for one in self._stored.values():
            yield from _read(one)


def _tensors(path: Path, beginnings: tuple[str, ...]) -> Iterator[tuple[str, _Stored]]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for name, about in header.items():
                if name.startswith(beginnings):
                    yield name, _Stored(path, 8 + length + about["data_offsets"][0], about)
    except (OSError, ValueError, LookupError, TypeError, MemoryError) as error:
        raise WeightsError(f"{path}: not a whole safetensors file ({error}); download it again") from error


def _read(one: _Stored) -> Iterator[bytes]:
    left = one.bytes
    with one.path.open("rb") as file:
        file.seek(one.start)
        while left:
            piece = file.read(min(left, _PIECE_BYTES))
            if not piece:
                raise WeightsError(f"{one.path}: shorter than its header says; download it again")
            left -= len(piece)
            yield piece
