"""Bytes of Adam's states on one rank, and of its step and its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from relax_hpc.config.schema import ActorConfig
from relax_hpc.ops.plan.model_memory import ITEM_BYTES, MAIN_BYTES

CHUNK_ELEMENTS = 2**24
"""Elements that `training.adam` updates at a time if states are offloaded or bfloat16."""
MOMENTS = 2


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """Memory of the optimizer of one rank."""

    states: float
    """Bytes of moments, and of main parameters if the model is in bfloat16."""
    offloaded: bool
    update: float
    """Additional bytes on the GPU during a step."""

    @property
    def device(self) -> float:
        """Bytes of states on the GPU."""
        return 0.0 if self.offloaded else self.states

    @property
    def pinned(self) -> float:
        """Bytes of states in host memory."""
        return self.states if self.offloaded else 0.0


def optimizer_bytes(actor: ActorConfig, count: float, item: int) -> OptimizerBytes:
    """Memory of the optimizer of a rank.

    ``count``: parameters that the rank updates. ``item``: bytes of each weight of the model.
    """
    moments = MOMENTS * ITEM_BYTES[actor.optimizer.states]
    # A float32 model needs no separate main parameters.
    main = MAIN_BYTES if item < MAIN_BYTES else 0
    update = _update_bytes(actor, count, moments, main)
    return OptimizerBytes((moments + main) * count, actor.optimizer.offload, update)


def _update_bytes(actor: ActorConfig, count: float, moments: int, main: int) -> float:
    """Additional bytes on the GPU during a step of ``count`` parameters.

    ``moments``, ``main``: bytes per parameter of both moments and of the main parameter.
    """
    is_rounded, is_fused = actor.optimizer.states == "bfloat16", actor.kernels == "fused"
    is_offloaded = actor.optimizer.offload
    if not is_rounded and not is_offloaded:
        # torch's Adam holds the square roots of all second moments; a fused kernel holds nothing.
        return 0.0 if is_fused else MAIN_BYTES * count
    # Such a step works on chunks. Two chunks of offloaded states are in transfer.
    transfers = 2 * (moments + main) if is_offloaded else 0
    # Per parameter of a chunk: two temporary values, and both moments in float32 before rounding.
    temporaries = 2
    if is_rounded:
        temporaries = 0 if is_fused else 2 + MOMENTS
    return CHUNK_ELEMENTS * transfers + min(CHUNK_ELEMENTS, count) * MAIN_BYTES * temporaries


def gather_bytes(count: float, share: float) -> tuple[float, float]:
    """Bytes on the GPU and in host memory while a distributed optimizer saves a checkpoint.

    megatron-core 0.16.1 gathers one kind of state of ``count`` parameters at a time from all
    data-parallel ranks, and keeps all three kinds in float32 on the host; ``share`` of the
    parameters are this rank's. See its DistributedOptimizer.get_parameter_state_dp_zero.
    """
    device = MAIN_BYTES * (count + share)
    # On the host: the rank's own shares of all kinds; all kinds, gathered; and of the current
    # kind the received parts, their concatenation, and those of the previous kind.
    host = 3 * MAIN_BYTES * share + (3 + 3) * MAIN_BYTES * count
    return device, host
