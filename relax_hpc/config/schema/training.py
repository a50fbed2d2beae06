"""Settings of the training and forward groups: parallelism, optimizer, kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from relax_hpc.base.settings import bounded


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """Distribution of the model over the ranks of a training or forward group. The number of ranks
    is tensor * pipeline * context * data."""

    tensor: int = bounded(1, 1)
    """Number of ranks that share each matrix. It may be a multiple of the model's number of
    key-value heads. Several ranks then share a head, and each of them gathers the queries, keys and
    values of all, which needs more communication."""
    pipeline: int = bounded(1, 1)
    """Number of stages, each with a part of the layers. Stages have equal numbers of layers unless
    the next two settings are set."""
    first_stage_layers: int = bounded(0, 0)
    """Number of layers of the first stage, which also has the embedding. The other stages share the
    remaining layers evenly. With 0 it has as many layers as the others."""
    last_stage_layers: int = bounded(0, 0)
    """Number of layers of the last stage, which also has the output layer; see
    `first_stage_layers`."""
    context: int = bounded(1, 1)
    """Number of ranks that share each row, for rows that are too long for one rank. Every rank has
    the same number of the row's tokens. A micro-batch is this factor larger."""
    data: int = bounded(1, 1)
    """Number of replicas of the model, each of which trains on its own rows."""
    expert: int = bounded(1, 1)
    """Number of ranks that share the experts of a layer, among the tensor * context * data ranks of
    a pipeline stage. Each rank has whole experts, and gets the tokens of all ranks that chose them.
    With 1 every rank has all experts, divided by `tensor`. It adds no ranks."""
    sequence_parallel: bool = False
    """Whether tensor ranks also divide the activations of norms and dropouts along the sequence."""

    @property
    def ranks(self) -> int:
        """Number of processes of the group."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def expert_tensor(self) -> int:
        """Number of ranks that share each matrix of an expert."""
        # megatron-core 0.16.1 reduces gradients over the wrong ranks if several tensor ranks each
        # have whole experts, and gloo cannot exchange the tokens of experts that are both
        # distributed over ranks and divided.
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
    """Learning rate after the first `warmup_steps`. `schedule` defines how it decreases after
    them."""
    final_lr_share: float = bounded(1.0, 0.0, 1.0)
    """Learning rate of the last step as a share of `lr`."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Course of the learning rate after the warm-up, from `lr` to its final share: linearly, by
    half a cosine (slow at both ends), or not at all."""
    warmup_steps: int = bounded(0, 0)
    """Number of first steps in which the learning rate rises to `lr`."""
    beta1: float = bounded(0.9, 0.0, 1.0)
    """Decay rate of Adam's first moment."""
    beta2: float = bounded(0.95, 0.0, 1.0)
    """Decay rate of Adam's second moment."""
    eps: float = bounded(1e-8, 0.0)
    """Term that Adam adds to the denominator."""
    weight_decay: float = bounded(0.0, 0.0)
    """Coefficient of weight decay."""
    clip_grad: float = bounded(1.0, 0.0)
    """Largest norm of the gradient; larger gradients are scaled down to it. With 0 there is no
    limit."""
    distributed: bool = False
    """Shard the optimizer state over data-parallel ranks."""
    overlap_gradients: bool = False
    """Sum gradients over data-parallel and context ranks during the last backward pass of a step
    instead of after it. One bucket of parameters is summed after the other. A bucket has
    `actor.megatron.bucket_size` parameters, by default at least 40 million. The sums are the same.
    With one rank there are none. This is not measured on GPUs."""
    states: Literal["float32", "bfloat16"] = "float32"
    """Type of Adam's two moments. `bfloat16` needs 4 bytes less per parameter. A step is computed
    in float32, and the new moments are rounded up or down at random: the mean is exact, and the
    error of each is at most about one percent."""
    offload: bool = False
    """Keep Adam's moments, and float32 main parameters if parameters are bfloat16, in pinned host
    memory. They pass through the GPU in each step. This saves up to 12 bytes of GPU memory per
    parameter."""


