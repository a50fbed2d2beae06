"""Versions on disk: a Hugging Face directory each, written by all ranks of the actor, readable without this program."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from relax_hpc.rundir import sync_directory, write_atomic
from relax_hpc.weights.manifest import Manifest, WeightsError, digest, read_journaled
from relax_hpc.weights.pull import Puller
from relax_hpc.weights.tensors import SafetensorsFile, Tensor

FOLDER = "model"
"""In the directory of a version."""
LISTING = "files.json"
TENSORS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
_PIECE_BYTES = 4 << 20
FileSums = dict[str, dict[str, Any]]
"""Name -> {bytes, xxh3_128}."""


def shares(tensors: Mapping[str, Tensor], writers: int) -> list[list[str]]:
    """Which tensors each of ``writers`` writes: neighbours by name, of about equal bytes; none for some if few.

    >>> shares({name: Tensor("U8", (10,)) for name in "abcd"}, 2)
    [['a', 'b'], ['c', 'd']]
    """
    total, seen = sum(tensor.bytes for tensor in tensors.values()), 0
    found: list[list[str]] = [[] for _ in range(writers)]
    for name in sorted(tensors):
        found[min(writers - 1, writers * seen // max(1, total))].append(name)
        seen += tensors[name].bytes
    return found


def write_share(
    manifest: Manifest, puller: Puller, folder: Path, number: int, writers: int, memory: Path, sync: bool
) -> FileSums:
    """Write what writer ``number`` of ``writers`` has to write of a version into ``folder``; the sums of its file.

    The file is put together in folder ``memory``. OSError: no room, or it cannot be written.
    """
    names = shares(manifest.tensors, writers)[number]
    if not names:
        return {}
    mine = {name: manifest.tensors[name] for name in names}
    temporary = memory / f".share-{os.getpid()}"
    with SafetensorsFile(temporary, mine) as file:
        # Without a name it goes with this process, however that ends.
        temporary.unlink()
        chunks = [chunk for chunk in manifest.chunks if any(part.name in mine for part in chunk.parts)]
        puller.pull(manifest, chunks, file)
        target = folder / file_name(number, writers)
        return {target.name: write_summed(file.pieces(_PIECE_BYTES), target, sync)}


def file_name(number: int, writers: int) -> str:
    """Of a writer's file, as Hugging Face names them.

    >>> file_name(0, 1), file_name(1, 4)
    ('model.safetensors', 'model-00002-of-00004.safetensors')
    """
    return TENSORS if writers == 1 else f"model-{number + 1:05d}-of-{writers:05d}.safetensors"


def copy_summed(source: Path, target: Path) -> dict[str, Any]:
    """Copy a file; {bytes, xxh3_128} of what was copied."""
    with source.open("rb") as file:
        return write_summed(iter(partial(file.read, _PIECE_BYTES), b""), target, sync=False)


def write_summed(pieces: Iterable[bytes | memoryview], target: Path, sync: bool) -> dict[str, Any]:
    """Write ``pieces`` to a new file; its {bytes, xxh3_128}."""
    found, size = xxhash.xxh3_128(), 0
    with target.open("wb") as file:
        for piece in pieces:
            found.update(piece)
            size += file.write(piece)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    return {"bytes": size, "xxh3_128": found.hexdigest()}


def finish(manifest: Manifest, partial: Path, source: Path, sums: Sequence[FileSums], writers: int, sync: bool) -> str:
    """Complete ``partial``, where every share is written, with the small files of the model directory ``source``, and
    give it its name; the digest to be journaled."""
    copy_small(source, partial)
    if writers > 1:
        owners = enumerate(shares(manifest.tensors, writers))
        owner = {name: file_name(number, writers) for number, names in owners for name in names}
        total = sum(tensor.bytes for tensor in manifest.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": owner}
        (partial / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    listing = json.dumps({name: sum_ for share in sums for name, sum_ in share.items()}, indent=1).encode()
    write_atomic(partial.parent / LISTING, listing, sync)
    if sync:
        for path in partial.iterdir():
            sync_directory(path)
        sync_directory(partial)
    partial.rename(partial.parent / FOLDER)
    if sync:
        sync_directory(partial.parent)
    return digest(listing)


def copy_verified(directory: Path, expected: str, target: Path) -> int:
    """Copy the tensors of a version's directory to ``target``, each file as it was listed; the bytes copied.

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
            raise WeightsError(f"{path}: {found['bytes']} bytes do not match {LISTING}; it was replaced or damaged")
    return sum(wanted["bytes"] for wanted in listing.values())


def copy_small(source: Path, target: Path) -> None:
    """Everything of a model directory but the weights."""
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, target / path.name)
