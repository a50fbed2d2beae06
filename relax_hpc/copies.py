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
    """Threads that copy, each a share of the bytes: one alone does not use all of the memory's speed."""

    def __init__(self, name: str, hands: int = _HANDS) -> None:
        """``name``: of the threads; ``hands``: how many."""
        self._pool, self._hands = ThreadPoolExecutor(hands, name), hands

    def copy(self, sources: Sequence[Tensor], rooms: Sequence[Tensor]) -> None:
        """Copy each of ``sources``, in any strides, to its room of the same type: contiguous, or of its shape."""
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


def _numbers(tensor: Tensor) -> np.ndarray:
    """The same memory as integers; numpy knows no bfloat16."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(kinds[tensor.element_size()]).numpy()
