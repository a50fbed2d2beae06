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

# Streams of copies from a GPU.
_STREAMS = 2


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
            if self._copies:
                self._copies.copy(self.slices, self._targets[number])
            else:
                views = [part.view() for part in self.slices]
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
    """Copies from a GPU on separate streams, into pinned memory, while training continues.

    While one stream starts a copy, or makes a strided tensor contiguous, another one uses the link.
    """

    def __init__(self, slabs: Sequence[Slab]) -> None:
        import torch

        # Pinned memory is required for copies that do not block the host.
        for slab in slabs:
            pin_memory(torch.frombuffer(slab.memory, dtype=torch.uint8), "weights")
        self._streams = [torch.cuda.Stream() for _ in range(_STREAMS)]
        self._done = [torch.cuda.Event() for _ in range(_STREAMS)]

    def copy(self, slices: Sequence[WeightSlice], targets: Sequence[torch.Tensor]) -> None:
        """Start to copy the present values of ``slices`` to ``targets``."""
        import torch

        # The copy starts after the optimizer step that is queued on the training stream.
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())
        loads = [0] * _STREAMS
        for part, target in zip(slices, targets, strict=True):
            lightest = loads.index(min(loads))
            loads[lightest] += target.nbytes
            with torch.cuda.stream(self._streams[lightest]):
                # Each view is made while the device copies the ones before it.
                view = part.view()
                target.view(view.shape).copy_(view, non_blocking=True)
        for stream, done in zip(self._streams, self._done, strict=True):
            done.record(stream)

    def block_stream(self) -> None:
        """Make later work of the current stream wait for the copies."""
        import torch

        for done in self._done:
            torch.cuda.current_stream().wait_event(done)

    def wait(self) -> None:
        for done in self._done:
            done.synchronize()
