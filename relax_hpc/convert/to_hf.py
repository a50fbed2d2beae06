"""A megatron-core distributed checkpoint, a run's or a converted one, as a Hugging Face model, file
after file."""

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
from relax_hpc.base.weight_files import INDEX
from relax_hpc.convert.frozen_tensors import Passengers
from relax_hpc.convert.hf_tensors import DTYPES, TYPE_NAMES, write_tensors
from relax_hpc.convert.sharded_names import Parameter, parameters
from relax_hpc.convert.to_megatron import HEADERS, SMALL_FILES
from relax_hpc.convert.torch_dist import METADATA, StoredState
from relax_hpc.convert.workspace import Workspace, in_files
from relax_hpc.training.models.hf_mapping import all_pieces, published_forms, split, stored_forms
from relax_hpc.training.models.pieces import Forms, Piece, StoredForm, find_form, single_form
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.weights.tensors import header_text
from relax_hpc.training.weights.version_files import file_name

_NORM_BESIDE_EXPERTS = (
    "decoder.layers.pre_mlp_layernorm.weight",
    "decoder.layers.mlp.linear_fc1.layer_norm_weight",
)
"""Names of a norm: megatron-core's own layers store it under the second one."""


class MegatronTensors:
    """The pieces of a model that lie in a distributed checkpoint, saved under any split.

    ConfigError names the tensor that is unknown, missing or mis-shaped. Rows that pad the
    vocabulary are left out.
    """

    def __init__(self, state: StoredState, spec: ModelSpec) -> None:
        self.state, self.spec = state, spec
        self._place: dict[str, tuple[Parameter, str, bool]] = {}
        found = set()
        for one in parameters(spec):
            key = self._key(one)
            self._check_shape(one, key)
            found.add(key)
            self._place |= {
                piece.name: (one, key, key != one.own_key or not one.index)
                for piece in one.entry.pieces
            }
        for key in state.tensors:
            if key not in found and "optimizer." not in key:
                where = state.directory / METADATA
                raise ConfigError(
                    f"{where}: unknown tensor {key}; this is not the model that config.json "
                    "describes"
                )
        self._fused: tuple[Parameter, list[Tensor]] | None = None

    def _key(self, one: Parameter) -> str:
        keys = [one.key, one.own_key]
        if one.key == _NORM_BESIDE_EXPERTS[0]:
            keys.append(_NORM_BESIDE_EXPERTS[1])
        for key in keys:
            if key in self.state.tensors:
                return key
        where = self.state.directory / METADATA
        raise ConfigError(f"{where}: tensor {one.key} is missing, expected shape {list(one.whole)}")

    def _check_shape(self, one: Parameter, key: str) -> None:
        found = tuple(self.state.tensors[key].size)
        expected = one.whole if key != one.own_key or not one.index else one.stack[1:] + one.shape
        padded = (
            one.entry.pieces[0].name in (self.spec.embedding, self.spec.output)
            and found[0] >= expected[0]
        )
        if found[padded:] != expected[padded:]:
            where = self.state.directory / METADATA
            raise ConfigError(
                f"{where}: tensor {key} has shape {list(found)}, expected {list(expected)}"
            )

    def dtype(self, name: str) -> torch.dtype:
        """Type of a piece."""
        return self.state.tensors[self._place[name][1]].properties.dtype

    def read(self, name: str) -> Tensor:
        """Tensor of a piece."""
        one, key, stacked = self._place[name]
        number = [piece.name for piece in one.entry.pieces].index(name)
        if one.entry.fuse == "none":
            return self._read(one, key, stacked)
        # The pieces of a parameter are asked for one after the other.
        if self._fused is None or self._fused[0] is not one:
            self._fused = one, split(one.entry, self._read(one, key, stacked), self.spec)
        return self._fused[1][number]

    def _read(self, one: Parameter, key: str, stacked: bool) -> Tensor:
        index = one.index if stacked else one.index[1:]
        start, shape = index + (0,) * len(one.shape), (1,) * len(index) + one.shape
        return self.state.read(key, start, shape).view(one.shape)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A safetensors file to write: its header, and the tensors whose bytes follow."""

    name: str
    header: str
    forms: tuple[StoredForm, ...]


@dataclass(frozen=True, slots=True)
class ToHf:
    """The conversion of a whole model. Holds one parameter and its pieces at a time."""

    source: MegatronTensors
    spec: ModelSpec
    hf_config: dict[str, Any]
    small_files: Path
    """Folder with config.json and tokenizer."""
    headers: dict[str, str] | None
    """The headers of the files that the model came from, to be made again; None: new files."""
    dtype: torch.dtype | None
    """Type of the result; None: the types of the source."""
    shard_bytes: int
    """Bytes of a new file at most."""
    passengers: Passengers
    """Tensors of the model that are not trained."""

    def dtype_of(self, name: str) -> torch.dtype:
        """Type that a piece is stored in."""
        return (
            self.passengers.dtype(name)
            if name in self.passengers
            else self.dtype or self.source.dtype(name)
        )

    def _read(self, name: str) -> Tensor:
        read = self.passengers.read if name in self.passengers else self.source.read
        return read(name).to(self.dtype_of(name))

    def _alone(self) -> dict[str, StoredForm]:
        """Tensors that are not trained, by name."""
        return {
            name: single_form(Piece(name, self.passengers.shape(name))) for name in self.passengers
        }

    def files(self) -> list[FilePlan]:
        """Plans of the files: what goes into each."""
        if self.headers is None:
            return self._new_files()
        forms = stored_forms(self.spec) | {name: (form,) for name, form in self._alone().items()}
        return [self._file_again(name, text, forms) for name, text in self.headers.items()]

    def _file_again(self, name: str, text: str, known: dict[str, Forms]) -> FilePlan:
        about = json.loads(text)
        metadata = about.pop("__metadata__", None)
        order = sorted(about, key=lambda tensor: about[tensor]["data_offsets"])
        forms = {
            tensor: find_form(known.get(tensor, ()), tuple(about[tensor]["shape"]))
            for tensor in order
        }
        if unknown := [tensor for tensor, form in forms.items() if form is None]:
            raise ConfigError(
                f"{self.small_files}: unknown tensor {unknown[0]} in the headers of {name}"
            )
        types = {
            tensor: TYPE_NAMES[self.dtype_of(forms[tensor].pieces[0].name)] for tensor in order
        }
        if any(about[tensor]["dtype"] != types[tensor] for tensor in order):
            text = header_text(
                [(tensor, types[tensor], forms[tensor].shape) for tensor in order], metadata
            )
        return FilePlan(name, text, tuple(forms.values()))

    def _new_files(self) -> list[FilePlan]:
        forms, plans = published_forms(self.spec) | self._alone(), []
        types = {name: self.dtype_of(form.pieces[0].name) for name, form in forms.items()}
        sizes = (
            (name, math.prod(form.shape) * types[name].itemsize) for name, form in forms.items()
        )
        groups = in_files(sizes, self.shard_bytes)
        for number, names in enumerate(groups):
            about = [(name, TYPE_NAMES[types[name]], forms[name].shape) for name in names]
            file = file_name(number, len(groups))
            plans.append(
                FilePlan(
                    file, header_text(about, {"format": "pt"}), tuple(forms[name] for name in names)
                )
            )
        return plans

    def write(
        self, work: Workspace, progress: Callable[[str], None], check: Callable[[Path], None]
    ) -> None:
        """All files, those that are finished left as they are; if it passes the ``check``, the
        directory appears."""
        plans = self.files()
        for number, plan in enumerate(plans, start=1):
            tensors = (tensor for form in plan.forms for tensor in self._parts(form))
            record = work.file(plan.name, partial(write_tensors, text=plan.header, tensors=tensors))
            progress(f"file {number} of {len(plans)}, {record['bytes'] / 1e6:.1f} MB: {plan.name}")
        work.finish(lambda path: self._describe(path, plans), check)

    def _parts(self, form: StoredForm) -> Iterator[Tensor]:
        """Parts of a tensor whose bytes follow each other."""
        for block in form.blocks if form.transposed else [(piece,) for piece in form.pieces]:
            rows = [self._read(piece.name) for piece in block]
            yield torch.cat(rows).t() if form.transposed else rows[0]

    def _describe(self, path: Path, plans: list[FilePlan]) -> None:
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
        there = self.small_files / INDEX
        if self.headers == {plan.name: plan.header for plan in plans}:
            if there.exists():
                copy_regular(there, path / INDEX)
        elif len(plans) > 1:
            names = {
                plan.name: [name for name in json.loads(plan.header) if name != "__metadata__"]
                for plan in plans
            }
            where = {name: file for file, found in names.items() for name in found}
            forms = (form for plan in plans for form in plan.forms)
            total = sum(
                math.prod(form.shape) * self.dtype_of(form.pieces[0].name).itemsize
                for form in forms
            )
            about = {"metadata": {"total_size": total}, "weight_map": where}
            (path / INDEX).write_text(json.dumps(about, indent=2) + "\n")


def check_types(source: MegatronTensors) -> None:
    """ConfigError naming a parameter whose type no safetensors file of ours has."""
    for name in all_pieces(source.spec):
        if source.dtype(name) not in TYPE_NAMES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
            raise ConfigError(
                f"{source.state.directory}: tensor {name} is {source.dtype(name)}, allowed: "
                f"{allowed}"
            )
