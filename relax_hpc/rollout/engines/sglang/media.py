"""Media in requests to SGLang 0.5.21: the server gets the trainer's preprocessed inputs, byte for
byte, instead of preprocessing media itself.

A request names blobs of the media store, which the server reads after `install`. An unpatched
server takes lists of numbers in such a request for tensors, and answers 500. The patches are needed
on GPUs too. Position ids are the trainer's as well: for Qwen3-Omni, SGLang truncates fractions of a
position, and fails on two sounds together with an image.
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
from relax_hpc.rollout.engines.sglang.import_patches import patch_on_import
from relax_hpc.training.models.towers.audio import encode_by_length

if TYPE_CHECKING:
    import numpy as np
    import torch

_FORMAT = "processor_output"
"""SGLang's name for inputs that need no preprocessing."""
_FEATURES = {
    Kind.IMAGE: "pixel_values",
    Kind.VIDEO: "pixel_values_videos",
    Kind.AUDIO: "input_features",
}
_GRIDS = {Kind.IMAGE: "image_grid_thw", Kind.VIDEO: "video_grid_thw"}
_CACHED_MEDIA = 8
"""Media whose features are cached: the requests of a prompt group arrive together and have the same
media."""


def request_fields(media_by_request: Sequence[Sequence[PromptMedium]]) -> dict[str, Any]:
    """Fields of an HTTP request for the media of its requests.

    A field belongs to a kind of medium and has a list for each request: one mapping with all media
    of that kind in order, or no mapping.
    """
    # An empty list and not None for a request without media: if the first request has None, SGLang
    # 0.5.21 treats the values of all requests as media of one.
    fields: dict[str, list[Any]] = defaultdict(lambda: [[] for _ in media_by_request])
    for number, media in enumerate(media_by_request):
        for kind in {medium.kind for medium in media}:
            of_kind = [medium for medium in media if medium.kind == kind]
            blobs = [str(medium.blob) for medium in of_kind]
            fields[f"{kind}_data"][number] = [
                {"format": _FORMAT, "blobs": blobs, "spans": spans_of(of_kind)}
            ]
    return fields


def install(model: Path) -> None:
    """Make SGLang read the blobs of requests, in a process that has not imported it yet.
    ``model``: the directory that it serves."""
    patch_on_import(
        {
            "sglang.srt.multimodal.processors.qwen_vl": functools.partial(
                _read_blobs, Rules.from_model(model)
            ),
            "sglang.srt.models.qwen3_vl_moe": _set_deepstack_levels,
            "sglang.srt.models.qwen3_omni_moe": _encode_sounds_separately,
        }
    )


def _set_deepstack_levels(module: ModuleType) -> None:
    # SGLang 0.5.21 gives decoders with experts three DeepStack levels, as the published models
    # have, and ignores the number in the vision configuration.
    model = module.Qwen3VLMoeForConditionalGeneration
    initialize = model.__init__

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, config, *args, **kwargs)
        self.model.deepstack_embed_to_decoder_layer = range(
            len(config.vision_config.deepstack_visual_indexes)
        )

    model.__init__ = __init__


def _encode_sounds_separately(module: ModuleType) -> None:
    # SGLang 0.5.21 concatenates the padded sounds of several requests, and the server exits if they
    # are padded to different lengths. See also `towers.audio.encode_by_length` for the batches.
    model = module.Qwen3OmniMoeThinkerForConditionalGeneration

    def get_audio_feature(self: Any, items: Sequence[Any]) -> torch.Tensor:
        import torch

        tower = self.audio_tower
        parameter = next(tower.parameters())
        sounds: list[torch.Tensor] = []
        for item in items:
            # An item has several sounds if one of them belongs to a video with several spans.
            for sound, mask in zip(item.feature, item.feature_attention_mask, strict=True):
                sounds.append(sound[:, mask.bool()].to(parameter))
        lengths = [sound.shape[1] for sound in sounds]

        def encode(numbers: list[int]) -> torch.Tensor:
            frames = torch.cat([sounds[number] for number in numbers], dim=1)
            feature_lens = torch.tensor(
                [lengths[number] for number in numbers], device=parameter.device
            )
            return tower(frames, feature_lens=feature_lens).last_hidden_state.flatten(0, -2)

        return encode_by_length(lengths, 2 * tower.n_window, encode)

    model.get_audio_feature = get_audio_feature


