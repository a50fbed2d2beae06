"""Bytes of Adam's states on one rank, and what a step and a checkpoint take beside them."""

from __future__ import annotations

from dataclasses import dataclass

from relax_hpc.config.schema import ActorConfig
from relax_hpc.ops.plan.model_memory import ITEM_BYTES, MAIN_BYTES

PIECE = 2**24
"""Elements that `training.adam` updates at a time."""
MOMENTS = 2


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """Memory that the optimizer of one rank takes."""

    states: float
    """Bytes of moments, and of main parameters of a model in bfloat16."""
    offloaded: bool
    update: float
    """Bytes on the GPU, in a step, beside all that is there always."""

    @property
    def device(self) -> float:
        """Bytes of states on the GPU."""
        return 0.0 if self.offloaded else self.states

    @property
    def pinned(self) -> float:
        """Bytes of states in host memory."""
        return self.states if self.offloaded else 0.0


def optimizer_bytes(actor: ActorConfig, count: float, item: int) -> OptimizerBytes:
    """The optimizer of a rank that updates ``count`` parameters, whose weights have ``item`` bytes
    each."""
    moments = MOMENTS * ITEM_BYTES[actor.optimizer.states]
    # Under float32 the parameters are the main parameters.
    main = MAIN_BYTES if item < MAIN_BYTES else 0
    return OptimizerBytes(
        (moments + main) * count, actor.optimizer.offload, _update(actor, count, moments, main)
    )


def _update(actor: ActorConfig, count: float, moments: int, main: int) -> float:
    rounded, one_kernel = actor.optimizer.states == "bfloat16", actor.kernels == "fused"
    if not rounded and not actor.optimizer.offload:
        # Of all parameters at a time: a square root of each second moment, unless one kernel does
        # all.
        return 0.0 if one_kernel else MAIN_BYTES * count
    # Of a piece: two on their way, moments in float32, and what Adam or the rounding makes of them.
    rooms = 2 * (moments + main) * actor.optimizer.offload
    made = 0 if rounded and one_kernel else MAIN_BYTES * (MOMENTS * rounded + 2)
    return PIECE * rooms + min(PIECE, count) * made


def gathered(count: float, own: float) -> tuple[float, float]:
    """Bytes on the GPU and in host memory while a distributed optimizer's states of ``count``
    parameters are made ready for a checkpoint: megatron-core gathers one kind at a time from all
    data-parallel ranks, of which this one has ``own``, and has all three in float32. See
    DistributedOptimizer.get_parameter_state_dp_zero of megatron-core 0.16.1.
    """
    # A rank's own parts; those of all, and of the kind at hand the parts, joined, and the last
    # kind's.
    return MAIN_BYTES * (count + own), 3 * MAIN_BYTES * own + (3 + 3) * MAIN_BYTES * count
