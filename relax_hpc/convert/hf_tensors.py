"""Safetensors files read and written piece by piece: strict about headers, and never more in memory
than one tensor.

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
class Place:
    """Place of a piece in a file."""

    path: Path
    stored: StoredTensor
    """The piece, or the block turned around that it is a part of."""
    rows: slice | None = None
    """Rows that it has of the block; None: it is no part of one."""


def write_tensors(file: Any, text: str, tensors: Iterable[Tensor]) -> None:
    """A file's header and then its tensors, each taken when the one before it is written."""
    data = text.encode()
    file.write(len(data).to_bytes(8, "little") + data)
    for tensor in tensors:
        file.write(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy if it is contiguous."""
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


class HfTensors:
    """The pieces of a model that lie in a Hugging Face directory, whichever form they are stored
    in.

    ConfigError names the file that is broken, or the tensor that is unknown, missing, mis-shaped or
    there twice.
    """

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        paths = weight_files(directory)
        self.directory = directory
        self.headers = {path.name: read_header(path) for path in paths}
        """Header of each file, by name."""
        self._place: dict[str, Place] = {}
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
            expected = " or ".join(str([*one.shape]) for one in forms)
            raise ConfigError(
                f"{path}: tensor {name} has shape {list(stored.shape)}, expected {expected}"
            )
        if spec.tied and name == spec.output:
            self._place[name] = Place(path, stored)
            return
        for piece, place in _places(path, stored, form):
            if piece.name in self._place:
                raise ConfigError(
                    f"{path}: tensor {name}: {piece.name} lies in another file or tensor too"
                )
            self._place[piece.name] = place

    def _check_complete(self, spec: ModelSpec) -> None:
        for name, piece in all_pieces(spec).items():
            if name not in self._place:
                where = f"{self.directory}: tensor {name}"
                raise ConfigError(f"{where} is missing, expected shape {list(piece.shape)}")

    def dtype(self, name: str) -> torch.dtype:
        """Type of a piece."""
        return DTYPES[self._place[name].stored.dtype]

    def read(self, name: str) -> Tensor:
        """Tensor of a piece."""
        return read_place(self._place[name])


def read_place(place: Place) -> Tensor:
    """The tensor that lies there."""
    whole = _read(place.path, place.stored)
    return whole if place.rows is None else whole[:, place.rows].t().contiguous()


def _places(path: Path, stored: StoredTensor, form: StoredForm) -> Iterator[tuple[Piece, Place]]:
    """Places of the pieces of a tensor."""
    at = stored.start
    if not form.transposed:
        for piece in form.pieces:
            one = StoredTensor(stored.dtype, piece.shape, at)
            yield piece, Place(path, one)
            at += one.bytes
        return
    for pieces in form.blocks:
        block, first = StoredTensor(stored.dtype, stored.shape[1:], at), 0
        for piece in pieces:
            yield piece, Place(path, block, slice(first, first + piece.shape[0]))
            first += piece.shape[0]
        at += block.bytes


def _read(path: Path, stored: StoredTensor) -> Tensor:
    room = torch.empty(stored.bytes, dtype=torch.uint8)
    with open_regular(path) as file:
        file.seek(stored.start)
        _fill(file, memoryview(room.numpy()), path)
    return room.view(DTYPES[stored.dtype]).view(stored.shape)


def _fill(file: BinaryIO, view: memoryview, path: Path) -> None:
    if file.readinto(view) != len(view):  # type: ignore[attr-defined]
        raise ConfigError(f"{path}: shorter than its header says; download it again")
