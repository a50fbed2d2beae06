"""Our policy and its trainer as they are measured: random weights of a shape, in bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapes import hf_config

from relax_hpc.algorithms import Grpo
from relax_hpc.config.load import build
from relax_hpc.config.schema import ActorConfig, ModelConfig, ParallelConfig
from relax_hpc.training import parallel

if TYPE_CHECKING:
    from relax_hpc.training.model import PolicyModel
    from relax_hpc.training.trainer import Trainer

PATIENCE_S = 120.0


def settings_of(actor: dict[str, Any], device: str) -> ActorConfig:
    """An `actor` section. What runs on GPUs alone is left out on a CPU."""
    settings = build(ActorConfig, actor)
    if device == "cpu":
        settings.kernels, settings.optimizer.offload = "plain", False
    return settings


def policy(shape: str, settings: ActorConfig, device: str) -> PolicyModel:
    """In a group of this process alone."""
    parallel.initialize_alone(device, 0, PATIENCE_S)
    from relax_hpc.training.model import PolicyModel

    return PolicyModel(
        hf_config(shape), ModelConfig(dtype="bfloat16", device=device), ParallelConfig(), settings
    )


def trainer(shape: str, actor: dict[str, Any], device: str) -> Trainer:
    """A policy with its optimizer."""
    settings = settings_of(actor, device)
    model = policy(shape, settings, device)
    from relax_hpc.training.trainer import Trainer

    return Trainer.from_settings(model, Grpo(), settings, 1.0)
