"""Versions on disk. Each is a Hugging Face directory, which all ranks of the actor write and other
programs can read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import xxhash

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.rundir import sync_directory, write_atomic
from relax_hpc.training.weights.file_form import FileForm
from relax_hpc.training.weights.manifest import (
    MANIFEST,
    FileSums,
    Manifest,
    WeightsError,
    digest,
    read_journaled,
)
from relax_hpc.training.weights.pull import Puller
from relax_hpc.training.weights.summed_files import PIECE_BYTES, copy_summed, write_summed
from relax_hpc.training.weights.tensors import SafetensorsFile, TensorInfo
from relax_hpc.training.weights.untrained_tensors import UntrainedTensors

FOLDER = "model"
"""Name of the model's folder in the directory of a version."""
LISTING = "files.json"
TENSORS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json"),
    *(".pt", ".pth", ".gguf"),
)
# Files of a model directory that define the meaning of its tensors. Other files, such as a README,
# may change during a run.
_DEFINING_FILES = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "*.jinja", "*processor_config.json"),
    "chat_template.json",
)


def divide_tensors(tensors: Mapping[str, TensorInfo], writers: int) -> list[list[str]]:
    """Names of the tensors that each of ``writers`` writes: consecutive names of about equal bytes.
    A writer may get none.

    >>> divide_tensors({name: TensorInfo("U8", (10,)) for name in "abcd"}, 2)
    [['a', 'b'], ['c', 'd']]
    """
    total, assigned = sum(tensor.bytes for tensor in tensors.values()), 0
    names: list[list[str]] = [[] for _ in range(writers)]
    for name in sorted(tensors):
        names[min(writers - 1, writers * assigned // max(1, total))].append(name)
        assigned += tensors[name].bytes
    return names


@dataclass(frozen=True, slots=True)
class FileDivision:
    """Division of a version into files: one for each writer, and one for untrained tensors."""

    writers: int
    has_untrained: bool = False
    form: FileForm = field(default_factory=FileForm)

    @property
    def files(self) -> int:
        """Number of files."""
        return self.writers + self.has_untrained

    def shares(self, manifest: Manifest) -> list[dict[str, TensorInfo]]:
        """Tensors of each writer's file."""
        stored = self.form.stored_tensors(manifest.tensors)
        divided = divide_tensors(stored, self.writers)
        return [{name: stored[name] for name in names} for names in divided]

    def file(self, number: int) -> str:
        """Name of a file."""
        return file_name(number, self.files)


def write_share(
    manifest: Manifest,
    puller: Puller,
    folder: Path,
    number: int,
    division: FileDivision,
    memory: Path,
    sync: bool,
) -> FileSums:
    """Write the file of writer ``number`` into ``folder``, and return its sums.

    The file is assembled in folder ``memory``. OSError: the disk is full, or it cannot be written.
    """
    share = division.shares(manifest)[number]
    if not share:
        return {}
    inside = {name: inner for name, inner in division.form.inside.items() if inner.holder in share}
    temporary = memory / f".share-{os.getpid()}"
    with SafetensorsFile(temporary, share, inside) as file:
        # Without a name, the kernel frees the memory when this process ends, for any reason.
        temporary.unlink()
        wanted = share.keys() | inside.keys()
        chunks = [
            chunk for chunk in manifest.chunks if any(part.name in wanted for part in chunk.parts)
        ]
        puller.pull(manifest, chunks, file)
        target = folder / division.file(number)
        return {target.name: write_summed(file.pieces(PIECE_BYTES), target, sync)}


def file_name(number: int, files: int) -> str:
    """Hugging Face's name of file ``number`` of ``files``.

    >>> file_name(0, 1), file_name(1, 4)
    ('model.safetensors', 'model-00002-of-00004.safetensors')
    """
    return TENSORS if files == 1 else f"model-{number + 1:05d}-of-{files:05d}.safetensors"


def finish(
    manifest: Manifest,
    partial: Path,
    source: Path,
    sums: Sequence[FileSums],
    division: FileDivision,
    untrained: UntrainedTensors,
    sync: bool,
) -> str:
    """Complete and rename the directory ``partial``, in which all shares are written.

    It adds the small files of the model directory ``source`` and its ``untrained`` tensors.
    ``sums``: of each writer's share. Returns the digest to be journaled. WeightsError: a small file
    has changed since the publication.
    """
    small = copy_small(source, partial)
    check_small(small, manifest.small, source)
    untrained_file = division.file(division.writers)
    if division.files > 1:
        weight_map: dict[str, str] = {}
        for number, share in enumerate(division.shares(manifest)):
            weight_map |= dict.fromkeys(share, division.file(number))
        weight_map |= untrained.weight_map(untrained_file)
        total = sum(tensor.bytes for tensor in manifest.tensors.values()) + untrained.total_bytes
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (partial / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    all_sums: FileSums = {}
    for share_sums in sums:
        all_sums |= share_sums
    all_sums |= small
    if untrained:
        all_sums |= untrained.link(partial / untrained_file)
    listing = json.dumps(all_sums, indent=1).encode()
    write_atomic(partial.parent / LISTING, listing, sync)
    if sync:
        for path in partial.iterdir():
            sync_directory(path)
        sync_directory(partial)
    whole = partial.rename(partial.parent / FOLDER)
    try:
        if sync:
            sync_directory(partial.parent)
    except OSError:
        # The write is tried again, and needs its name for that.
        whole.rename(partial)
        raise
    return digest(listing)


def copy_verified(directory: Path, expected: str, target: Path) -> int:
    """Copy the files of a version's directory to ``target``, and compare them with the listing.

    Returns the number of bytes. WeightsError names the file that is missing or damaged.
    """
    listing: FileSums = read_journaled(directory / LISTING, expected, json.loads)
    for name, listed in listing.items():
        path = directory / FOLDER / Path(name).name
        try:
            copied = copy_summed(path, target / path.name)
        except FileNotFoundError as error:
            raise WeightsError(f"{path}: {error.strerror}") from error
        if copied != listed:
            raise WeightsError(
                f"{path}: {copied['bytes']} bytes do not match {LISTING}; it was replaced or "
                "damaged"
            )
    return sum(listed["bytes"] for listed in listing.values())


def copy_small(source: Path, target: Path) -> FileSums:
    """Copy all files of a model directory except the weights. Returns the sums of the copies."""
    sums = {}
    for path in _small_files(source):
        data = path.read_bytes()
        (target / path.name).write_bytes(data)
        sums[path.name] = _sums(data)
    return sums


def small_sums(directory: Path) -> FileSums:
    """Checksums of the files of a model directory that define the meaning of its tensors."""
    files = [path for path in _small_files(directory) if _is_defining(path.name)]
    return {path.name: _sums(path.read_bytes()) for path in files}


def _is_defining(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _DEFINING_FILES)


def _sums(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}


def check_small(present: FileSums, published: FileSums, directory: Path) -> None:
    """Compare the sums of files in ``directory`` with those of a published version. WeightsError
    names the first file that differs."""
    for name, sums in published.items():
        if present.get(name) != sums:
            state = "is missing" if name not in present else "was replaced or damaged"
            raise WeightsError(
                f"{directory / name}: {state} since the run's weights were published"
            )


def check_unchanged(weights: Path, model: Path) -> None:
    """ConfigError if the defining files of a run's ``model`` directory have changed since its
    newest version in ``weights``. A resumed run would misinterpret its tensors."""
    # Newest first; a damaged manifest is skipped.
    for path in sorted(weights.glob(f"*-v*/{MANIFEST}"), reverse=True):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            newest = Manifest.decode(path.read_bytes())
            try:
                return check_small(small_sums(model), newest.small, model)
            except WeightsError as error:
                raise ConfigError(
                    f"{error}; restore the previous file, or start a new run"
                ) from error


def check_listed(directory: Path) -> None:
    """ConfigError if ``directory`` is the model of a run's version, and its defining files do not
    match the listing."""
    listing = directory.parent / LISTING
    if directory.name == FOLDER and listing.is_file():
        try:
            listed: FileSums = json.loads(listing.read_bytes())
            small = {name: sums for name, sums in listed.items() if _is_defining(name)}
            check_small(small_sums(directory), small, directory)
        except (ValueError, AttributeError, WeightsError) as error:
            raise ConfigError(f"{error}; take another version, or copy it again") from error


def _small_files(directory: Path) -> list[Path]:
    """All files of a model directory except the weights."""
    files = []
    for path in sorted(directory.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
            files.append(path)
    return files
