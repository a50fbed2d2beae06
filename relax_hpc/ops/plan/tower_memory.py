"""Memory of towers on a rank of the first pipeline stage: weights without gradients, and
activations."""

from __future__ import annotations

import math

from relax_hpc.config.schema import Config, ForwardConfig, TrainerConfig
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.models.towers.tower import Tower


def frozen_parameters(spec: ModelSpec, config: Config, stage: int) -> int:
    """Parameters of a rank of ``stage`` that stay as they are."""
    frozen = config.model.frozen_towers if stage == 0 else []
    return sum(parameters(tower) for tower in spec.towers if tower.name in frozen)


def parameters(tower: Tower) -> int:
    """Parameters of a tower, all of which each rank of the first stage has."""
    return sum(math.prod(shape) for _, shape in tower.shapes())


def media_tokens(config: Config, settings: TrainerConfig | ForwardConfig, tokens: int) -> float:
    """Tokens of a micro-batch that stand for media at most, if rows are as long as they may be:
    whole prompts, of which no two share one. Ranks of sequence parallelism have media of their
    own."""
    prompt, parallel = config.data.max_prompt_tokens, settings.parallel
    found = tokens * prompt / (prompt + config.rollout.max_new_tokens)
    if most := settings.max_media_tokens_per_micro_batch:
        found = min(found, max(most, prompt))
    return found / (parallel.tensor if parallel.sequence_parallel else 1)


def kept_elements(spec: ModelSpec, config: Config) -> float:
    """Elements of a token of media that are kept for the backward pass, of the kind that takes
    most."""
    trained = [tower for tower in spec.towers if tower.name not in config.model.frozen_towers]
    return max((_kept(tower, config.actor.recompute == "full") for tower in trained), default=0.0)


def _kept(tower: Tower, again: bool) -> float:
    sizes = tower.sizes
    return sizes.rows * tower.depth * (sizes.width if again else sizes.block) + sizes.ends


def working_elements(spec: ModelSpec, config: Config) -> float:
    """Elements of a token of media that the backward pass of one layer takes beside, or the forward
    pass of one that keeps nothing."""
    found = [0.0]
    for tower in spec.towers:
        sizes, frozen = tower.sizes, tower.name in config.model.frozen_towers
        again = sizes.block if frozen or config.actor.recompute == "full" else 0
        found.append(sizes.rows * (again + (0 if frozen else sizes.block / 2)))
    return max(found)


def scored_elements(spec: ModelSpec) -> float:
    """Elements of a token of media that a forward pass which keeps nothing takes at most."""
    return max(
        (max(tower.sizes.rows * tower.sizes.block, tower.sizes.ends) for tower in spec.towers),
        default=0.0,
    )
