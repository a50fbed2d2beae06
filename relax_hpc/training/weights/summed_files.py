"""Files that are written or copied together with a checksum of their bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

PIECE_BYTES = 4 << 20
"""Bytes that are read, summed and written in one step."""


def copy_summed(source: Path, target: Path) -> dict[str, Any]:
    """Copy a file. Returns {bytes, xxh3_128} of the copy."""
    with source.open("rb") as file:
        return write_summed(iter(partial(file.read, PIECE_BYTES), b""), target, sync=False)


def write_summed(pieces: Iterable[bytes | memoryview], target: Path, sync: bool) -> dict[str, Any]:
    """Write ``pieces`` to a new file. Returns its {bytes, xxh3_128}."""
    state, size = xxhash.xxh3_128(), 0
    with target.open("wb") as file:
        for piece in pieces:
            state.update(piece)
            size += file.write(piece)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    return {"bytes": size, "xxh3_128": state.hexdigest()}
