"""Layout of rows in a pack: one after the other in a single sequence, split over context-parallel
ranks.

Each of `context` ranks has two pieces of every row: one from its front, and the mirrored one from
its end. So all ranks have the same work under a causal mask (zigzag; arXiv 2407.21783, section
3.3.2):

>>> layout = PackLayout.from_lengths([5, 2], PackSplit(context=2))
>>> # Rows are padded to 8 and 4 tokens: pieces of 2 and 1.
>>> [layout.rank_indices(rank).tolist() for rank in range(2)]
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
    """Tensor-parallel ranks under sequence parallelism. Each has the same number of tokens."""
    context: int = 1
    """Context-parallel ranks."""
    rank: int = 0
    """Number of this rank among the context-parallel ranks."""
    sequence_rank: int = 0
    """Number of this rank among the sequence-parallel ranks."""
    embeds: bool = True
    """Whether this rank's pipeline stage has the embedding, and so receives the media."""

    def embedded_indices(self, layout: PackLayout) -> np.ndarray:
        """Indices of the tokens that this rank embeds, in its order: [total / context /
        sequence]."""
        local = layout.rank_indices(self.rank)
        size = len(local) // self.sequence
        return local[self.sequence_rank * size :][:size]


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Index of every row's tokens in a pack. Padding at the end of the pack counts as one more
    row."""

    widths: np.ndarray
    """Tokens of each row with its padding. The row of padding is last, if there is one."""
    starts: np.ndarray
    """Index of each row's first token."""
    context: int

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], split: PackSplit) -> PackLayout:
        """Layout of rows of `lengths` under `split`.

        Only context parallelism pads each row, to a multiple of twice its ranks.
        """
        pieces = 2 * split.context if split.context > 1 else 1
        widths = [-(-length // pieces) * pieces for length in lengths]
        # Every rank gets the same number of tokens: two pieces per context rank, and an equal share
        # of these for each sequence-parallel rank.
        multiple = split.context * math.lcm(split.sequence, 2 if split.context > 1 else 1)
        padding = -sum(widths) % multiple
        if padding:
            widths.append(padding)
        sizes = np.array(widths, np.int64)
        return cls(sizes, np.cumsum(sizes) - sizes, split.context)

    @property
    def total(self) -> int:
        """Tokens of the pack, including padding."""
        return int(self.widths.sum())

    def positions(self) -> np.ndarray:
        """Position of each token in its row: [total]."""
        return np.arange(self.total) - np.repeat(self.starts, self.widths)

    def rank_indices(self, rank: int) -> np.ndarray:
        """Indices of the tokens that a rank has, in its order: [total / context]."""
        return _consecutive(*self._pieces(rank))

    def _pieces(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """First indices and sizes of the pieces of rows that a rank has."""
        if self.context == 1:
            return self.starts, self.widths
        # Early tokens attend to few keys, late tokens to many. A piece from the front and its
        # mirror image from the end together have the same work on every rank.
        size = self.widths // (2 * self.context)
        front = self.starts + rank * size
        mirrored = self.starts + (2 * self.context - 1 - rank) * size
        firsts = np.stack([front, mirrored], 1)
        return firsts.reshape(-1), np.repeat(size, 2)

    def rank_rows(
        self, rank: int, device: str | torch.device, positions: np.ndarray | None = None
    ) -> PackedRows:
        """Rows of a rank as attention takes them.

        ``positions``: of all tokens, [total] or [3, total]. None: the positions in their rows.
        """
        firsts, sizes = self._pieces(rank)
        if positions is None:
            positions = self.positions()
        local = positions[..., self.rank_indices(rank)]
        if self.context == 1:
            return PackedRows.from_pieces(local, sizes, sizes, None, device)
        # A piece attends to its row from the row's start to the piece's end.
        starts = np.repeat(self.starts, 2)
        visible = firsts + sizes - starts
        order = self.gather_order()[_consecutive(starts, visible)]
        return PackedRows.from_pieces(local, sizes, visible, order, device)

    def gather_order(self) -> np.ndarray:
        """Index of each token, [total], in the concatenated tokens of all ranks."""
        return np.argsort(np.concatenate([self.rank_indices(rank) for rank in range(self.context)]))


def _consecutive(firsts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """`sizes` consecutive numbers from each of `firsts` on.

    >>> _consecutive(np.array([3, 0]), np.array([2, 1])).tolist()
    [3, 4, 0]
    """
    ends = np.cumsum(sizes)
    return np.arange(ends[-1]) + np.repeat(firsts - (ends - sizes), sizes)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of a pack, which megatron-core passes to rotary embedding and attention as
    `packed_seq_params`.

    Pieces of queries are consecutive. Piece i attends to its own keys only, and is the end of them.
    """

    positions: Tensor
    """Positions of this rank's tokens in their rows: [t] int64, or of time, height and width, [3,
    t]."""
    queries: list[int]
    """Tokens of each piece."""
    keys: list[int]
    """Keys that each piece attends to."""
    query_ends: Tensor
    """[pieces + 1] int32: 0, and the end of each piece of queries."""
    key_ends: Tensor
    """[pieces + 1] int32: 0, and the end of each piece's keys."""
    order: Tensor | None
    """[keys] int64: indices into the concatenated keys of all context ranks. None: this rank has
    all keys."""
    routes: Routes | None = None
    """Experts that compute its tokens. None: the routers choose."""
    media: MediaPass | None = None
    """Media among its tokens. None: it has none."""
    qkv_format: str = "rows"
    """A format that megatron-core 0.16.1 does not know, so that it leaves [t, 1, heads, dim]
    unchanged."""
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
        """Build on `device`. Lists stay on the host, so that reading them does not synchronize."""
        query_ends, key_ends = (
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32) for sizes in (queries, keys)
        )
        return cls(
            positions=upload(positions, device),
            queries=queries.tolist(),
            keys=keys.tolist(),
            query_ends=upload(query_ends, device),
            key_ends=upload(key_ends, device),
            order=None if order is None else upload(order, device),
        )
