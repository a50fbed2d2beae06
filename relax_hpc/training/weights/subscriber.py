"""Readers of weights: engines, actor_fwd and a refreshed reference pull the newest version, and
verify it before they use it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import chain, repeat
from pathlib import Path

from relax_hpc.base.background import print_log_line
from relax_hpc.base.errors import DeadlineError
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import WeightsConfig
from relax_hpc.net.transport import Descriptor, Plane
from relax_hpc.queue.client import PublishedVersion, QueueClient
from relax_hpc.training.weights.manifest import Manifest, WeightsError, read_manifest
from relax_hpc.training.weights.node_cache import StagedFolder, Staging, staging_root
from relax_hpc.training.weights.pull import Anchor, Puller
from relax_hpc.training.weights.relay import Ask, make_relay
from relax_hpc.training.weights.slab import MARK
from relax_hpc.training.weights.tensors import SafetensorsFile
from relax_hpc.training.weights.version_files import TENSORS, check_small, copy_small, copy_verified

NOTHING = Version(0, 0)
"""Version that a reader serves before its first pull."""
_FILE = "file"
# Seconds for the hub to name other readers of a version. After that the reader uses the actor.
_HUB_S = 5.0
# Seconds to wait for a newer version after a failed read. After that the read is tried again.
_NEWER_S = 10.0


class Fetcher:
    """Fetches versions into the memory of this node, from the actor's memory or from files."""

    def __init__(
        self, run: RunDir, planes: Sequence[Plane], settings: WeightsConfig, ask: Ask | None = None
    ) -> None:
        """``ask``: request to the hub for readers of other nodes, with which this node exchanges
        versions. None: no relays."""
        self.run, self.settings = run, settings
        self.puller = Puller(planes, settings.read_timeout_s)
        self.staging = Staging(staging_root(run))
        self.relay = make_relay(planes, ask)
        # Folder of the present anchor, to which deltas of later versions refer.
        self._anchor: StagedFolder | None = None

    def fetch(self, published: PublishedVersion) -> StagedFolder:
        """A verified model directory of ``published`` in memory. WeightsError, one line: it cannot
        be read."""
        try:
            staged = self._stage(published)
            if self.settings.anchor_every and self._is_anchor(published):
                self._hold_anchor(self._stage(published))
            return staged
        except DeadlineError as error:
            raise WeightsError(str(error)) from error
        except OSError as error:
            raise WeightsError(f"version {published.version}: {error}") from error

    def fetch_in_time(self, published: PublishedVersion) -> StagedFolder:
        """`fetch`, tried again for at most `read_timeout_s`."""
        deadline = time.monotonic() + self.settings.read_timeout_s
        for pause in _pauses():
            try:
                return self.fetch(published)
            except WeightsError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(pause)
        raise AssertionError("_pauses() does not end")

    def _stage(self, published: PublishedVersion) -> StagedFolder:
        # The process that pulls has a limit per record. Processes that wait for it need a longer
        # limit.
        patience_s = self.settings.write_timeout_s
        staged = self.staging.get(
            published.version, lambda folder: self._pull(published, folder), patience_s
        )
        if self.relay:
            self.relay.settle(staged)
        return staged

    def relay_folders(self, published: PublishedVersion) -> list[Descriptor]:
        """Folders in which this process forwards ``published``. Other nodes' ranks of its group use
        them, because they cannot ask the hub."""
        return self.relay.folders(published.version) if self.relay else []

    def _is_anchor(self, published: PublishedVersion) -> bool:
        """Whether a version is an anchor; also False if its manifest cannot be read."""
        with contextlib.suppress(WeightsError):
            manifest = read_manifest(self.run.weights / published.version, published.digest)
            return manifest.anchor == published.version
        return False

    def _hold_anchor(self, staged: StagedFolder) -> None:
        if self._anchor is not None:
            self._anchor.release()
        self._anchor = staged

    def _pull(self, published: PublishedVersion, folder: Path) -> None:
        """Create the folder of a version, from memory or else from files."""
        small = copy_small(self.run.model, folder)
        directory = self.run.weights / published.version
        try:
            manifest = read_manifest(directory, published.digest)
            check_small(small, manifest.small, self.run.model)
            # Reuses the memory of an old version, which is faster than new memory.
            self.staging.take_spare(folder / TENSORS)
            with contextlib.ExitStack() as stack:
                file = stack.enter_context(SafetensorsFile(folder / TENSORS, manifest.tensors))
                anchor = self._open_anchor(manifest, stack)
                if self.relay:
                    share, sources = stack.enter_context(
                        self.relay.pulling(manifest, folder / TENSORS)
                    )
                    self.puller.pull(manifest, manifest.chunks, file, anchor, sources, share.add)
                else:
                    self.puller.pull(manifest, manifest.chunks, file, anchor)
            (folder / MARK).write_bytes(manifest.encode())
        except WeightsError as error:
            if not published.files:
                raise
            (folder / TENSORS).unlink(missing_ok=True)
            try:
                self.puller.bytes[_FILE] += copy_verified(directory, published.files, folder)
            except WeightsError as file_error:
                raise WeightsError(f"{file_error}; and from memory: {error}") from error

    def _open_anchor(self, manifest: Manifest, stack: contextlib.ExitStack) -> Anchor | None:
        """The anchor of ``manifest``, if this process holds it as one file of the same tensors."""
        if self._anchor is not None and self._anchor.path.name == manifest.anchor:
            with contextlib.suppress(OSError, ValueError):
                file = SafetensorsFile.open_existing(self._anchor.path / TENSORS, manifest.tensors)
                return Anchor(manifest.anchor, stack.enter_context(file))
        return None

    def forget_before(self, version: str) -> None:
        """Remove older versions that no process of this node uses."""
        self.staging.clear(lambda name: name < version)


