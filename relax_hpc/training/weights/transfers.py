"""Transfers from tensors in host memory, such as a node's copy of a version, into live parameters
on any device.

A GPU copies from pinned memory at the speed of its link, and from other memory at an eighth of it.
So pieces go through two pinned rooms: while the device takes one, threads fill the other. On a CPU
they go straight.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from relax_hpc.base.host_memory import allocate_host_memory
from relax_hpc.base.parallel_copies import Copier

Pair = tuple[Tensor, Tensor]
"""Source and target of one shape, in any strides; the source in host memory."""
_ROOM_BYTES, _PIECE_BYTES = 64 << 20, 8 << 20
_ALIGNED = 64
_HANDS = 6
"""Threads that copy: one copies about 10 GB/s, a link takes 50."""


class Transfers:
    """Copies to ``device``. What it needs is made at the first use and kept.

    >>> target = torch.zeros(3)
    >>> Transfers(torch.device("cpu")).copy([(torch.ones(3), target)])
    >>> target
    tensor([1., 1., 1.])
    """

    def __init__(
        self, device: torch.device, staged: bool | None = None, room_bytes: int = _ROOM_BYTES
    ) -> None:
        """``staged``: through the rooms, of ``room_bytes`` each; if None, where the device is none
        of the host's."""
        self.device = device
        self._staged = device.type != "cpu" if staged is None else staged
        self._room_bytes, self._piece_bytes = room_bytes, min(_PIECE_BYTES, room_bytes)
        self._rooms: list[_Room] = []
        self._copier = Copier(
            "transfers", min(_HANDS, len(os.sched_getaffinity(0))) if self._staged else 2
        )

    def copy(self, pairs: Iterable[Pair]) -> None:
        """Each source to its target, which may be of another type; they are there when this
        returns."""
        self.send(pairs)
        self.wait()

    @torch.no_grad()
    def send(self, pairs: Iterable[Pair]) -> None:
        """The same for what the device is asked next: sources are read when this returns."""
        if self._staged and not self._rooms:
            self._rooms = [_Room(self._room_bytes, self.device) for _ in range(2)]
        cut = (
            piece
            for source, target in pairs
            for piece in pieces(source, target.detach(), self._piece_bytes)
        )
        for batch in batches(cut, self._room_bytes):
            if self._staged:
                self._rooms[0].send(batch, self._copier)
                self._rooms.reverse()
            else:
                _copy_here(batch, self._copier)

    def wait(self) -> None:
        """Wait until all that was sent is there."""
        for room in self._rooms:
            room.wait()


def pieces(source: Tensor, target: Tensor, limit: int) -> Iterator[Pair]:
    """The same pair in pieces of about ``limit`` bytes of the source at most."""
    parts = -(-source.nbytes // limit)
    if parts < 2:
        if source.numel():
            yield source, target
        return
    axis = next(axis for axis, size in enumerate(source.shape) if size > 1)
    rows = -(-source.shape[axis] // parts)
    for one, other in zip(source.split(rows, axis), target.split(rows, axis), strict=True):
        yield from pieces(one, other, limit)


def batches(pairs: Iterable[Pair], limit: int) -> Iterator[list[Pair]]:
    """Neighbours together whose sources fit into ``limit`` bytes, each at an aligned place."""
    batch: list[Pair] = []
    size = 0
    for pair in pairs:
        needed = _aligned(pair[0].nbytes)
        if batch and size + needed > limit:
            yield batch
            batch, size = [], 0
        batch.append(pair)
        size += needed
    if batch:
        yield batch


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _copy_here(batch: list[Pair], copier: Copier) -> None:
    same = [(source, target) for source, target in batch if source.dtype == target.dtype]
    copier.copy([source for source, _ in same], [target for _, target in same])
    for source, target in batch:
        if source.dtype != target.dtype:
            target.copy_(source)


class _Room:
    """Pinned memory that is filled by this process and emptied by the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = allocate_host_memory(size + _ALIGNED, device.type == "cuda", "weights")
        self._device = device
        self._taken = torch.cuda.Event() if device.type == "cuda" else None

    def send(self, batch: list[Pair], copier: Copier) -> None:
        """Returns when the sources are read; they arrive in the order of the device's current
        stream."""
        self.wait()
        staged, at = [], 0
        for source, _ in batch:
            staged.append(
                self._memory[at : at + source.nbytes].view(source.dtype).view(source.shape)
            )
            at += _aligned(source.nbytes)
        copier.copy([source for source, _ in batch], staged)
        for one, (_, target) in zip(staged, batch, strict=True):
            plain = target.is_contiguous() and one.dtype == target.dtype
            # Else torch would convert it here first, in memory that is not pinned.
            target.copy_(
                one if plain else one.to(self._device, non_blocking=True), non_blocking=True
            )
        if self._taken:
            self._taken.record()

    def wait(self) -> None:
        """Wait until the device has taken what was sent."""
        if self._taken:
            self._taken.synchronize()
