"""Inputs of towers: the media of a rank's part of a pack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from relax_hpc.data.multimodal.rules import Rules


@dataclass(frozen=True, slots=True)
class TowerMedia:
    """Media of one tower, and the tokens that get their embeddings."""

    values: Tensor
    """Concatenated values of all media; see `media.TowerInput`."""
    grids: Tensor
    """Grids of the media, [media, 3] int64, on the host."""
    targets: Tensor
    """Indices of the p tokens of this rank that get an embedding, [p] int64."""
    sources: Tensor
    """Index of the embedding that each of these tokens gets, [p] int64."""
    rules: Rules


MediaInputs = Mapping[str, TowerMedia]
"""Media of a rank's part of a pack, by the names of towers. A tower without media has no entry."""


@dataclass(slots=True, eq=False)
class MediaPass:
    """One forward pass over the media of a micro-batch."""

    inputs: MediaInputs
    levels: Tensor | None = None
    """Values that are added to the results of the first decoder layers, [layers, n, hidden]. None:
    the towers have not computed them."""
    level_media: TowerMedia | None = None
    """Media whose tower computed the ``levels``."""
