"""Transfers from tensors in host memory, such as a node's copy of a version, to live parameters on
any device.

A GPU copies from pinned memory at the speed of its link, from other memory at an eighth of it. So
pieces go through two pinned buffers: while the device reads one, threads fill the other. On a CPU,
pieces are copied directly.
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
_BUFFER_BYTES, _PIECE_BYTES = 64 << 20, 8 << 20
_ALIGNED = 64
# Copying threads: one copies about 10 GB/s, a link transfers 50 GB/s.
_THREADS = 6


class Transfers:
    """Copies to ``device``. Its buffers are allocated at the first use.

    >>> target = torch.zeros(3)
    >>> Transfers(torch.device("cpu")).copy([(torch.ones(3), target)])
    >>> target
    tensor([1., 1., 1.])
    """

    def __init__(
        self, device: torch.device, staged: bool | None = None, buffer_bytes: int = _BUFFER_BYTES
    ) -> None:
        """``staged``: whether to use buffers, of ``buffer_bytes`` each. None: only if the device is
        not the host."""
        self.device = device
        self._staged = device.type != "cpu" if staged is None else staged
        self._buffer_bytes, self._piece_bytes = buffer_bytes, min(_PIECE_BYTES, buffer_bytes)
        self._buffers: list[_PinnedBuffer] = []
        threads = min(_THREADS, len(os.sched_getaffinity(0))) if self._staged else 2
        self._copier = Copier("transfers", threads)

    def copy(self, pairs: Iterable[Pair]) -> None:
        """Copy each source to its target, which may have another type. Returns when the copies are
        complete."""
        self.send(pairs)
        self.wait()

    @torch.no_grad()
    def send(self, pairs: Iterable[Pair]) -> None:
        """Copy each source to its target, ordered before the device's next work. Returns when the
        sources are read."""
        if self._staged and not self._buffers:
            self._buffers = [_PinnedBuffer(self._buffer_bytes, self.device) for _ in range(2)]
        for batch in batches(self._all_pieces(pairs), self._buffer_bytes):
            if self._staged:
                self._buffers[0].send(batch, self._copier)
                self._buffers.reverse()
            else:
                _copy_on_host(batch, self._copier)

    def _all_pieces(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        for source, target in pairs:
            yield from pieces(source, target.detach(), self._piece_bytes)

    def wait(self) -> None:
        """Wait until all sent pieces have arrived."""
        for buffer in self._buffers:
            buffer.wait()


def pieces(source: Tensor, target: Tensor, limit: int) -> Iterator[Pair]:
    """Split a pair into pieces with at most about ``limit`` bytes of the source."""
    count = -(-source.nbytes // limit)
    if count < 2:
        if source.numel():
            yield source, target
        return
    # Along the first axis, pieces of a contiguous tensor are contiguous.
    axis = next(axis for axis, size in enumerate(source.shape) if size > 1)
    rows = -(-source.shape[axis] // count)
    for pair in zip(source.split(rows, axis), target.split(rows, axis), strict=True):
        yield from pieces(*pair, limit)


def batches(pairs: Iterable[Pair], limit: int) -> Iterator[list[Pair]]:
    """Group consecutive pairs whose aligned sources fit into ``limit`` bytes."""
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


def _copy_on_host(batch: list[Pair], copier: Copier) -> None:
    same = [(source, target) for source, target in batch if source.dtype == target.dtype]
    copier.copy([source for source, _ in same], [target for _, target in same])
    for source, target in batch:
        if source.dtype != target.dtype:
            target.copy_(source)


class _PinnedBuffer:
    """Pinned memory that this process fills and the device reads."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = allocate_host_memory(size + _ALIGNED, device.type == "cuda", "weights")
        self._device = device
        self._read = torch.cuda.Event() if device.type == "cuda" else None

    def send(self, batch: list[Pair], copier: Copier) -> None:
        """Copy a batch through this buffer. Returns when the sources are read; the targets are
        written in the order of the device's current stream."""
        self.wait()
        staged, start = [], 0
        for source, _ in batch:
            memory = self._memory[start : start + source.nbytes]
            staged.append(memory.view(source.dtype).view(source.shape))
            start += _aligned(source.nbytes)
        copier.copy([source for source, _ in batch], staged)
        for values, (_, target) in zip(staged, batch, strict=True):
            if not target.is_contiguous() or values.dtype != target.dtype:
                # Converted on the device: torch 2.13 would first convert on the host, in memory
                # that is not pinned.
                values = values.to(self._device, non_blocking=True)
            target.copy_(values, non_blocking=True)
        if self._read:
            self._read.record()

    def wait(self) -> None:
        """Wait until the device has read the buffer."""
        if self._read:
            self._read.synchronize()
