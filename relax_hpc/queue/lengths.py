"""The tokens of each row of a prompt group in few bytes: the controller keeps them for every row
that it knows."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache


def packed(lengths: Sequence[int]) -> bytes:
    """Two bytes a row, or four if one is longer than 65535 tokens; little-endian, in the order of
    the ids.

    >>> packed([5, 258])
    b'\\x05\\x00\\x02\\x01'
    """
    return struct.pack(
        f"<{len(lengths)}{'H' if max(lengths, default=0) < 1 << 16 else 'I'}", *lengths
    )


def unpacked(data: bytes, rows: int) -> tuple[int, ...]:
    """Lengths that were `packed`. struct.error if there are not ``rows`` of them.

    >>> unpacked(packed([5, 70_000]), 2)
    (5, 70000)
    """
    return _layout(rows, len(data)).unpack(data)


@lru_cache(maxsize=1024)
def _layout(rows: int, size: int) -> struct.Struct:
    return struct.Struct(f"<{rows}{'H' if size == 2 * rows else 'I'}")


def is_packed(data: object, rows: int) -> bool:
    """Whether ``data`` are the lengths of ``rows`` rows."""
    return type(data) is bytes and len(data) in (2 * rows, 4 * rows)
