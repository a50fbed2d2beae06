"""Copies of versions in the run directory, for engines on other nodes."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from relax_hpc.base.rundir import write_json
from relax_hpc.base.versions import Version
from relax_hpc.training.weights.slab import MARK
from relax_hpc.training.weights.summed_files import copy_summed
from relax_hpc.training.weights.version_files import LISTING

_KEPT = 2
"""Versions whose copies are kept: an engine may still read the one before the newest."""


class SharedVersions:
    """The folder ``external`` of a run. One process writes it: the leader of the first rollout
    group. Each version is copied once, however many engines read it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._copying = asyncio.Lock()
        self._users = Counter[str]()
        """Engines that load a version now, by its name."""

    @contextlib.asynccontextmanager
    async def published(self, staged: Path, version: Version) -> AsyncIterator[Path]:
        """Folder with a copy of the model directory ``staged`` of ``version``, and the checksums of
        its files. It stays while the body runs, also if an engine loads for longer than two
        training steps. Older copies are removed. OSError: the disk is full, or it cannot be
        written."""
        target = self.root / str(version)
        self._users[target.name] += 1
        try:
            async with self._copying:
                if not target.exists():
                    await asyncio.to_thread(self._copy, staged, target)
                    await asyncio.to_thread(self._remove_old)
            yield target
        finally:
            self._users[target.name] -= 1

    def _copy(self, staged: Path, target: Path) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            sums = {}
            for path in sorted(staged.iterdir()):
                if path.is_file() and path.name != MARK:
                    sums[path.name] = copy_summed(path, partial / path.name)
            write_json(partial / LISTING, sums)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _remove_old(self) -> None:
        with contextlib.suppress(OSError):
            for path in sorted(self.root.glob("i*-v*"))[:-_KEPT]:
                if self._users[path.name] <= 0:
                    shutil.rmtree(path, ignore_errors=True)

    async def clear(self) -> None:
        """Remove all copies. No engine reads them any more."""
        await asyncio.to_thread(shutil.rmtree, self.root, True)
