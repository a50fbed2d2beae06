"""`relax-hpc plan` beside what transformers' towers keep for the backward pass, counted on a CPU
byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from relax_hpc.config import Config
from relax_hpc.config.schema import GroupConfig
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.ops.plan import roles, tower_memory
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.towers.encoder_input import TowerMedia
from relax_hpc.training.models.towers.tower import Tower
from tests.helpers.media_helpers import QWEN3_OMNI_THINKER
from tests.training.test_tower_families import QWEN3_VL_2B

NEAR = 0.05
WIDE = {
    "visual": {"width": 64, "inner": 100, "heads": 4, "depth": 4},
    "audio": {"width": 64, "inner": 100, "heads": 4, "depth": 4},
}
"""Sizes at which what is counted once a row, as of norms, is little."""


@contextmanager
def kept(module: torch.nn.Module) -> Iterator[dict[int, Any]]:
    """Storages that autograd keeps, but for parameters, by address."""
    own, found = (
        {value.untyped_storage().data_ptr() for value in module.parameters()},
        dict[int, Any](),
    )

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def media_of(tower: Tower) -> tuple[TowerMedia, int]:
    """Media, and their tokens."""
    nothing = torch.zeros(0, dtype=torch.int64)
    if tower.name == "audio":
        return TowerMedia(
            torch.randn(400, tower.bins), torch.tensor([[1, 1, 400]]), nothing, nothing, Rules()
        ), 52
    pixels = torch.randint(256, (256, 96), dtype=torch.uint8)
    return TowerMedia(pixels, torch.tensor([[1, 16, 16]]), nothing, nothing, Rules()), 64


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", WIDE)
def test_a_tower_keeps_what_the_plan_says(name: str, again: bool):
    tower = next(one for one in spec_from_config(QWEN3_OMNI_THINKER).towers if one.name == name)
    tower = replace(tower, **WIDE[name], **({"deep": (0, 2)} if name == "visual" else {}))
    module, (media, tokens) = tower.build(), media_of(tower)
    assert tower_memory.parameters(tower) == sum(value.numel() for value in module.parameters())
    if again:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    with kept(module) as found:
        result = tower.encode(module, media)
    elements = sum(storage.nbytes() for storage in found.values()) / 4 / tokens
    assert tower_memory._kept(tower, again) == pytest.approx(elements, rel=NEAR)
    assert result.shape == (1 + tower.levels, tokens, tower.out)


def test_a_frozen_tower_takes_its_weights_and_a_layer_alone():
    config, spec = (
        Config(groups={"actor": GroupConfig(roles=["actor"])}),
        spec_from_config(QWEN3_VL_2B),
    )
    free = roles.actor_footprint(config, spec, "actor", 1)
    config.model.frozen_towers = ["visual"]
    frozen = roles.actor_footprint(config, spec, "actor", 1)
    tower = tower_memory.parameters(spec.towers[0])
    assert 4e8 < tower < 4.2e8 and frozen.resident["weights"] == free.resident["weights"]
    assert free.resident["gradients"] - frozen.resident["gradients"] == 4 * tower
    assert free.resident["optimizer states"] - frozen.resident["optimizer states"] == 8 * tower
    assert (
        free.phases["backward"]["towers' activations"]
        > 0
        == frozen.phases["backward"]["towers' activations"]
    )
