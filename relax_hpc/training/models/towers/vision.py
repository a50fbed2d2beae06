"""Vision tower of Qwen3-VL and later models, for images and videos. arXiv 2511.21631."""

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
    MAPPING,
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
    lambda value: isinstance(value, list) and all(map(TOKEN.fits, value)),
)
# transformers 5.17 writes what earlier releases had in their code: frequencies for rows and columns
# with this base.
_ROPE_RULES = {
    "rope_parameters": MAPPING,
    "rope_parameters.rope_type": one_of("axial"),
    "rope_parameters.rope_theta": one_of(10000.0),
}
# Keys of `vision_config` -> fields of `VisionTower`.
_FIELDS = {
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


@dataclass(frozen=True, kw_only=True)
class VisionTower(Tower):
    """Vision tower that one `vision_config` describes."""

    name = "visual"
    kinds = (Kind.IMAGE, Kind.VIDEO)
    built_by = "qwen3_vl", "Qwen3VLVisionModel"
    extra_rules: ClassVar[Mapping[str, Rule]] = {}
    """Rules for further keys of `vision_config`."""
    mergers: ClassVar[str] = "deepstack_merger_list"
    """Name of the mergers whose tokens go to layers of the decoder. A merger makes tokens of
    patches."""
    merger_modules: ClassVar[tuple[str, str, str]] = ("norm", "linear_fc1", "linear_fc2")
    """Names of the modules of a merger."""

    inner: int
    """Width of a feed-forward layer."""
    channels: int
    patch: int
    """Side of a patch in pixels."""
    merge: int
    """Side, in patches, of the square that becomes one token."""
    temporal: int
    """Frames of a patch."""
    learned: int
    """Number of learned positions, which form a square."""
    deep: tuple[int, ...]
    """Layers whose results go to the first layers of the decoder, in this order."""
    activation: str

    @classmethod
    def section(cls, kinds: Sequence[str]) -> Section:
        """Rules for a `vision_config` whose `model_type` is one of ``kinds``."""
        rules = {
            **ANYWHERE,
            **dict.fromkeys(_FIELDS, SIZE),
            "depth": LAYERS,
            "model_type": one_of(*kinds),
            "deepstack_visual_indexes": _LEVELS,
            "hidden_act": one_of("gelu_pytorch_tanh"),
            "initializer_range": NUMBER,
            **_ROPE_RULES,
            **cls.extra_rules,
        }
        return Section(rules, (*_FIELDS, "deepstack_visual_indexes"))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], prefix: str) -> Self:
        """Build from the content of `vision_config`. ``prefix``: see `Tower`."""
        return cls(
            prefix=prefix,
            deep=tuple(config["deepstack_visual_indexes"]),
            activation=config.get("hidden_act", "gelu_pytorch_tanh"),
            **{name: config[key] for key, name in _FIELDS.items()},
        )

    @property
    def levels(self) -> int:
        """See `Tower.levels`."""
        return len(self.deep)

    @property
    def sizes(self) -> TowerSizes:
        """See `Tower.sizes`."""
        # Stored per row: inputs and outputs of two norms; queries, keys and values; rotated queries
        # and keys; attention's results by frame and together. In the feed-forward layer: the values
        # before and after the activation.
        block = 11 * self.width + 2 * self.inner
        values = self.channels * self.temporal * self.patch**2
        ends = self.merge**2 * values + (4 + 3 * self.levels) * self.merged
        return TowerSizes(self.merge**2, self.width, block, ends)

    def multiply_adds(self, grid: Grid) -> int:
        """See `Tower.multiply_adds`. Patches attend to patches of the same time."""
        time, frame = grid[0], grid[1] * grid[2]
        values = self.channels * self.temporal * self.patch**2
        layer = 4 * self.width**2 + 2 * self.width * self.inner + 2 * frame * self.width
        patches = time * frame * (values * self.width + self.depth * layer)
        merger = self.merged**2 + self.merged * self.out
        tokens = time * frame // self.merge**2
        return patches + tokens * (1 + self.levels) * merger

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

    def _block(self, prefix: str) -> Shapes:
        yield from layer_norm(f"{prefix}norm1", self.width)
        yield from layer_norm(f"{prefix}norm2", self.width)
        yield from linear(f"{prefix}attn.qkv", 3 * self.width, self.width)
        yield from linear(f"{prefix}attn.proj", self.width, self.width)
        yield from linear(f"{prefix}mlp.linear_fc1", self.inner, self.width)
        yield from linear(f"{prefix}mlp.linear_fc2", self.width, self.inner)

    @property
    def merged(self) -> int:
        """Width of the concatenated patches of a token."""
        return self.width * self.merge**2

    def _merger(self, prefix: str, norm_width: int) -> Shapes:
        """Parameters of a merger."""
        norm, first, second = self.merger_modules
        yield from layer_norm(f"{prefix}{norm}", norm_width)
        yield from linear(f"{prefix}{first}", self.merged, self.merged)
        yield from linear(f"{prefix}{second}", self.out, self.merged)

    def config(self) -> dict[str, Any]:
        """See `Tower.config`."""
        sizes = {key: getattr(self, name) for key, name in _FIELDS.items()}
        return sizes | {"deepstack_visual_indexes": list(self.deep), "hidden_act": self.activation}

    def encode(self, module: torch.nn.Module, media: TowerMedia) -> Tensor:
        """See `Tower.encode`; the values of ``media`` are pixels, uint8 [patches, values]."""
        import torch

        pixels = normalize_pixels(media.values, media.rules)
        # pooler_output: embeddings of the tokens; deepstack_features: values of each level.
        result = module(pixels, grid_thw=media.grids, **self._grid_inputs(media))
        return torch.stack([result.pooler_output, *result.deepstack_features])

    def _grid_inputs(self, media: TowerMedia) -> dict[str, Tensor]:
        """Arguments of the module that depend on the grids only.

        transformers 5.12 would compute them in the forward pass, and synchronize with the GPU in
        every layer. So the host computes them here.
        """
        from transformers import vision_utils

        from relax_hpc.training.models.upload import upload

        device = media.values.device
        positions = vision_utils.get_vision_position_ids(media.grids, self.merge)
        return {
            **self._learned_positions(media.grids, device),
            "position_ids": upload(positions.numpy(), device),
            # Stays on the host, because only the host reads it.
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(media.grids),
        }

    def _learned_positions(self, grids: Tensor, device: torch.device) -> dict[str, Tensor]:
        """Indices and weights of the learned positions between which each patch lies."""
        from transformers import vision_utils

        from relax_hpc.training.models.upload import upload

        side = math.isqrt(self.learned)
        if hasattr(vision_utils, "get_vision_interpolation_indices_and_weights"):
            # transformers 5.17 has other names for them, and the patches in the first axis.
            names = "interp_indices", "interp_weights"
            corners, weights = vision_utils.get_vision_interpolation_indices_and_weights(
                grids, side, align_corners=True, spatial_merge_size=self.merge
            )
        else:
            names = "bilinear_indices", "bilinear_weights"
            corners, weights = vision_utils.get_vision_bilinear_indices_and_weights(
                grids, side, self.merge
            )
        return {
            names[0]: upload(corners.numpy(), device),
            names[1]: upload(weights.numpy(), device),
        }


def normalize_pixels(pixels: Tensor, rules: Rules) -> Tensor:
    """Normalize uint8 ``pixels`` [patches, values] to float32.

    The result equals that of `multimodal.features.patches` bit for bit.
    """
    import torch

    from relax_hpc.training.models.upload import upload

    full = np.float32(255)
    mean, std = (
        upload(np.array(values, np.float32)[:, None] * full, pixels.device)
        for values in (rules.mean, rules.std)
    )
    by_channel = pixels.unflatten(1, (len(rules.mean), -1)).to(torch.float32)
    return by_channel.sub_(mean).div_(std).flatten(1)
