"""Conversion of a megatron-core distributed checkpoint to a Hugging Face model, file by file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import copy_regular
from relax_hpc.base.weight_files import INDEX
from relax_hpc.convert.frozen_tensors import FrozenTensors
from relax_hpc.convert.hf_tensors import DTYPES, TYPE_NAMES, write_tensors
from relax_hpc.convert.sharded_names import StackedParameter, parameters
from relax_hpc.convert.to_megatron import HEADERS, SMALL_FILES
from relax_hpc.convert.torch_dist import METADATA, StoredState
from relax_hpc.convert.workspace import Workspace, group_into_files
from relax_hpc.training.models.hf_mapping import all_pieces, published_forms, split, stored_forms
from relax_hpc.training.models.pieces import Forms, Piece, StoredForm, find_form, single_form
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.weights.tensors import header_text
from relax_hpc.training.weights.version_files import file_name

_EXPERT_NORM_KEYS = (
    "decoder.layers.pre_mlp_layernorm.weight",
    "decoder.layers.mlp.linear_fc1.layer_norm_weight",
)
"""Keys of the norm before experts. megatron-core's own layers store it under the second one."""


class MegatronTensors:
    """The pieces of a model in a distributed checkpoint that was saved under any split.

    ConfigError names a tensor that is unknown, missing, or has a wrong shape. Rows that pad the
    vocabulary are dropped.
    """

    def __init__(self, state: StoredState, spec: ModelSpec) -> None:
        self.state, self.spec = state, spec
        self._locations: dict[str, _Location] = {}
        known_keys = set()
        for parameter in parameters(spec):
            key = self._key(parameter)
            is_stacked = key != parameter.unstacked_key or not parameter.index
            self._check_shape(parameter, key, is_stacked)
            known_keys.add(key)
            for piece in parameter.entry.pieces:
                self._locations[piece.name] = _Location(parameter, key, is_stacked)
        for key in state.tensors:
            if key not in known_keys and "optimizer." not in key:
                raise ConfigError(
                    f"{state.directory / METADATA}: unknown tensor {key}; this is not the model "
                    "that config.json describes"
                )
        self._fused: tuple[StackedParameter, list[Tensor]] | None = None

    def _key(self, parameter: StackedParameter) -> str:
        """Key of a parameter in the checkpoint, which may have been saved in several ways."""
        keys = [parameter.key, parameter.unstacked_key]
        if parameter.key == _EXPERT_NORM_KEYS[0]:
            keys.append(_EXPERT_NORM_KEYS[1])
        for key in keys:
            if key in self.state.tensors:
                return key
        raise ConfigError(
            f"{self.state.directory / METADATA}: tensor {parameter.key} is missing, expected shape "
            f"{list(parameter.stacked_shape)}"
        )

    def _check_shape(self, parameter: StackedParameter, key: str, is_stacked: bool) -> None:
        shape = tuple(self.state.tensors[key].size)
        expected = parameter.stacked_shape
        if not is_stacked:
            expected = parameter.stack[1:] + parameter.shape
        # megatron-core pads the vocabulary to a multiple of the tensor ranks.
        has_vocabulary = parameter.entry.pieces[0].name in (self.spec.embedding, self.spec.output)
        is_padded = has_vocabulary and shape[0] >= expected[0]
        if shape[is_padded:] != expected[is_padded:]:
            raise ConfigError(
                f"{self.state.directory / METADATA}: tensor {key} has shape {list(shape)}, "
                f"expected {list(expected)}"
            )

    def dtype(self, name: str) -> torch.dtype:
        """Type of a piece."""
        return self.state.tensors[self._locations[name].key].properties.dtype

    def read(self, name: str) -> Tensor:
        """Read a piece."""
        location = self._locations[name]
        entry = location.parameter.entry
        if entry.fuse == "none":
            return self._read(location)
        # Callers read the pieces of a parameter one after another, so the last one is cached.
        if self._fused is None or self._fused[0] is not location.parameter:
            self._fused = location.parameter, split(entry, self._read(location), self.spec)
        names = [piece.name for piece in entry.pieces]
        return self._fused[1][names.index(name)]

    def _read(self, location: _Location) -> Tensor:
        """Read a whole parameter."""
        index, shape = location.parameter.index, location.parameter.shape
        if not location.is_stacked:
            index = index[1:]
        start, block_shape = index + (0,) * len(shape), (1,) * len(index) + shape
        return self.state.read(location.key, start, block_shape).view(shape)


class _Location(NamedTuple):
    """Parameter of a piece, and the tensor of the checkpoint that holds it."""

    parameter: StackedParameter
    key: str
    is_stacked: bool
    """Whether the tensor holds all layers."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A safetensors file to write: its header, and the tensors that follow."""

    name: str
    header: str
    forms: tuple[StoredForm, ...]


