"""The actor's side: a rank's part of each version is copied once, and all the rest happens beside
training.

`Publisher.publish` returns when the copy is made. A thread then offers it on the planes, has the
leader write the manifest and the queue's controller journal it, and removes what nobody needs;
another one writes the files that are due. The threads of the ranks follow each other, by channels
that nobody else uses.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.base.background import BackgroundThread
from relax_hpc.base.disk_waits import retry_write
from relax_hpc.base.errors import DeadlineError, RelaxError
from relax_hpc.base.rundir import RunDir, write_atomic
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import WeightsConfig
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.net.transport import Plane, SlabPool
from relax_hpc.queue.client import QueueClient
from relax_hpc.training.weights.delta import AnchorDeltas
from relax_hpc.training.weights.file_form import FileForm
from relax_hpc.training.weights.file_writer import FileWriter
from relax_hpc.training.weights.manifest import MANIFEST, Chunk, FileSums, Manifest, digest
from relax_hpc.training.weights.ring import SlabRing, WeightSlice
from relax_hpc.training.weights.tensors import TensorInfo
from relax_hpc.training.weights.version_files import FOLDER, check_unchanged, small_sums


@dataclass(frozen=True, slots=True)
class _Job:
    version: Version
    slab: int
    last: bool


class Publisher:
    """One rank's. ``client``: the leader's, None elsewhere. Every rank makes and calls it alike.

    ::

        publisher.publish(Version(incarnation, step + 1))
        publisher.settle(timeout_s)
    """

    def __init__(
        self,
        run: RunDir,
        client: QueueClient | None,
        channel: Callable[[], RankChannel],
        planes: Sequence[Plane],
        pool: SlabPool,
        tensors: Mapping[str, TensorInfo],
        slices: Sequence[WeightSlice],
        slabs: int,
        settings: WeightsConfig,
        refresh_every: int = 0,
        device: int | None = None,
        form: FileForm | None = None,
    ) -> None:
        """``channel`` makes one. ``tensors``: the whole version's; ``slices``: what this rank
        publishes of them, from GPU number ``device`` if that is given. Versions that are multiples
        of ``refresh_every`` get files in any case: a reference may ask for one long after.
        ``form``: that of files; None: each tensor is one of theirs. ConfigError: config.json or the
        tokenizer of a run that goes on is another one than its versions were published with.
        """
        self.run, self.client, self.channel, self.settings = run, client, channel(), settings
        self.tensors, self.slabs, self.refresh_every = dict(tensors), slabs, refresh_every
        self.ring = SlabRing(
            pool, planes, tensors, slices, slabs, settings.chunk_bytes, device is not None
        )
        self.files = FileWriter(
            run, client, channel(), planes, settings, device, form or FileForm()
        )
        self._small: FileSums = {}
        if client is not None:
            check_unchanged(run.weights, run.model)
            self._small = small_sums(run.model)
        self._deltas = AnchorDeltas(pool, self.ring, tensors, settings.anchor_every)
        self.work = BackgroundThread("weights", self._publish, device)

    def publish(self, version: Version, last: bool = False) -> None:
        """Copy the weights as they are, and have them published as ``version``. The ``last`` one
        gets files.

        Raises what went wrong with an earlier version, such as FencedError.
        """
        self.check()
        # The slab that is next may still wait to be published.
        self._await(self.work, self.settings.write_timeout_s, self.slabs - 1)
        self.work.put(_Job(version, self.ring.copy(), last))

    def check(self) -> None:
        """Raise what has gone wrong with an earlier version."""
        self.work.check()
        self.files.work.check()

    def delta_share(self) -> float:
        """Bytes of this rank's deltas so far, in those of the records that they stand for; 1
        without any."""
        return self._deltas.bytes / self._deltas.whole_bytes if self._deltas.whole_bytes else 1.0

    def await_copy(self) -> None:
        """Wait for the copy of the weights, before they change again."""
        self.ring.await_copy()

    def settle(self, timeout_s: float) -> None:
        """Wait until all that was to be published has been. DeadlineError after ``timeout_s``
        seconds."""
        self._await(self.work, timeout_s)
        self._await(self.files.work, timeout_s)

    def _await(self, work: BackgroundThread, timeout_s: float, most: int = 0) -> None:
        # The leader has the deadline: it knows of the hub, and ends with all others.
        if not work.wait(
            timeout_s, most, lambda: self.client is None or self.client.beat.is_blocked
        ):
            raise DeadlineError(
                f"publishing weights takes more than {timeout_s:g} s; see {self.run.weights}"
            )

    def close(self) -> None:
        """Offer nothing any more; to be called after `settle`."""
        self.ring.close()

    # -- in the thread -----------------------------------------------------------------------------

    def _publish(self, job: _Job) -> None:
        self.ring.settle()
        chunks = self.ring.offer(job.slab, f"weights-{job.version}-{self.channel.rank:06d}")
        chunks, anchor = self._deltas.add(job.version, job.slab, chunks)
        parts = self.channel.gather([chunk.plain() for chunk in chunks])
        manifest = None
        if parts is not None:
            everything = tuple(Chunk.from_plain(one) for part in parts for one in part)
            manifest = Manifest(str(job.version), self.tensors, everything, anchor, self._small)
        self.channel.run_on_leader(
            lambda: self._announce(job.version, self.run.weights / str(job.version), manifest)
        )
        number, keep = job.version.number, self.settings.keep_every
        kept = bool(keep) and not number % keep
        refreshes = bool(self.refresh_every) and not number % self.refresh_every
        self.files.offer(
            job.version, manifest, wanted=job.last or kept or refreshes, sync=job.last or kept
        )

    def _announce(self, version: Version, directory: Path, manifest: Manifest | None) -> None:
        """The leader's part: write the manifest, have it journaled, delete what nobody needs."""
        assert manifest is not None and self.client is not None
        text = manifest.encode()
        try:
            retry_write(directory, lambda: _write_manifest(directory, text))
        except OSError as error:
            raise RelaxError(
                f"{directory}: {error.strerror}; version {version} is not published"
            ) from error
        keep = set(self.client.weights.publish(version, digest(text)).result())
        for name in older_version_folders(self.run, version):
            if name not in keep and not self._is_kept(name):
                shutil.rmtree(self.run.weights / name, ignore_errors=True)

    def _is_kept(self, name: str) -> bool:
        """Whether the files of version ``name`` are kept for good."""
        every = self.settings.keep_every
        with contextlib.suppress(ValueError):
            due = bool(every) and not Version.parse(name).number % every
            return due and (self.run.weights / name / FOLDER).is_dir()
        return False


def _write_manifest(directory: Path, text: bytes) -> None:
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    write_atomic(temporary / MANIFEST, text)
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)


def older_version_folders(run: RunDir, version: Version) -> list[str]:
    """Directories in <run>/weights from before ``version``: published or not, half written by a
    dead actor or whole."""
    found: list[str] = []
    for path in run.weights.iterdir():
        with contextlib.suppress(ValueError):
            if Version.parse(path.name.removeprefix(".").partition(".")[0]) < version:
                found.append(path.name)
    return sorted(found)
