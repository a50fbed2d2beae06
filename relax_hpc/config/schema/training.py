"""Settings of the training and forward groups: parallelism, optimizer, kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from relax_hpc.base.settings import bounded


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """Split of the model over a training or forward group. Ranks = tensor * pipeline * context *
    data."""

    tensor: int = bounded(1, 1)
    """Ranks that share each matrix. Of a multiple of the model's key-value heads several share a
    head, and each gathers the queries, keys and values of all: more to send than up to that
    number."""
    pipeline: int = bounded(1, 1)
    """Stages that each have a part of the layers, the same number unless the next two say
    otherwise."""
    first_stage_layers: int = bounded(0, 0)
    """Layers of the stage that has the embedding too; the others share the rest evenly. 0: as many
    as they have."""
    last_stage_layers: int = bounded(0, 0)
    """Layers of the stage that has the output layer too; as `first_stage_layers`."""
    context: int = bounded(1, 1)
    """Ranks that share each row, every one with as many of its tokens: for rows that are too long
    for one. A micro-batch is as many times larger."""
    data: int = bounded(1, 1)
    expert: int = bounded(1, 1)
    """Ranks that share a layer's experts, of the tensor * context * data ranks of a pipeline stage:
    each has whole experts, and gets the tokens of all ranks that chose them. 1: every rank has all,
    cut as `tensor` says. It adds no ranks."""
    sequence_parallel: bool = False

    @property
    def ranks(self) -> int:
        """Processes of the group."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def expert_tensor(self) -> int:
        """Ranks that share each matrix of an expert."""
        # megatron-core 0.16.1 reduces gradients over the wrong ranks where experts are in one piece
        # in each of several tensor ranks, and gloo cannot exchange tokens of experts that are both
        # dealt out and cut.
        return self.tensor if self.expert == 1 else 1

    def __str__(self) -> str:
        return (
            f"tensor {self.tensor} * pipeline {self.pipeline} * context {self.context} * data "
            f"{self.data}"
        )


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """Adam of megatron-core."""

    lr: float = bounded(1e-6, 0.0)
    """Learning rate after the first `warmup_steps`; `schedule` says how it falls after them."""
    final_lr_share: float = bounded(1.0, 0.0, 1.0)
    """Learning rate of the last step as a share of `lr`."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Course of the learning rate from `lr`, after the warm-up, to its last share: evenly, by half
    a cosine, which is slow at both ends, or not at all."""
    warmup_steps: int = bounded(0, 0)
    beta1: float = bounded(0.9, 0.0, 1.0)
    beta2: float = bounded(0.95, 0.0, 1.0)
    eps: float = bounded(1e-8, 0.0)
    weight_decay: float = bounded(0.0, 0.0)
    clip_grad: float = bounded(1.0, 0.0)
    distributed: bool = False
    """Shard optimizer state over data-parallel ranks."""
    overlap_gradients: bool = False
    """Sum gradients over data-parallel and context ranks while the last backward pass of a step
    goes on, a bucket of parameters after the other (`actor.megatron.bucket_size` of them, at least
    40 million unless it is set), instead of after it. The same sums; of one rank there are none.
    Not measured on GPUs."""
    states: Literal["float32", "bfloat16"] = "float32"
    """Type of Adam's two moments. `bfloat16`: 4 bytes a parameter less; a step is computed in
    float32, and what it leaves is rounded up or down by chance: right in the mean, and each to a
    hundredth."""
    offload: bool = False
    """Keep Adam's moments, and float32 main parameters under bfloat16, in pinned host memory; they
    pass through the GPU in each step: up to 12 bytes a parameter less on it."""


Kernels = Literal["plain", "fused", "te"]


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """A group that trains a model."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_tokens_per_micro_batch: int = bounded(8192, 1)
    """Tokens that a rank takes through one forward and backward pass: rows lie in it one after the
    other, without padding. A longer row is a micro-batch of its own."""
    max_media_tokens_per_micro_batch: int = bounded(0, 0)
    """Tokens that stand for media among these, each row's counted, so that a rank's towers encode
    no more at once. A row that has more is a micro-batch of its own. 0: as many as fit."""
    balance_window: int = bounded(4, 1)
    """Micro-batches of each data-parallel rank whose tokens make a window, of prompt groups in
    ticket order. Within it rows are balanced over the ranks by length, to which media add their
    tokens once more, and dealt to few micro-batches of equal size: a larger one is balanced better
    and has fewer, a smaller one is trained sooner."""
    kernels: Kernels = "plain"
    """Implementation of the layers, those of the actor also in the forward roles. `plain`: torch,
    on every device; `fused`: Triton kernels for norms, rotary embedding, gated activation and
    log-probabilities, and one for Adam, on GPUs; `te`: Transformer Engine, which is refused unless
    a layer of it is as near to float32 as a plain one is."""
    experts: Literal["sequential", "grouped"] = "sequential"
    """Computation of the experts of a rank: one after the other, or `grouped`, all in one product
    of torch's (`torch.nn.functional.grouped_mm`), beside which their weights lie in one piece for
    the time of a layer."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again instead of keeping them. `full`: all of a
    layer but its input, a third more computation; `selective`: those of its norms and of its
    feed-forward layer."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Further settings of megatron-core's TransformerConfig and DistributedDataParallelConfig by
    name (`recompute_modules: [core_attn]`), passed through as they are; what is decided elsewhere
    is refused."""

    @property
    def pack_tokens(self) -> int:
        """Most tokens of a micro-batch, over all context ranks that share it."""
        return self.max_tokens_per_micro_batch * self.parallel.context

    @property
    def pack_media_tokens(self) -> int:
        """Most tokens of media of a micro-batch, over all context ranks; 0: no bound."""
        return self.max_media_tokens_per_micro_batch * self.parallel.context


@dataclass(kw_only=True, slots=True)
class ActorConfig(TrainerConfig):
    """The group that trains the policy."""

    forward: list[Literal["actor_fwd", "reference"]] = field(default_factory=list)
    """Roles that run inside of the actor, in no group: it swaps their weights in and scores each
    window before it trains on it, with its own parallelism and micro-batches. Less hardware, a
    longer step, and for each of them one more copy of the weights in host memory."""
    simulated_step_s: float = bounded(0.0, 0.0)
    """Seconds that a pass over a training batch takes, in which nothing is computed and the weights
    stay as they are: for trying a cluster, and for measuring what is around training. 0: train."""


@dataclass(kw_only=True, slots=True)
class ForwardConfig:
    """The forward-only groups: actor_fwd, reference and teacher."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    max_tokens_per_micro_batch: int = bounded(8192, 1)
    max_media_tokens_per_micro_batch: int = bounded(0, 0)
    """Bound of a forward pass, as `actor.max_media_tokens_per_micro_batch`."""

    @property
    def pack_tokens(self) -> int:
        """Most tokens of a micro-batch, over all context ranks that share it."""
        return self.max_tokens_per_micro_batch * self.parallel.context

    @property
    def pack_media_tokens(self) -> int:
        """Most tokens of media of a micro-batch, over all context ranks; 0: no bound."""
        return self.max_media_tokens_per_micro_batch * self.parallel.context