class Subscriber:
    """One reader of weights. `reader`: its name for the controller, such as "rollout/0". A version
    that it serves is not deleted."""

    def __init__(
        self,
        run: RunDir,
        client: QueueClient,
        reader: str,
        planes: Sequence[Plane],
        settings: WeightsConfig,
        every: int = 1,
        evaluates: bool = False,
        relays: bool = False,
    ) -> None:
        """``every``: the reader uses only multiples of this number. ``evaluates``: whether it can
        run evaluations. ``relays``: whether readers forward versions to each other, see `relay`."""
        self.client, self.reader, self.every, self.evaluates = client, reader, every, evaluates
        self.fetcher = Fetcher(run, planes, settings, self._ask if relays else None)
        self.serving = NOTHING
        # Newest version that could not be read.
        self._unreadable = NOTHING

    def _ask(self, version: str, folder: Descriptor) -> Sequence[Descriptor]:
        relays = self.client.weights.relays(self.reader, Version.parse(version), folder, _HUB_S)
        return relays.result()

    def newer(self) -> Future[PublishedVersion | None]:
        """Future of the next version above the present one; None: the run is finished.
        For EVALUATION_DUE see `WeightRequests.newer`.

        Versions that could not be read are skipped.
        """
        evaluator = self.reader if self.evaluates else ""
        newest_known = max(self.serving, self._unreadable)
        return self.client.weights.newer(newest_known, self.every, evaluator=evaluator)

    def fetch(self, announced: PublishedVersion) -> tuple[PublishedVersion, StagedFolder] | None:
        """The announced version or a newer one. None: none can be read, and the present version
        stays in use."""
        deadline = time.monotonic() + self.fetcher.settings.read_timeout_s
        published, tried = announced, set()
        for pause in _pauses():
            try:
                return published, self.fetcher.fetch(published)
            except WeightsError as error:
                reason = error
            if published not in tried:
                print_log_line(f"weights: {reason}; {self.reader} tries again")
            tried.add(published)
            candidate = self._next_candidate(published)
            # Every candidate is tried at least once, even if the first try took too long.
            if time.monotonic() > deadline and candidate in tried:
                self._skip(published, reason)
                return None
            published = candidate
            time.sleep(pause)
        raise AssertionError("_pauses() does not end")

    def _next_candidate(self, failed: PublishedVersion) -> PublishedVersion:
        """The newest version. If it has failed, alternately the newest version with files."""
        weights = self.client.weights
        try:
            newest = weights.newer(self.serving, self.every, _NEWER_S).result()
            if (newest is None or newest.version == failed.version) and not failed.files:
                on_disk = weights.newest_on_disk(self.serving, self.every, _NEWER_S).result()
                newest = on_disk or newest
        except DeadlineError:
            return failed
        return newest or failed

    def _skip(self, published: PublishedVersion, reason: WeightsError) -> None:
        """Note that ``published`` cannot be read, and keep the present version."""
        self._unreadable = Version.parse(published.version)
        print_log_line(f"weights: {reason}; {self.reader} continues with {self.serving}")
        self.client.status.note("weights_unreadable", self.reader, "unreadable")

    def served(self, version: Version) -> bool:
        """Report to the controller that this reader now uses ``version``. Returns whether an
        evaluation is due."""
        self.serving = version
        if version == NOTHING and self.fetcher.relay:
            # The reader may be about to stop, and must not hold a version in this node's memory.
            self.fetcher.relay.close()
        due = self.client.weights.serve(self.reader, version, self.evaluates).result()
        self.fetcher.forget_before(str(version))
        return due


def _pauses() -> Iterator[float]:
    """Seconds between attempts: from 0 to 1, without end."""
    return chain((min(1.0, 0.1 * number) for number in range(11)), repeat(1.0))
