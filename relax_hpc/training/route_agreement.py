"""RouteAgreement of the routes that rows came with and those that the trainer would have taken, by
stretches of each row.

Lengths do not show that routes are shifted by a token or are another row's; that the routers choose
others does. Of whole rows the share would hide what is wrong with the end of a long one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from relax_hpc.training.models.batches import Batch
from relax_hpc.training.models.packs import PackLayout, PackSplit

STRETCH = 16
"""Tokens of a stretch, at least, if a row has so many: what concerns twice as many has one for
itself."""


class RouteAgreement:
    """Counts of equal routes of all rows of a window, as far as this rank has computed them; ranks'
    tables add up."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """``lengths`` of the rows, tokens."""
        self._stretches = np.maximum(1, np.array(lengths) // STRETCH)
        self._firsts = np.cumsum(self._stretches) - self._stretches
        self.table = torch.zeros(2, int(self._stretches.sum()))
        """Routes that are the same, and all that were compared: float32 [2, stretches of all
        rows]."""

    def add(self, batch: Batch, rows: Sequence[int], split: PackSplit, mine: slice) -> None:
        """Count the routes of a micro-batch of `rows`, by number, after its forward pass; of what
        this rank has of its pack the routers saw ``mine``."""
        if not batch.lengths or not batch.routes or not batch.routes.equal:
            return
        places = PackLayout.from_lengths(batch.lengths, split)
        here = places.rank_indices(split.rank)[mine]
        known = batch.routes.known.cpu().numpy()
        lines = np.repeat(np.arange(len(places.widths)), places.widths)[here][known]
        positions, numbers = places.positions()[here][known], np.array(rows)[lines]
        at = self._firsts[numbers] + np.minimum(positions // STRETCH, self._stretches[numbers] - 1)
        same = torch.stack([*batch.routes.equal.values()]).sum(0).cpu()[known]
        where = torch.from_numpy(at)
        self.table[0].index_add_(0, where, same.float())
        self.table[1].index_add_(0, where, torch.full((len(at),), float(len(batch.routes.equal))))

    def shares(self) -> np.ndarray:
        """Least share of equal routes over the stretches of each row: [rows]; 1 where none were
        compared."""
        same, compared = self.table.numpy()
        return np.minimum.reduceat(
            np.where(compared > 0, same / np.maximum(compared, 1.0), 1.0), self._firsts
        )
