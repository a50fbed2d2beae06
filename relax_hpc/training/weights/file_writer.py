"""The files of a version, written by all actor ranks while the next versions are trained and
published."""

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
class _Job:
    version: Version
    manifest: Manifest | None
    """Manifest, in the leader."""
    wanted: bool
    """Whether files are written however many versions there are since."""
    sync: bool


class FileWriter:
    """Writer of files of one rank. Every rank offers it the same versions in the same order, from
    one thread."""

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
        """``channel``: used by nothing else."""
        self.run, self.client, self.channel, self.settings = run, client, channel, settings
        self._puller, self._form = Puller(planes, settings.read_timeout_s), form
        self._untrained = UntrainedTensors(
            run.model, form.untrained if client else (), run.weights / FILE
        )
        """Tensors that versions have beside those of ranks, in the leader."""
        self.work = BackgroundThread("weights, files", self._write, device)

    def offer(self, version: Version, manifest: Manifest | None, wanted: bool, sync: bool) -> None:
        """Have the files of ``version`` written: if ``wanted``, and else if it is one of those that
        have files and no newer one is there when its turn comes."""
        every = self.settings.file_every
        if wanted or (every and not version.number % every):
            self.work.put(_Job(version, manifest, wanted, sync))

    def _write(self, job: _Job) -> None:
        """All ranks write their shares, as often as it takes where a disk is full; if one cannot
        for another reason, or a newer version is due meanwhile, this one stays without files."""
        folder = self.run.weights / str(job.version)
        full = WriteRetry(folder)
        while True:
            due = {
                "write": job.wanted or self.work.pending == 1,
                "manifest": job.manifest and job.manifest.encode(),
            }
            due["more"] = bool(self._untrained)
            due = self.channel.broadcast(due if self.channel.rank == 0 else None)
            if not due["write"]:
                full.note_success()
                return
            division = FileDivision(self.channel.size, due["more"], self._form)
            number = self._try(job, Manifest.decode(due["manifest"]), folder / _PARTIAL, division)
            if not number:
                full.note_success()
                return
            full.note_failure(OSError(number, "cannot be written"))
            time.sleep(max(0.0, full.next_try - time.monotonic()))

    def _try(self, job: _Job, manifest: Manifest, partial: Path, division: FileDivision) -> int:
        """Write it once; the number of the error after which it is to be tried again, 0 if it is
        not."""
        gathered = self.channel.gather(self._share(manifest, partial, division, job.sync))
        return self.channel.run_on_leader(
            lambda: self._finish(job, manifest, partial, division, gathered or [])
        )

    def _finish(
        self,
        job: _Job,
        manifest: Manifest,
        partial: Path,
        division: FileDivision,
        gathered: list[dict[str, Any]],
    ) -> int:
        """Finish the files, in the leader, when all ranks have written theirs, or failed."""
        assert self.client is not None
        failures = [(found["failure"], found["errno"]) for found in gathered if "failure" in found]
        if not failures:
            try:
                sums = [found["sums"] for found in gathered]
                listing = finish(
                    manifest, partial, self.run.model, sums, division, self._untrained, job.sync
                )
            except (OSError, RelaxError) as error:
                failures = [(str(error), getattr(error, "errno", None) or 0)]
        if not failures:
            self.client.weights.filed(job.version, listing).result()
            return 0
        shutil.rmtree(partial, ignore_errors=True)
        print_log_line(
            f"weights: version {job.version} has no files: {'; '.join(why for why, _ in failures)}"
        )
        # What a full disk has not caused no room on it will mend.
        number = min((number if number in CURES else 0) for _, number in failures)
        if not number:
            self.client.status.note("weights_unwritten", str(job.version), "unwritten")
        return number

    def _share(
        self, manifest: Manifest, partial: Path, division: FileDivision, sync: bool
    ) -> dict[str, Any]:
        """Checksums of what this rank has written, or why it has not."""
        rank = self.channel.rank
        try:
            partial.mkdir(mode=0o700, exist_ok=True)
            memory = private_folder(staging_root(self.run))
            return {
                "sums": write_share(manifest, self._puller, partial, rank, division, memory, sync)
            }
        except Exception as error:
            # Whoever left here would leave the others waiting.
            return {"failure": f"rank {rank}: {error}", "errno": getattr(error, "errno", None) or 0}
