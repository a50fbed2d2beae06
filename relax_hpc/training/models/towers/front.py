"""Towers in front of a decoder. They put embeddings of media in place of tokens, and add values to
the results of the decoder's first layers.

A tower is trained or frozen. Ranks of one stage with different tokens of a pack (context and
sequence parallel ranks) encode only the media of these tokens. So the gradients of a tower are
sums over these ranks, as over data-parallel ranks. Towers need no collective: a rank without media
continues immediately.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from relax_hpc.training.models.towers.attention import choose_attention
from relax_hpc.training.models.towers.encoder_input import MediaPass, TowerMedia
from relax_hpc.training.models.towers.tower import Tower

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class Towers(torch.nn.Module):
    """Towers of a model, by their names."""

    def __init__(self, towers: Sequence[Tower], config: TransformerConfig) -> None:
        """``config``: the decoder's."""
        super().__init__()
        self.specs = {tower.name: tower for tower in towers}
        # Whether one attention computes all frames of a layer, where a kernel exists.
        self.packs_frames = False
        for tower in towers:
            module: Any = tower.build()
            for value in module.parameters():
                # Buffers stay float32, as transformers leaves them.
                value.data = value.data.to(config.params_dtype)
                # megatron-core 0.16.1 sums gradients over tensor-parallel ranks if this is set.
                value.sequence_parallel = config.sequence_parallel
                value.repeated = not config.sequence_parallel
            if config.recompute_granularity == "full":
                # Without this name, transformers 5.12 treats the module as a language model and
                # warns that it has no token embeddings.
                module.main_input_name = "values"
                module.gradient_checkpointing_enable({"use_reentrant": False})
            self.add_module(tower.name, module)

    def freeze(self, names: Collection[str]) -> None:
        """Exclude these towers from training. Call it before the optimizer is built."""
        for name in self.specs:
            getattr(self, name).requires_grad_(name not in names)

    def forward(self, embedded: Tensor, media: MediaPass | None) -> Tensor:
        """Put media in place of the embeddings [t, 1, h] of this rank's tokens."""
        for name, tower in self.specs.items():
            module = getattr(self, name)
            if media is not None and name in media.inputs:
                embedded = self._insert(embedded, tower, module, media, media.inputs[name])
            elif torch.is_grad_enabled():
                trained = [value for value in module.parameters() if value.requires_grad]
                embedded = _ZeroGradients.apply(embedded, *trained)
        return embedded

    def _insert(
        self,
        embedded: Tensor,
        tower: Tower,
        module: torch.nn.Module,
        media: MediaPass,
        inputs: TowerMedia,
    ) -> Tensor:
        """Encode ``inputs``, and insert the results into ``embedded``."""
        if self.packs_frames:
            choose_attention(module, tower.head_size)
        trains = torch.is_grad_enabled() and next(module.parameters()).requires_grad
        with torch.set_grad_enabled(trains):
            encoded = tower.encode(module, inputs).to(embedded.dtype)
        if not tower.levels:
            return _Insertion.apply(embedded, encoded, inputs, None)
        media.levels = encoded[1:].detach().requires_grad_(trains)
        media.level_media = inputs
        return _Insertion.apply(embedded, encoded, inputs, media)

    def register_levels(self, layers: Sequence[torch.nn.Module]) -> None:
        """Make the first of the decoder's ``layers`` add the values that towers have for them."""
        levels = max(tower.levels for tower in self.specs.values())
        for level, layer in enumerate(layers[:levels]):
            layer.register_forward_hook(_AddLevel(level), with_kwargs=True)


class _AddLevel:
    """Forward hook that adds a tower's values to the result of one layer, in any pass."""

    def __init__(self, level: int) -> None:
        self.level = level

    def __call__(
        self, _: Any, __: Any, kwargs: Mapping[str, Any], result: tuple[Tensor, Any]
    ) -> Any:
        media: MediaPass | None = kwargs["packed_seq_params"].media
        if media is None or media.levels is None or media.level_media is None:
            return None
        hidden, *others = result
        values = media.levels[self.level].index_select(0, media.level_media.sources)
        return (hidden.index_add(0, media.level_media.targets, values[:, None]), *others)


class _Insertion(torch.autograd.Function):
    """Embeddings with those of a tower in place of the tokens of its media.

    The levels get their gradient separately. A decoder layer may be recomputed in its own backward
    pass, which must end at the tower's results. The tower's backward pass comes once, at the end,
    with the gradient of the embeddings and of the levels.
    """

    @staticmethod
    def forward(
        ctx: Any, embedded: Tensor, encoded: Tensor, inputs: TowerMedia, media: MediaPass | None
    ) -> Tensor:
        # The levels are no arguments of this function: autograd would wait for the backward pass
        # below before it gave them a gradient.
        ctx.inputs, ctx.levels = inputs, media.levels if media else None
        ctx.shape = encoded.shape
        values = encoded[0].index_select(0, inputs.sources)
        return embedded.index_copy(0, inputs.targets, values[:, None])

    @staticmethod
    def backward(ctx: Any, d_result: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        inputs, levels, d_encoded = ctx.inputs, ctx.levels, None
        if ctx.needs_input_grad[1]:
            d_encoded = d_result.new_zeros(ctx.shape)
            d_inserted = d_result.index_select(0, inputs.targets)[:, 0]
            d_encoded[0].index_add_(0, inputs.sources, d_inserted)
            if levels is not None:
                d_encoded[1:] = levels.grad
        return d_result.index_fill(0, inputs.targets, 0.0), d_encoded, None, None


class _ZeroGradients(torch.autograd.Function):
    """Identity of embeddings, with zero gradients for a tower without media.

    megatron-core's sums over ranks begin only after every parameter had a gradient.
    """

    @staticmethod
    def forward(ctx: Any, embedded: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, d_embedded: Tensor) -> tuple[Tensor, ...]:
        zeros = [value.new_zeros(()).expand_as(value) for value in ctx.parameters]
        return d_embedded, *zeros
