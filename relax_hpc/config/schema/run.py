"""The whole configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from relax_hpc.algorithms import Algorithm, Grpo
from relax_hpc.base.reward_settings import RewardSettings
from relax_hpc.base.settings import bounded
from relax_hpc.config.schema.cluster import GroupConfig, SiteConfig, SlurmConfig
from relax_hpc.config.schema.environment import EnvironmentConfig
from relax_hpc.config.schema.generation import GenrmConfig, RolloutConfig
from relax_hpc.config.schema.policy import DataConfig, ModelConfig, WarmStartConfig
from relax_hpc.config.schema.running import (
    CheckpointConfig,
    EvalConfig,
    EventsConfig,
    LivenessConfig,
    MetricsConfig,
    ProfileConfig,
    QueueConfig,
    SamplesConfig,
    WeightsConfig,
)
from relax_hpc.config.schema.service import ServiceConfig
from relax_hpc.config.schema.training import ActorConfig, ForwardConfig, TrainerConfig


def default_groups() -> dict[str, GroupConfig]:
    """Return one group per role. The role advantages runs with the queue controller in the hub."""
    return {
        "hub": GroupConfig(roles=["advantages"]),
        "rollout": GroupConfig(roles=["rollout"]),
        "actor": GroupConfig(roles=["actor"]),
    }


_OPTIONAL = ("actor_fwd", "reference", "teacher", "critic", "genrm")
"""Optional roles. Each has a group of its name."""


def optional_groups() -> dict[str, GroupConfig]:
    """Return groups that a run has if a layer names them, or if its algorithm needs their
    fields."""
    return {name: GroupConfig(roles=[name]) for name in _OPTIONAL}


@dataclass(kw_only=True, slots=True)
class Config:
    """A run. Several files compose from left to right. The resolved configuration is stored in the
    run directory."""

    name: str = "run"
    """Name of the run."""
    run_dir: str = ""
    """The run directory, on a filesystem that every node can read. If it is empty, it is
    runs/<name>."""
    layout: Literal["local", "het", "jobs"] = "local"
    """Jobs or processes of the run's groups. `local`: process trees on this machine. `het`: one
    heterogeneous Slurm job. `jobs`: one Slurm job per group."""
    seed: int = bounded(0, 0)
    """Seed of all random choices of the run."""
    steps: int = bounded(100, 1)
    """Number of training steps of the run."""
    prompts_per_step: int = bounded(32, 1)
    """Number of prompt groups in a training step."""
    samples_per_prompt: int = bounded(8, 1)
    """Number of episodes for each prompt (GRPO's group size). It must be at least 2 if their
    rewards are compared. 1 is enough for ppo, reinforce_pp and distill without reward_weight. sft
    (1) and dpo (2) set it."""
    max_staleness: int = bounded(0, 0, 64)
    """Largest number of versions by which the weights that sampled a row may be behind the weights
    that train on it. 0: synchronous and on-policy. 1: near on-policy. More: fully asynchronous."""
    colocate: bool = False
    """Let the actor and the engines share devices, in one group, and take turns. The engines
    release their memory when a step is generated; then the actor trains. While the engines run, the
    actor's weights and optimizer are in host memory. It needs max_staleness 0."""
    threads: int = bounded(1, 1)
    """Number of CPU threads of each process."""
    only: Literal["", "rollout", "train"] = ""
    """Part of the loop that runs. `rollout`: engines generate the rows of all steps with the start
    weights, and nothing is trained. `train`: train on the rows of the file `rows`, and generate
    nothing. Empty: both."""
    rows: str = ""
    """File of rows for `only: train`, in the format jsonl of `relax-hpc queue export`."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    algorithm: Algorithm = field(default_factory=Grpo)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    reward: RewardSettings = field(default_factory=RewardSettings)
    genrm: GenrmConfig = field(default_factory=GenrmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    actor_fwd: ForwardConfig = field(default_factory=ForwardConfig)
    reference: ForwardConfig = field(default_factory=ForwardConfig)
    teacher: ForwardConfig = field(default_factory=ForwardConfig)
    critic: TrainerConfig = field(default_factory=TrainerConfig)
    """The group that trains the critic, for an algorithm with one: the policy's model with a value
    as output."""
    queue: QueueConfig = field(default_factory=QueueConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    site: SiteConfig = field(default_factory=SiteConfig)
    groups: dict[str, GroupConfig] = field(default_factory=default_groups)
    """Groups of processes by their names, each with its roles and resources."""
