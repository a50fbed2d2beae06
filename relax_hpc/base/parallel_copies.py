"""Copies of many tensors in the memory of one host."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_HANDS = 2


class Copier:
    """Threads that copy, each a share of the bytes: one alone does not use all of the memory's
    speed."""

    def __init__(self, name: str, hands: int = _HANDS) -> None:
        """``name``: name of the threads; ``hands``: their number."""
        self._pool, self._hands = ThreadPoolExecutor(hands, name), hands

    def copy(self, sources: Sequence[Tensor], rooms: Sequence[Tensor]) -> None:
        """Copy each of ``sources``, in any strides, to its room of the same type: contiguous, or of
        its shape."""
        shares: list[list[int]] = [[] for _ in range(self._hands)]
        loads = [0] * self._hands
        for index in sorted(range(len(sources)), key=lambda index: -sources[index].nbytes):
            least = loads.index(min(loads))
            shares[least].append(index)
            loads[least] += sources[index].nbytes

        def copy_share(share: list[int]) -> None:
            for index in share:
                source = _numbers(sources[index])
                # Half as long again by torch, which writes through the cache.
                np.copyto(_numbers(rooms[index]).reshape(source.shape), source)

        list(self._pool.map(copy_share, shares))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


class _Memory:
    """Tensor as numpy's array interface describes it."""

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
    """The same memory as integers; numpy knows no bfloat16. What it got by torch's own way torch
    would never let go."""
    return np.asarray(_Memory(tensor))
