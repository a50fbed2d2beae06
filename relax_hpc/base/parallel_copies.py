"""Copies of many tensors in the memory of one host."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_THREADS = 2


class Copier:
    """Threads that each copy a share of the bytes. One thread does not use the whole memory
    bandwidth."""

    def __init__(self, name: str, threads: int = _THREADS) -> None:
        """``name``: name of the threads; ``threads``: their number."""
        self._pool, self._threads = ThreadPoolExecutor(threads, name), threads

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy each of ``sources`` to its target.

        A target has the type of its source, and is contiguous or has the same shape. Sources may
        have any strides.
        """
        shares: list[list[int]] = [[] for _ in range(self._threads)]
        loads = [0] * self._threads
        for index in sorted(range(len(sources)), key=lambda index: -sources[index].nbytes):
            lightest = loads.index(min(loads))
            shares[lightest].append(index)
            loads[lightest] += sources[index].nbytes

        def copy_share(share: list[int]) -> None:
            for index in share:
                source = _numbers(sources[index])
                # torch takes 1.5 times as long, because it writes through the cache.
                np.copyto(_numbers(targets[index]).reshape(source.shape), source)

        list(self._pool.map(copy_share, shares))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


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
