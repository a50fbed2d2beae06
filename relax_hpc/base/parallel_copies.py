"""Copies of many tensors in the memory of one host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from relax_hpc.base.errors import DeadlineError

if TYPE_CHECKING:
    from torch import Tensor

_THREADS = 2
# A source may be a mapped file on a shared filesystem, whose server can stop to answer.
_LIMIT_S = 600.0
# One thread copies fewer bytes sooner than a second thread wakes up.
_SMALLEST_SHARE_BYTES = 256 << 10
_PAGE_BYTES = 4096

ArrayPair = tuple[np.ndarray, np.ndarray]
"""Source and target of one shape."""


class Copier:
    """Threads that each copy a share of the bytes. One thread does not use the whole memory
    bandwidth."""

    def __init__(self, name: str, threads: int = _THREADS, limit_s: float = _LIMIT_S) -> None:
        """``name``: name of the threads; ``threads``: their number; ``limit_s``: limit of one
        copy."""
        self._name, self._threads, self._limit_s = name, threads, limit_s
        self._pool = ThreadPoolExecutor(threads, name)

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy each of ``sources`` to its target. See `start` and `RunningCopy.wait`."""
        self.start(sources, targets).wait()

    def start(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> RunningCopy:
        """Start to copy each of ``sources`` to its target.

        A target has the type of its source, and is contiguous or has the same shape. Sources may
        have any strides.
        """
        pairs = [_flatten(*pair) for pair in zip(sources, targets, strict=True)]
        shares = split_evenly(pairs, self._threads)
        futures = [self._pool.submit(_copy_share, share) for share in shares]
        return RunningCopy(futures, time.monotonic() + self._limit_s, self._name)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


@dataclass(frozen=True, slots=True)
class RunningCopy:
    """Copy that threads make."""

    futures: list[Future[None]]
    deadline: float
    """On the clock of `time.monotonic`."""
    name: str

    def wait(self) -> None:
        """Wait until the copy is complete.

        An error of a thread is raised when all threads have ended. DeadlineError: the copy is not
        complete in time. Its threads may still write to the targets.
        """
        _, unfinished = wait(self.futures, max(0.0, self.deadline - time.monotonic()))
        if unfinished:
            raise DeadlineError(
                f"{self.name}: a copy is not complete in time; if its source is a file, see the "
                "file system"
            )
        for future in self.futures:
            future.result()


def split_evenly(pairs: Sequence[ArrayPair], count: int) -> list[list[ArrayPair]]:
    """Distribute the rows of ``pairs`` over at most ``count`` shares of about equal bytes."""
    total = sum(source.nbytes for source, _ in pairs)
    share_bytes = max(_SMALLEST_SHARE_BYTES, -(-total // count))
    share_bytes = -(-share_bytes // _PAGE_BYTES) * _PAGE_BYTES
    shares: list[list[ArrayPair]] = [[]]
    free_bytes = share_bytes
    for source, target in pairs:
        start = 0
        while source.size and start < len(source):
            row_bytes = source.nbytes // len(source)
            stop = min(len(source), start + max(1, free_bytes // row_bytes))
            shares[-1].append((source[start:stop], target[start:stop]))
            free_bytes -= (stop - start) * row_bytes
            start = stop
            if free_bytes <= 0:
                shares.append([])
                free_bytes = share_bytes
    return [share for share in shares if share]


def _copy_share(share: Sequence[ArrayPair]) -> None:
    for source, target in share:
        # torch takes 1.5 times as long, because it writes through the cache.
        np.copyto(target, source)


def _flatten(source: Tensor, target: Tensor) -> ArrayPair:
    """The memory of two tensors, in one dimension if both are contiguous."""
    source_array = _numbers(source)
    target_array = _numbers(target).reshape(source_array.shape)
    if source_array.flags.c_contiguous and target_array.flags.c_contiguous:
        return source_array.reshape(-1), target_array.reshape(-1)
    return source_array, target_array


class _Memory:
    """A tensor with numpy's array interface."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        item = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * item for stride in tensor.stride()),
            "typestr": f"<i{item}",
            "data": (tensor.data_ptr(), False),
        }


def _numbers(tensor: Tensor) -> np.ndarray:
    """The memory of ``tensor`` as integers, because numpy has no bfloat16."""
    # Not `Tensor.numpy()`: torch would keep the memory of the tensor for ever.
    return np.asarray(_Memory(tensor))
