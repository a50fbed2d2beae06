"""Towers in front of a decoder: their embeddings in the places of media, and what they add to its
first layers.

A tower may be trained or frozen. Ranks of one stage that have other tokens of a pack (context and
sequence parallel ranks) encode the media of their own tokens alone, so that the gradients of a
tower are sums over them, as over data-parallel ranks. There is nothing that ranks do together: one
without media goes on at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from relax_hpc.training.models.towers.encoder_input import MediaPass, TowerMedia
from relax_hpc.training.models.towers.tower import Tower

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class Towers(torch.nn.Module):
    """Towers of a model, by their names."""

    def __init__(self, towers: Sequence[Tower], config: TransformerConfig) -> None:
        """``config``: the decoder's."""
        super().__init__()
        self.about = {tower.name: tower for tower in towers}
        for tower in towers:
            module = tower.build()
            for value in module.parameters():
                # Buffers stay float32, as transformers leaves them.
                value.data = value.data.to(config.params_dtype)
                # By it megatron-core sums gradients over tensor-parallel ranks.
                value.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
                value.repeated = not config.sequence_parallel  # type: ignore[attr-defined]
            if config.recompute_granularity == "full":
                # Else transformers takes it for a language model, and warns that it has no
                # embeddings of tokens.
                module.main_input_name = "values"
                module.gradient_checkpointing_enable({"use_reentrant": False})
            self.add_module(tower.name, module)

    def freeze(self, names: Collection[str]) -> None:
        """Leave the weights of these towers as they are; before an optimizer is made."""
        for name in self.about:
            getattr(self, name).requires_grad_(name not in names)

    def forward(self, embedded: Tensor, media: MediaPass | None) -> Tensor:
        """Embeddings [t, 1, h] of this rank's tokens -> the same with media in their places."""
        given = media.inputs if media else {}
        for name, tower in self.about.items():
            module = getattr(self, name)
            if name in given:
                embedded = self._placed(embedded, tower, module, media, given[name])
            elif torch.is_grad_enabled():
                embedded = _Unused.apply(
                    embedded, *(one for one in module.parameters() if one.requires_grad)
                )
        return embedded

    def _placed(
        self,
        embedded: Tensor,
        tower: Tower,
        module: torch.nn.Module,
        media: MediaPass,
        given: TowerMedia,
    ) -> Tensor:
        trains = torch.is_grad_enabled() and next(module.parameters()).requires_grad
        with torch.set_grad_enabled(trains):
            found = tower.encode(module, given).to(embedded.dtype)
        if tower.levels:
            media.levels, media.added = found[1:].detach().requires_grad_(trains), given
        return _Placed.apply(embedded, found, given, media if tower.levels else None)

    def feed(self, layers: Sequence[torch.nn.Module]) -> None:
        """Have the first of the decoder's ``layers`` add to their results what towers have for
        them."""
        levels = max(tower.levels for tower in self.about.values())
        for level, layer in enumerate(layers[:levels]):
            layer.register_forward_hook(_Level(level), with_kwargs=True)


class _Level:
    """Sum of a layer's result and what a tower has for it, whichever pass it is of."""

    def __init__(self, level: int) -> None:
        self.level = level

    def __call__(
        self, _: Any, __: Any, given: Mapping[str, Any], result: tuple[Tensor, Any]
    ) -> Any:
        media = given["packed_seq_params"].media
        if media is None or media.levels is None:
            return None
        hidden, *rest = result
        values = media.levels[self.level].index_select(0, media.added.sources)
        return (hidden.index_add(0, media.added.places, values[:, None]), *rest)


class _Placed(torch.autograd.Function):
    """Embeddings with those of a tower in the places of its media.

    The gradient of what a tower gives to layers comes from these. Each may be computed again, in a
    backward pass of its own, which must end at the tower's results: the tower's comes once, and
    last, with the gradient of the embeddings.
    """

    @staticmethod
    def forward(
        ctx: Any, embedded: Tensor, found: Tensor, given: TowerMedia, media: MediaPass | None
    ) -> Tensor:
        # Levels that were arguments would wait for the backward pass below before they had a
        # gradient.
        ctx.given, ctx.levels, ctx.shape = given, media.levels if media else None, found.shape
        return embedded.index_copy(
            0, given.places, found[0].index_select(0, given.sources)[:, None]
        )

    @staticmethod
    def backward(ctx: Any, d_placed: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        given, levels, d_found = ctx.given, ctx.levels, None
        if ctx.needs_input_grad[1]:
            d_found = d_placed.new_zeros(ctx.shape)
            d_found[0].index_add_(0, given.sources, d_placed.index_select(0, given.places)[:, 0])
            if levels is not None:
                d_found[1:] = levels.grad
        return d_placed.index_fill(0, given.places, 0.0), d_found, None, None


class _Unused(torch.autograd.Function):
    """Embeddings as they are, and gradients of 0 for a tower that nothing stands for: sums over
    ranks begin when each parameter has had a gradient."""

    @staticmethod
    def forward(ctx: Any, embedded: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, d_embedded: Tensor) -> tuple[Tensor, ...]:
        return d_embedded, *(one.new_zeros(()).expand_as(one) for one in ctx.parameters)
