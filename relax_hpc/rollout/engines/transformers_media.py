"""Media in the transformers engine: their inputs of a forward pass, and the position ids of its
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from relax_hpc.data.media import PromptMedium, spans_of
from relax_hpc.data.multimodal.features import features as features_of
from relax_hpc.data.multimodal.medium import Kind, Medium
from relax_hpc.data.multimodal.positions import positions
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.queue.storage.media import MediaStore

if TYPE_CHECKING:
    import torch


_VISUAL_INPUTS = {
    Kind.IMAGE: ("pixel_values", "image_grid_thw"),
    Kind.VIDEO: ("pixel_values_videos", "video_grid_thw"),
}
"""Kind -> names of the inputs with its pixels and its grids."""


class MediaInputs:
    """Inputs of the forward passes over one prompt and its response, including the tokens."""

    def __init__(
        self, media: Sequence[PromptMedium], rules: Rules | None, model: torch.nn.Module
    ) -> None:
        """Read the blobs of ``media``. ``rules``: None if the ``model`` takes text only."""
        # Any: torch types attributes of a module, such as `device`, as Tensor or Module.
        self._model: Any = model
        self._rules, self._spans = rules, spans_of(media)
        self._by_id = {medium.blob.name: _read(medium.blob) for medium in media if medium.blob}
        self._order = [self._by_id[medium.blob.name] for medium in media if medium.blob]

    def for_pass(self, tokens: Sequence[int], start: int) -> dict[str, Any]:
        """Inputs of a pass over ``tokens[start:]``; earlier tokens are in the cache."""
        import torch

        device = self._model.device
        ids = torch.tensor([tokens[start:]], device=device)
        if not (self._order and self._rules):
            return {"input_ids": ids}
        position_ids = positions(len(tokens), self._spans, self._by_id, self._rules)
        inputs = {
            "input_ids": ids,
            "position_ids": torch.from_numpy(position_ids[:, None, start:]).to(device),
        }
        # All media are in the prompt, so only the first pass needs them.
        return inputs if start else inputs | self._visual_inputs(device) | self._audio_inputs(ids)

    def _visual_inputs(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Pixels and grids of images and videos."""
        import torch

        inputs = {}
        for kind, (pixels_name, grids_name) in _VISUAL_INPUTS.items():
            media = self._of_kind(kind)
            if media:
                pixels = np.concatenate([self._features(medium) for medium in media])
                inputs[pixels_name] = torch.from_numpy(pixels).to(device)
                inputs[grids_name] = torch.tensor([medium.grid for medium in media], device=device)
        return inputs

    def _audio_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Embeddings of the tokens, with those of sounds at their placeholders."""
        import torch

        sounds = self._of_kind(Kind.AUDIO)
        if not sounds:
            return {}
        embedded = self._model.get_input_embeddings()(ids)
        is_sound = ids == self._model.config.audio_token_id
        encoded = []
        # One call for each sound: in a batch, transformers lets the end of a short sound depend on
        # the longer ones.
        for sound in sounds:
            values = torch.from_numpy(self._features(sound))
            mask = torch.ones(1, len(values), dtype=torch.long)
            features = self._model.get_audio_features(values.t()[None].to(embedded), mask)
            encoded.append(features.last_hidden_state)
        return {"inputs_embeds": embedded.masked_scatter(is_sound[..., None], torch.cat(encoded))}

    def _features(self, medium: Medium) -> np.ndarray:
        # `for_pass` has checked that there are rules.
        return features_of(medium, cast(Rules, self._rules))

    def _of_kind(self, kind: Kind) -> list[Medium]:
        return [medium for medium in self._order if medium.kind is kind]


def _read(blob: Path) -> Medium:
    return Medium.from_bytes(MediaStore(blob.parent).read(blob.name))
