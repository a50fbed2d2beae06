"""Choice of the prompt that a ticket gets: a pure function of the seed, the ticket and the
attempt."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

CYCLE = 1000
"""Tickets after which the pattern of weighted sets repeats."""


def prompt_at(ticket: int, attempt: int, count: int, seed: int, shuffle: bool) -> int:
    """Index, below `count`, of the prompt that `ticket` gets at its `attempt`.

    Attempt 0 visits each prompt once a pass of `count` tickets, in file order or in an order drawn
    with `seed` for each pass. A later attempt draws from the other prompts, so that it does not
    repeat the prompt of attempt 0.
    """
    number, position = divmod(ticket, count)
    first = int(_shuffled(count, seed, number)[position]) if shuffle else position
    if attempt == 0 or count == 1:
        return first
    other = _hash(f"{seed}/{ticket}/{attempt}") % (count - 1)
    return other + (other >= first)


class Ordered:
    """Order of rows by ascending numbers, such as a difficulty, in each pass."""

    def __init__(self, numbers: np.ndarray, seed: int, shuffle: bool) -> None:
        """``numbers``: float64 [rows]. ``shuffle``: rows with equal numbers are shuffled, with
        another order in each pass; otherwise they keep the order of the file."""
        self._numbers, self._seed, self._shuffle = numbers, seed, shuffle
        self._pass, self._indices = -1, np.zeros(0, np.uint32)

    def prompt_at(self, ticket: int, attempt: int) -> int:
        """Index of the row that ``ticket`` gets; a later attempt gets one of the next rows."""
        count = len(self._numbers)
        number, position = divmod(ticket, count)
        return int(self._indices_of(number)[(position + attempt) % count])

    def _indices_of(self, number: int) -> np.ndarray:
        """Indices of all rows in the order of pass ``number``."""
        if self._pass != number:
            count = len(self._numbers)
            ties = _keys(count, self._seed, number) if self._shuffle else np.arange(count)
            self._indices = np.lexsort((ties, self._numbers)).astype(np.uint32)
            self._pass = number
        return self._indices


class Visits:
    """Assignment of rows, from one set or several, to the tickets of a run."""

    def __init__(
        self,
        counts: Sequence[int],
        weights: Sequence[float],
        seed: int,
        shuffle: bool,
        numbers: np.ndarray | None = None,
    ) -> None:
        """``counts``: number of rows of each set; row numbers continue from set to set.
        ``weights``: shares of the sets; empty: all rows are one set. ``numbers``: float64 [rows],
        the order of visits, see `Ordered`."""
        self._seed, self._shuffle = seed, shuffle
        self._pattern = _pattern(tuple(weights)) if weights else None
        self._counts = list(counts) if weights else [sum(counts)]
        self._starts = [0, *accumulate(self._counts)]
        self._ordered: list[Ordered] = []
        if numbers is not None:
            for start, count in zip(self._starts, self._counts, strict=False):
                self._ordered.append(Ordered(numbers[start : start + count], seed, shuffle))

    def prompt_at(self, ticket: int, attempt: int) -> int:
        """Number of the row that ``ticket`` gets at its ``attempt``."""
        if self._pattern is None:
            return self._row(0, ticket, attempt)
        cycle, position = divmod(ticket, CYCLE)
        sets, ranks, quotas = self._pattern
        chosen = sets[position]
        return self._row(chosen, cycle * quotas[chosen] + ranks[position], attempt)

    def _row(self, chosen: int, visit: int, attempt: int) -> int:
        """Number of the row of set ``chosen`` at a ``visit`` of that set."""
        start, count = self._starts[chosen], self._counts[chosen]
        if self._ordered:
            return start + self._ordered[chosen].prompt_at(visit, attempt)
        return start + prompt_at(visit, attempt, count, self._seed, self._shuffle)


@functools.lru_cache(maxsize=4)
def _pattern(weights: Sequence[float]) -> tuple[list[int], list[int], list[int]]:
    """Pattern of a cycle: the set of each ticket; the number of earlier tickets with the same set;
    and the number of tickets of each set, which are spread evenly.

    >>> sets, ranks, quotas = _pattern((3.0, 1.0))
    >>> sets[:8], ranks[:8], quotas
    ([0, 0, 1, 0, 0, 0, 1, 0], [0, 1, 0, 2, 3, 4, 1, 5], [750, 250])
    """
    shares = np.array(weights) / sum(weights) * CYCLE
    quotas = np.floor(shares).astype(int)
    # Rounding down leaves tickets over. The sets with the largest remainders get them.
    for index in np.argsort(quotas - shares, kind="stable")[: CYCLE - quotas.sum()]:
        quotas[index] += 1
    slots: list[tuple[float, int, int]] = []
    for index, quota in enumerate(quotas):
        slots += [((rank + 0.5) / quota, index, rank) for rank in range(quota)]
    slots.sort()
    return [index for _, index, _ in slots], [rank for *_, rank in slots], quotas.tolist()


@functools.lru_cache(maxsize=3)
def _shuffled(count: int, seed: int, number: int) -> np.ndarray:
    """A permutation of range(count) for pass ``number``: indices sorted by `_keys`."""
    return np.argsort(_keys(count, seed, number)).astype(np.uint32)


def _keys(count: int, seed: int, number: int) -> np.ndarray:
    """Random numbers uint64 [count]: SplitMix64 of (seed, pass number, index).

    numpy's own generator is not used, because its streams may change with its version. A resumed
    run must have the same order.
    """
    with np.errstate(over="ignore"):
        z = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(_hash(f"{seed}/{number}"))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _hash(text: str) -> int:
    """64 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
