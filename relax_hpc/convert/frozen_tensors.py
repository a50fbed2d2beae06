"""Tensors of a Hugging Face model that are not trained; a conversion copies them unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from relax_hpc.base.weight_files import read_header
from relax_hpc.convert.hf_tensors import DTYPES, TensorLocation, read_location, write_tensors
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.weights.tensors import header_text

FROZEN_FILE = "passengers.safetensors"
"""Name of the file with these tensors in a converted checkpoint."""


class FrozenTensors:
    """The untrained tensors of a directory. Each is read on demand."""

    def __init__(self, locations: Mapping[str, TensorLocation] = MappingProxyType({})) -> None:
        self._locations = locations

    @classmethod
    def from_directory(cls, directory: Path, spec: ModelSpec) -> FrozenTensors:
        """Find the untrained tensors of ``directory``; there may be none.

        ConfigError names a file that is damaged.
        """
        # Read the files, not the index: a converted checkpoint has the index of the whole model,
        # but only the file of these tensors.
        locations = dict[str, TensorLocation]()
        paths = sorted(directory.glob("*.safetensors")) if spec.untrained_prefixes else []
        for path in paths:
            for name, stored in read_header(path).tensors.items():
                if spec.is_untrained(name):
                    locations[name] = TensorLocation(path, stored)
        return cls(locations)

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __contains__(self, name: str) -> bool:
        return name in self._locations

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._locations[name].stored.shape

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor; a conversion does not change it."""
        return DTYPES[self._locations[name].stored.dtype]

    def read(self, name: str) -> Tensor:
        """Read a tensor."""
        return read_location(self._locations[name])

    def write(self, file: Any) -> None:
        """Write all tensors into one file."""
        entries = [
            (name, location.stored.dtype, location.stored.shape)
            for name, location in self._locations.items()
        ]
        write_tensors(file, header_text(entries, {"format": "pt"}), map(self.read, self._locations))