def _read_blobs(rules: Rules, module: ModuleType) -> None:
    # SGLang 0.5.21 gets lists and mappings from JSON, but its processor_output format needs
    # tensors. They are read here, in the server, where the processor expects them.
    processor = module.QwenVLImageProcessor
    process = processor.process_mm_data_async

    async def process_mm_data_async(
        self: Any, image_data: Any, input_text: Any, request_obj: Any, **kwargs: Any
    ) -> Any:
        data = {kind: getattr(request_obj, f"{kind}_data", None) or [] for kind in Kind}
        items = await asyncio.to_thread(_load_items, data, input_text, rules)
        for kind, values in items.items():
            setattr(request_obj, f"{kind}_data", values)
        return await process(self, request_obj.image_data, input_text, request_obj, **kwargs)

    processor.process_mm_data_async = process_mm_data_async


def _load_items(
    data: Mapping[Kind, Sequence[Any]], ids: Any, rules: Rules
) -> dict[Kind, list[Any]]:
    """SGLang's media items of a request with token ``ids``, by kind. ``data``: fields of the
    request by kind, of which those with blobs are ours."""
    ours = {kind: values[0] for kind, values in data.items() if values and "blobs" in values[0]}
    if not ours:
        return {}
    media: dict[str, tuple[np.ndarray, Header]] = {}
    spans: list[Any] = []
    for item in ours.values():
        spans += item["spans"]
        for path in item["blobs"]:
            media[Path(path).name] = _read(path, rules)
    spans.sort(key=lambda span: span["start"])
    headers = {name: header for name, (_, header) in media.items()}
    position_fields = _position_fields(len(ids), spans, headers, rules)
    items: dict[Kind, list[Any]] = {}
    for kind, item in ours.items():
        of_kind = [media[Path(path).name] for path in item["blobs"]]
        items[kind] = [_item(kind, item["spans"], of_kind) | position_fields]
    return items


def _position_fields(
    tokens: int, spans: Sequence[Any], media: Mapping[str, Header], rules: Rules
) -> dict[str, Any]:
    """Position ids of a prompt, and the difference between later position ids and token numbers."""
    import torch

    position_ids = torch.from_numpy(positions(tokens, spans, media, rules))
    return {
        "mrope_positions": position_ids,
        "mrope_position_delta": position_ids.max().reshape(1, 1) + 1 - tokens,
    }


def _item(
    kind: Kind, spans: Sequence[Any], media: Sequence[tuple[np.ndarray, Header]]
) -> dict[str, Any]:
    """SGLang's item of all ``media`` of one ``kind``: features with headers, in order."""
    import torch

    values = [torch.from_numpy(array) for array, _ in media]
    # In SGLang the second offset is the last token of a span.
    offsets = [[span["start"], span["start"] + span["length"] - 1] for span in spans]
    item: dict[str, Any] = {"format": _FORMAT, "offsets": offsets}
    if kind is Kind.AUDIO:
        ones = [torch.ones(len(array), dtype=torch.long) for array in values]
        padded = torch.nn.utils.rnn.pad_sequence(values, batch_first=True).transpose(1, 2)
        mask = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True)
        return item | {_FEATURES[kind]: padded, "feature_attention_mask": mask}
    grids = torch.tensor([header.grid for _, header in media])
    return item | {_FEATURES[kind]: torch.cat(values), _GRIDS[kind]: grids}


@functools.lru_cache(maxsize=_CACHED_MEDIA)
def _read(path: str, rules: Rules) -> tuple[np.ndarray, Header]:
    """Features and header of the medium in the blob at ``path``."""
    blob = Path(path)
    medium = Medium.from_bytes(MediaStore(blob.parent).read(blob.name))
    return features(medium, rules), medium.header
