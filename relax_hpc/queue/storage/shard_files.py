"""Shards as files in one folder on the shared filesystem, which every node can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from relax_hpc.base.disk_waits import retry_write
from relax_hpc.base.rundir import sync_directory
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage import record_file
from relax_hpc.queue.storage.shard import check_name


class ShardFiles:
    """Files of shards. If ``durable``, they survive a power loss after `write` returns."""

    def __init__(self, folder: Path, durable: bool = True) -> None:
        self.folder, self.durable = folder, durable
        self._open: dict[str, dict[str, Row]] = {}

    def write(self, name: str, record: memoryview) -> dict[str, Any]:
        """Write a record of `shard.pack` under ``name``, by rename; the descriptor with which
        others read it."""
        self.write_some({name: record})
        return {"name": name, "bytes": len(record)}

    def write_some(
        self, records: Mapping[str, memoryview], until: Callable[[], bool] = lambda: True
    ) -> None:
        """Write ``records`` by name, and sync their folder once. While the disk is full, writes are
        tried again until ``until()`` is true."""
        for name, record in records.items():
            path = self.folder / check_name(name)
            retry_write(path, partial(record_file.write, path, record, self.durable), until)
        if self.durable:
            retry_write(self.folder, partial(sync_directory, self.folder), until)

    def read(self, descriptor: dict[str, Any]) -> dict[str, Row]:
        """Rows of a shard by row id, mapped. ShardError: the file is missing or damaged."""
        name = check_name(descriptor["name"])
        if name not in self._open:
            self._open[name] = record_file.read(self.folder / name)
        return self._open[name]

    def has(self, name: str) -> bool:
        """Whether the file exists, even if it is damaged."""
        return (self.folder / check_name(name)).exists()

    def forget(self, keep: set[str]) -> None:
        """Drop the mappings of all shards that are not in ``keep``."""
        self._open = {name: rows for name, rows in self._open.items() if name in keep}
