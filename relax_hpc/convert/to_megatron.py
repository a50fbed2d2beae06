"""Conversion of a Hugging Face model to a megatron-core distributed checkpoint, file by file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import copy_regular
from relax_hpc.base.rundir import write_json
from relax_hpc.convert.frozen_tensors import FROZEN_FILE, FrozenTensors
from relax_hpc.convert.hf_tensors import HfTensors
from relax_hpc.convert.sharded_names import StackedParameter, parameters
from relax_hpc.convert.torch_dist import (
    Shard,
    shards_from_json,
    shards_to_json,
    write_description,
    write_shards,
)
from relax_hpc.convert.workspace import HashedFile, Workspace, group_into_files
from relax_hpc.training.checkpoint.store import FORMAT_VERSION, MARKER, checksum
from relax_hpc.training.models.hf_mapping import fuse
from relax_hpc.training.models.spec import ModelSpec

HUGGINGFACE = "huggingface"
"""Folder of a converted checkpoint with the source's small files and the headers of its weights."""
HEADERS = "headers.json"
SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.md", "LICENSE*")
"""Small files of the model's directory that a conversion copies."""


@dataclass(frozen=True, slots=True)
class ToMegatron:
    """Conversion of a Hugging Face model. It holds one parameter and its pieces at a time."""

    source: HfTensors
    spec: ModelSpec
    dtype: torch.dtype | None
    """Type of the result; None: the types of the source."""
    shard_bytes: int
    """Maximum bytes of a file; a larger parameter gets a separate file."""

    def files(self) -> list[list[StackedParameter]]:
        """Parameters of each file. ConfigError: layers or fused tensors have different types."""
        self._check_types()
        sizes = [
            (parameter, math.prod(parameter.shape) * self.dtype_of(parameter).itemsize)
            for parameter in parameters(self.spec)
        ]
        return group_into_files(sizes, self.shard_bytes)

    def _check_types(self) -> None:
        types: dict[str, torch.dtype] = {}
        for parameter in parameters(self.spec):
            for piece in parameter.entry.pieces:
                dtype = self.dtype or self.source.dtype(piece.name)
                expected = types.setdefault(parameter.key, dtype)
                if expected != dtype:
                    raise ConfigError(
                        f"{self.source.directory}: tensor {piece.name} is {dtype}, others that "
                        f"are stored with it are {expected}; convert all to one type with --dtype"
                    )

    def dtype_of(self, parameter: StackedParameter) -> torch.dtype:
        """Type in which a parameter is stored."""
        return self.dtype or self.source.dtype(parameter.entry.pieces[0].name)

    def read_parameter(self, parameter: StackedParameter) -> Tensor:
        """Fuse a parameter from its pieces; its shape is `parameter.shape`."""
        pieces = [self.source.read(piece.name) for piece in parameter.entry.pieces]
        return fuse(parameter.entry, pieces, self.spec).to(self.dtype_of(parameter))

    def write(
        self, work: Workspace, progress: Callable[[str], None], check: Callable[[Path], None]
    ) -> None:
        """Write all files that are not finished; ``check`` decides whether the result is kept."""
        files = self.files()
        records = {}
        for number, contents in enumerate(files):
            name = f"__{number}_0.distcp"
            records[name] = work.file(name, partial(self._write_file, contents))
            size = records[name]["bytes"] / 1e6
            last = contents[-1].entry.name
            progress(f"part {number + 1} of {len(files)}, {size:.1f} MB: up to {last}")
        work.finish(lambda path: self._describe(path, records), check)

    def _write_file(
        self, contents: list[StackedParameter], file: HashedFile
    ) -> list[dict[str, Any]]:
        def shards() -> Iterator[tuple[str, tuple[int, ...] | None, Any]]:
            for parameter in contents:
                offsets = parameter.index + (0,) * len(parameter.shape)
                # The stored block has a leading axis of size 1 for layer and expert.
                leading_axes = (None,) * len(parameter.index)
                yield parameter.key, offsets, self.read_parameter(parameter)[leading_axes]
                if parameter.extra_state is not None:
                    yield parameter.extra_state, None, [None]

        return shards_to_json(write_shards(file, shards()))

    def _describe(self, path: Path, records: dict[str, dict[str, Any]]) -> None:
        """Write the metadata, what the conversion back needs, and finally the marker."""
        tensors = {
            parameter.key: (parameter.stacked_shape, self.dtype_of(parameter))
            for parameter in parameters(self.spec)
        }
        shards: dict[str, list[Shard]] = {
            name: shards_from_json(record["about"]) for name, record in records.items()
        }
        write_description(path, tensors, shards)
        self._copy_small_files(path / HUGGINGFACE)
        checksums = {name: record["checksum"] for name, record in records.items()}
        write_marker(path, checksums)

    def _copy_small_files(self, folder: Path) -> None:
        """Copy the source's small files, frozen tensors, and headers of its weights."""
        folder.mkdir(exist_ok=True)
        for pattern in SMALL_FILES:
            for file in self.source.directory.glob(pattern):
                copy_regular(file, folder / file.name)
        frozen = FrozenTensors.from_directory(self.source.directory, self.spec)
        if list(frozen):
            with (folder / FROZEN_FILE).open("wb") as target:
                frozen.write(target)
        headers = {name: header.text for name, header in self.source.headers.items()}
        (folder / HEADERS).write_text(json.dumps(headers))


def write_marker(path: Path, checksums: dict[str, str]) -> None:
    """Write the marker of a checkpoint without optimizer, with the checksums of all files.

    ``checksums``: those that are known; the others are calculated.
    """
    names = sorted(file.name for file in path.iterdir() if file.is_file())
    files = {name: checksums.get(name) or checksum(path / name) for name in names}
    marker = {
        "format": FORMAT_VERSION,
        "files": files,
        "layout": None,
        "optimizer": None,
        "meta": {"converted": True},
    }
    write_json(path / MARKER, marker, sync=True)
