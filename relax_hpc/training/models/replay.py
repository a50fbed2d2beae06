"""Rollout routing replay (arXiv 2510.11370): tokens are computed by the experts that the engine
chose for them.

Whose routes a layer takes is said by what it is called with, `PackedRows.routes` of the
micro-batch. So each pass has its own, whatever passes of other micro-batches a pipeline puts in
between, and a pass that is computed again the same. Probabilities are the router's own, by its
present weights, of the experts that were chosen: it learns.
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
    """Routes by the engine, of the tokens of a micro-batch that this rank's routers see."""

    packed: Tensor
    """uint8 [t, layers, chosen, width], see `relax_hpc.base.routes`; all bits set of tokens without
    one."""
    replays: bool
    """Whether they are replayed; else they are compared alone."""
    known: Tensor = field(init=False)
    """bool [t]: whether a token has a route."""
    equal: dict[int, Tensor] = field(default_factory=dict)
    """Whether a layer's router would have chosen the same, bool [t], by layer, once that is
    computed."""

    def __post_init__(self) -> None:
        self.known = self.packed[:, 0].ne(NONE).flatten(1).any(1)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Numbers of experts [t, chosen] int64, and whether there is a route [t, 1] bool."""
        one = self.packed[:, layer]
        numbers = one[..., 0].long()
        if one.shape[-1] > 1:
            numbers = numbers + 256 * one[..., 1].long()
        return numbers, self.known[:, None]


class RoutedLayer:
    """Neighbour of one layer's router, which asks it which experts to take."""

    def __init__(self, layer: int) -> None:
        """``layer``: its number in the whole model."""
        self.layer = layer
        self.routes: Routes | None = None
        """Routes of the pass that is being computed."""

    def take(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take the routes that the transformer layer is called with, before it is computed."""
        self.routes = kwargs["packed_seq_params"].routes

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK = torch.topk,
    ) -> tuple[Tensor, Tensor]:
        """Scores [t, experts] -> those of the experts that are taken, and their numbers, [t, topk]
        each."""
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.routes is None:
            return values, own
        given, known = self.routes.of_layer(self.layer)
        self.routes.equal[self.layer] = (own[:, :, None] == given[:, None]).any(-1).all(-1)
        if not self.routes.replays:
            return values, own
        taken = torch.where(known, given, own)
        return scores.gather(1, taken), taken


def install(stage: torch.nn.Module, layers: Sequence[int]) -> None:
    """Have all layers of a stage, by their numbers in the whole model, take the routes that they
    are called with."""
    for number, layer in zip(layers, stage.decoder.layers, strict=True):
        routed = RoutedLayer(number)
        layer.mlp.router.router_replay = routed
        layer.register_forward_pre_hook(routed.take, with_kwargs=True)
        layer.mlp.replay = routed
