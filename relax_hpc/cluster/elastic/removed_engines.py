"""Engines of own groups that are removed without a restart: the setting `rollout.without`."""

from __future__ import annotations

from collections.abc import Collection

from relax_hpc.base.rundir import RunDir
from relax_hpc.config import load_resolved
from relax_hpc.config.changes import add_change, change_files


class RemovedEngines:
    """The setting `rollout.without` of ``group``, which all members of the group share. The
    processes of the group follow it (`rollout/membership.py`)."""

    def __init__(self, run: RunDir, group: str) -> None:
        self._run, self._group = run, group
        self._read_from: list[str] | None = None
        self._without: list[str] = []
        self._replicas = 0

    def read(self) -> tuple[int, list[str]]:
        """The engines of one group, and the names of those that are removed."""
        files = [path.name for path in change_files(self._run, self._group)]
        if files != self._read_from:
            rollout = load_resolved(self._run.root, self._group).rollout
            self._read_from, self._without = files, list(rollout.without)
            self._replicas = rollout.replicas
        return self._replicas, self._without

    def write(self, without: Collection[str]) -> None:
        """Remove exactly the engines ``without``."""
        _, present = self.read()
        if set(present) != set(without):
            config = load_resolved(self._run.root, self._group)
            changed = {"rollout.without": sorted(without)}
            add_change(self._run, config, self._group, (), changed)
