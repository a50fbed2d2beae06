"""Rollout routing replay (arXiv 2510.11370): the experts that the engine chose compute the tokens.

A layer takes its routes from the arguments of its call (`PackedRows.routes` of the micro-batch). So
each pass has its own routes, even if a pipeline alternates between micro-batches, and a recomputed
pass has the same routes. The router computes the probabilities of these experts by its present
weights, so it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from relax_hpc.base.routes import NONE

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(slots=True, eq=False)
class Routes:
    """The engine's routes for the tokens of a micro-batch that this rank's routers process."""

    packed: Tensor
    """uint8 [t, layers, chosen, width], see `relax_hpc.base.routes`. A token without a route has
    all bits set."""
    replays: bool
    """Whether the routes are replayed. If not, they are only compared."""
    has_route: Tensor = field(init=False)
    """bool [t]: whether a token has a route."""
    equal: dict[int, Tensor] = field(default_factory=dict)
    """Whether a layer's router would have chosen the same experts, bool [t], by layer. Layers that
    were not computed yet have no entry."""

    def __post_init__(self) -> None:
        self.has_route = self.packed[:, 0].ne(NONE).flatten(1).any(1)

    def layer_experts(self, layer: int) -> tuple[Tensor, Tensor]:
        """Numbers of the experts in a layer, [t, chosen] int64, and whether tokens have a route,
        [t, 1] bool."""
        packed = self.packed[:, layer]
        # Numbers of 256 or more need a second byte.
        numbers = packed[..., 0].long()
        if packed.shape[-1] > 1:
            numbers = numbers + 256 * packed[..., 1].long()
        return numbers, self.has_route[:, None]


class RoutedLayer:
    """Routes of one layer. megatron-core's router calls `get_replay_topk` instead of choosing
    experts."""

    def __init__(self, layer: int) -> None:
        """``layer``: its number in the whole model."""
        self.layer = layer
        # Routes of the present pass.
        self.routes: Routes | None = None

    def set_routes(
        self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Forward pre-hook: take the routes from the arguments of the transformer layer."""
        self.routes = kwargs["packed_seq_params"].routes

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK = torch.topk,
    ) -> tuple[Tensor, Tensor]:
        """Choose experts by ``scores`` [t, experts], or by the routes if they are replayed.

        Returns their scores and their numbers, [t, topk] each.
        """
        values, by_scores = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.routes is None:
            return values, by_scores
        by_routes, has_route = self.routes.layer_experts(self.layer)
        matches = by_scores[:, :, None] == by_routes[:, None]
        self.routes.equal[self.layer] = matches.any(-1).all(-1)
        # With `model.routing_replay` "record" only the agreement is measured.
        if not self.routes.replays:
            return values, by_scores
        experts = torch.where(has_route, by_routes, by_scores)
        return scores.gather(1, experts), experts


def install(stage: Any, layers: Sequence[int]) -> None:
    """Make all layers of a ``stage`` use the routes of their calls.

    ``stage``: a megatron-core model. ``layers``: numbers of its layers in the whole model.
    """
    for number, layer in zip(layers, stage.decoder.layers, strict=True):
        routed = RoutedLayer(number)
        layer.mlp.router.router_replay = routed
        layer.register_forward_pre_hook(routed.set_routes, with_kwargs=True)
        layer.mlp.replay = routed
