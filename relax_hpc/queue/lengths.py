"""Compact encoding of the lengths of the rows of a prompt group: the controller keeps them for
every row."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeGuard


def pack_lengths(lengths: Sequence[int]) -> bytes:
    """Two bytes for each row, or four if a row is longer than 65535 tokens; little-endian, in the
    order of the ids.

    >>> pack_lengths([5, 258])
    b'\\x05\\x00\\x02\\x01'
    """
    code = "H" if max(lengths, default=0) < 1 << 16 else "I"
    return struct.pack(f"<{len(lengths)}{code}", *lengths)


def unpack_lengths(data: bytes, rows: int) -> tuple[int, ...]:
    """Lengths that `pack_lengths` encoded. struct.error if there are not ``rows`` of them.

    >>> unpack_lengths(pack_lengths([5, 70_000]), 2)
    (5, 70000)
    """
    return _layout(rows, len(data)).unpack(data)


@lru_cache(maxsize=1024)
def _layout(rows: int, size: int) -> struct.Struct:
    return struct.Struct(f"<{rows}{'H' if size == 2 * rows else 'I'}")


def is_packed(data: object, rows: int) -> TypeGuard[bytes]:
    """Whether ``data`` can be the encoded lengths of ``rows`` rows."""
    return type(data) is bytes and len(data) in (2 * rows, 4 * rows)
