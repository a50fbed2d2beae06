"""The readers' side: engines, actor_fwd and a refreshed reference pull the newest version and
verify it before use."""

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
_HUB_S = 5.0
"""Seconds for the hub to say who else has a version; then the actor is read from."""
_ASK_S = 10.0
"""Seconds to wait for a newer version than one that cannot be read; then that is tried again."""


class Fetcher:
    """Gets versions into the memory of this node, by the actor's memory or by their files."""

    def __init__(
        self, run: RunDir, planes: Sequence[Plane], settings: WeightsConfig, ask: Ask | None = None
    ) -> None:
        """``ask``: for readers of other nodes to take versions from, and who are given them in
        turn; None: there are too few of them."""
        self.run, self.settings = run, settings
        self.puller = Puller(planes, settings.read_timeout_s)
        self.staging = Staging(staging_root(run))
        self.relay = make_relay(planes, ask)
        self._anchor: StagedFolder | None = None
        """Folder of the anchor that later versions come as differences to; held as long as it may
        be needed."""

    def fetch(self, news: PublishedVersion) -> StagedFolder:
        """A model directory of ``news``, verified, in memory. WeightsError: it is not to be had, in
        one line."""
        try:
            staged = self._get(news)
            if self.settings.anchor_every and self._is_anchor(news):
                self._hold(self._get(news))
            return staged
        except DeadlineError as error:
            raise WeightsError(str(error)) from error
        except OSError as error:
            raise WeightsError(f"version {news.version}: {error}") from error

    def fetch_in_time(self, news: PublishedVersion) -> StagedFolder:
        """Fetch as of `fetch`, tried again for a while."""
        deadline = time.monotonic() + self.settings.read_timeout_s
        for pause in _pauses():
            try:
                return self.fetch(news)
            except WeightsError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(pause)
        raise AssertionError("there are always more pauses")

    def _get(self, news: PublishedVersion) -> StagedFolder:
        # Who makes it has limits of its own, for each record; whoever waits for that must not give
        # up before.
        patience_s = self.settings.write_timeout_s
        staged = self.staging.get(news.version, lambda folder: self._make(news, folder), patience_s)
        if self.relay:
            self.relay.settle(staged)
        return staged

    def where(self, news: PublishedVersion) -> list[Descriptor]:
        """Places where this process passes ``news`` on, for other nodes' ranks of its group that
        cannot ask the hub."""
        return self.relay.where(news.version) if self.relay else []

    def _is_anchor(self, news: PublishedVersion) -> bool:
        """Whether a version is an anchor; False as well where nobody can tell any more."""
        with contextlib.suppress(WeightsError):
            return (
                read_manifest(self.run.weights / news.version, news.digest).anchor == news.version
            )
        return False

    def _hold(self, staged: StagedFolder) -> None:
        if self._anchor is not None:
            self._anchor.release()
        self._anchor = staged

    def _make(self, news: PublishedVersion, folder: Path) -> None:
        small = copy_small(self.run.model, folder)
        directory = self.run.weights / news.version
        try:
            manifest = read_manifest(directory, news.digest)
            check_small(small, manifest.small, self.run.model)
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
            if not news.files:
                raise
            (folder / TENSORS).unlink(missing_ok=True)
            try:
                self.puller.bytes[_FILE] += copy_verified(directory, news.files, folder)
            except WeightsError as worse:
                raise WeightsError(f"{worse}; and from memory: {error}") from error

    def _open_anchor(self, manifest: Manifest, stack: contextlib.ExitStack) -> Anchor | None:
        """The anchor that this process holds, if it is a single file of the same tensors."""
        if self._anchor is not None and self._anchor.path.name == manifest.anchor:
            with contextlib.suppress(OSError, ValueError):
                file = SafetensorsFile.open_existing(self._anchor.path / TENSORS, manifest.tensors)
                return Anchor(manifest.anchor, stack.enter_context(file))
        return None

    def forget_before(self, version: str) -> None:
        """Remove older versions that no process of this node uses."""
        self.staging.clear(lambda name: name < version)


class Subscriber:
    """One reader. `reader` names it to the controller ("rollout/0"); a version is safe from
    deletion once served."""

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
        """``every``: only versions whose number is a multiple of it are of interest. ``evaluates``:
        it can. ``relays``: versions go from reader to reader, see `relay`."""
        self.client, self.reader, self.every, self.evaluates = client, reader, every, evaluates
        self.fetcher = Fetcher(run, planes, settings, self._ask if relays else None)
        self.serving = NOTHING
        self._given_up = NOTHING

    def _ask(self, version: str, where: Descriptor) -> Sequence[Descriptor]:
        return self.client.weights.relays(
            self.reader, Version.parse(version), where, _HUB_S
        ).result()

    def newer(self) -> Future[PublishedVersion | None]:
        """A future of the next version above the one served; None: the run is finished. OWED: see
        `Weights.newer`.

        Versions that could not be read are not told of again.
        """
        evaluator = self.reader if self.evaluates else ""
        return self.client.weights.newer(
            max(self.serving, self._given_up), self.every, evaluator=evaluator
        )

    def fetch(self, announced: PublishedVersion) -> tuple[PublishedVersion, StagedFolder] | None:
        """The announced version, or a newer one; None if none can be had: then the last good one
        stays in use."""
        deadline = time.monotonic() + self.fetcher.settings.read_timeout_s
        news, tried = announced, set()
        for pause in _pauses():
            try:
                return news, self.fetcher.fetch(news)
            except WeightsError as error:
                why = error
            if news not in tried:
                print_log_line(f"weights: {why}; {self.reader} tries again")
            tried.add(news)
            another = self._another(news)
            # At least one of each kind, however long the first one took.
            if time.monotonic() > deadline and another in tried:
                self._give_up(news, why)
                return None
            news = another
            time.sleep(pause)
        raise AssertionError("there are always more pauses")

    def _another(self, failed: PublishedVersion) -> PublishedVersion:
        """The newest version; if that has failed, in turns with the newest that has files."""
        weights, about = self.client.weights, (self.serving, self.every, _ASK_S)
        try:
            newest = weights.newer(*about).result()
            if (newest is None or newest.version == failed.version) and not failed.files:
                newest = weights.newest_on_disk(*about).result() or newest
        except DeadlineError:
            return failed
        return newest or failed

    def _give_up(self, news: PublishedVersion, why: WeightsError) -> None:
        self._given_up = Version.parse(news.version)
        print_log_line(f"weights: {why}; {self.reader} goes on with {self.serving}")
        self.client.status.note("weights_unreadable", self.reader, "unreadable")

    def served(self, version: Version) -> bool:
        """Tell the controller that this reader now works with ``version``; whether an evaluation is
        due."""
        self.serving = version
        if version == NOTHING and self.fetcher.relay:
            # It may be about to leave, and is not to keep a version in this node's memory.
            self.fetcher.relay.close()
        due = self.client.weights.serve(self.reader, version, self.evaluates).result()
        self.fetcher.forget_before(str(version))
        return due


def _pauses() -> Iterator[float]:
    """Seconds between attempts: none at first, then more and more."""
    return chain((min(1.0, 0.1 * number) for number in range(11)), repeat(1.0))
