"""The slabs of one actor rank: each version is copied into the one that was used longest ago."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_hpc.base.host_memory import pin_memory
from relax_hpc.base.parallel_copies import Copier
from relax_hpc.net.transport import Plane, PlaneError, Slab, SlabPool
from relax_hpc.training.weights.manifest import Chunk, checksum, lay_out_chunks
from relax_hpc.training.weights.tensors import TensorInfo, TensorPart, torch_type

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Slice of tensor `name` that this rank holds: `start` to `stop` along `axis`. `view` returns
    its current values, in any strides, with elements in the order of the whole tensor."""

    name: str
    axis: int
    start: int
    stop: int
    view: Callable[[], torch.Tensor]


class SlabRing:
    """Ring of as many slabs as versions can be in use: with ``max_staleness`` + 2 of them, none is
    written while an engine that must have its version reads it. A reader that is slower still finds
    that the checksum does not match."""

    def __init__(
        self,
        pool: SlabPool,
        planes: Sequence[Plane],
        tensors: Mapping[str, TensorInfo],
        slices: Sequence[WeightSlice],
        count: int,
        limit: int,
        pinned: bool,
    ) -> None:
        """``slices``: of this rank. ``count`` slabs, ``pinned`` for copies from a GPU; chunks of up
        to ``limit`` bytes, each a record on ``planes``. OSError: the memory is not to be had."""
        import torch

        self.planes, self.slices = planes, slices
        self.chunks = lay_out_chunks(
            [(one.name, one.axis, one.start, one.stop) for one in slices], tensors, limit
        )
        self.bytes = self.chunks[-1][1] if self.chunks else 0
        self._slabs: list[Slab] = [pool.take(max(1, self.bytes)) for _ in range(count)]
        self._pool = pool
        self._offered: list[list[tuple[str, Slab | None]]] = [[] for _ in range(count)]
        """Names of records by slab, and the memory that was taken for those that lie elsewhere."""
        self._next = 0
        parts = [(begin, part) for begin, _, parts in self.chunks for part in parts]
        self._rooms: list[list[torch.Tensor]] = []
        for slab in self._slabs:
            # What lies between the parts is in the checksums too.
            memory = torch.frombuffer(slab.memory, dtype=torch.uint8).zero_()
            self._rooms.append(
                [
                    _room(memory, begin + part.offset, part, tensors[part.name])
                    for begin, part in parts
                ]
            )
        self._copies = _Copies(self._slabs) if pinned else None
        self._copier = Copier("weights-copy")

    def copy(self) -> int:
        """Copy all slices as they are into the next slab; its number. What was offered of it is
        offered no more."""
        import torch

        number, self._next = self._next, (self._next + 1) % len(self._slabs)
        self.withdraw(number)
        with torch.no_grad():
            views = [one.view() for one in self.slices]
        if self._copies:
            self._copies.copy(views, self._rooms[number])
        else:
            self._copier.copy(views, self._rooms[number])
        return number

    def await_copy(self) -> None:
        """Have what this process's device does next wait until the last copy is through with the
        weights."""
        if self._copies:
            self._copies.hold_device()

    def settle(self) -> None:
        """Wait, in this thread, until what was copied last has arrived."""
        if self._copies:
            self._copies.wait()

    def record(self, number: int, index: int) -> memoryview:
        """Bytes of chunk ``index`` in slab ``number``."""
        begin, end, _ = self.chunks[index]
        return self._slabs[number].memory[begin:end]

    def offer(self, number: int, prefix: str) -> list[Chunk]:
        """Put the chunks of slab ``number`` on all planes, as records whose names begin with
        ``prefix``."""
        made = []
        for index, (begin, end, parts) in enumerate(self.chunks):
            name, record = f"{prefix}-{index:04d}", self.record(number, index)
            made.append(
                Chunk(
                    name,
                    end - begin,
                    checksum(record),
                    parts,
                    publish_record(self.planes, name, record),
                )
            )
            self._offered[number].append((name, None))
        return made

    def offer_beside(self, number: int, name: str, data: bytes) -> dict[str, dict]:
        """Put ``data``, which belongs to what is in slab ``number``, on all planes; its
        descriptors."""
        slab = self._pool.take(len(data))
        slab.memory[: len(data)] = data
        self._offered[number].append((name, slab))
        return publish_record(self.planes, name, slab.memory[: len(data)])

    def withdraw(self, number: int) -> None:
        """Offer slab ``number`` no more."""
        for name, slab in self._offered[number]:
            for plane in self.planes:
                plane.retire(name)
            if slab is not None:
                self._pool.give_back(slab)
        self._offered[number] = []

    def close(self) -> None:
        """Offer nothing; the memory goes with its pool."""
        self._copier.close()
        for number in range(len(self._slabs)):
            self.withdraw(number)


def publish_record(planes: Sequence[Plane], name: str, record: memoryview) -> dict[str, dict]:
    """Publish ``record`` on each plane that can; its descriptors."""
    offers = {}
    for plane in planes:
        with contextlib.suppress(PlaneError):
            offers[plane.name] = plane.publish(name, record)
    return offers


def _room(memory: torch.Tensor, at: int, part: TensorPart, whole: TensorInfo) -> torch.Tensor:
    return memory[at : at + part.bytes(whole)].view(torch_type(whole.dtype))


class _Copies:
    """Copies from a GPU on a stream of their own, into memory that is pinned for it: training goes
    on meanwhile."""

    def __init__(self, slabs: Sequence[Slab]) -> None:
        import torch

        for slab in slabs:
            pin_memory(torch.frombuffer(slab.memory, dtype=torch.uint8), "weights")
        self._stream, self._done = torch.cuda.Stream(), torch.cuda.Event()

    def copy(self, views: Sequence[torch.Tensor], rooms: Sequence[torch.Tensor]) -> None:
        """Begin to copy each of ``views`` as it is to its room."""
        import torch

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for view, room in zip(views, rooms, strict=True):
                room.view(view.shape).copy_(view, non_blocking=True)
            self._done.record(self._stream)

    def hold_device(self) -> None:
        """Let all that is queued on the current stream from now on begin after the copies."""
        import torch

        torch.cuda.current_stream().wait_event(self._done)

    def wait(self) -> None:
        self._done.synchronize()
