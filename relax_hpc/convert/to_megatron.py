"""A Hugging Face model as a megatron-core distributed checkpoint, one part (file) after the
other."""

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
from relax_hpc.convert.frozen_tensors import FILE, Passengers
from relax_hpc.convert.hf_tensors import HfTensors
from relax_hpc.convert.sharded_names import Parameter, parameters
from relax_hpc.convert.torch_dist import (
    Shard,
    shards_from_json,
    shards_to_json,
    write_description,
    write_shards,
)
from relax_hpc.convert.workspace import HashedFile, Workspace, in_files
from relax_hpc.training.checkpoint.store import FORMAT_VERSION, MARKER, checksum
from relax_hpc.training.models.hf_mapping import fuse
from relax_hpc.training.models.spec import ModelSpec

HUGGINGFACE = "huggingface"
"""Folder of a converted checkpoint with the source's small files, and the headers of its
weights."""
HEADERS = "headers.json"
SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.md", "LICENSE*")
"""Files of the model's directory that are copied along."""


@dataclass(frozen=True, slots=True)
class ToMegatron:
    """The conversion of a whole model. Holds one parameter and its pieces at a time."""

    source: HfTensors
    spec: ModelSpec
    dtype: torch.dtype | None
    """Type of the result; None: the types of the source."""
    shard_bytes: int
    """Bytes of a part at most; a larger parameter has one of its own."""

    def parts(self) -> list[list[Parameter]]:
        """Parameters of each file. ConfigError: a type differs between layers or fused tensors."""
        self._check_types()
        sizes = (
            (one, math.prod(one.shape) * self.dtype_of(one).itemsize)
            for one in parameters(self.spec)
        )
        return in_files(sizes, self.shard_bytes)

    def _check_types(self) -> None:
        types: dict[str, torch.dtype] = {}
        for one in parameters(self.spec):
            for piece in one.entry.pieces:
                found = self.dtype or self.source.dtype(piece.name)
                if types.setdefault(one.key, found) != found:
                    raise ConfigError(
                        f"{self.source.directory}: tensor {piece.name} is {found}, others that "
                        f"are stored with it are {types[one.key]}; give all one type with --dtype"
                    )

    def dtype_of(self, one: Parameter) -> torch.dtype:
        """Type that a parameter is stored in."""
        return self.dtype or self.source.dtype(one.entry.pieces[0].name)

    def parameter(self, one: Parameter) -> Tensor:
        """Parameter [its axes], made of its pieces."""
        pieces = [self.source.read(piece.name) for piece in one.entry.pieces]
        return fuse(one.entry, pieces, self.spec).to(self.dtype_of(one))

    def write(
        self, work: Workspace, progress: Callable[[str], None], check: Callable[[Path], None]
    ) -> None:
        """All files, those that are finished left as they are; if it passes the ``check``, the
        directory appears."""
        parts = self.parts()
        records = {}
        for number, part in enumerate(parts):
            name = f"__{number}_0.distcp"
            records[name] = work.file(name, partial(self._write_part, part))
            size = records[name]["bytes"] / 1e6
            progress(
                f"part {number + 1} of {len(parts)}, {size:.1f} MB: up to {part[-1].entry.name}"
            )
        work.finish(lambda path: self._describe(path, records), check)

    def _write_part(self, part: list[Parameter], file: HashedFile) -> list[dict[str, Any]]:
        def shards() -> Iterator[tuple[str, tuple[int, ...] | None, Any]]:
            for one in part:
                offsets = one.index + (0,) * len(one.shape)
                yield one.key, offsets, self.parameter(one)[(None,) * len(one.index)]
                if one.extra_state is not None:
                    yield one.extra_state, None, [None]

        return shards_to_json(write_shards(file, shards()))

    def _describe(self, path: Path, records: dict[str, dict[str, Any]]) -> None:
        """Write the metadata, what the way back needs, and the marker last."""
        whole = {one.key: (one.whole, self.dtype_of(one)) for one in parameters(self.spec)}
        shards: dict[str, list[Shard]] = {
            name: shards_from_json(one["about"]) for name, one in records.items()
        }
        write_description(path, whole, shards)
        self._take_along(path / HUGGINGFACE)
        checksums = {name: one["checksum"] for name, one in records.items()}
        write_marker(path, checksums)

    def _take_along(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for pattern in SMALL_FILES:
            for file in self.source.directory.glob(pattern):
                copy_regular(file, folder / file.name)
        passengers = Passengers.of(self.source.directory, self.spec)
        if list(passengers):
            with (folder / FILE).open("wb") as target:
                passengers.write(target)
        headers = {name: header.text for name, header in self.source.headers.items()}
        (folder / HEADERS).write_text(json.dumps(headers))


def write_marker(path: Path, known: dict[str, str]) -> None:
    """The marker of a checkpoint without optimizer, with the checksums of all files."""
    names = sorted(file.name for file in path.iterdir() if file.is_file())
    files = {name: known.get(name) or checksum(path / name) for name in names}
    about = {"layout": None, "optimizer": None, "meta": {"converted": True}}
    write_json(path / MARKER, {"format": FORMAT_VERSION, "files": files, **about}, sync=True)
