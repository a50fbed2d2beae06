"""The vision tower of Qwen3-VL and of what came after it: one for images and videos. arXiv
2511.21631."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from relax_hpc.data.multimodal.medium import Grid, Kind
from relax_hpc.training.models.rules import (
    ANYWHERE,
    LAYERS,
    NUMBER,
    SIZE,
    TOKEN,
    Rule,
    Section,
    one_of,
)
from relax_hpc.training.models.towers.tower import Shapes, Tower, TowerSizes, layer_norm, linear

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from relax_hpc.data.multimodal.rules import Rules
    from relax_hpc.training.models.towers.encoder_input import TowerMedia

_LEVELS = Rule(
    "a list of numbers of the tower's layers",
    lambda found: isinstance(found, list) and all(map(TOKEN.fits, found)),
)
_SIZES = {
    "depth": "depth",
    "hidden_size": "width",
    "intermediate_size": "inner",
    "num_heads": "heads",
    "in_channels": "channels",
    "patch_size": "patch",
    "spatial_merge_size": "merge",
    "temporal_patch_size": "temporal",
    "out_hidden_size": "out",
    "num_position_embeddings": "learned",
}
"""Keys of `vision_config` -> fields."""


@dataclass(frozen=True, kw_only=True)
class VisionTower(Tower):
    """Vision tower, as one `vision_config` describes it."""

    name = "visual"
    kinds = (Kind.IMAGE, Kind.VIDEO)
    built_by = "qwen3_vl", "Qwen3VLVisionModel"
    own_rules: ClassVar[Mapping[str, Rule]] = {}
    """Rules for keys that `vision_config` has beside the usual ones."""
    mergers: ClassVar[str] = "deepstack_merger_list"
    """Name of the layers that make tokens of patches for layers of the decoder."""
    merger_parts: ClassVar[tuple[str, str, str]] = ("norm", "linear_fc1", "linear_fc2")
    """Names of the parts of a layer that makes tokens of patches."""

    width: int
    inner: int
    """Width of a feed-forward layer."""
    heads: int
    channels: int
    patch: int
    """Pixels of a side of a patch."""
    merge: int
    """Patches of a side of the square that becomes one token."""
    temporal: int
    """Frames of a patch."""
    learned: int
    """Learned positions, those of a square."""
    deep: tuple[int, ...]
    """Layers whose results go to layers of the decoder, the first one's to the first."""
    activation: str

    @classmethod
    def section(cls, kinds: Sequence[str]) -> Section:
        """Rules for `vision_config`, whose `model_type` is one of ``kinds``."""
        rules = {
            **ANYWHERE,
            **dict.fromkeys(_SIZES, SIZE),
            "depth": LAYERS,
            "model_type": one_of(*kinds),
            "deepstack_visual_indexes": _LEVELS,
            "hidden_act": one_of("gelu_pytorch_tanh"),
            "initializer_range": NUMBER,
            **cls.own_rules,
        }
        return Section(rules, (*_SIZES, "deepstack_visual_indexes"))

    @classmethod
    def from_config(cls, known: Mapping[str, Any], place: str) -> Self:
        """Build from the content of `vision_config`."""
        sizes = {name: known[key] for key, name in _SIZES.items()}
        deep, activation = (
            tuple(known["deepstack_visual_indexes"]),
            known.get("hidden_act", "gelu_pytorch_tanh"),
        )
        return cls(place=place, deep=deep, activation=activation, **sizes)

    @property
    def levels(self) -> int:
        """See `Tower.levels`."""
        return len(self.deep)

    @property
    def sizes(self) -> TowerSizes:
        """See `Tower.sizes`."""
        # Two inputs of norms and what they give, queries, keys and values, two of them rotated, the
        # results of frames and of all together; of the feed-forward layer what comes before and
        # after the activation.
        block = 11 * self.width + 2 * self.inner
        values = self.channels * self.temporal * self.patch**2
        ends = self.merge**2 * values + (4 + 3 * self.levels) * self.merged
        return TowerSizes(self.merge**2, self.width, block, ends)

    def multiply_adds(self, grid: Grid) -> int:
        """See `Tower.multiply_adds`; patches attend to those of the same time."""
        time, frame = grid[0], grid[1] * grid[2]
        values = self.channels * self.temporal * self.patch**2
        layer = 4 * self.width**2 + 2 * self.width * self.inner + 2 * frame * self.width
        mergers = (1 + self.levels) * (self.merged**2 + self.merged * self.out)
        return (
            time * frame * (values * self.width + self.depth * layer)
            + time * frame // self.merge**2 * mergers
        )

    def shapes(self) -> Shapes:
        """See `Tower.shapes`."""
        yield (
            "patch_embed.proj.weight",
            (self.width, self.channels, self.temporal, self.patch, self.patch),
        )
        yield "patch_embed.proj.bias", (self.width,)
        yield "pos_embed.weight", (self.learned, self.width)
        for layer in range(self.depth):
            yield from self._block(f"blocks.{layer}.")
        yield from self._merger("merger.", self.width)
        for level in range(self.levels):
            yield from self._merger(f"{self.mergers}.{level}.", self.merged)

    def _block(self, place: str) -> Shapes:
        yield from layer_norm(f"{place}norm1", self.width)
        yield from layer_norm(f"{place}norm2", self.width)
        yield from linear(f"{place}attn.qkv", 3 * self.width, self.width)
        yield from linear(f"{place}attn.proj", self.width, self.width)
        yield from linear(f"{place}mlp.linear_fc1", self.inner, self.width)
        yield from linear(f"{place}mlp.linear_fc2", self.width, self.inner)

    @property
    def merged(self) -> int:
        """Width of the patches of a token together."""
        return self.width * self.merge**2

    def _merger(self, place: str, normed: int) -> Shapes:
        """Parameters of a layer that makes tokens of patches; ``normed``: the width of its norm."""
        norm, first, second = self.merger_parts
        yield from layer_norm(f"{place}{norm}", normed)
        yield from linear(f"{place}{first}", self.merged, self.merged)
        yield from linear(f"{place}{second}", self.out, self.merged)

    def config(self) -> dict[str, Any]:
        """See `Tower.config`."""
        sizes = {key: getattr(self, name) for key, name in _SIZES.items()}
        return sizes | {"deepstack_visual_indexes": list(self.deep), "hidden_act": self.activation}

    def encode(self, module: torch.nn.Module, media: TowerMedia) -> Tensor:
        """See `Tower.encode`; the values of ``media`` are pixels, uint8 [patches, values]."""
        import torch

        found = module(
            normalised(media.values, media.rules), grid_thw=media.grids, **self._placed(media)
        )
        return torch.stack([found.pooler_output, *found.deepstack_features])

    def _placed(self, media: TowerMedia) -> dict[str, Tensor]:
        """Tensors that follow from the grids alone. Worked out on the host: transformers' way would
        wait for a GPU in every layer."""
        from transformers import vision_utils

        from relax_hpc.training.models.upload import upload

        side, device = math.isqrt(self.learned), media.values.device
        corners, weights = vision_utils.get_vision_bilinear_indices_and_weights(
            media.grids, side, self.merge
        )
        positions = vision_utils.get_vision_position_ids(media.grids, self.merge)
        return {
            "bilinear_indices": upload(corners.numpy(), device),
            "bilinear_weights": upload(weights.numpy(), device),
            "position_ids": upload(positions.numpy(), device),
            # Of which the host alone makes use.
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(media.grids),
        }


def normalised(pixels: Tensor, rules: Rules) -> Tensor:
    """uint8 ``pixels`` [patches, values] as float32, bit for bit what `multimodal.features.patches`
    makes of them."""
    import torch

    from relax_hpc.training.models.upload import upload

    full = np.float32(255)
    mean, std = (
        upload(np.array(each, np.float32)[:, None] * full, pixels.device)
        for each in (rules.mean, rules.std)
    )
    return (
        pixels.unflatten(1, (len(rules.mean), -1)).to(torch.float32).sub_(mean).div_(std).flatten(1)
    )
