"""Manifest of a version: its tensors, and the records of ranks that contain their parts."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
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
    """Published weights are missing, truncated or different from the journaled digest."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A record of `bytes` bytes with parts of tensors, and its descriptor on each plane. `digest`
    is its XXH3 (128 bits)."""

    name: str
    bytes: int
    digest: str
    parts: tuple[TensorPart, ...]
    planes: dict[str, dict[str, Any]] = field(default_factory=dict)
    delta: Delta | None = None

    def plain(self) -> dict[str, Any]:
        """Plain values for JSON or msgpack; descriptors may contain bytes."""
        return asdict(self)

    @classmethod
    def from_plain(cls, value: dict[str, Any]) -> Chunk:
        """Inverse of `plain`."""
        delta = value["delta"]
        parts = tuple(TensorPart(**part) for part in value["parts"])
        return cls(**{**value, "parts": parts, "delta": Delta(**delta) if delta else None})


@dataclass(frozen=True, slots=True)
class Delta:
    """A record with the differences between a chunk and the same chunk of the manifest's
    anchor."""

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
    """Version that deltas refer to: this version for later deltas, or an older version."""
    small: FileSums = field(default_factory=dict)
    """Checksums of the files that define the meaning of the tensors: config.json and the tokenizer.
    Empty: they are unknown."""

    def encode(self) -> bytes:
        """Bytes of the manifest file. ValueError if the chunks are not a partition of the
        tensors."""
        error = coverage_error(self.tensors, _all_parts(self.chunks))
        if error:
            raise ValueError(f"version {self.version}: {error}")
        content = {"format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(content, default=_encode_bytes).encode()

    @classmethod
    def decode(cls, text: bytes) -> Manifest:
        """Inverse of `encode`. ValueError, LookupError, TypeError or AttributeError: it is not a
        manifest."""
        value = json.loads(text, object_hook=_decode_bytes)
        if value["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"format {value['format_version']}, this program reads {FORMAT_VERSION}"
            )
        tensors = {
            name: TensorInfo(info["dtype"], tuple(info["shape"]))
            for name, info in value["tensors"].items()
        }
        unknown = {info.dtype for info in tensors.values()} - ITEM_BYTES.keys()
        if unknown:
            raise ValueError(f"types {sorted(unknown)}, this program reads {sorted(ITEM_BYTES)}")
        chunks = tuple(map(Chunk.from_plain, value["chunks"]))
        error = coverage_error(tensors, _all_parts(chunks))
        if error:
            raise ValueError(error)
        # A manifest comes from a file, so offsets are checked before memory is read by them.
        for chunk in chunks:
            for part in chunk.parts:
                end = part.offset + part.bytes(tensors[part.name])
                if part.offset < 0 or end > chunk.bytes:
                    raise ValueError(f"chunk {chunk.name}: parts beyond its {chunk.bytes} bytes")
        return cls(value["version"], tensors, chunks, value["anchor"], value.get("small", {}))


def _all_parts(chunks: Sequence[Chunk]) -> list[TensorPart]:
    """Parts of all chunks."""
    parts: list[TensorPart] = []
    for chunk in chunks:
        parts += chunk.parts
    return parts


def _encode_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    raise TypeError(f"{type(value)} in a manifest")


def _decode_bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[_BYTES], validate=True) if value.keys() == {_BYTES} else value


def digest(data: bytes | memoryview) -> str:
    """Digest that the controller journals: sha256 of ``data`` in hex."""
    return hashlib.sha256(data).hexdigest()


def checksum(data: bytes | bytearray | memoryview) -> str:
    """XXH3, 128 bits in hex, of a record. The journaled digest covers it, because the manifest
    contains it."""
    return xxhash.xxh3_128_hexdigest(data)


def read_manifest(directory: Path, expected: str) -> Manifest:
    """The manifest of a version's directory. WeightsError names the file if it does not have the
    journaled digest ``expected``."""
    return read_journaled(directory / MANIFEST, expected, Manifest.decode)


def read_journaled(path: Path, expected: str, decode: Callable[[bytes], Any]) -> Any:
    """The decoded content of a small file with the journaled digest ``expected``. WeightsError
    names the file."""
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
    """Lay out a rank's parts (name, axis, start, stop) in chunks: (begin, end, parts) of each.

    A chunk has up to ``limit`` bytes, or one larger part. Offsets of parts are relative to their
    chunk.
    """
    chunks: list[tuple[int, int, tuple[TensorPart, ...]]] = []
    begin, end = 0, 0
    chunk_parts: list[TensorPart] = []
    for name, axis, start, stop in parts:
        size = TensorPart(name, axis, start, stop, 0).bytes(tensors[name])
        if chunk_parts and end - begin + size > limit:
            chunks.append((begin, end, tuple(chunk_parts)))
            begin = end = _aligned(end)
            chunk_parts = []
        offset = _aligned(end)
        chunk_parts.append(TensorPart(name, axis, start, stop, offset - begin))
        end = offset + size
    return [*chunks, (begin, end, tuple(chunk_parts))] if chunk_parts else chunks


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNED) * _ALIGNED