Kernels = Literal["plain", "fused", "te"]
Experts = Literal["auto", "sequential", "grouped"]


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """A group that trains a model."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_tokens_per_micro_batch: int = bounded(8192, 1)
    """Maximum number of tokens of a rank in one forward and backward pass. Rows are packed one
    after the other without padding. A longer row has its own micro-batch."""
    max_media_tokens_per_micro_batch: int = bounded(0, 0)
    """Maximum number of media tokens among these tokens, so that the towers of a rank do not encode
    more media in one pass. A row with more media tokens has its own micro-batch. With 0 there is no
    separate limit."""
    balance_window: int = bounded(4, 1)
    """Number of micro-batches per data-parallel rank in a window. A window consists of prompt
    groups in the order of training. Within a window, rows are distributed over the ranks by length
    (media count their tokens twice) and packed into few micro-batches of equal size. A larger
    window is balanced better and has fewer micro-batches; a smaller window is trained earlier."""
    kernels: Kernels = "plain"
    """Implementation of the layers. The actor's setting also applies to the forward roles. `plain`:
    torch, on every device. `fused`: Triton kernels, on GPUs, for norms, rotary embedding, gated
    activation, log-probabilities and Adam. `te`: Transformer Engine. `fused` and `te` are refused
    unless their layer is as close to float32 as a plain layer. If it is not set, a model in
    bfloat16 on GPUs uses `fused`, if Triton is installed."""
    experts: Experts = "auto"
    """Computation of the experts of a rank. `sequential`: one after the other. `grouped`: all in
    one product of torch (`torch.nn.functional.grouped_mm`), for which a second copy of the layer's
    expert weights exists during the layer. On GPUs it needs bfloat16, and widths per tensor rank
    that are multiples of 8. `auto`: `grouped` on GPUs where it can run, otherwise `sequential`.
    Forward roles group experts where they can, unless the actor has `sequential`."""
    warm_up: bool = False
    """Whether the group runs two small micro-batches and discards their gradient before its first
    step. Kernels are then compiled and ranks connected while the group still counts as loading."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes instead of storing them. `none`: none. `full`:
    all activations of a layer except its input, which costs a third more computation. `selective`:
    the activations of norms and of the feed-forward layer."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Further settings of megatron-core's TransformerConfig and DistributedDataParallelConfig by
    name (`recompute_modules: [core_attn]`), passed without change. Settings that other options
    determine are refused."""

    @property
    def pack_tokens(self) -> int:
        """Maximum number of tokens of a micro-batch, over all context ranks that share it."""
        return self.max_tokens_per_micro_batch * self.parallel.context

    @property
    def pack_media_tokens(self) -> int:
        """Maximum number of media tokens of a micro-batch, over all context ranks; 0: no limit."""
        return self.max_media_tokens_per_micro_batch * self.parallel.context


@dataclass(kw_only=True, slots=True)
class ActorConfig(TrainerConfig):
    """The group that trains the policy."""

    forward: list[Literal["actor_fwd", "reference"]] = field(default_factory=list)
    """Roles that run inside the actor and need no group. The actor swaps in their weights and
    scores each window before it trains on it, with its own parallelism and micro-batches. This
    needs less hardware, makes steps longer, and needs one more copy of the weights in host memory
    for each role."""
    simulated_step_s: float = bounded(0.0, 0.0)
    """Seconds of a simulated pass over a training batch, in which nothing is computed and the
    weights do not change. It serves to try a cluster, and to measure everything except training.
    With 0 the actor trains."""


@dataclass(kw_only=True, slots=True)
class ForwardConfig:
    """The forward-only groups: actor_fwd, reference and teacher."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    max_tokens_per_micro_batch: int = bounded(8192, 1)
    """Maximum number of tokens of a forward pass, as `actor.max_tokens_per_micro_batch`."""
    max_media_tokens_per_micro_batch: int = bounded(0, 0)
    """Maximum number of media tokens of a forward pass, as
    `actor.max_media_tokens_per_micro_batch`."""
    warm_up: bool = False
    """Whether the group scores two small micro-batches before its first rows, as
    `actor.warm_up`."""

    @property
    def pack_tokens(self) -> int:
        """Maximum number of tokens of a micro-batch, over all context ranks that share it."""
        return self.max_tokens_per_micro_batch * self.parallel.context

    @property
    def pack_media_tokens(self) -> int:
        """Maximum number of media tokens of a micro-batch, over all context ranks; 0: no limit."""
        return self.max_media_tokens_per_micro_batch * self.parallel.context
