"""Deltas of a record against an older record: the changed blocks, in a form that compresses well.

A step at a small learning rate changes few bfloat16 weights, mostly in their low byte. So the
exclusive or of old and new is nearly all zeros. It compresses better if the first bytes of all
numbers come first, then the second bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from relax_hpc.base.versions import Version
from relax_hpc.net.transport import SlabPool
from relax_hpc.training.weights.manifest import Chunk, Delta, checksum
from relax_hpc.training.weights.ring import SlabRing
from relax_hpc.training.weights.tensors import ITEM_BYTES, TensorInfo

BLOCK_BYTES = 64 << 10
_HEAD = struct.Struct("<4sQBI")
_MAGIC = b"RLXD"
_LEVEL = 1


class AnchorDeltas:
    """Deltas of one actor rank: it stores a copy of the last anchor, and offers the differences of
    each later version in addition to the whole version."""

    def __init__(
        self, pool: SlabPool, ring: SlabRing, tensors: Mapping[str, TensorInfo], every: int
    ) -> None:
        """``every``: number of versions from one anchor to the next; 0: no anchors."""
        self.every, self.anchor = every, Version(0, 0)
        # Bytes of all deltas so far, and of the records that they replace.
        self.bytes = self.whole_bytes = 0
        self._ring = ring
        self._copy = pool.take(max(1, ring.bytes)).memory if every else memoryview(b"")
        self._items = [
            min(ITEM_BYTES[tensors[part.name].dtype] for part in parts)
            for _, _, parts in ring.chunks
        ]

    def add(self, version: Version, slab: int, chunks: Sequence[Chunk]) -> tuple[list[Chunk], str]:
        """Chunks of a version with their deltas, and the name of the anchor; "" without anchors."""
        if not self.every:
            return list(chunks), ""
        is_same_incarnation = version.incarnation == self.anchor.incarnation
        if not is_same_incarnation or version.number - self.anchor.number >= self.every:
            self.anchor = version
            for index, (begin, end, _) in enumerate(self._ring.chunks):
                self._copy[begin:end] = self._ring.record(slab, index)
            return list(chunks), str(version)
        with_deltas = [self._with_delta(index, slab, chunk) for index, chunk in enumerate(chunks)]
        return with_deltas, str(self.anchor)

    def _with_delta(self, index: int, slab: int, chunk: Chunk) -> Chunk:
        begin, end, _ = self._ring.chunks[index]
        data = encode(self._copy[begin:end], self._ring.record(slab, index), self._items[index])
        self.bytes += len(data)
        self.whole_bytes += chunk.bytes
        if len(data) >= chunk.bytes:
            return chunk
        name = f"{chunk.name}-delta"
        offers = self._ring.offer_extra(slab, name, data)
        return replace(chunk, delta=Delta(name, len(data), checksum(data), offers))


def encode(old: memoryview, new: memoryview, item: int) -> bytes:
    """Delta of ``new`` against ``old``, records of the same size. Their numbers have ``item``
    bytes: 1, 2, 4 or 8."""
    import zstandard

    if len(old) != len(new):
        raise ValueError(
            f"delta: found records of {len(old)} and {len(new)} bytes, allowed: equal sizes"
        )
    old_blocks, new_blocks = _blocks(old), _blocks(new)
    changed = (old_blocks != new_blocks).any(axis=1)
    difference = old_blocks[changed] ^ new_blocks[changed]
    # Transposed: first the first bytes of all numbers, then the second bytes.
    planes = difference.reshape(-1, item).T.tobytes()
    head = _HEAD.pack(_MAGIC, len(new), item, int(changed.sum()))
    body = zstandard.ZstdCompressor(level=_LEVEL).compress(planes)
    return head + np.packbits(changed).tobytes() + body


def apply(old: bytearray, delta: memoryview) -> None:
    """Change ``old`` in place to the record that ``delta`` encodes. Applying it twice restores the
    old record. ValueError: it is not a delta of such a record."""
    import zstandard

    if len(delta) < _HEAD.size:
        raise ValueError(f"delta: found {len(delta)} bytes, less than a header")
    magic, size, item, count = _HEAD.unpack_from(delta)
    if magic != _MAGIC or size != len(old) or item not in (1, 2, 4, 8):
        raise ValueError(f"delta: not one of a record of {len(old)} bytes")
    blocks = -(-size // BLOCK_BYTES)
    start = _HEAD.size + -(-blocks // 8)
    # Sizes are checked before and after decompression, because the data comes from a socket.
    flags = np.frombuffer(delta[_HEAD.size : start], np.uint8)
    changed = np.flatnonzero(np.unpackbits(flags, count=blocks))
    try:
        planes = zstandard.ZstdDecompressor().decompress(
            delta[start:], max_output_size=count * BLOCK_BYTES
        )
    except zstandard.ZstdError as error:
        raise ValueError(f"delta: {error}") from error
    if len(changed) != count or len(planes) != count * BLOCK_BYTES:
        raise ValueError(
            f"delta: {len(changed)} changed blocks with {len(planes)} bytes, its header says "
            f"{count} blocks"
        )
    difference = np.frombuffer(planes, np.uint8).reshape(item, -1).T.reshape(count, BLOCK_BYTES)
    record = np.frombuffer(old, np.uint8)
    for number, block in zip(changed, difference, strict=True):
        target = record[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        target ^= block[: len(target)]


def _blocks(record: memoryview) -> np.ndarray:
    """[blocks, BLOCK_BYTES] uint8, padded with zeros. It copies only if padding is needed."""
    array = np.frombuffer(record, np.uint8)
    if len(array) % BLOCK_BYTES:
        array = np.pad(array, (0, -len(array) % BLOCK_BYTES))
    return array.reshape(-1, BLOCK_BYTES)
