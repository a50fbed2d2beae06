"""Digests of the weights of all versions, in files that are kept when the weights are removed.

The actor's leader adds a line for each version to logs/<group>/inc-NNNNNN/versions.jsonl. Two
versions have the same digest if all their bytes are equal, and the ranks published the same parts.
A manifest has no such digest, because it contains addresses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from relax_hpc.base.disk_waits import AppendFile
from relax_hpc.base.foreign_files import open_in_run, parse_json, read_lines
from relax_hpc.base.rundir import RunDir, is_map
from relax_hpc.training.weights.manifest import Chunk

VERSIONS_FILE = "versions.jsonl"


@dataclass(frozen=True, slots=True)
class VersionDigest:
    """Digest of a version, and the device that computed it."""

    version: str
    digest: str
    device: str


def digest_of_chunks(chunks: Iterable[Chunk]) -> str:
    """XXH3, 128 bits in hex, of the records of a version and the tensors in them."""
    state = xxhash.xxh3_128()
    for chunk in chunks:
        state.update(chunk.digest.encode())
        for part in chunk.parts:
            location = (part.name, part.axis, part.start, part.stop, part.offset)
            state.update(repr(location).encode())
    return state.hexdigest()


class DigestLog:
    """Appends digests to a file. A full disk does not stop it: lines are written later."""

    def __init__(self, path: Path, device: str) -> None:
        self._file, self._device = AppendFile(path), device

    def add(self, version: str, chunks: Iterable[Chunk]) -> None:
        """Add a line for ``version``, whose records of all ranks are ``chunks``."""
        line = {"version": version, "digest": digest_of_chunks(chunks), "device": self._device}
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()


def read_digests(run: RunDir, group: str) -> dict[str, VersionDigest]:
    """The digests of all versions that ``group`` has published. Incomplete lines are left out."""
    digests: dict[str, VersionDigest] = {}
    for path in sorted((run.root / "logs" / group).glob(f"inc-*/{VERSIONS_FILE}")):
        with open_in_run(path) as file:
            for text in read_lines(file):
                try:
                    line = parse_json(text)
                except ValueError:
                    continue
                if is_map(line, version=str, digest=str, device=str):
                    digest = VersionDigest(line["version"], line["digest"], line["device"])
                    digests[digest.version] = digest
    return digests
