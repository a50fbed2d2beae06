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

_SIZES = struct.Struct("<II")
_CHECK = struct.Struct("<I")
_HEAD = _SIZES.size + _CHECK.size
_NAME = re.compile(r"epoch-(\d{6})\.journal")


class JournalError(ValueError):
    """A journal damaged in its middle; the message names the file and the offset."""


def _frame(body: bytes) -> bytes:
    """Length and checksum of ``body``, a checksum over those two, so that a bad length is not taken for a torn tail."""
    sizes = _SIZES.pack(len(body), zlib.crc32(body))
    return sizes + _CHECK.pack(zlib.crc32(sizes)) + body


def _read(path: Path, limit: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Records of ``path`` with the offset behind each. Without a ``limit`` a torn tail ends it; a bad middle raises."""
    data = memoryview(path.read_bytes())[:limit]
    at = 0
    while at + _HEAD <= len(data):
        size, crc = _SIZES.unpack_from(data, at)
        if zlib.crc32(data[at : at + _SIZES.size]) != _CHECK.unpack_from(data, at + _SIZES.size)[0]:
            raise JournalError(f"{path}: a record's length does not match its checksum at offset {at}")
        end = at + _HEAD + size
        body = data[at + _HEAD : end]
        if len(body) < size:
            break
        if zlib.crc32(body) != crc:
            if end == len(data) and limit is None:
                break
            raise JournalError(f"{path}: checksum does not match at offset {at}")
        yield end, msgpack.unpackb(body, strict_map_key=False)
        at = end
    if limit is not None and at != limit:
        raise JournalError(f"{path}: ends at offset {at}, sealed at {limit}")


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
        paths = {epoch: path for epoch, path in self._files().items() if epoch < self.epoch}
        sealed: dict[str, int] = {}
        # The newest seal binds: what an older controller wrote later, whole or not, is not even looked at.
        for epoch in sorted(paths, reverse=True):
            first = next(_read(paths[epoch], sealed.get(str(epoch))), None)
            for older in [other for other in paths if first and other < epoch]:
                sealed.setdefault(str(older), first[1]["lengths"].get(str(older), 0))
        for epoch in sorted(paths):
            end = 0
            for offset, record in _read(paths[epoch], sealed.get(str(epoch))):
                end = offset
                if record["op"] != "seal":
                    yield record
            sealed.setdefault(str(epoch), end)
        self.append({"op": "seal", "lengths": sealed})
        self.commit()

    def _files(self) -> dict[int, Path]:
        return {int(m[1]): path for path in self.folder.iterdir() if (m := _NAME.fullmatch(path.name))}

    def superseded(self) -> int:
        """Epoch of a successor, or 0. Ask after ``commit`` and before replying: a successor makes its file before it
        reads this one, so what was written while there was none is in its replay."""
        newest = max(self._files(), default=0)
        return newest if newest > self.epoch else 0

    def append(self, record: dict[str, Any]) -> None:
        """Buffer ``record``; it counts after the next ``commit``."""
        self._pending.append(_frame(msgpack.packb(record)))

    def commit(self) -> bool:
        """Hand all buffered records to the operating system in one write; whether there were any."""
        data = memoryview(b"".join(self._pending))
        wrote = bool(self._pending)
        self._pending.clear()
        while data:
            data = data[self._file.write(data) :]
        return wrote

    def close(self) -> None:
        self.commit()
        self._file.close()
