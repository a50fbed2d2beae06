"""Publication of weights by the actor. A rank's part of each version is copied once; threads do the
rest during training.

`Publisher.publish` returns after the copy. Then a thread offers the copy on the planes. In the
leader it writes the manifest, which the queue's controller journals, and removes old versions.
Another thread writes files. The threads of all ranks work in step, over separate channels.
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
from relax_hpc.training.weights.version_digests import DigestLog
from relax_hpc.training.weights.version_files import FOLDER, check_unchanged, small_sums


@dataclass(frozen=True, slots=True)
class _PublishTask:
    version: Version
    slab: int
    last: bool


class Publisher:
    """Publisher of one rank. ``client``: only in the leader. All ranks create and call it in the
    same way.

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
        digests: DigestLog | None = None,
    ) -> None:
        """``channel``: creates a channel. ``tensors``: of the whole version. ``slices``: parts that
        this rank publishes, from GPU number ``device`` if given. ``refresh_every``: multiples of it
        always get files, because a reference may request such a version later. ``form``: of the
        files; None: files contain each tensor unchanged. ``digests``: log of the digests of all
        versions, only in the leader.

        ConfigError: config.json or the tokenizer of a resumed run differ from those of its
        versions.
        """
        self.run, self.client, self.channel, self.settings = run, client, channel(), settings
        self.tensors, self.slabs, self.refresh_every = dict(tensors), slabs, refresh_every
        self.ring = SlabRing(
            pool, planes, tensors, slices, slabs, settings.chunk_bytes, device is not None
        )
        self.files = FileWriter(
            run, client, channel(), planes, settings, device, form or FileForm()
        )
        self._digests = digests
        self._small: FileSums = {}
        if client is not None:
            check_unchanged(run.weights, run.model)
            self._small = small_sums(run.model)
        self._deltas = AnchorDeltas(pool, self.ring, tensors, settings.anchor_every)
        self.work = BackgroundThread("weights", self._publish, device)

    def publish(self, version: Version, last: bool = False) -> None:
        """Copy the present weights, and publish them as ``version``. The ``last`` version gets
        files.

        Raises the error of an earlier version, such as FencedError.
        """
        self.check()
        # Wait until the next slab is published.
        self._await(self.work, self.settings.write_timeout_s, self.slabs - 1)
        self.work.put(_PublishTask(version, self.ring.copy(), last))

    def check(self) -> None:
        """Raise the error of an earlier version."""
        self.work.check()
        self.files.work.check()

    def delta_share(self) -> float:
        """Bytes of this rank's deltas so far, divided by the bytes of the records that they
        replace; 1 without deltas."""
        return self._deltas.bytes / self._deltas.whole_bytes if self._deltas.whole_bytes else 1.0

    def await_copy(self) -> None:
        """Make the device wait for the copy of the weights, before they change again."""
        self.ring.await_copy()

    def settle(self, timeout_s: float) -> None:
        """Wait until all versions are published and all files are written. DeadlineError after
        ``timeout_s`` seconds."""
        self._await(self.work, timeout_s)
        self._await(self.files.work, timeout_s)

    def _await(self, work: BackgroundThread, timeout_s: float, max_pending: int = 0) -> None:
        # Only the leader measures time: it knows whether the hub is unreachable, and all ranks end
        # with it.
        def is_paused() -> bool:
            return self.client is None or self.client.beat.is_blocked

        if not work.wait(timeout_s, max_pending, is_paused):
            raise DeadlineError(
                f"publishing weights takes more than {timeout_s:g} s; see {self.run.weights}"
            )

    def close(self) -> None:
        """Withdraw all offers. Call it after `settle`."""
        self.ring.close()

    # -- in the thread -----------------------------------------------------------------------------

    def _publish(self, task: _PublishTask) -> None:
        version = task.version
        self.ring.settle()
        chunks = self.ring.offer(task.slab, f"weights-{version}-{self.channel.rank:06d}")
        chunks, anchor = self._deltas.add(version, task.slab, chunks)
        gathered = self.channel.gather([chunk.plain() for chunk in chunks])
        manifest: Manifest | None = None
        if gathered is not None:
            all_chunks: list[Chunk] = []
            for rank_chunks in gathered:
                all_chunks += map(Chunk.from_plain, rank_chunks)
            manifest = Manifest(str(version), self.tensors, tuple(all_chunks), anchor, self._small)
        directory = self.run.weights / str(version)
        self.channel.run_on_leader(lambda: self._announce(version, directory, manifest))
        number, keep = version.number, self.settings.keep_every
        kept = bool(keep) and not number % keep
        refreshes = bool(self.refresh_every) and not number % self.refresh_every
        is_required, sync = task.last or kept or refreshes, task.last or kept
        self.files.offer(version, manifest, is_required=is_required, sync=sync)

    def _announce(self, version: Version, directory: Path, manifest: Manifest | None) -> None:
        """In the leader: write the manifest, journal it, and delete versions without readers."""
        assert manifest is not None and self.client is not None
        text = manifest.encode()
        try:
            retry_write(directory, lambda: _write_manifest(directory, text))
        except OSError as error:
            raise RelaxError(
                f"{directory}: {error.strerror}; version {version} is not published"
            ) from error
        keep = set(self.client.weights.publish(version, digest(text)).result())
        if self._digests:
            self._digests.add(str(version), manifest.chunks)
        for name in older_version_folders(self.run, version):
            if name not in keep and not self._is_kept(name):
                shutil.rmtree(self.run.weights / name, ignore_errors=True)

    def _is_kept(self, name: str) -> bool:
        """Whether the files of version ``name`` are kept permanently."""
        every = self.settings.keep_every
        with contextlib.suppress(ValueError):
            is_multiple = bool(every) and not Version.parse(name).number % every
            return is_multiple and (self.run.weights / name / FOLDER).is_dir()
        return False


def _write_manifest(directory: Path, text: bytes) -> None:
    # Renamed at the end: a directory with a version's name has a complete manifest.
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    write_atomic(temporary / MANIFEST, text)
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)


def older_version_folders(run: RunDir, version: Version) -> list[str]:
    """Directories of versions before ``version`` in <run>/weights, including partial ones of a dead
    actor."""
    names: list[str] = []
    for path in run.weights.iterdir():
        with contextlib.suppress(ValueError):
            if Version.parse(path.name.removeprefix(".").partition(".")[0]) < version:
                names.append(path.name)
    return sorted(names)
