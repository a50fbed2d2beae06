"""Tensors that towers take: the media of a rank's part of a pack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from relax_hpc.data.multimodal.rules import Rules


@dataclass(frozen=True, slots=True)
class TowerMedia:
    """Media of one tower."""

    values: Tensor
    """Values of all media, one after the other; see `TowerInput`."""
    grids: Tensor
    """Grids of the media, [media, 3] int64, on the host."""
    places: Tensor
    """Tokens of this rank that get an embedding, [p] int64: their numbers among those that it has
    of the pack."""
    sources: Tensor
    """Number of the embedding that each gets, [p] int64, among those of all ``values``."""
    rules: Rules


MediaInputs = Mapping[str, TowerMedia]
"""Media of a rank's part of a pack, by the names of towers; a tower that has none there is left
out."""


@dataclass(slots=True, eq=False)
class MediaPass:
    """One forward pass of the media of a micro-batch."""

    inputs: MediaInputs
    levels: Tensor | None = None
    """Values to add to the results of the first layers, [layers, n, hidden], once the towers have
    made them."""
    added: TowerMedia | None = None
    """Media whose tower has made the ``levels``."""
