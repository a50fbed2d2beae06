"""Media of a pack: each distinct medium once, and the tokens that get its embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
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
# Names of towers by the kinds of media.
_TOWERS = {
    **dict.fromkeys(VisionTower.kinds, VisionTower.name),
    **dict.fromkeys(AudioTower.kinds, AudioTower.name),
}


@dataclass(frozen=True, slots=True)
class TowerInput:
    """One medium in the form that its tower takes."""

    kind: Kind
    values: np.ndarray
    """See `multimodal.features.raw_features`."""
    grid: Grid
    tokens: int
    """Tokens that its embeddings replace."""

    @classmethod
    def from_medium(cls, medium: Medium, rules: Rules) -> Self:
        """Build from a stored medium by the ``rules`` of the model's family."""
        return cls(medium.kind, raw_features(medium, rules), medium.grid, rules.tokens(medium))


@dataclass(frozen=True, slots=True)
class RowMedia:
    """Media that some rows name in their `spans`."""

    inputs: Mapping[str, TowerInput]
    """Media by their ids."""
    positions: Callable[[Row], np.ndarray]
    """Function that computes the position ids (time, height, width) of a row, [3, tokens]."""
    rules: Rules

    @classmethod
    def from_media(cls, media: Mapping[str, Medium], rules: Rules) -> Self:
        """Build from stored media by their ids.

        Do not call it in the training thread: the values of a large image take long.
        """

        def row_positions(row: Row) -> np.ndarray:
            return positions(len(row["token_ids"]), row["spans"], media, rules)

        inputs = {name: TowerInput.from_medium(medium, rules) for name, medium in media.items()}
        return cls(inputs, row_positions, rules)


def media_inputs(
    rows: Sequence[Row],
    media: RowMedia,
    layout: PackLayout,
    split: PackSplit,
    device: str | torch.device,
) -> MediaInputs:
    """Media behind this rank's tokens, out of ``rows`` in ``layout``.

    Spans of a medium take its tokens in order, and start again after its last token.
    UnusableMedium: the spans do not fit their media."""
    # For each token of the pack: its index among the tokens that this rank embeds, or -1.
    local = np.full(layout.total, -1, np.int64)
    embedded = split.embedded_indices(layout)
    local[embedded] = np.arange(len(embedded))
    collected: dict[str, _CollectedMedia] = {}
    for start, row in zip(layout.starts, rows, strict=False):
        taken: dict[str, int] = {}
        for span in row.get("spans") or ():
            name, length = span["media_id"], span["length"]
            medium, first = media.inputs[name], taken.get(name, 0)
            if first + length > medium.tokens:
                where = f"a span of {length} tokens at {span['start']}"
                limit = f"its {medium.kind} has {medium.tokens} tokens"
                raise UnusableMedium(Reason.SPANS, f"{where}: {limit}")
            # 0 after the last token, so that a repeated medium starts again.
            taken[name] = (first + length) % medium.tokens
            targets = local[start + span["start"] :][:length]
            if (targets >= 0).any():
                tower = collected.setdefault(_TOWERS[medium.kind], _CollectedMedia())
                tower.add_span(name, medium, targets, first)
        if any(taken.values()):
            raise UnusableMedium(Reason.SPANS, "the spans do not use all tokens of a medium")
    return {name: tower.concat(media.rules, device) for name, tower in collected.items()}


@dataclass(slots=True)
class _CollectedMedia:
    """Media of one tower while `media_inputs` collects them."""

    inputs: list[TowerInput] = field(default_factory=list)
    first_sources: dict[str, int] = field(default_factory=dict)
    """Index of the first embedding of each medium."""
    tokens: int = 0
    targets: list[np.ndarray] = field(default_factory=list)
    sources: list[np.ndarray] = field(default_factory=list)

    def add_span(self, name: str, medium: TowerInput, targets: np.ndarray, first: int) -> None:
        """Add a span that stands for the tokens of a medium from ``first`` on.

        ``targets``: indices of its tokens in this rank, -1 for tokens of other ranks.
        """
        if name not in self.first_sources:
            self.first_sources[name] = self.tokens
            self.inputs.append(medium)
            self.tokens += medium.tokens
        local = np.flatnonzero(targets >= 0)
        self.targets.append(targets[local])
        self.sources.append(self.first_sources[name] + first + local)

    def concat(self, rules: Rules, device: str | torch.device) -> TowerMedia:
        """Concatenate the collected media on ``device``."""
        return TowerMedia(
            upload(np.concatenate([medium.values for medium in self.inputs]), device),
            torch.tensor([medium.grid for medium in self.inputs], dtype=torch.int64),
            upload(np.concatenate(self.targets), device),
            upload(np.concatenate(self.sources), device),
            rules,
        )
