"""Media in the engine that runs Hugging Face's model: what its forward pass takes of them, and
where tokens stand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_hpc.data.media import PromptMedium, spans_of
from relax_hpc.data.multimodal.features import features
from relax_hpc.data.multimodal.medium import Kind, Medium
from relax_hpc.data.multimodal.positions import positions
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.queue.storage.media import MediaStore

if TYPE_CHECKING:
    import torch


_SEEN = {
    Kind.IMAGE: ("pixel_values", "image_grid_thw"),
    Kind.VIDEO: ("pixel_values_videos", "video_grid_thw"),
}
"""Names of values and grids of what is seen, by kind."""


class MediaInputs:
    """Inputs of the passes over one prompt and its response, their tokens among them."""

    def __init__(
        self, media: Sequence[PromptMedium], rules: Rules | None, model: torch.nn.Module
    ) -> None:
        """Read the blobs of ``media``. ``rules``: None of a ``model`` that takes text alone."""
        self._rules, self._model, self._spans = rules, model, spans_of(media)
        self._by_id = {medium.blob.name: _read(medium.blob) for medium in media if medium.blob}
        self._order = [self._by_id[medium.blob.name] for medium in media if medium.blob]

    def of(self, tokens: Sequence[int], start: int) -> dict[str, Any]:
        """Inputs of a pass over a sequence of ``tokens``, from number ``start`` on."""
        import torch

        device = self._model.device
        ids = torch.tensor([tokens[start:]], device=device)
        if not (self._order and self._rules):
            return {"input_ids": ids}
        where = positions(len(tokens), self._spans, self._by_id, self._rules)[:, None, start:]
        found = {"input_ids": ids, "position_ids": torch.from_numpy(where).to(device)}
        return found if start else found | self._seen(device) | self._heard(ids)

    def _seen(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Images and videos."""
        import torch

        found = {}
        for kind, (values, grids) in _SEEN.items():
            if mine := self._of_kind(kind):
                pixels = np.concatenate([features(medium, self._rules) for medium in mine])
                found[values] = torch.from_numpy(pixels).to(device)
                found[grids] = torch.tensor([medium.grid for medium in mine], device=device)
        return found

    def _heard(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Embeddings of the tokens, with those of sounds in their places. Each sound is encoded by
        itself: given all, transformers has the end of a short one depend on the others."""
        import torch

        mine = self._of_kind(Kind.AUDIO)
        if not mine:
            return {}
        embedded, places = (
            self._model.get_input_embeddings()(ids),
            ids == self._model.config.audio_token_id,
        )
        heard = [
            self._model.get_audio_features(
                values.t()[None].to(embedded), torch.ones(1, len(values), dtype=torch.long)
            )
            for values in (torch.from_numpy(features(medium, self._rules)) for medium in mine)
        ]
        found = torch.cat([one.last_hidden_state for one in heard])
        return {"inputs_embeds": embedded.masked_scatter(places[..., None], found)}

    def _of_kind(self, kind: Kind) -> list[Medium]:
        return [medium for medium in self._order if medium.kind is kind]


def _read(blob: Path) -> Medium:
    return Medium.from_bytes(MediaStore(blob.parent).read(blob.name))
