"""Safetensors files, read and written piece by piece, with at most one tensor in memory.

The reasons not to use the safetensors library are in `relax_hpc.base.weight_files` (reading) and
`relax_hpc.training.weights.tensors.header_text` (writing).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import open_regular
from relax_hpc.base.weight_files import (
    StoredTensor,
    check_tied,
    read_header,
    stored_tensors,
    weight_files,
)
from relax_hpc.training.models.hf_mapping import all_pieces, stored_forms
from relax_hpc.training.models.pieces import Forms, Piece, StoredForm, find_form
from relax_hpc.training.models.spec import ModelSpec

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types that weights may have, by their names in files."""
TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Location of a piece in a file."""

    path: Path
    stored: StoredTensor
    """The piece, or the transposed block that contains it."""
    rows: slice | None = None
    """Rows of the piece in a transposed block; None: the piece is not in such a block."""


def write_tensors(file: Any, text: str, tensors: Iterable[Tensor]) -> None:
    """Write the header ``text``, then the tensors; the next is taken when one is written."""
    data = text.encode()
    file.write(len(data).to_bytes(8, "little") + data)
    for tensor in tensors:
        file.write(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy if it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


class HfTensors:
    """The pieces of a model in a Hugging Face directory, in any form in which they are stored.

    ConfigError names a damaged file, or a tensor that is unknown, missing, stored twice, or has a
    wrong shape.
    """

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        paths = weight_files(directory)
        self.directory = directory
        self.headers = {path.name: read_header(path) for path in paths}
        """Header of each file, by name."""
        self._locations: dict[str, TensorLocation] = {}
        forms = stored_forms(spec)
        for path in paths:
            for name, stored in self.headers[path.name].tensors.items():
                if not spec.is_untrained(name):
                    self._add(path, name, stored, forms.get(name, ()), spec)
        self._check_complete(spec)
        if spec.tied:
            check_tied(stored_tensors(directory), spec.output, spec.embedding)

    def _add(
        self, path: Path, name: str, stored: StoredTensor, forms: Forms, spec: ModelSpec
    ) -> None:
        if not forms:
            raise ConfigError(
                f"{path}: unknown tensor {name}; this is not the model that config.json describes"
            )
        form = find_form(forms, stored.shape)
        if form is None:
            expected = " or ".join(str([*allowed.shape]) for allowed in forms)
            raise ConfigError(
                f"{path}: tensor {name} has shape {list(stored.shape)}, expected {expected}"
            )
        if spec.tied and name == spec.output:
            self._locations[name] = TensorLocation(path, stored)
            return
        for piece, location in _piece_locations(path, stored, form):
            if piece.name in self._locations:
                raise ConfigError(
                    f"{path}: tensor {name}: {piece.name} is in another file or tensor too"
                )
            self._locations[piece.name] = location

    def _check_complete(self, spec: ModelSpec) -> None:
        for name, piece in all_pieces(spec).items():
            if name not in self._locations:
                raise ConfigError(
                    f"{self.directory}: tensor {name} is missing, expected shape "
                    f"{list(piece.shape)}"
                )

    def dtype(self, name: str) -> torch.dtype:
        """Type of a piece."""
        return DTYPES[self._locations[name].stored.dtype]

    def read(self, name: str) -> Tensor:
        """Read a piece."""
        return read_location(self._locations[name])


def read_location(location: TensorLocation) -> Tensor:
    """Read the tensor at ``location``."""
    tensor = _read(location.path, location.stored)
    return tensor if location.rows is None else tensor[:, location.rows].t().contiguous()


def _piece_locations(
    path: Path, stored: StoredTensor, form: StoredForm
) -> Iterator[tuple[Piece, TensorLocation]]:
    """Locations of the pieces of a stored tensor."""
    start = stored.start
    if not form.transposed:
        for piece in form.pieces:
            tensor = StoredTensor(stored.dtype, piece.shape, start)
            yield piece, TensorLocation(path, tensor)
            start += tensor.bytes
        return
    for pieces in form.blocks:
        block, first_row = StoredTensor(stored.dtype, stored.shape[1:], start), 0
        for piece in pieces:
            rows = slice(first_row, first_row + piece.shape[0])
            yield piece, TensorLocation(path, block, rows)
            first_row += piece.shape[0]
        start += block.bytes


def _read(path: Path, stored: StoredTensor) -> Tensor:
    data = torch.empty(stored.bytes, dtype=torch.uint8)
    with open_regular(path) as file:
        file.seek(stored.start)
        _fill(file, data.numpy().data, path)
    return data.view(DTYPES[stored.dtype]).view(stored.shape)


def _fill(file: BinaryIO, view: memoryview, path: Path) -> None:
    # The type BinaryIO lacks readinto, which regular files have.
    if file.readinto(view) != len(view):  # type: ignore[attr-defined]
        raise ConfigError(f"{path}: shorter than its header says; download it again")
