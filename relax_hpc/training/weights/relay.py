"""A node's reader passes a version on to readers of other nodes, each record from the moment it is
verified here.

So the actor sends a version to a few nodes, however many there are. What a node has it has in one
file, as whole tensors; a record of it is put together again for whoever asks, and is compared with
the journaled digest there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from relax_hpc.base.background import print_log_line
from relax_hpc.base.errors import DeadlineError, RefusedError
from relax_hpc.config.schema import Config
from relax_hpc.net.transport import Descriptor, Plane, PlaneError, TcpPlane
from relax_hpc.net.transport.tcp import RecordPending, record_in_folder
from relax_hpc.queue.controller.relays import FAN_OUT
from relax_hpc.training.weights.manifest import Chunk, Manifest
from relax_hpc.training.weights.node_cache import StagedFolder
from relax_hpc.training.weights.tensors import SafetensorsFile

Ask = Callable[[str, Descriptor], Sequence[Descriptor]]
"""Question to the hub: given a version and where this node passes it on, the places to read it
from, best first."""
NAME = "relay"
_READERS = frozenset(("rollout", "actor_fwd"))
_COMES_S = 0.1
"""Seconds that a thread waits for a record that is on its way here, before it says so."""
_SILENCE_S = 5.0
"""Seconds without any sign of another node. There are others, so less than the actor is waited
for."""


class SharedVersion:
    """The records of one version that this node has. Any thread."""

    def __init__(self, manifest: Manifest, path: Path) -> None:
        """``path``: file that the records are put into."""
        self._chunks = {chunk.name: chunk for chunk in manifest.chunks}
        self._file: SafetensorsFile | None = SafetensorsFile.open_existing(path, manifest.tensors)
        self._has: set[str] = set()
        self._changed, self._reading = threading.Condition(), threading.Lock()
        self._last: tuple[str, weakref.ref[np.ndarray] | None] = ("", None)
        self._held: StagedFolder | None = None

    def add(self, chunk: Chunk) -> None:
        """Note that ``chunk`` is verified, and in the file."""
        with self._changed:
            self._has.add(chunk.name)
            self._changed.notify_all()

    def give(self, name: str) -> memoryview | None:
        """Record of a chunk, see `tcp.Give`."""
        chunk = self._chunks.get(name)
        if chunk is None:
            return None
        with self._changed:
            if not self._changed.wait_for(
                lambda: name in self._has or self._file is None, _COMES_S
            ):
                raise RecordPending
        with self._reading:
            if self._file is None:
                return None
            # Those who read from here are about equally far: a record that is being sent is there
            # for the next one.
            last, record = self._last[0], self._last[1]() if self._last[1] else None
            if last != name or record is None:
                record = np.zeros(chunk.bytes, np.uint8)
                for part in chunk.parts:
                    self._file.get(part, memoryview(record))
                self._last = name, weakref.ref(record)
            return memoryview(record)

    def hold(self, staged: StagedFolder) -> None:
        """The file lies in this folder by now, which is not to be used for another version until
        the `end`."""
        with self._reading:
            if self._file is not None and self._held is None:
                self._held = staged.again()

    def end(self) -> None:
        """Give nothing any more, and let go of the memory. Safe to call twice."""
        with self._reading, self._changed:
            file, self._file = self._file, None
            self._changed.notify_all()
        if file is not None:
            file.close()
        if self._held is not None:
            self._held.release()


class VersionSources:
    """Other nodes that have a version, the best first. One that has failed is not asked again."""

    def __init__(self, folders: Sequence[Descriptor]) -> None:
        self._folders = list(folders)

    def read(
        self, plane: TcpPlane, chunk: Chunk, timeout_s: float, check: Callable[[memoryview], None]
    ) -> memoryview:
        """The record by the first that has it as ``check`` wants it. PlaneError: by none."""
        why_not = ["no other node has it"]
        for folder in list(self._folders):
            try:
                found = plane.read(
                    record_in_folder(folder, chunk.name, chunk.bytes), timeout_s, _SILENCE_S
                )
                check(found)
                return found
            except (PlaneError, LookupError, TypeError) as error:
                why_not.append(str(error))
                self._drop(folder, error)
        raise PlaneError("; ".join(why_not))

    def _drop(self, folder: Descriptor, error: Exception) -> None:
        # Two threads read at a time, and both may find it gone.
        if folder in self._folders:
            self._folders.remove(folder)
            print_log_line(f"weights: another node passes on no more, the next is asked: {error}")

    def __bool__(self) -> bool:
        return bool(self._folders)


class Relay:
    """Relay of this process: it passes on what it pulls itself, and the version before while that
    is pulled."""

    def __init__(self, plane: TcpPlane, ask: Ask) -> None:
        self._plane, self._ask = plane, ask
        self._shares: dict[str, SharedVersion] = {}

    @contextmanager
    def pulling(
        self, manifest: Manifest, path: Path
    ) -> Iterator[tuple[SharedVersion, VersionSources]]:
        """Pass ``manifest``'s version on while the file at ``path`` is filled, and from then on."""
        version = manifest.version
        self._end(version)
        share = self._shares[version] = SharedVersion(manifest, path)
        try:
            yield (
                share,
                self._sources(version, self._plane.open_folder(f"{NAME}-{version}", share.give)),
            )
        except BaseException:
            self._end(version)
            raise

    def _sources(self, version: str, where: Descriptor) -> VersionSources:
        try:
            return VersionSources(self._ask(version, where))
        except (DeadlineError, RefusedError):
            # A hub of older code, or one that is away: the actor is there for everybody.
            return VersionSources([])

    def settle(self, staged: StagedFolder) -> None:
        """The version of ``staged`` is there, by whomever: older ones are passed on no more."""
        self.close(but=staged.path.name)
        share = self._shares.get(staged.path.name)
        if share is not None:
            share.hold(staged)

    def where(self, version: str) -> list[Descriptor]:
        """Descriptors of the folder in which this process passes ``version`` on; empty if it does
        not."""
        return [self._plane.folder(f"{NAME}-{version}")] if version in self._shares else []

    def close(self, but: str = "") -> None:
        """Stop passing on all versions."""
        for version in list(self._shares):
            if version != but:
                self._end(version)

    def _end(self, version: str) -> None:
        if share := self._shares.pop(version, None):
            self._plane.close_folder(f"{NAME}-{version}")
            share.end()


def relay_pays(config: Config) -> bool:
    """Whether a relay relay_pays: more nodes read than would read from the actor anyway."""
    nodes = sum(
        group.resources.nodes
        for group in config.groups.values()
        if _READERS.intersection(group.roles)
    )
    return config.layout != "local" and nodes > FAN_OUT


def make_relay(planes: Sequence[Plane], ask: Ask | None) -> Relay | None:
    """Passing on goes by sockets: what is read one-sidedly costs its maker no more than the link,
    and is not."""
    plane = next((plane for plane in planes if isinstance(plane, TcpPlane)), None)
    return Relay(plane, ask) if plane is not None and ask is not None else None
