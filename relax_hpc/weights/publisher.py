"""The actor's side: a rank's part of each version is copied once, and all the rest happens beside training.

`Publisher.publish` returns when the copy is made. A thread then offers it on the planes, has the leader write the
manifest and the queue's controller journal it, removes what nobody needs, and writes the files that are due. The
threads of the ranks follow each other, by a channel that nobody else uses.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.config.schema import WeightsConfig
from relax_hpc.errors import DeadlineError, RelaxError
from relax_hpc.rendezvous.channel import Channel
from relax_hpc.rundir import RunDir, private_folder, write_atomic
from relax_hpc.transfer_queue.client import QueueClient
from relax_hpc.transfer_queue.planes import Plane, SlabPool
from relax_hpc.versions import Version
from relax_hpc.weights.delta import Deltas
from relax_hpc.weights.files import FOLDER, finish, write_share
from relax_hpc.weights.manifest import MANIFEST, Chunk, Manifest, WeightsError, digest
from relax_hpc.weights.pull import Puller
from relax_hpc.weights.ring import SlabRing, Slice
from relax_hpc.weights.staging import staging_root
from relax_hpc.weights.tensors import Tensor

_PARTIAL = ".model.partial"


@dataclass(frozen=True, slots=True)
class _Job:
    version: Version
    slab: int
    last: bool


class Publisher:
    """One rank's. ``client``: the leader's, None elsewhere. Every rank makes and calls it alike.

    >>> publisher.publish(Version(epoch, step + 1))
    >>> publisher.settle(timeout_s)
    """

    def __init__(
        self,
        run: RunDir,
        client: QueueClient | None,
        channel: Channel,
        planes: Sequence[Plane],
        pool: SlabPool,
        tensors: Mapping[str, Tensor],
        slices: Sequence[Slice],
        slabs: int,
        settings: WeightsConfig,
        pinned: bool = False,
    ) -> None:
        """``tensors``: the whole version's; ``slices``: what this rank publishes of them, ``pinned`` if from a GPU."""
        self.run, self.client, self.channel, self.settings = run, client, channel, settings
        self.tensors = dict(tensors)
        self.ring = SlabRing(pool, planes, tensors, slices, slabs, settings.chunk_bytes, pinned)
        self._deltas = Deltas(pool, self.ring, tensors, settings.anchor_every)
        self._puller = Puller(planes, settings.read_timeout_s)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._waiting = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
        self._thread.start()

    def publish(self, version: Version, last: bool = False) -> None:
        """Copy the weights as they are, and have them published as ``version``. The ``last`` one gets files.

        Raises what went wrong with an earlier version, such as FencedError.
        """
        self._check()
        slab = self.ring.copy()
        with self._idle:
            self._waiting += 1
        self._jobs.put(_Job(version, slab, last))

    def delta_share(self) -> float:
        """Bytes of this rank's deltas so far, in those of the records that they stand for; 1 without any."""
        return self._deltas.bytes / self._deltas.whole_bytes if self._deltas.whole_bytes else 1.0

    def await_copy(self) -> None:
        """Before the weights change again."""
        self.ring.await_copy()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def settle(self, timeout_s: float) -> None:
        """Wait until all that was to be published has been. DeadlineError after ``timeout_s`` seconds."""
        with self._idle:
            done = self._idle.wait_for(lambda: self._failure or not self._waiting, timeout_s)
        self._check()
        if not done:
            raise DeadlineError(f"publishing weights has not ended within {timeout_s:g} s; see {self.run.weights}")

    def close(self) -> None:
        """After `settle`: end the thread, offer nothing any more."""
        self._jobs.put(None)
        self._thread.join()
        self.ring.close()

    # -- in the thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self._publish(job)
                with self._idle:
                    self._waiting -= 1
                    self._idle.notify_all()
        except BaseException as error:
            with self._idle:
                self._failure = error
                self._idle.notify_all()

    def _publish(self, job: _Job) -> None:
        self.ring.settle()
        chunks = self.ring.offer(job.slab, f"weights-{job.version}-{self.channel.rank:06d}")
        chunks, anchor = self._deltas.add(job.version, job.slab, chunks)
        parts = self.channel.gather([chunk.plain() for chunk in chunks])
        directory = self.run.weights / str(job.version)
        manifest = None
        if parts is not None:
            everything = tuple(Chunk.of(one) for part in parts for one in part)
            manifest = Manifest(str(job.version), self.tensors, everything, anchor)
            self._announce(job.version, directory, manifest)
        if self.channel.tell({"write": self._files_due(job)} if parts is not None else None)["write"]:
            self._write_files(job, directory, manifest)

    def _announce(self, version: Version, directory: Path, manifest: Manifest) -> None:
        """Write the manifest, have it journaled, delete what nobody needs."""
        text = manifest.encode()
        shutil.rmtree(directory, ignore_errors=True)
        temporary = directory.with_name(f".{version}.{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(mode=0o700)
            write_atomic(temporary / MANIFEST, text)
            temporary.rename(directory)
        except OSError as error:
            raise RelaxError(f"{directory}: {error.strerror}; version {version} is not published") from error
        keep = set(self.client.call("publish", version=str(version), digest=digest(text))["keep"])
        for name in old_directories(self.run, version):
            if name not in keep and not self._is_kept(name):
                shutil.rmtree(self.run.weights / name, ignore_errors=True)

    def _is_kept(self, name: str) -> bool:
        """Whether the files of version ``name`` are for good."""
        every = self.settings.keep_every
        with contextlib.suppress(ValueError):
            return (
                bool(every) and not Version.parse(name).number % every and (self.run.weights / name / FOLDER).is_dir()
            )
        return False

    def _files_due(self, job: _Job) -> bool:
        """Versions that are already superseded are passed over, unless they are to be kept."""
        settings, number = self.settings, job.version.number
        if job.last or (settings.keep_every and not number % settings.keep_every):
            return True
        return bool(settings.file_every) and not number % settings.file_every and self._jobs.empty()

    def _write_files(self, job: _Job, directory: Path, manifest: Manifest | None) -> None:
        """All ranks write their shares of the version; if one cannot, it stays without files."""
        manifest = Manifest.decode(self.channel.tell(manifest.encode() if manifest else None))
        sync = bool(self.settings.keep_every) and not job.version.number % self.settings.keep_every
        rank, ranks, partial = self.channel.rank, self.channel.size, directory / _PARTIAL
        found: dict[str, object] = {}
        try:
            partial.mkdir(mode=0o700, exist_ok=True)
            memory = private_folder(staging_root(self.run))
            found["sums"] = write_share(manifest, self._puller, partial, rank, ranks, memory, sync)
        except (OSError, WeightsError) as error:
            found["failure"] = f"rank {rank}: {error}"
        gathered = self.channel.gather(found)
        if gathered is None:
            return
        failures = [one["failure"] for one in gathered if "failure" in one]
        try:
            if failures:
                raise OSError("; ".join(failures))
            listing = finish(manifest, partial, self.run.model, [one["sums"] for one in gathered], ranks, sync)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            print(f"weights: version {job.version} has no files: {error}", file=sys.stderr, flush=True)
            self.client.submit("note", what="weights_unwritten", name=str(job.version), reason="unwritten")
            return
        self.client.call("filed", version=str(job.version), digest=listing)


def old_directories(run: RunDir, version: Version) -> list[str]:
    """What lies in <run>/weights from before ``version``: published or not, half written by a dead actor or whole."""
    found: list[str] = []
    for path in run.weights.iterdir():
        with contextlib.suppress(ValueError):
            if Version.parse(path.name.removeprefix(".").partition(".")[0]) < version:
                found.append(path.name)
    return sorted(found)
