"""Memory of towers on a rank of the first pipeline stage: frozen parameters and activations."""

from __future__ import annotations

import math

from relax_hpc.config.schema import Config, ForwardConfig, TrainerConfig
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.models.towers.tower import Tower


def frozen_parameters(spec: ModelSpec, config: Config, stage: int) -> int:
    """Parameters of frozen towers on a rank of ``stage``."""
    frozen = config.model.frozen_towers if stage == 0 else []
    return sum(parameters(tower) for tower in spec.towers if tower.name in frozen)


def parameters(tower: Tower) -> int:
    """Parameters of a tower. Each rank of the first stage has all of them."""
    return sum(math.prod(shape) for _, shape in tower.shapes())


def media_tokens(config: Config, settings: TrainerConfig | ForwardConfig, tokens: int) -> float:
    """Maximum of media tokens in a micro-batch of ``tokens`` tokens, on one rank.

    It assumes rows of maximum length whose prompts consist of media. With sequence parallelism
    each tensor rank has different media.
    """
    prompt, parallel = config.data.max_prompt_tokens, settings.parallel
    count = tokens * prompt / (prompt + config.rollout.max_new_tokens)
    limit = settings.max_media_tokens_per_micro_batch
    if limit:
        count = min(count, max(limit, prompt))
    return count / (parallel.tensor if parallel.sequence_parallel else 1)


def kept_elements(spec: ModelSpec, config: Config) -> float:
    """Elements per media token that the largest trained tower keeps for the backward pass."""
    trained = [tower for tower in spec.towers if tower.name not in config.model.frozen_towers]
    is_recomputed = config.actor.recompute == "full"
    return max((_kept(tower, is_recomputed) for tower in trained), default=0.0)


def _kept(tower: Tower, is_recomputed: bool) -> float:
    sizes = tower.sizes
    per_layer = sizes.width if is_recomputed else sizes.block
    return sizes.rows * tower.depth * per_layer + sizes.ends


def working_elements(spec: ModelSpec, config: Config) -> float:
    """Additional elements per media token while one layer of a tower is computed.

    A trained layer needs gradients, and its block if that is recomputed. A frozen layer needs its
    block in the forward pass.
    """
    counts = [0.0]
    for tower in spec.towers:
        sizes, is_frozen = tower.sizes, tower.name in config.model.frozen_towers
        count: float = 0
        if is_frozen or config.actor.recompute == "full":
            count += sizes.block
        if not is_frozen:
            count += sizes.block / 2
        counts.append(sizes.rows * count)
    return max(counts)


def scored_elements(spec: ModelSpec) -> float:
    """Elements per media token of a forward pass that keeps nothing."""
    sizes = [tower.sizes for tower in spec.towers]
    return max((max(size.rows * size.block, size.ends) for size in sizes), default=0.0)
