"""Media in requests to SGLang: what the trainer has prepared, byte for byte, in place of SGLang's own preprocessing.

A request names blobs of the media store, which the server reads. `install` has it do so: left alone, SGLang 0.5.21
takes lists of numbers in such a request for tensors, and answers 500. Needed beside a GPU too.
"""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from relax_hpc.data.media import PromptMedium
from relax_hpc.engines.sglang.after_import import change
from relax_hpc.multimodal.features import patches
from relax_hpc.multimodal.medium import Medium
from relax_hpc.multimodal.rules import Rules
from relax_hpc.transfer_queue.storage.media import MediaStore

if TYPE_CHECKING:
    import numpy as np

_FORMAT = "processor_output"
"""SGLang's word for inputs that need no preprocessing."""
_FEATURES = {"image": "pixel_values", "video": "pixel_values_videos"}
_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
_KEPT = 8
"""Media whose features are kept: a prompt group's requests come together, and all have the same."""


def fields_of(requests: Sequence[Sequence[PromptMedium]]) -> dict[str, Any]:
    """Fields of an HTTP request for the media of its ``requests``, by kind: of each request a list of one mapping,
    which holds all of that kind in order, or an empty one: where the first has None, SGLang makes media of all."""
    found: dict[str, list[Any]] = defaultdict(lambda: [[] for _ in requests])
    for number, media in enumerate(requests):
        for kind in {medium.kind for medium in media}:
            mine = [medium for medium in media if medium.kind == kind]
            blobs = [str(medium.blob) for medium in mine]
            # Both ends of a span belong to it.
            spans = [[start, start + length - 1] for medium in mine for start, length in medium.spans]
            found[f"{kind}_data"][number] = [{"format": _FORMAT, "blobs": blobs, "offsets": spans}]
    return found


def install(model: Path) -> None:
    """Have SGLang read the blobs of requests in a process that has not imported it yet. ``model``: the directory that
    it serves."""
    change({"sglang.srt.multimodal.processors.qwen_vl": functools.partial(_read_blobs, Rules.of(model))})


def _read_blobs(rules: Rules, module: ModuleType) -> None:
    processor = module.QwenVLImageProcessor
    process = processor.process_mm_data_async

    async def process_mm_data_async(self: Any, image_data: Any, input_text: Any, request_obj: Any, **more: Any) -> Any:
        for kind in _FEATURES:
            if found := getattr(request_obj, f"{kind}_data", None):
                setattr(request_obj, f"{kind}_data", await asyncio.to_thread(_as_tensors, kind, found, rules))
        return await process(self, request_obj.image_data, input_text, request_obj, **more)

    processor.process_mm_data_async = process_mm_data_async


def _as_tensors(kind: str, parts: Sequence[Any], rules: Rules) -> list[Any]:
    """``parts`` of a request, with the features of the blobs that they name."""
    return [_of_blobs(kind, part, rules) if isinstance(part, Mapping) and "blobs" in part else part for part in parts]


def _of_blobs(kind: str, part: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    import numpy as np
    import torch

    media = [_features(path, rules) for path in part["blobs"]]
    return {
        "format": _FORMAT,
        "offsets": part["offsets"],
        _FEATURES[kind]: torch.from_numpy(np.concatenate([values for values, _ in media])),
        _GRIDS[kind]: torch.tensor([grid for _, grid in media]),
    }


@functools.lru_cache(maxsize=_KEPT)
def _features(path: str, rules: Rules) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Patches of the medium whose blob is at ``path``, and their grid."""
    blob = Path(path)
    medium = Medium.from_bytes(MediaStore(blob.parent).read(blob.name))
    return patches(medium, rules), medium.grid
