"""Writer of the files of a version. All actor ranks write them while the next versions are trained
and published."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_hpc.base.background import BackgroundThread, print_log_line
from relax_hpc.base.disk_waits import CURES, WriteRetry
from relax_hpc.base.errors import RelaxError
from relax_hpc.base.rundir import RunDir, private_folder
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import WeightsConfig
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.net.transport import Plane
from relax_hpc.queue.client import QueueClient
from relax_hpc.training.weights.file_form import FileForm
from relax_hpc.training.weights.manifest import Manifest
from relax_hpc.training.weights.node_cache import staging_root
from relax_hpc.training.weights.pull import Puller
from relax_hpc.training.weights.untrained_tensors import FILE, UntrainedTensors
from relax_hpc.training.weights.version_files import FileDivision, finish, write_share

_PARTIAL = ".model.partial"


@dataclass(frozen=True, slots=True)
class _FileTask:
    version: Version
    manifest: Manifest | None
    """Manifest, only in the leader."""
    is_required: bool
    """Whether files are written even if newer versions exist."""
    sync: bool


class FileWriter:
    """File writer of one rank. All ranks offer the same versions in the same order, from one
    thread."""

    def __init__(
        self,
        run: RunDir,
        client: QueueClient | None,
        channel: RankChannel,
        planes: Sequence[Plane],
        settings: WeightsConfig,
        device: int | None,
        form: FileForm,
    ) -> None:
        """``channel``: used only by this writer."""
        self.run, self.client, self.channel, self.settings = run, client, channel, settings
        self._puller, self._form = Puller(planes, settings.read_timeout_s), form
        # Further tensors of the files of versions, only in the leader.
        self._untrained = UntrainedTensors(
            run.model, form.untrained if client else (), run.weights / FILE
        )
        self.work = BackgroundThread("weights, files", self._write, device)

    def offer(
        self, version: Version, manifest: Manifest | None, is_required: bool, sync: bool
    ) -> None:
        """Queue the files of ``version``.

        They are written if ``is_required``. Otherwise they are written if `file_every` selects the
        version, and no newer version is queued when its turn comes.
        """
        every = self.settings.file_every
        if is_required or (every and not version.number % every):
            self.work.put(_FileTask(version, manifest, is_required, sync))

    def _write(self, task: _FileTask) -> None:
        """Write the files with all ranks. While a disk is full, try again.

        The version stays without files if a rank fails for another reason, or if a newer version is
        queued meanwhile.
        """
        folder = self.run.weights / str(task.version)
        disk = WriteRetry(folder)
        while True:
            message: dict[str, Any] | None = None
            if self.channel.rank == 0:
                message = {
                    "write": task.is_required or self.work.pending == 1,
                    "manifest": task.manifest and task.manifest.encode(),
                    "more": bool(self._untrained),
                }
            message = self.channel.broadcast(message)
            if not message["write"]:
                disk.note_success()
                return
            # All ranks divide the version in the same way, so no rank needs to be told its tensors.
            division = FileDivision(self.channel.size, message["more"], self._form)
            manifest = Manifest.decode(message["manifest"])
            number = self._try_write(task, manifest, folder / _PARTIAL, division)
            if not number:
                disk.note_success()
                return
            disk.note_failure(OSError(number, "cannot be written"))
            time.sleep(max(0.0, disk.next_try - time.monotonic()))

    def _try_write(
        self, task: _FileTask, manifest: Manifest, partial: Path, division: FileDivision
    ) -> int:
        """Write the files once. Returns the error number if it should be tried again, else 0."""
        gathered = self.channel.gather(self._write_share(manifest, partial, division, task.sync))
        return self.channel.run_on_leader(
            lambda: self._finish(task, manifest, partial, division, gathered or [])
        )

    def _finish(
        self,
        task: _FileTask,
        manifest: Manifest,
        partial: Path,
        division: FileDivision,
        gathered: list[dict[str, Any]],
    ) -> int:
        """Complete the files in the leader, after all ranks have written their shares or failed.
        Returns as `_try_write`."""
        assert self.client is not None
        failures = [(share["failure"], share["errno"]) for share in gathered if "failure" in share]
        if not failures:
            try:
                sums = [share["sums"] for share in gathered]
                listing = finish(
                    manifest, partial, self.run.model, sums, division, self._untrained, task.sync
                )
            except (OSError, RelaxError) as error:
                failures = [(str(error), getattr(error, "errno", None) or 0)]
        if not failures:
            self.client.weights.filed(task.version, listing).result()
            return 0
        reasons = "; ".join(reason for reason, _ in failures)
        shutil.rmtree(partial, ignore_errors=True)
        print_log_line(f"weights: version {task.version} has no files: {reasons}")
        # 0 if one failure has another cause than the disk: space would not solve it.
        number = min((number if number in CURES else 0) for _, number in failures)
        if not number:
            self.client.status.note("weights_unwritten", str(task.version), "unwritten")
        return number

    def _write_share(
        self, manifest: Manifest, partial: Path, division: FileDivision, sync: bool
    ) -> dict[str, Any]:
        """Checksums of the file that this rank has written, or the reason of its failure."""
        rank = self.channel.rank
        try:
            partial.mkdir(mode=0o700, exist_ok=True)
            memory = private_folder(staging_root(self.run))
            sums = write_share(manifest, self._puller, partial, rank, division, memory, sync)
            return {"sums": sums}
        except Exception as error:
            # Any error: a rank that left here would let the other ranks wait.
            return {"failure": f"rank {rank}: {error}", "errno": getattr(error, "errno", None) or 0}
