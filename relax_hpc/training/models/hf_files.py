"""Hugging Face model directories: lazy reading of safetensors, and atomic writing of a
directory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import copy_regular, read_json_object
from relax_hpc.base.weight_files import weight_files

if TYPE_CHECKING:
    from relax_hpc.training.models.spec import ModelSpec

_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
)
_COPIED_CONFIGS = ("generation_config.json", "*processor_config.json", "chat_template.json")


class SafetensorFiles(Mapping[str, Any]):
    """The tensors of a directory by name, as lazy slices: `files[name][0:4]` reads four rows.

    A context manager; ConfigError names the file that is missing or broken, or a tensor stored
    twice.
    """

    def __init__(self, directory: Path) -> None:
        paths = weight_files(directory)
        self._stack = ExitStack()
        self._owner: dict[str, Any] = {}
        for path in paths:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path}: not a whole safetensors file ({error})") from error
            for name in file.offset_keys():
                if name in self._owner:
                    raise ConfigError(
                        f"{path}: another file of the directory has tensor {name} too"
                    )
                self._owner[name] = file

    def __enter__(self) -> SafetensorFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Any:
        return self._owner[name].get_slice(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def __len__(self) -> int:
        return len(self._owner)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, read from the headers."""
        return {name: tuple(self[name].get_shape()) for name in self}


def load_untrained_tensors(directory: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Tensors of a directory that are not trained."""
    if not spec.untrained_prefixes:
        return {}
    with SafetensorFiles(directory) as files:
        return {name: files[name][:] for name in files if spec.is_untrained(name)}


def read_config(directory: Path) -> dict[str, Any]:
    """The content of config.json. ConfigError if it is missing or not a JSON object."""
    return read_json_object(directory / "config.json")


def write_directory(
    directory: Path, hf_config: dict[str, Any], tensors: Mapping[str, Tensor], source: Path | None
) -> None:
    """Write config.json, model.safetensors and the tokenizer files of `source` into a new
    `directory`.

    The complete directory appears by rename. ConfigError if it exists.
    """
    if directory.exists():
        raise ConfigError(f"{directory}: exists already; a model directory is never overwritten")
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    if source is not None:
        for pattern in (*_COPIED, *_COPIED_CONFIGS):
            for path in source.glob(pattern):
                copy_regular(path, partial / path.name)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    # Keeps the key of the source: transformers 5 writes `dtype`, earlier releases `torch_dtype`.
    key = "dtype" if "dtype" in hf_config else "torch_dtype"
    (partial / "config.json").write_text(json.dumps(hf_config | {key: dtype}, indent=2) + "\n")
    save_file(dict(tensors), partial / "model.safetensors", metadata={"format": "pt"})
    # Synced before the rename: a directory with the final name has complete files.
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    partial.rename(directory)
