"""Layout of rows in a pack: one after the other in a single sequence, and cut over context-parallel
ranks.

Each of `context` ranks has two pieces of every row, one from its front and the mirrored one from
its end, so that all have the same work under a causal mask (zigzag; arXiv 2407.21783, section
3.3.2):

>>> places = PackLayout.from_lengths([5, 2], PackSplit(context=2))
>>> # Rows padded to 8 and 4 tokens: pieces of 2 and 1.
>>> [places.rank_indices(rank).tolist() for rank in range(2)]
[[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from relax_hpc.training.models.upload import upload

if TYPE_CHECKING:
    from relax_hpc.training.models.replay import Routes
    from relax_hpc.training.models.towers.encoder_input import MediaPass


@dataclass(frozen=True, slots=True)
class PackSplit:
    """Split of a pack over the ranks of a replica."""

    sequence: int = 1
    """Tensor-parallel ranks under sequence parallelism, each with as many tokens."""
    context: int = 1
    """Context-parallel ranks."""
    rank: int = 0
    """Number of this rank among the context-parallel ranks."""
    sequence_rank: int = 0
    """Number of this rank among those of sequence parallelism."""
    embeds: bool = True
    """Whether this rank's pipeline stage has the embedding, so that media come there."""

    def embedded_indices(self, places: PackLayout) -> np.ndarray:
        """PackLayout whose embeddings this rank has, in its order: [total / context / sequence]."""
        mine = places.rank_indices(self.rank)
        size = len(mine) // self.sequence
        return mine[self.sequence_rank * size :][:size]


@dataclass(frozen=True, slots=True)
class PackLayout:
    """PackLayout of the tokens of every row; padding at the end of the pack is a row by itself."""

    widths: np.ndarray
    """Tokens of each row with its padding, the row of padding last if there is one."""
    starts: np.ndarray
    """First place of each row."""
    context: int

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], split: PackSplit) -> PackLayout:
        """Rows of `lengths` under `split`: only context parallelism pads within, to twice its ranks
        at most."""
        pieces = 2 * split.context if split.context > 1 else 1
        widths = [-(-length // pieces) * pieces for length in lengths]
        if rest := -sum(widths) % (
            split.context * math.lcm(split.sequence, 2 if split.context > 1 else 1)
        ):
            widths.append(rest)
        sizes = np.array(widths, np.int64)
        return cls(sizes, np.cumsum(sizes) - sizes, split.context)

    @property
    def total(self) -> int:
        """Tokens of the pack, padding counted."""
        return int(self.widths.sum())

    def positions(self) -> np.ndarray:
        """Position of each place in its row: [total]."""
        return np.arange(self.total) - np.repeat(self.starts, self.widths)

    def rank_indices(self, rank: int) -> np.ndarray:
        """PackLayout that a rank has, in its order: [total / context]."""
        return _spans(*self._pieces(rank))

    def _pieces(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """First places and sizes of the pieces of rows that a rank has."""
        if self.context == 1:
            return self.starts, self.widths
        size = self.widths // (2 * self.context)
        firsts = np.stack(
            [self.starts + rank * size, self.starts + (2 * self.context - 1 - rank) * size], 1
        )
        return firsts.reshape(-1), np.repeat(size, 2)

    def rank_rows(
        self, rank: int, device: str | torch.device, positions: np.ndarray | None = None
    ) -> PackedRows:
        """Rows of a rank as attention takes them; ``positions`` of all places, None: those in their
        rows."""
        firsts, sizes = self._pieces(rank)
        positions = (self.positions() if positions is None else positions)[
            ..., self.rank_indices(rank)
        ]
        if self.context == 1:
            return PackedRows.from_pieces(positions, sizes, sizes, None, device)
        # A piece looks at its row from the start to the piece's end.
        starts = np.repeat(self.starts, 2)
        seen = firsts + sizes - starts
        return PackedRows.from_pieces(
            positions, sizes, seen, self.gather_order()[_spans(starts, seen)], device
        )

    def gather_order(self) -> np.ndarray:
        """Index of each place, [total], in the parts of all ranks one after the other."""
        return np.argsort(np.concatenate([self.rank_indices(rank) for rank in range(self.context)]))


def _spans(firsts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """`sizes` consecutive numbers from each of `firsts` on.

    >>> _spans(np.array([3, 0]), np.array([2, 1])).tolist()
    [3, 4, 0]
    """
    ends = np.cumsum(sizes)
    return np.arange(ends[-1]) + np.repeat(firsts - (ends - sizes), sizes)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of a pack as megatron-core hands them on to rotary embedding and attention, as
    `packed_seq_params`.

    Pieces of queries lie one after the other. Piece i looks at keys of its own alone, of which it
    is the end.
    """

    positions: Tensor
    """Positions of this rank's tokens in their rows: [t] int64, or of time, height and width, [3,
    t]."""
    queries: list[int]
    """Tokens of each piece."""
    keys: list[int]
    """Keys that each piece looks at."""
    query_ends: Tensor
    """[pieces + 1] int32: 0, and the end of each piece of queries."""
    key_ends: Tensor
    order: Tensor | None
    """[keys] int64: which of the keys of all context ranks, one rank's after the other's; None:
    this rank has all."""
    routes: Routes | None = None
    """Experts that compute its tokens; None: those that the routers choose."""
    media: MediaPass | None = None
    """Media among its tokens; None: there are none."""
    qkv_format: str = "rows"
    """Format name that is none of megatron-core's, so that [t, 1, heads, dim] stay as they are."""
    cp_group: Any = None

    @classmethod
    def from_pieces(
        cls,
        positions: np.ndarray,
        queries: np.ndarray,
        keys: np.ndarray,
        order: np.ndarray | None,
        device: str | torch.device,
    ) -> PackedRows:
        """Build on `device`; fields that are no tensors stay on the host, so that nobody waits for
        them."""
        ends = [
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32) for sizes in (queries, keys)
        ]
        return cls(
            positions=upload(positions, device),
            queries=queries.tolist(),
            keys=keys.tolist(),
            query_ends=upload(ends[0], device),
            key_ends=upload(ends[1], device),
            order=None if order is None else upload(order, device),
        )
