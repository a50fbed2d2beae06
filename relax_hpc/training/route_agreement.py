"""Agreement between the routes of rows and the choices of the trainer's routers, by stretches of
each row.

The length of the routes does not show whether they are shifted by a token or belong to another row.
Different choices of the routers show it. A share over whole rows would hide a problem at the end of
a long row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from relax_hpc.training.models.batches import Batch
from relax_hpc.training.models.packs import PackLayout, PackSplit

STRETCH = 16
"""Minimum number of tokens of a stretch; a shorter row is one stretch. A problem of twice as many
tokens fills at least one stretch."""


class RouteAgreement:
    """Counts of equal routes of the rows of a window that this rank has computed. The tables of all
    ranks are added."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """``lengths`` of the rows, tokens."""
        self._stretches = np.maximum(1, np.array(lengths) // STRETCH)
        self._firsts = np.cumsum(self._stretches) - self._stretches
        # Numbers of equal routes and of compared routes: float32 [2, stretches of all rows].
        self.table = torch.zeros(2, int(self._stretches.sum()))

    def add(
        self, batch: Batch, rows: Sequence[int], split: PackSplit, router_tokens: slice
    ) -> None:
        """Count the routes of a micro-batch after its forward pass.

        ``rows``: numbers of its rows in the window. ``router_tokens``: the tokens that the routers
        processed, among this rank's tokens of the pack.
        """
        if not batch.lengths or not batch.routes or not batch.routes.equal:
            return
        layout = PackLayout.from_lengths(batch.lengths, split)
        local = layout.rank_indices(split.rank)[router_tokens]
        has_route = batch.routes.has_route.cpu().numpy()
        lines = np.repeat(np.arange(len(layout.widths)), layout.widths)[local][has_route]
        positions, numbers = layout.positions()[local][has_route], np.array(rows)[lines]
        # The last stretch of a row also contains the tokens of an incomplete stretch.
        stretches = np.minimum(positions // STRETCH, self._stretches[numbers] - 1)
        columns = torch.from_numpy(self._firsts[numbers] + stretches)
        equal = torch.stack([*batch.routes.equal.values()]).sum(0).cpu()[has_route]
        layers = float(len(batch.routes.equal))
        self.table[0].index_add_(0, columns, equal.float())
        self.table[1].index_add_(0, columns, torch.full((len(columns),), layers))

    def shares(self) -> np.ndarray:
        """Smallest share of equal routes over the stretches of each row, [rows]. A stretch without
        compared routes counts as 1."""
        equal, compared = self.table.numpy()
        shares = np.where(compared > 0, equal / np.maximum(compared, 1.0), 1.0)
        return np.minimum.reduceat(shares, self._firsts)
