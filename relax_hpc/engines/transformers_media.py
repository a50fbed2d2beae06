"""Media in the engine that runs Hugging Face's model: what its forward pass takes of them, and where tokens stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_hpc.data.media import PromptMedium, spans_of
from relax_hpc.multimodal.features import patches
from relax_hpc.multimodal.medium import Medium
from relax_hpc.multimodal.positions import positions
from relax_hpc.multimodal.rules import Rules
from relax_hpc.transfer_queue.storage.media import MediaStore

if TYPE_CHECKING:
    import torch


class MediaInputs:
    """Inputs of the passes over one prompt and its response, beside their tokens; none, of a prompt without media."""

    def __init__(self, media: Sequence[PromptMedium], rules: Rules | None, device: torch.device) -> None:
        """Read the blobs of ``media``. ``rules``: None of a model that takes text alone."""
        self._rules, self._device, self._spans = rules, device, spans_of(media)
        self._media = [_read(medium) for medium in media]
        self._by_id = {span["media_id"]: medium for span, medium in zip(self._spans, self._media, strict=True)}

    def of(self, tokens: int, start: int) -> dict[str, Any]:
        """Inputs of a pass over tokens ``start`` to ``tokens`` of the sequence."""
        import torch

        if not (self._media and self._rules):
            return {}
        where = positions(tokens, self._spans, self._by_id, self._rules)[:, None, start:]
        found = {"position_ids": torch.from_numpy(where).to(self._device)}
        if start:
            return found
        pixels = np.concatenate([patches(medium, self._rules) for medium in self._media])
        grids = torch.tensor([medium.grid for medium in self._media])
        return found | {
            "pixel_values": torch.from_numpy(pixels).to(self._device),
            "image_grid_thw": grids.to(self._device),
        }


def _read(medium: PromptMedium) -> Medium:
    assert medium.blob, "media of a request are stored"
    return Medium.from_bytes(MediaStore(medium.blob.parent).read(medium.blob.name))
