"""Media in requests to SGLang: what the trainer has prepared, byte for byte, in place of SGLang's
own preprocessing.

A request names blobs of the media store, which the server reads. `install` has it do so: left
alone, SGLang 0.5.21 takes lists of numbers in such a request for tensors, and answers 500. Needed
beside a GPU too. Position ids are the trainer's as well: SGLang's own, of Qwen3-Omni, cut off parts
of a position, and fail on two sounds beside an image.
"""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from relax_hpc.data.media import PromptMedium, spans_of
from relax_hpc.data.multimodal.features import features
from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.positions import positions
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.queue.storage.media import MediaStore
from relax_hpc.rollout.engines.sglang.after_import import change
from relax_hpc.training.models.towers.audio import encoded

if TYPE_CHECKING:
    import numpy as np
    import torch

_FORMAT = "processor_output"
"""SGLang's word for inputs that need no preprocessing."""
_FEATURES = {
    Kind.IMAGE: "pixel_values",
    Kind.VIDEO: "pixel_values_videos",
    Kind.AUDIO: "input_features",
}
_GRIDS = {Kind.IMAGE: "image_grid_thw", Kind.VIDEO: "video_grid_thw"}
_KEPT = 8
"""Media whose features are kept: a prompt group's requests come together, and all have the same."""


def fields_of(requests: Sequence[Sequence[PromptMedium]]) -> dict[str, Any]:
    """Fields of an HTTP request for the media of its ``requests``, by kind: of each request a list
    of one mapping, which holds all of that kind in order, or an empty one: where the first has
    None, SGLang makes media of all."""
    found: dict[str, list[Any]] = defaultdict(lambda: [[] for _ in requests])
    for number, media in enumerate(requests):
        for kind in {medium.kind for medium in media}:
            mine = [medium for medium in media if medium.kind == kind]
            blobs = [str(medium.blob) for medium in mine]
            found[f"{kind}_data"][number] = [
                {"format": _FORMAT, "blobs": blobs, "spans": spans_of(mine)}
            ]
    return found


def install(model: Path) -> None:
    """Have SGLang read the blobs of requests in a process that has not imported it yet. ``model``:
    the directory that it serves."""
    change(
        {
            "sglang.srt.multimodal.processors.qwen_vl": functools.partial(
                _read_blobs, Rules.of(model)
            ),
            "sglang.srt.models.qwen3_vl_moe": _count_levels,
            "sglang.srt.models.qwen3_omni_moe": _hear_alone,
        }
    )


def _count_levels(module: ModuleType) -> None:
    # Decoders of experts have three levels of DeepStack in SGLang, as the published models,
    # whatever their tower has.
    model = module.Qwen3VLMoeForConditionalGeneration
    make = model.__init__

    def __init__(self: Any, config: Any, *rest: Any, **more: Any) -> None:
        make(self, config, *rest, **more)
        self.model.deepstack_embed_to_decoder_layer = range(
            len(config.vision_config.deepstack_visual_indexes)
        )

    model.__init__ = __init__


def _hear_alone(module: ModuleType) -> None:
    # Given sounds of several requests that are not padded alike, the server ends; and see
    # `towers.audio.encoded`.
    model = module.Qwen3OmniMoeThinkerForConditionalGeneration

    def get_audio_feature(self: Any, items: Sequence[Any]) -> torch.Tensor:
        import torch

        tower = self.audio_tower
        first = next(tower.parameters())
        # An item has several sounds where one of them, a video's own, lies in several places.
        padded = [
            pair
            for item in items
            for pair in zip(item.feature, item.feature_attention_mask, strict=True)
        ]
        sounds = [sound[:, mask.bool()].to(first) for sound, mask in padded]
        lengths = [sound.shape[1] for sound in sounds]

        def encode(some: list[int]) -> torch.Tensor:
            frames = torch.cat([sounds[number] for number in some], dim=1)
            mine = torch.tensor([lengths[number] for number in some], device=first.device)
            return tower(frames, feature_lens=mine).last_hidden_state.flatten(0, -2)

        return encoded(lengths, 2 * tower.n_window, encode)

    model.get_audio_feature = get_audio_feature


def _read_blobs(rules: Rules, module: ModuleType) -> None:
    processor = module.QwenVLImageProcessor
    process = processor.process_mm_data_async

    async def process_mm_data_async(
        self: Any, image_data: Any, input_text: Any, request_obj: Any, **more: Any
    ) -> Any:
        named = {kind: getattr(request_obj, f"{kind}_data", None) or [] for kind in Kind}
        for kind, parts in (await asyncio.to_thread(_as_tensors, named, input_text, rules)).items():
            setattr(request_obj, f"{kind}_data", parts)
        return await process(self, request_obj.image_data, input_text, request_obj, **more)

    processor.process_mm_data_async = process_mm_data_async


def _as_tensors(
    named: Mapping[Kind, Sequence[Any]], ids: Any, rules: Rules
) -> dict[Kind, list[Any]]:
    """Parts of a request with token ``ids`` whose media are ``named``, with the features of the
    blobs, by kind."""
    ours = {kind: parts for kind, parts in named.items() if parts and "blobs" in parts[0]}
    media = {
        Path(path).name: _read(path, rules) for (part,) in ours.values() for path in part["blobs"]
    }
    spans = sorted(
        (span for (part,) in ours.values() for span in part["spans"]),
        key=lambda span: span["start"],
    )
    about = (
        _places(len(ids), spans, {name: header for name, (_, header) in media.items()}, rules)
        if ours
        else {}
    )
    return {
        kind: [
            _of_blobs(kind, part["spans"], [media[Path(path).name] for path in part["blobs"]])
            | about
        ]
        for kind, (part,) in ours.items()
    }


def _places(
    tokens: int, spans: Sequence[Any], media: Mapping[str, Header], rules: Rules
) -> dict[str, Any]:
    """Position ids of a prompt, and how far those behind it are from numbers of tokens."""
    import torch

    found = torch.from_numpy(positions(tokens, spans, media, rules))
    return {
        "mrope_positions": found,
        "mrope_position_delta": found.max().reshape(1, 1) + 1 - tokens,
    }


def _of_blobs(
    kind: Kind, spans: Sequence[Any], media: Sequence[tuple[np.ndarray, Header]]
) -> dict[str, Any]:
    import torch

    values = [torch.from_numpy(one) for one, _ in media]
    # Both ends of a span belong to it.
    offsets = [[span["start"], span["start"] + span["length"] - 1] for span in spans]
    found: dict[str, Any] = {"format": _FORMAT, "offsets": offsets}
    if kind is Kind.AUDIO:
        frames = [torch.ones(len(one), dtype=torch.long) for one in values]
        padded = torch.nn.utils.rnn.pad_sequence(values, batch_first=True).transpose(1, 2)
        mask = torch.nn.utils.rnn.pad_sequence(frames, batch_first=True)
        return found | {_FEATURES[kind]: padded, "feature_attention_mask": mask}
    grids = torch.tensor([header.grid for _, header in media])
    return found | {_FEATURES[kind]: torch.cat(values), _GRIDS[kind]: grids}


@functools.lru_cache(maxsize=_KEPT)
def _read(path: str, rules: Rules) -> tuple[np.ndarray, Header]:
    """Features of the medium whose blob is at ``path``, and what it is."""
    blob = Path(path)
    medium = Medium.from_bytes(MediaStore(blob.parent).read(blob.name))
    return features(medium, rules), medium.header
