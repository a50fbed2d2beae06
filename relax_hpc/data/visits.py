"""Choice of the prompt that a ticket gets."""

from __future__ import annotations

import functools
import hashlib

import numpy as np


def prompt_at(ticket: int, attempt: int, count: int, seed: int, shuffle: bool) -> int:
    """Index, below `count`, of the prompt that `ticket` gets at its `attempt`: a pure function of its arguments.

    Attempt 0 visits each prompt once an epoch of `count` tickets, in file order or in an order drawn anew from
    `seed` each epoch. Later attempts draw from the other prompts, so a prompt that failed is not tried again.
    """
    epoch, position = divmod(ticket, count)
    first = int(_order(count, seed, epoch)[position]) if shuffle else position
    if attempt == 0 or count == 1:
        return first
    other = _hash(f"{seed}/{ticket}/{attempt}") % (count - 1)
    return other + (other >= first)


@functools.lru_cache(maxsize=3)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(count): indices sorted by SplitMix64 of (seed, epoch, index).

    Not numpy's own generator: its streams may change with its version, and a resumed run must see the same order.
    """
    with np.errstate(over="ignore"):
        z = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(_hash(f"{seed}/{epoch}"))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31))).astype(np.uint32)


def _hash(text: str) -> int:
    """64 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