@dataclass(frozen=True, slots=True)
class ToHf:
    """Conversion of a whole checkpoint. It holds one parameter and its pieces at a time."""

    source: MegatronTensors
    spec: ModelSpec
    hf_config: dict[str, Any]
    small_files: Path
    """Folder with config.json and tokenizer."""
    headers: dict[str, str] | None
    """Headers of the original files, which are written again; None: new files."""
    dtype: torch.dtype | None
    """Type of the result; None: the types of the source."""
    shard_bytes: int
    """Maximum bytes of a new file."""
    frozen: FrozenTensors
    """Tensors of the model that are not trained."""

    def dtype_of(self, name: str) -> torch.dtype:
        """Type in which a piece is stored."""
        if name in self.frozen:
            return self.frozen.dtype(name)
        return self.dtype or self.source.dtype(name)

    def _read(self, name: str) -> Tensor:
        read = self.frozen.read if name in self.frozen else self.source.read
        return read(name).to(self.dtype_of(name))

    def _frozen_forms(self) -> dict[str, StoredForm]:
        """Forms of the frozen tensors, by name."""
        return {name: single_form(Piece(name, self.frozen.shape(name))) for name in self.frozen}

    def files(self) -> list[FilePlan]:
        """A plan for each file."""
        if self.headers is None:
            return self._new_files()
        forms: dict[str, Forms] = dict(stored_forms(self.spec))
        for name, form in self._frozen_forms().items():
            forms[name] = (form,)
        return [self._original_file(name, text, forms) for name, text in self.headers.items()]

    def _original_file(self, name: str, text: str, forms_by_name: dict[str, Forms]) -> FilePlan:
        """Plan of a file with the header ``text``; the header is changed if types differ."""
        header = json.loads(text)
        metadata = header.pop("__metadata__", None)
        order = sorted(header, key=lambda tensor: header[tensor]["data_offsets"])
        forms = list[StoredForm]()
        entries = list[tuple[str, str, tuple[int, ...]]]()
        for tensor in order:
            shape = tuple(header[tensor]["shape"])
            form = find_form(forms_by_name.get(tensor, ()), shape)
            if form is None:
                raise ConfigError(
                    f"{self.small_files}: unknown tensor {tensor} in the headers of {name}"
                )
            forms.append(form)
            entries.append((tensor, TYPE_NAMES[self.dtype_of(form.pieces[0].name)], form.shape))
        if any(header[tensor]["dtype"] != dtype for tensor, dtype, _ in entries):
            text = header_text(entries, metadata)
        return FilePlan(name, text, tuple(forms))

    def _new_files(self) -> list[FilePlan]:
        """Plans of files of at most `shard_bytes`."""
        forms = published_forms(self.spec) | self._frozen_forms()
        types = {name: self.dtype_of(form.pieces[0].name) for name, form in forms.items()}
        sizes = [
            (name, math.prod(form.shape) * types[name].itemsize) for name, form in forms.items()
        ]
        groups = group_into_files(sizes, self.shard_bytes)
        plans = []
        for number, names in enumerate(groups):
            entries = [(name, TYPE_NAMES[types[name]], forms[name].shape) for name in names]
            header = header_text(entries, {"format": "pt"})
            file_forms = tuple(forms[name] for name in names)
            plans.append(FilePlan(file_name(number, len(groups)), header, file_forms))
        return plans

    def write(
        self, work: Workspace, progress: Callable[[str], None], check: Callable[[Path], None]
    ) -> None:
        """Write all files that are not finished; ``check`` decides whether the result is kept."""
        plans = self.files()
        for number, plan in enumerate(plans, start=1):
            write = partial(write_tensors, text=plan.header, tensors=self._tensors(plan))
            record = work.file(plan.name, write)
            progress(f"file {number} of {len(plans)}, {record['bytes'] / 1e6:.1f} MB: {plan.name}")
        work.finish(lambda path: self._describe(path, plans), check)

    def _tensors(self, plan: FilePlan) -> Iterator[Tensor]:
        """Tensors of a file in the order of their bytes."""
        for form in plan.forms:
            if form.transposed:
                for block in form.blocks:
                    yield torch.cat([self._read(piece.name) for piece in block]).t()
            else:
                for piece in form.pieces:
                    yield self._read(piece.name)

    def _describe(self, path: Path, plans: list[FilePlan]) -> None:
        """Write the small files, the index, and the type in config.json."""
        for pattern in SMALL_FILES:
            for file in self.small_files.glob(pattern):
                if file.name not in (INDEX, HEADERS):
                    copy_regular(file, path / file.name)
        self._write_index(path, plans)
        types = {str(self.dtype_of(name)).removeprefix("torch.") for name in all_pieces(self.spec)}
        key = "dtype" if "dtype" in self.hf_config else "torch_dtype"
        if len(types) == 1 and self.hf_config.get(key) not in types:
            changed = self.hf_config | {key: types.pop()}
            (path / "config.json").write_text(json.dumps(changed, indent=2) + "\n")

    def _write_index(self, path: Path, plans: list[FilePlan]) -> None:
        original = self.small_files / INDEX
        if self.headers == {plan.name: plan.header for plan in plans}:
            if original.exists():
                copy_regular(original, path / INDEX)
            return
        if len(plans) <= 1:
            return
        weight_map, total_size = dict[str, str](), 0
        for plan in plans:
            for name in json.loads(plan.header):
                if name != "__metadata__":
                    weight_map[name] = plan.name
            for form in plan.forms:
                itemsize = self.dtype_of(form.pieces[0].name).itemsize
                total_size += math.prod(form.shape) * itemsize
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def check_types(source: MegatronTensors) -> None:
    """ConfigError: a parameter has a type that converted safetensors files do not support."""
    for name in all_pieces(source.spec):
        if source.dtype(name) not in TYPE_NAMES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
            raise ConfigError(
                f"{source.state.directory}: tensor {name} is {source.dtype(name)}, allowed: "
                f"{allowed}"
            )
