"""Media in the engine that runs Hugging Face's model: what its forward pass takes of them, and where tokens stand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_hpc.data.media import PromptMedium, spans_of
from relax_hpc.multimodal.features import patches
from relax_hpc.multimodal.medium import Kind, Medium
from relax_hpc.multimodal.positions import positions
from relax_hpc.multimodal.rules import Rules
from relax_hpc.transfer_queue.storage.media import MediaStore

if TYPE_CHECKING:
    import torch


_NAMES = {
    Kind.IMAGE: ("pixel_values", "image_grid_thw"),
    Kind.VIDEO: ("pixel_values_videos", "video_grid_thw"),
}
"""Names of values and grids, by kind."""


class MediaInputs:
    """Inputs of the passes over one prompt and its response, beside their tokens; none, of a prompt without media."""

    def __init__(self, media: Sequence[PromptMedium], rules: Rules | None, device: torch.device) -> None:
        """Read the blobs of ``media``. ``rules``: None of a model that takes text alone."""
        self._rules, self._device, self._spans = rules, device, spans_of(media)
        self._by_id = {medium.blob.name: _read(medium.blob) for medium in media if medium.blob}
        self._order = [self._by_id[medium.blob.name] for medium in media if medium.blob]

    def of(self, tokens: int, start: int) -> dict[str, Any]:
        """Inputs of a pass over tokens ``start`` to ``tokens`` of the sequence."""
        import torch

        if not (self._order and self._rules):
            return {}
        where = positions(tokens, self._spans, self._by_id, self._rules)[:, None, start:]
        found = {"position_ids": torch.from_numpy(where).to(self._device)}
        if start:
            return found
        for kind, (values, grids) in _NAMES.items():
            if mine := [medium for medium in self._order if medium.kind is kind]:
                pixels = np.concatenate([patches(medium, self._rules) for medium in mine])
                found[values] = torch.from_numpy(pixels).to(self._device)
                found[grids] = torch.tensor([medium.grid for medium in mine], device=self._device)
        return found


def _read(blob: Path) -> Medium:
    return Medium.from_bytes(MediaStore(blob.parent).read(blob.name))
