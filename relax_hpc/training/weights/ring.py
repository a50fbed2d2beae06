"""Ring of slabs of one actor rank. Each version is copied into the least recently used slab."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_hpc.base.host_memory import pin_memory
from relax_hpc.base.parallel_copies import Copier
from relax_hpc.net.transport import Plane, PlaneError, Slab, SlabPool
from relax_hpc.training.weights.manifest import Chunk, checksum, lay_out_chunks
from relax_hpc.training.weights.tensors import TensorInfo, torch_type

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
    """Ring of slabs, one for each version in use.

    With ``max_staleness`` + 2 slabs, no slab is overwritten while an engine that still needs its
    version reads it. A slower reader detects that the checksum does not match.
    """

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
        """``slices``: of this rank. ``count``: number of slabs, ``pinned`` for copies from a GPU.
        ``limit``: bytes of a chunk, which is one record on ``planes``. OSError: the node has too
        little memory."""

        self.planes, self.slices = planes, slices
        bounds = [(part.name, part.axis, part.start, part.stop) for part in slices]
        self.chunks = lay_out_chunks(bounds, tensors, limit)
        self.bytes = self.chunks[-1][1] if self.chunks else 0
        self._slabs: list[Slab] = [pool.take(max(1, self.bytes)) for _ in range(count)]
        self._pool = pool
        # Names of the offered records by slab, with the slab of an extra record.
        self._offered: list[list[tuple[str, Slab | None]]] = [[] for _ in range(count)]
        self._next = 0
        self._targets = [self._part_views(slab, tensors) for slab in self._slabs]
        self._copies = _DeviceCopies(self._slabs) if pinned else None
        self._copier = Copier("weights-copy")

    def _part_views(self, slab: Slab, tensors: Mapping[str, TensorInfo]) -> list[torch.Tensor]:
        """Views of all parts in a slab, flat, in the types of their tensors."""
        import torch

        # Zeroed, because the checksums also cover the padding between parts.
        memory = torch.frombuffer(slab.memory, dtype=torch.uint8).zero_()
        views = []
        for begin, _, parts in self.chunks:
            for part in parts:
                info, start = tensors[part.name], begin + part.offset
                view = memory[start : start + part.bytes(info)]
                views.append(view.view(torch_type(info.dtype)))
        return views

    def copy(self) -> int:
        """Copy the present values of all slices into the next slab, after withdrawing its offers.
        Returns the number of the slab."""
        import torch

        number, self._next = self._next, (self._next + 1) % len(self._slabs)
        # Withdrawn first, so that a reader of the old version notices that its record has changed.
        self.withdraw(number)
        with torch.no_grad():
            views = [part.view() for part in self.slices]
        if self._copies:
            self._copies.copy(views, self._targets[number])
        else:
            self._copier.copy(views, self._targets[number])
        return number

    def await_copy(self) -> None:
        """Make the device's current stream wait until the last copy has read the weights."""
        if self._copies:
            self._copies.block_stream()

    def settle(self) -> None:
        """Wait in this thread until the last copy is complete."""
        if self._copies:
            self._copies.wait()

    def record(self, number: int, index: int) -> memoryview:
        """Bytes of chunk ``index`` in slab ``number``."""
        begin, end, _ = self.chunks[index]
        return self._slabs[number].memory[begin:end]

    def offer(self, number: int, prefix: str) -> list[Chunk]:
        """Offer the chunks of slab ``number`` on all planes, as records with names that begin with
        ``prefix``."""
        chunks = []
        for index, (begin, end, parts) in enumerate(self.chunks):
            name, record = f"{prefix}-{index:04d}", self.record(number, index)
            descriptors = publish_record(self.planes, name, record)
            chunks.append(Chunk(name, end - begin, checksum(record), parts, descriptors))
            self._offered[number].append((name, None))
        return chunks

    def offer_extra(self, number: int, name: str, data: bytes) -> dict[str, dict]:
        """Offer ``data`` on all planes as long as slab ``number``. Returns its descriptors."""
        slab = self._pool.take(len(data))
        slab.memory[: len(data)] = data
        self._offered[number].append((name, slab))
        return publish_record(self.planes, name, slab.memory[: len(data)])

    def withdraw(self, number: int) -> None:
        """Withdraw all offers of slab ``number``."""
        for name, slab in self._offered[number]:
            for plane in self.planes:
                plane.retire(name)
            if slab is not None:
                self._pool.give_back(slab)
        self._offered[number] = []

    def close(self) -> None:
        """Withdraw all offers. The pool owns the memory."""
        self._copier.close()
        for number in range(len(self._slabs)):
            self.withdraw(number)


def publish_record(planes: Sequence[Plane], name: str, record: memoryview) -> dict[str, dict]:
    """Publish ``record`` on each plane that supports it. Returns its descriptors."""
    descriptors = {}
    for plane in planes:
        with contextlib.suppress(PlaneError):
            descriptors[plane.name] = plane.publish(name, record)
    return descriptors


class _DeviceCopies:
    """Copies from a GPU on a separate stream, into pinned memory, while training continues."""

    def __init__(self, slabs: Sequence[Slab]) -> None:
        import torch

        # Pinned memory is required for copies that do not block the host.
        for slab in slabs:
            pin_memory(torch.frombuffer(slab.memory, dtype=torch.uint8), "weights")
        self._stream, self._done = torch.cuda.Stream(), torch.cuda.Event()

    def copy(self, views: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Start to copy the present values of ``views`` to ``targets``."""
        import torch

        # The copy starts after the optimizer step that is queued on the training stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for view, target in zip(views, targets, strict=True):
                target.view(view.shape).copy_(view, non_blocking=True)
            self._done.record(self._stream)

    def block_stream(self) -> None:
        """Make later work of the current stream wait for the copies."""
        import torch

        torch.cuda.current_stream().wait_event(self._done)

    def wait(self) -> None:
        self._done.synchronize()
