"""The manifest of a version: which tensors it has, and in which records of which ranks their parts
lie."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from relax_hpc.base.errors import RelaxError
from relax_hpc.training.weights.tensors import ITEM_BYTES, TensorInfo, TensorPart, coverage_error

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
_BYTES = "base64"
_ALIGNED = 64


FileSums = dict[str, dict[str, Any]]
"""Checksums by file name: {bytes, xxh3_128}."""


class WeightsError(RelaxError):
    """Published weights that are missing, truncated or not what the controller journaled."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A record of `bytes` bytes with parts of tensors, and how to find it by plane; `digest` is its
    XXH3 (128 bits)."""

    name: str
    bytes: int
    digest: str
    parts: tuple[TensorPart, ...]
    planes: dict[str, dict[str, Any]] = field(default_factory=dict)
    delta: Delta | None = None

    def plain(self) -> dict[str, Any]:
        """Plain values for JSON or msgpack, but for bytes in descriptors."""
        return asdict(self)

    @classmethod
    def from_plain(cls, value: dict[str, Any]) -> Chunk:
        """Inverse of `plain`."""
        delta = value["delta"]
        parts = tuple(TensorPart(**part) for part in value["parts"])
        return cls(**{**value, "parts": parts, "delta": Delta(**delta) if delta else None})


@dataclass(frozen=True, slots=True)
class Delta:
    """A record with what differs between a chunk and the same chunk of the manifest's anchor."""

    name: str
    bytes: int
    digest: str
    planes: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Manifest of a whole version."""

    version: str
    tensors: dict[str, TensorInfo]
    chunks: tuple[Chunk, ...]
    anchor: str = ""
    """Version that deltas are made against: this one itself, for those to come, or an older one."""
    small: FileSums = field(default_factory=dict)
    """Checksums of the files that say what the tensors mean: config.json, the tokenizer. Empty:
    none were told."""

    def encode(self) -> bytes:
        """Manifest as it is written. ValueError if the chunks are not a partition of the
        tensors."""
        if wrong := coverage_error(
            self.tensors, [part for chunk in self.chunks for part in chunk.parts]
        ):
            raise ValueError(f"version {self.version}: {wrong}")
        return json.dumps(
            {"format_version": FORMAT_VERSION, **asdict(self)}, default=_plain
        ).encode()

    @classmethod
    def decode(cls, text: bytes) -> Manifest:
        """Inverse of `encode`; on anything else ValueError, LookupError, TypeError or
        AttributeError."""
        value = json.loads(text, object_hook=_restored)
        if value["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"format {value['format_version']}, this program reads {FORMAT_VERSION}"
            )
        tensors = {
            name: TensorInfo(one["dtype"], tuple(one["shape"]))
            for name, one in value["tensors"].items()
        }
        if unknown := {one.dtype for one in tensors.values()} - ITEM_BYTES.keys():
            raise ValueError(f"types {sorted(unknown)}, this program reads {sorted(ITEM_BYTES)}")
        chunks = tuple(map(Chunk.from_plain, value["chunks"]))
        if wrong := coverage_error(tensors, [part for chunk in chunks for part in chunk.parts]):
            raise ValueError(wrong)
        for chunk in chunks:
            ends = [part.offset + part.bytes(tensors[part.name]) for part in chunk.parts]
            if (
                max(ends, default=0) > chunk.bytes
                or min((part.offset for part in chunk.parts), default=0) < 0
            ):
                raise ValueError(f"chunk {chunk.name}: parts beyond its {chunk.bytes} bytes")
        return cls(value["version"], tensors, chunks, value["anchor"], value.get("small", {}))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    raise TypeError(f"{type(value)} in a manifest")


def _restored(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[_BYTES], validate=True) if value.keys() == {_BYTES} else value


def digest(data: bytes | memoryview) -> str:
    """Digest that the controller journals: sha256 of ``data`` in hex."""
    return hashlib.sha256(data).hexdigest()


def checksum(data: bytes | memoryview) -> str:
    """XXH3, 128 bits in hex: of the large parts, which the journaled digest covers through it."""
    return xxhash.xxh3_128_hexdigest(data)


def read_manifest(directory: Path, expected: str) -> Manifest:
    """The manifest of a version's directory, if it is the journaled one. WeightsError names the
    file."""
    return read_journaled(directory / MANIFEST, expected, Manifest.decode)


def read_journaled(path: Path, expected: str, decode: Any) -> Any:
    """The content of a small file whose digest was journaled. WeightsError names the file."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from error
    if digest(text) != expected:
        raise WeightsError(f"{path}: digest is not the journaled one; it was replaced or damaged")
    try:
        return decode(text)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path}: {error}") from error


def lay_out_chunks(
    parts: Sequence[tuple[str, int, int, int]], tensors: Mapping[str, TensorInfo], limit: int
) -> list[tuple[int, int, tuple[TensorPart, ...]]]:
    """Lay out a rank's parts (name, axis, start, stop) one after the other: (begin, end, parts) of
    each chunk.

    Chunks are up to ``limit`` bytes long, or one part; offsets of parts are within their chunk.
    """
    chunks: list[tuple[int, int, tuple[TensorPart, ...]]] = []
    begin, end, mine = 0, 0, []
    for name, axis, start, stop in parts:
        size = TensorPart(name, axis, start, stop, 0).bytes(tensors[name])
        if mine and end - begin + size > limit:
            chunks.append((begin, end, tuple(mine)))
            begin, mine = -(-end // _ALIGNED) * _ALIGNED, []
            end = begin
        at = -(-end // _ALIGNED) * _ALIGNED
        mine.append(TensorPart(name, axis, start, stop, at - begin))
        end = at + size
    return [*chunks, (begin, end, tuple(mine))] if mine else chunks
