"""The readers' side: engines and actor_fwd pull the newest version and verify it before they use it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from concurrent.futures import Future
from pathlib import Path

from relax_hpc.rundir import RunDir, private_folder
from relax_hpc.transfer_queue.client import QueueClient
from relax_hpc.versions import Version
from relax_hpc.weights.manifest import TENSORS, WeightsError, read_verified

NOTHING = Version(0, 0)
"""What a reader serves before its first pull."""


def staging_root(run: RunDir) -> Path:
    """Memory-backed folder of this run for verified copies; the supervisor removes it when the run ends."""
    name = f"relax-{os.getuid()}-{hashlib.sha256(str(run.root).encode()).hexdigest()[:16]}"
    memory = Path("/dev/shm")
    return (memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())) / name


def clear_staging(run: RunDir, group: str, epoch: int) -> None:
    """Remove what an incarnation of a group staged on this node."""
    for folder in staging_root(run).glob(f"{group}.*-e{epoch:06d}"):
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        staging_root(run).rmdir()


class Subscriber:
    """One reader. `reader` names it to the controller ("rollout/0"); a version is safe from deletion once served."""

    def __init__(self, run: RunDir, client: QueueClient, reader: str) -> None:
        self.run, self.client, self.reader = run, client, reader
        self.serving = NOTHING

    def newer(self) -> Future:
        """A future {version, digest} of the next version above the one served, or {finished}."""
        return self.client.submit("next_version", after=str(self.serving))

    def read(self, announced: dict[str, str]) -> tuple[dict[str, str], bytes]:
        """The verified safetensors bytes of an announced version, or of a newer one if it is gone already.

        With the announcement of what was read.
        """
        while True:
            try:
                return announced, read_verified(self.run.weights / announced["version"], announced["digest"])[TENSORS]
            except WeightsError:
                newest = self.client.call("next_version", after=str(self.serving))
                if newest.get("version", "") == announced["version"] or "version" not in newest:
                    raise
                announced = newest

    def stage(self, announced: dict[str, str]) -> tuple[Version, Path]:
        """A verified copy in memory that an engine can load as a model directory."""
        announced, data = self.read(announced)
        folder = private_folder(staging_root(self.run)) / self._folder_name()
        if not folder.exists():
            self._prepare(folder)
        temporary = folder / f".{TENSORS}"
        temporary.write_bytes(data)
        temporary.replace(folder / TENSORS)
        return Version.parse(announced["version"]), folder

    def _folder_name(self) -> str:
        """Of its own for each incarnation, so that one's clean-up never touches the next one's."""
        return f"{self.reader.replace('/', '.')}-e{self.client.epoch:06d}"

    def _prepare(self, folder: Path) -> None:
        """Everything of a model directory but the weights; it appears whole."""
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
        temporary.mkdir(mode=0o700)
        for source in self.run.model.iterdir():
            if source.suffix != ".safetensors" and source.is_file():
                shutil.copy(source, temporary / source.name)
        temporary.rename(folder)

    def served(self, version: Version) -> bool:
        """Tell the controller that this reader now works with ``version``; whether an evaluation is due."""
        self.serving = version
        return self.client.call("serve", reader=self.reader, version=str(version))["eval_due"]
