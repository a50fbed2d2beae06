"""A policy of ours and its trainer: random weights of a shape, in bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapes import hf_config, rows

from relax_hpc.algorithms import Grpo
from relax_hpc.config.load import build
from relax_hpc.config.schema import ActorConfig, ModelConfig, ParallelConfig
from relax_hpc.training import parallel

if TYPE_CHECKING:
    from relax_hpc.training.model import PolicyModel
    from relax_hpc.training.trainer import Trainer

Section = dict[str, Any]
"""The section `actor` of a configuration."""
PATIENCE_S = 120.0
"""Deadline of collectives."""


def settings_of(actor: Section, device: str) -> ActorConfig:
    """Settings of ``actor``. On a CPU, without those that need a GPU."""
    settings = build(ActorConfig, actor)
    if device == "cpu":
        settings.kernels, settings.optimizer.offload = "plain", False
    return settings


def policy(shape: str, settings: ActorConfig, device: str) -> PolicyModel:
    """A policy in a group of one rank, this process."""
    parallel.initialize_alone(device, 0, PATIENCE_S)
    from relax_hpc.training.model import PolicyModel

    return PolicyModel(
        hf_config(shape), ModelConfig(dtype="bfloat16", device=device), ParallelConfig(), settings
    )


def trainer(shape: str, actor: Section, device: str) -> Trainer:
    """A policy with its optimizer."""
    settings = settings_of(actor, device)
    model = policy(shape, settings, device)
    from relax_hpc.training.trainer import Trainer

    return Trainer.from_settings(model, Grpo(), settings, 1.0)


def new_batch(trained: Trainer, count: int, length: int) -> list[Any]:
    """One micro-batch of ``count`` rows of ``length`` tokens."""
    from relax_hpc.training.models.batches import collate

    model = trained.model
    return [collate(rows(count, length, model.spec.vocab), 0, str(model.device))]
