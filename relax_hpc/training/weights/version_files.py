"""Versions on disk: a Hugging Face directory each, written by all ranks of the actor, readable
without this program."""

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
_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
)
_MEANING = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
)
_MEANING += ("vocab.json", "merges.txt", "*.jinja", "*processor_config.json", "chat_template.json")
"""Files of a model directory that say what its tensors mean. The rest, such as a README, may change
during a run."""


def shares(tensors: Mapping[str, TensorInfo], writers: int) -> list[list[str]]:
    """Names of the tensors that each of ``writers`` writes: neighbours by name, of about equal
    bytes; some may get none.

    >>> shares({name: TensorInfo("U8", (10,)) for name in "abcd"}, 2)
    [['a', 'b'], ['c', 'd']]
    """
    total, seen = sum(tensor.bytes for tensor in tensors.values()), 0
    found: list[list[str]] = [[] for _ in range(writers)]
    for name in sorted(tensors):
        found[min(writers - 1, writers * seen // max(1, total))].append(name)
        seen += tensors[name].bytes
    return found


@dataclass(frozen=True, slots=True)
class FileDivision:
    """FileDivision of versions over files: one of each writer, and one more if something is not
    trained."""

    writers: int
    more: bool = False
    form: FileForm = field(default_factory=FileForm)

    def shares(self, manifest: Manifest) -> list[dict[str, TensorInfo]]:
        """Tensors of each writer's file."""
        stored = self.form.stored(manifest.tensors)
        return [{name: stored[name] for name in names} for names in shares(stored, self.writers)]

    def file(self, number: int) -> str:
        """Name of a file."""
        return file_name(number, self.writers + self.more)


def write_share(
    manifest: Manifest,
    puller: Puller,
    folder: Path,
    number: int,
    division: FileDivision,
    memory: Path,
    sync: bool,
) -> FileSums:
    """Write what writer ``number`` has to write of a version into ``folder``; the sums of its file.

    The file is put together in folder ``memory``. OSError: no room, or it cannot be written.
    """
    mine = division.shares(manifest)[number]
    if not mine:
        return {}
    inside = {name: one for name, one in division.form.inside.items() if one.holder in mine}
    temporary = memory / f".share-{os.getpid()}"
    with SafetensorsFile(temporary, mine, inside) as file:
        # Without a name it goes with this process, however that ends.
        temporary.unlink()
        wanted = mine.keys() | inside.keys()
        chunks = [
            chunk for chunk in manifest.chunks if any(part.name in wanted for part in chunk.parts)
        ]
        puller.pull(manifest, chunks, file)
        target = folder / division.file(number)
        return {target.name: write_summed(file.pieces(PIECE_BYTES), target, sync)}


def file_name(number: int, files: int) -> str:
    """Name of one of so many ``files``, as Hugging Face names them.

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
    """Complete ``partial``, where every share is written, with the small files of the model
    directory ``source`` and its ``untrained`` tensors, and give it its name; the digest to be
    journaled. ``sums``: those of each writer's share. WeightsError: a small file is not as it was
    published."""
    small = copy_small(source, partial)
    check_small(small, manifest.small, source)
    last = division.file(division.writers)
    if division.writers + division.more > 1:
        owner = {
            name: division.file(number)
            for number, mine in enumerate(division.shares(manifest))
            for name in mine
        }
        owner |= untrained.files(last)
        total = sum(tensor.bytes for tensor in manifest.tensors.values()) + untrained.bytes
        index = {"metadata": {"total_size": total}, "weight_map": owner}
        (partial / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    more = untrained.put(partial / last) if untrained else {}
    every = [*sums, small, more]
    listing = json.dumps(
        {name: sum_ for share in every for name, sum_ in share.items()}, indent=1
    ).encode()
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
        # It is written again, under a name that is free.
        whole.rename(partial)
        raise
    return digest(listing)


def copy_verified(directory: Path, expected: str, target: Path) -> int:
    """Copy the files of a version's directory to ``target``, each as it was listed; the bytes
    copied.

    WeightsError names the file that is missing or damaged.
    """
    listing: FileSums = read_journaled(directory / LISTING, expected, json.loads)
    for name, wanted in listing.items():
        path = directory / FOLDER / Path(name).name
        try:
            found = copy_summed(path, target / path.name)
        except FileNotFoundError as error:
            raise WeightsError(f"{path}: {error.strerror}") from error
        if found != wanted:
            raise WeightsError(
                f"{path}: {found['bytes']} bytes do not match {LISTING}; it was replaced or damaged"
            )
    return sum(wanted["bytes"] for wanted in listing.values())


def copy_small(source: Path, target: Path) -> FileSums:
    """Copy everything of a model directory but the weights; the sums of what was copied."""
    found = {}
    for path in _small(source):
        data = path.read_bytes()
        (target / path.name).write_bytes(data)
        found[path.name] = _sums(data)
    return found


def small_sums(directory: Path) -> FileSums:
    """Checksums of the files of a model directory that say what its tensors mean."""
    named = (
        path
        for path in _small(directory)
        if any(fnmatch(path.name, pattern) for pattern in _MEANING)
    )
    return {path.name: _sums(path.read_bytes()) for path in named}


def _sums(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}


def check_small(found: FileSums, wanted: FileSums, directory: Path) -> None:
    """WeightsError naming the first file of ``directory`` that is not as a version was published
    with."""
    for name, sums in wanted.items():
        if found.get(name) != sums:
            state = "is missing" if name not in found else "was replaced or damaged"
            raise WeightsError(
                f"{directory / name}: {state} since the run's weights were published"
            )


def check_unchanged(weights: Path, model: Path) -> None:
    """ConfigError if a run's model directory says another thing than when its newest version in
    ``weights`` was made: whoever goes on with that run would take its tensors for what they are
    not."""
    for path in sorted(weights.glob(f"*-v*/{MANIFEST}"), reverse=True):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            newest = Manifest.decode(path.read_bytes())
            try:
                return check_small(small_sums(model), newest.small, model)
            except WeightsError as error:
                raise ConfigError(
                    f"{error}; put the file of that time back, or start a new run"
                ) from error


def check_listed(directory: Path) -> None:
    """ConfigError if ``directory`` is the model of a run's version, and its small files are not as
    they were listed."""
    listing = directory.parent / LISTING
    if directory.name == FOLDER and listing.is_file():
        try:
            listed: FileSums = json.loads(listing.read_bytes())
            small = {
                name: sums
                for name, sums in listed.items()
                if any(fnmatch(name, one) for one in _MEANING)
            }
            check_small(small_sums(directory), small, directory)
        except (ValueError, AttributeError, WeightsError) as error:
            raise ConfigError(f"{error}; take another version, or copy it again") from error


def _small(directory: Path) -> list[Path]:
    return sorted(
        path for path in directory.iterdir() if path.is_file() and not _is_weights(path.name)
    )


def _is_weights(name: str) -> bool:
    return name.endswith(_WEIGHTS)
