"""Shards as files of one folder on the shared filesystem: always there, readable by every node, and by anyone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_hpc.disk import patiently
from relax_hpc.transfer_queue.row_schema import Row
from relax_hpc.transfer_queue.storage import hdf5
from relax_hpc.transfer_queue.storage.shard import check_name


class ShardFiles:
    """Durable, they survive a power loss from the moment that they are written."""

    def __init__(self, folder: Path, durable: bool = True) -> None:
        self.folder, self.durable = folder, durable
        self._open: dict[str, dict[str, Row]] = {}

    def write(self, name: str, record: memoryview) -> dict[str, Any]:
        """Write what `shard.pack` made under ``name`` by rename; the descriptor by which others read it."""
        check_name(name)
        columns = hdf5.columns_of(record)
        hdf5.write(self.folder / name, columns, {**columns.origin, "run": str(self.folder.parents[1])}, self.durable)
        return {"name": name, "bytes": len(record)}

    def write_patiently(
        self, name: str, record: memoryview, until: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """`write`, again and again while the disk is full, but not once ``until()``."""
        return patiently(self.folder / name, lambda: self.write(name, record), until)

    def read(self, descriptor: dict[str, Any]) -> dict[str, Row]:
        """Rows of a shard by sample id, mapped; ShardError if the file is missing or not whole."""
        name = check_name(descriptor["name"])
        if name not in self._open:
            self._open[name] = hdf5.read(self.folder / name)
        return self._open[name]

    def has(self, name: str) -> bool:
        """Whether there is such a file, whole or not."""
        return (self.folder / check_name(name)).exists()

    def forget(self, keep: set[str]) -> None:
        """Drop the mappings of all shards that are not in ``keep``."""
        self._open = {name: rows for name, rows in self._open.items() if name in keep}
