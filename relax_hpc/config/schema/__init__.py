"""The configuration of a run: one slotted dataclass per subject, every field documented below it.

`bounded` sets a default and its range. Checks over several fields are in
`relax_hpc.ops.checks.settings`.
"""

from relax_hpc.config.schema.autoscaler import AutoscalerConfig
from relax_hpc.config.schema.cluster import (
    ContainerConfig,
    GroupConfig,
    MpiConfig,
    ResourcesConfig,
    SiteConfig,
    SlurmConfig,
)
from relax_hpc.config.schema.environment import EnvironmentConfig
from relax_hpc.config.schema.generation import (
    EngineConfig,
    ExternalConfig,
    GenrmConfig,
    PartialRollout,
    RolloutConfig,
    SimulatedConfig,
)
from relax_hpc.config.schema.multimodal import MultimodalConfig
from relax_hpc.config.schema.policy import (
    DataConfig,
    ModelConfig,
    RoutingReplay,
    TinyModelConfig,
    WarmStartConfig,
)
from relax_hpc.config.schema.run import Config, default_groups, optional_groups
from relax_hpc.config.schema.running import (
    CheckpointConfig,
    Durability,
    EvalConfig,
    EventsConfig,
    LivenessConfig,
    MetricsConfig,
    Mode,
    PlanesConfig,
    ProfileConfig,
    QueueConfig,
    SamplesConfig,
    WeightsConfig,
)
from relax_hpc.config.schema.service import ServiceConfig
from relax_hpc.config.schema.training import (
    ActorConfig,
    Experts,
    ForwardConfig,
    Kernels,
    OptimizerConfig,
    ParallelConfig,
    TrainerConfig,
)

__all__ = [
    "ActorConfig",
    "AutoscalerConfig",
    "CheckpointConfig",
    "Config",
    "ContainerConfig",
    "DataConfig",
    "Durability",
    "EngineConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "EventsConfig",
    "Experts",
    "ExternalConfig",
    "ForwardConfig",
    "GenrmConfig",
    "GroupConfig",
    "Kernels",
    "LivenessConfig",
    "MetricsConfig",
    "Mode",
    "ModelConfig",
    "MpiConfig",
    "MultimodalConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PartialRollout",
    "PlanesConfig",
    "ProfileConfig",
    "QueueConfig",
    "ResourcesConfig",
    "RolloutConfig",
    "RoutingReplay",
    "SamplesConfig",
    "ServiceConfig",
    "SimulatedConfig",
    "SiteConfig",
    "SlurmConfig",
    "TinyModelConfig",
    "TrainerConfig",
    "WarmStartConfig",
    "WeightsConfig",
    "default_groups",
    "optional_groups",
]
