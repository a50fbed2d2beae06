"""Transfers from tensors in host memory, such as a node's copy of a version, to live parameters on
any device.

A GPU copies from pinned memory at the speed of its link, from other memory at an eighth of it. So
pieces go through two pinned buffers: while the device reads one, threads fill the other. Small
pieces share a buffer. On a CPU, pieces are copied directly.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from relax_hpc.base.host_memory import allocate_host_memory
from relax_hpc.base.parallel_copies import Copier, RunningCopy

Pair = tuple[Tensor, Tensor]
"""Source and target of one shape, in any strides; the source in host memory."""
_BUFFER_BYTES, _PIECE_BYTES = 64 << 20, 16 << 20
_ALIGNED = 64
# Copying threads: one copies 5 to 10 GB/s, a link transfers 50 GB/s.
_THREADS = 8


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
        # The buffer to fill next is first.
        self._buffers: list[_PinnedBuffer] = []
        self._filling: _PinnedBuffer | None = None
        self._batch: list[Pair] = []
        self._batch_bytes = 0
        threads = min(_THREADS, len(os.sched_getaffinity(0))) if self._staged else 2
        self._copier = Copier("transfers", threads)

    def copy(self, pairs: Iterable[Pair]) -> None:
        """Copy each source to its target, which may have another type. Returns when the copies are
        complete. DeadlineError: the sources cannot be read in time."""
        self.send(pairs)
        self.wait()

    def send(self, pairs: Iterable[Pair]) -> None:
        """Copy each source to its target, ordered before the device's next work. Returns when the
        sources are read."""
        try:
            for source, target in pairs:
                self._add(source, target)
        finally:
            # After an error too, so that no pair of this call is left for the next one.
            self.flush()

    def defer(self, source: Tensor, target: Tensor) -> None:
        """Copy ``source`` to ``target`` with the next ones, at the latest in `flush`. The device
        writes the targets in the order of the calls."""
        self._add(source, target)
        # Threads copy a batch on a host in any order, so a target must not be in it twice.
        if not self._staged:
            self.flush()

    def _add(self, source: Tensor, target: Tensor) -> None:
        for pair in pieces(source, target.detach(), self._piece_bytes):
            size = _aligned(pair[0].nbytes)
            if self._batch_bytes + size > self._buffer_bytes:
                self._start_batch()
            self._batch.append(pair)
            self._batch_bytes += size

    def flush(self) -> None:
        """Copy all deferred pairs, ordered before the device's next work. Returns when the sources
        are read. DeadlineError: they cannot be read in time. This object is not usable after it."""
        self._start_batch()
        self._send_filled()

    @torch.no_grad()
    def _start_batch(self) -> None:
        """Start to fill a buffer with the batch, after the buffer before it was sent."""
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if not batch:
            return
        if not self._staged:
            _copy_on_host(batch, self._copier)
            return
        if not self._buffers:
            self._buffers = [_PinnedBuffer(self._buffer_bytes, self.device) for _ in range(2)]
        self._send_filled()
        self._filling = self._buffers[0]
        self._buffers.reverse()
        self._filling.start_filling(batch, self._copier)

    @torch.no_grad()
    def _send_filled(self) -> None:
        """Let the device read the buffer that is filled."""
        buffer, self._filling = self._filling, None
        if buffer is not None:
            buffer.send()

    def wait(self) -> None:
        """Wait until all copies are complete."""
        self.flush()
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
        self._copy: RunningCopy | None = None
        self._pairs: list[Pair] = []

    def start_filling(self, batch: list[Pair], copier: Copier) -> None:
        """Start to copy the sources of a batch into this buffer."""
        self.wait()
        staged, start = [], 0
        for source, _ in batch:
            memory = self._memory[start : start + source.nbytes]
            staged.append(memory.view(source.dtype).view(source.shape))
            start += _aligned(source.nbytes)
        self._pairs = [(values, target) for values, (_, target) in zip(staged, batch, strict=True)]
        self._copy = copier.start([source for source, _ in batch], staged)

    def send(self) -> None:
        """Copy the batch to its targets, when this buffer is filled. They are written in the order
        of the device's current stream."""
        pairs, self._pairs = self._pairs, []
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.wait()
        for values, target in pairs:
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
