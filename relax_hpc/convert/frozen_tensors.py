"""Tensors of a Hugging Face directory that are no part of what is trained: they go through a
conversion as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from relax_hpc.base.weight_files import read_header
from relax_hpc.convert.hf_tensors import DTYPES, Place, read_place, write_tensors
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.weights.tensors import header_text

FILE = "passengers.safetensors"
"""File with them beside the small files of a converted checkpoint."""


class Passengers:
    """The untrained tensors of a directory, read when they are asked for."""

    def __init__(self, places: Mapping[str, Place] = MappingProxyType({})) -> None:
        self._places = places

    @classmethod
    def of(cls, directory: Path, spec: ModelSpec) -> Passengers:
        """Find those of ``directory``; there may be none. ConfigError names a file that is
        broken."""
        # A converted checkpoint keeps the model's index, and of its files those of these tensors
        # alone.
        paths = sorted(directory.glob("*.safetensors")) if spec.untrained_prefixes else []
        found = ((path, read_header(path).tensors.items()) for path in paths)
        return cls(
            {
                name: Place(path, one)
                for path, tensors in found
                for name, one in tensors
                if spec.is_untrained(name)
            }
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._places[name].stored.shape

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor, which it keeps."""
        return DTYPES[self._places[name].stored.dtype]

    def read(self, name: str) -> Tensor:
        """Tensor of that name."""
        return read_place(self._places[name])

    def write(self, file: Any) -> None:
        """Write all into a file of their own."""
        about = [(name, one.stored.dtype, one.stored.shape) for name, one in self._places.items()]
        write_tensors(file, header_text(about, {"format": "pt"}), map(self.read, self._places))
