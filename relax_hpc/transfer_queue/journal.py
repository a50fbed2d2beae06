"""The controller's append-only journal: one file an epoch, checksummed records, a successor seals what came before.

Durability `flush`: a record is handed to the operating system before its effect is seen, so it survives the death of
any process; it does not promise to survive a power loss.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

_PREFIX = struct.Struct("<II")
_NAME = re.compile(r"epoch-(\d{6})\.journal")


class JournalError(ValueError):
    """A journal damaged in its middle; the message names the file and the offset."""


def _read(path: Path, limit: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Records of ``path`` with the offset behind each, up to ``limit``; a torn tail ends it, a bad middle raises."""
    data = path.read_bytes()
    data = data[:limit] if limit is not None else data
    at = 0
    while at + _PREFIX.size <= len(data):
        size, crc = _PREFIX.unpack_from(data, at)
        body = data[at + _PREFIX.size : at + _PREFIX.size + size]
        if len(body) < size:
            return
        if zlib.crc32(body) != crc:
            if at + _PREFIX.size + size == len(data):
                return
            raise JournalError(f"{path}: checksum does not match at offset {at}")
        at += _PREFIX.size + size
        yield at, msgpack.unpackb(body, strict_map_key=False)


class Journal:
    """Opens a new epoch's file and yields what the earlier ones recorded.

    The first record of a file seals its predecessors at the lengths that were read, so that what an older controller
    still writes is never seen.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        self.folder, self.epoch = folder, epoch
        self.path = folder / f"epoch-{epoch:06d}.journal"
        self._pending: list[bytes] = []
        self._file = self.path.open("xb", buffering=0)

    def replay(self) -> Iterator[dict[str, Any]]:
        """All records of the earlier epochs, in order; then writes the seal. Call once, before ``append``."""
        paths = {int(m[1]): p for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name))}
        sealed: dict[str, int] = {}
        older = sorted(epoch for epoch in paths if epoch < self.epoch)
        for epoch in older:
            for _, record in _read(paths[epoch], None):
                if record["op"] == "seal":
                    sealed.update(record["lengths"])
        for epoch in older:
            end = 0
            for end, record in _read(paths[epoch], sealed.get(str(epoch))):
                if record["op"] != "seal":
                    yield record
            sealed.setdefault(str(epoch), end)
        self.append({"op": "seal", "lengths": sealed})
        self.commit()

    def append(self, record: dict[str, Any]) -> None:
        """Buffer ``record``; it counts after the next ``commit``."""
        body = msgpack.packb(record)
        self._pending.append(_PREFIX.pack(len(body), zlib.crc32(body)) + body)

    def commit(self) -> None:
        """Hand all buffered records to the operating system in one write."""
        if self._pending:
            data = memoryview(b"".join(self._pending))
            self._pending.clear()
            while data:
                data = data[self._file.write(data) :]

    def close(self) -> None:
        self.commit()
        self._file.close()
