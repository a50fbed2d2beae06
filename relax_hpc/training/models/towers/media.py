"""Media of a pack, as towers take them: each distinct one once, and where its embeddings go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from relax_hpc.data.multimodal.bad_media import BadMedium, Reason
from relax_hpc.data.multimodal.features import raw_features
from relax_hpc.data.multimodal.medium import Grid, Kind, Medium
from relax_hpc.data.multimodal.positions import positions
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.training.models.packs import PackLayout, PackSplit
from relax_hpc.training.models.towers.audio import AudioTower
from relax_hpc.training.models.towers.encoder_input import MediaInputs, TowerMedia
from relax_hpc.training.models.towers.vision import VisionTower
from relax_hpc.training.models.upload import upload

Row = Mapping[str, Any]
_TOWERS = {kind: tower.name for tower in (VisionTower, AudioTower) for kind in tower.kinds}
"""Names of towers by the kinds of media."""


@dataclass(frozen=True, slots=True)
class TowerInput:
    """One medium as its tower takes it."""

    kind: Kind
    values: np.ndarray
    """See `multimodal.features.raw_features`."""
    grid: Grid
    tokens: int
    """Tokens in whose places its embeddings come."""

    @classmethod
    def from_medium(cls, medium: Medium, rules: Rules) -> Self:
        """Build from a stored medium by the ``rules`` of the model's family."""
        return cls(medium.kind, raw_features(medium, rules), medium.grid, rules.tokens(medium))


@dataclass(frozen=True, slots=True)
class RowMedia:
    """Media that rows at hand name in their `spans`."""

    inputs: Mapping[str, TowerInput]
    """Media by their ids."""
    positions: Callable[[Row], np.ndarray]
    """Position ids (time, height, width) of a row with media, [3, tokens]."""
    rules: Rules

    @classmethod
    def from_media(cls, media: Mapping[str, Medium], rules: Rules) -> Self:
        """Build from stored media by their ids. Not in the thread that trains: values of a large
        image take a while."""

        def of_row(row: Row) -> np.ndarray:
            return positions(len(row["token_ids"]), row["spans"], media, rules)

        return cls(
            {name: TowerInput.from_medium(medium, rules) for name, medium in media.items()},
            of_row,
            rules,
        )


def media_inputs(
    rows: Sequence[Row],
    media: RowMedia,
    places: PackLayout,
    split: PackSplit,
    device: str | torch.device,
) -> MediaInputs:
    """Media that tokens of this rank stand for, out of ``rows`` that lie in ``places``.

    Spans of a medium take its tokens one after the other, and begin again when all are taken.
    BadMedium: spans that media do not fit.
    """
    mine = np.full(places.total, -1, np.int64)
    kept = split.embedded_indices(places)
    mine[kept] = np.arange(len(kept))
    found: dict[str, _Gathered] = {}
    for start, row in zip(places.starts, rows, strict=False):
        taken: dict[str, int] = {}
        for span in row.get("spans") or ():
            name, length = span["media_id"], span["length"]
            one, first = media.inputs[name], taken.get(name, 0)
            if first + length > one.tokens:
                at = f"a span of {length} tokens at {span['start']}"
                raise BadMedium(Reason.SPANS, f"{at}: its {one.kind} has {one.tokens} tokens")
            taken[name] = (first + length) % one.tokens
            at = mine[start + span["start"] :][:length]
            if (at >= 0).any():
                found.setdefault(_TOWERS[one.kind], _Gathered()).add(name, one, at, first)
        if any(taken.values()):
            raise BadMedium(Reason.SPANS, "spans that leave tokens of a medium over")
    return {name: gathered.media(media.rules, device) for name, gathered in found.items()}


@dataclass(slots=True)
class _Gathered:
    """Media of a tower while they are gathered."""

    inputs: list[TowerInput] = field(default_factory=list)
    begins: dict[str, int] = field(default_factory=dict)
    """Number of the first embedding of each medium."""
    tokens: int = 0
    places: list[np.ndarray] = field(default_factory=list)
    sources: list[np.ndarray] = field(default_factory=list)

    def add(self, name: str, one: TowerInput, at: np.ndarray, first: int) -> None:
        """Add a span that stands for the tokens of a medium from ``first`` on; ``at``: its places,
        -1 where another rank has them."""
        if name not in self.begins:
            self.begins[name] = self.tokens
            self.inputs.append(one)
            self.tokens += one.tokens
        here = np.flatnonzero(at >= 0)
        self.places.append(at[here])
        self.sources.append(self.begins[name] + first + here)

    def media(self, rules: Rules, device: str | torch.device) -> TowerMedia:
        """Put them together."""
        return TowerMedia(
            upload(np.concatenate([one.values for one in self.inputs]), device),
            torch.tensor([one.grid for one in self.inputs], dtype=torch.int64),
            upload(np.concatenate(self.places), device),
            upload(np.concatenate(self.sources), device),
            rules,
        )
