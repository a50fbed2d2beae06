"""The tokens of each sample of a prompt group in few bytes: the controller keeps them for every row that it knows."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def packed(lengths: Sequence[int]) -> bytes:
    """Two bytes a sample, or four if one is longer than 65535 tokens; little-endian, in sample order.

    >>> packed([5, 258])
    b'\\x05\\x00\\x02\\x01'
    """
    return struct.pack(f"<{len(lengths)}{'H' if max(lengths, default=0) < 1 << 16 else 'I'}", *lengths)


def unpacked(data: bytes, samples: int) -> tuple[int, ...]:
    """What was `packed`. struct.error if it is not of so many samples.

    >>> unpacked(packed([5, 70_000]), 2)
    (5, 70000)
    """
    return struct.unpack(f"<{samples}{'H' if len(data) == 2 * samples else 'I'}", data)


def is_packed(data: object, samples: int) -> bool:
    """Whether ``data`` are the lengths of so many samples."""
    return type(data) is bytes and len(data) in (2 * samples, 4 * samples)
