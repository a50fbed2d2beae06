"""Dispatch of tokens to the experts of a single rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.convert_helpers import MIXED, model
from tests.helpers.training_helpers import batch, one_rank_fixture, rows, trainer  # noqa: F401
from tests.requirements import requires

requires("torch", "megatron")
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection  # noqa: E402
from megatron.core.transformer.moe.token_dispatcher import (  # noqa: E402
    MoEAlltoAllTokenDispatcher,
)

from relax_hpc.training.models.expert_dispatch import LocalDispatcher  # noqa: E402
from relax_hpc.training.models.expert_layer import ExpertLayer  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_rank")]


def expert_layers(module: torch.nn.Module) -> list[Any]:
    return [child for child in module.modules() if isinstance(child, ExpertLayer)]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("experts", ["sequential", "grouped"])
def test_values_are_those_of_megatrons_dispatcher(
    experts: str, recompute: str, tmp_path: Path
) -> None:
    """Log-probabilities and gradients, bit for bit."""
    mixed = model(tmp_path / "mixed", MIXED | {"vocab_size": 64})
    ours = trainer(mixed, experts=experts, recompute=recompute)
    theirs = trainer(mixed, experts=experts, recompute=recompute)
    layers = expert_layers(theirs.model.module)
    assert layers
    for layer in layers:
        assert type(layer.token_dispatcher) is LocalDispatcher
        layer.token_dispatcher = MoEAlltoAllTokenDispatcher(
            layer.num_local_experts,
            layer.local_expert_indices,
            layer.config,
            get_default_pg_collection(),
        )
    given = batch(rows(4, seed=3))
    for trained in (ours, theirs):
        trained.accumulate([given])
    logprobs = [trained.model.forward_logprobs([given], 0.9) for trained in (ours, theirs)]
    for left, right in zip(*logprobs, strict=True):
        assert (left == right).all()
    parameters = dict(theirs.model.module.named_parameters())
    for name, parameter in ours.model.module.named_parameters():
        assert torch.equal(parameter.main_grad, parameters[name].main_grad), name
