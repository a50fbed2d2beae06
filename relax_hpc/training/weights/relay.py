"""Relay of versions between nodes: a reader forwards each record to readers of other nodes as soon
as it has verified the record.

So the actor sends a version only to a few nodes, for any number of nodes. A node stores the version
in one file, as whole tensors. It assembles a record again when another node requests it. The other
node compares the record with the journaled digest.
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
"""Request to the hub. Arguments: a version, and the folder in which this node forwards it. Result:
folders to read it from, best first."""
NAME = "relay"
_READERS = frozenset(("rollout", "actor_fwd"))
# Seconds that a thread waits for a record that is not complete, before it replies that the record
# is pending.
_PENDING_S = 0.1
# Seconds without data from another node. The limit is shorter than that for the actor, because
# there are further nodes.
_SILENCE_S = 5.0


class SharedVersion:
    """The records of one version that this node has. Thread-safe."""

    def __init__(self, manifest: Manifest, path: Path) -> None:
        """``path``: file that receives the records."""
        self._chunks = {chunk.name: chunk for chunk in manifest.chunks}
        self._file: SafetensorsFile | None = SafetensorsFile.open_existing(path, manifest.tensors)
        self._complete: set[str] = set()
        self._changed, self._reading = threading.Condition(), threading.Lock()
        self._last: tuple[str, weakref.ref[np.ndarray] | None] = ("", None)
        self._held: StagedFolder | None = None

    def add(self, chunk: Chunk) -> None:
        """Mark ``chunk`` as verified and complete in the file."""
        with self._changed:
            self._complete.add(chunk.name)
            self._changed.notify_all()

    def read(self, name: str) -> memoryview | None:
        """Record of a chunk; None: this node does not have it. RecordPending: it will have it."""
        chunk = self._chunks.get(name)
        if chunk is None:
            return None
        with self._changed:
            is_ready = self._changed.wait_for(
                lambda: name in self._complete or self._file is None, _PENDING_S
            )
            if not is_ready:
                raise RecordPending
        with self._reading:
            if self._file is None:
                return None
            # Readers progress at about the same rate, so they often request the same record. It is
            # reused as long as a transfer holds it.
            last_name, reference = self._last
            record = reference() if reference else None
            if last_name != name or record is None:
                record = np.zeros(chunk.bytes, np.uint8)
                for part in chunk.parts:
                    self._file.get(part, record.data)
                self._last = name, weakref.ref(record)
            return record.data

    def hold(self, staged: StagedFolder) -> None:
        """Keep ``staged``, the folder of the complete file, until `end`."""
        with self._reading:
            if self._file is not None and self._held is None:
                self._held = staged.duplicate()

    def end(self) -> None:
        """Stop sharing, and release the memory. A second call does nothing."""
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
        """The record from the first node whose data passes ``check``. PlaneError: no node has
        it."""
        errors = ["no other node has it"]
        for folder in list(self._folders):
            try:
                record = record_in_folder(folder, chunk.name, chunk.bytes)
                data = plane.read(record, timeout_s, _SILENCE_S)
                check(data)
                return data
            except (PlaneError, LookupError, TypeError) as error:
                errors.append(str(error))
                self._remove(folder, error)
        raise PlaneError("; ".join(errors))

    def _remove(self, folder: Descriptor, error: Exception) -> None:
        # Two threads read at the same time, so both may remove the same folder.
        if folder in self._folders:
            self._folders.remove(folder)
            print_log_line(f"weights: another node stopped its relay, trying the next one: {error}")

    def __bool__(self) -> bool:
        return bool(self._folders)


class Relay:
    """Relay of this process: it forwards the version that it pulls, and the previous version until
    the pull is complete."""

    def __init__(self, plane: TcpPlane, ask: Ask) -> None:
        self._plane, self._ask = plane, ask
        self._shares: dict[str, SharedVersion] = {}

    @contextmanager
    def pulling(
        self, manifest: Manifest, path: Path
    ) -> Iterator[tuple[SharedVersion, VersionSources]]:
        """Context of the pull of ``manifest``'s version into the file at ``path``. The version is
        forwarded during the pull and after it."""
        version = manifest.version
        # A previous pull of the same version may have failed.
        self._end(version)
        share = SharedVersion(manifest, path)
        self._shares[version] = share
        try:
            folder = self._plane.open_folder(f"{NAME}-{version}", share.read)
            yield share, self._sources(version, folder)
        except BaseException:
            self._end(version)
            raise

    def _sources(self, version: str, folder: Descriptor) -> VersionSources:
        try:
            return VersionSources(self._ask(version, folder))
        except (DeadlineError, RefusedError):
            # The hub has older code or is unreachable. Every reader can read from the actor.
            return VersionSources([])

    def settle(self, staged: StagedFolder) -> None:
        """Stop forwarding older versions, because this node has the version of ``staged``."""
        self.close(keep=staged.path.name)
        share = self._shares.get(staged.path.name)
        if share is not None:
            share.hold(staged)

    def folders(self, version: str) -> list[Descriptor]:
        """Descriptor of the folder in which this process forwards ``version``; empty if it does
        not."""
        return [self._plane.folder(f"{NAME}-{version}")] if version in self._shares else []

    def close(self, keep: str = "") -> None:
        """Stop forwarding all versions except ``keep``."""
        for version in list(self._shares):
            if version != keep:
                self._end(version)

    def _end(self, version: str) -> None:
        share = self._shares.pop(version, None)
        if share is not None:
            self._plane.close_folder(f"{NAME}-{version}")
            share.end()


def relay_pays(config: Config) -> bool:
    """Whether a relay is useful: more nodes read than the actor serves directly."""
    nodes = sum(
        group.resources.nodes
        for group in config.groups.values()
        if _READERS.intersection(group.roles)
    )
    return config.layout != "local" and nodes > FAN_OUT


def make_relay(planes: Sequence[Plane], ask: Ask | None) -> Relay | None:
    """The relay of this process; None without a TCP plane or without ``ask``.

    Only sockets are relayed. One-sided reads (RDMA) use only the actor's link, so a relay would not
    save work.
    """
    plane = next((plane for plane in planes if isinstance(plane, TcpPlane)), None)
    return Relay(plane, ask) if plane is not None and ask is not None else None
