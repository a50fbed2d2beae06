"""One rank of overlap.py."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import torch
import torch.distributed as dist
from child import answer, middle, timed
from policies import PATIENCE_S, settings_of
from shapes import hf_config, rows

from relax_hpc.algorithms import Grpo
from relax_hpc.config.schema import ActorConfig, ModelConfig, ParallelConfig
from relax_hpc.training import parallel
from relax_hpc.training.models.families import spec_from_config

_FIRST = 2
"""Steps that are not measured. They load kernels and count the gradients of each parameter."""
_NORM_TOLERANCE = 1e-3
"""Relative difference of gradient norms. Sums in bfloat16 may have another order."""


def measure(
    device: str,
    shape: str,
    count: int,
    length: int,
    micro: int,
    actor: dict[str, Any],
    rank: int,
    ranks: int,
    meeting: str,
    steps: int = 6,
) -> dict[str, float]:
    """Median seconds of a step with and without overlap.

    Each rank has ``count`` rows of ``length`` tokens, in micro-batches of ``micro`` tokens.
    ``meeting``: file where the ranks exchange their addresses. RuntimeError: the gradients differ.
    """
    split = ParallelConfig(data=ranks)
    parallel.initialize(
        split, rank, ranks, rank, dist.FileStore(meeting, ranks), device, 0, PATIENCE_S
    )
    from relax_hpc.training.models.batches import collate

    samples = rows(count * ranks, length, spec_from_config(hf_config(shape)).vocab)[rank::ranks]
    rows_per_batch = max(1, micro // length)
    starts = range(0, count, rows_per_batch)
    micro_batches = [samples[start : start + rows_per_batch] for start in starts]
    settings = settings_of(actor, device)
    settings.parallel = split
    seconds: dict[str, float] = {}
    norms: dict[str, float] = {}
    for name, overlapped in (("after_s", False), ("beside_s", True)):
        settings = copy.deepcopy(settings)
        settings.optimizer.overlap_gradients = overlapped
        batches = [collate(micro_batch, 0, device) for micro_batch in micro_batches]
        seconds[name], norms[name] = _steps(shape, settings, batches, device, steps)
        gc.collect()
    if not math.isclose(*norms.values(), rel_tol=_NORM_TOLERANCE):
        raise RuntimeError(
            f"gradient norm {norms['beside_s']} with overlap, {norms['after_s']} without"
        )
    return seconds | {"beside_of_after": seconds["beside_s"] / seconds["after_s"]}


def _steps(
    shape: str, settings: ActorConfig, batches: list[Any], device: str, steps: int
) -> tuple[float, float]:
    """Median seconds of a step, and the gradient's norm in the last step."""
    from megatron.core import tensor_parallel

    from relax_hpc.training.model import PolicyModel
    from relax_hpc.training.trainer import Trainer

    # Both calls begin with the same weights.
    torch.manual_seed(0)
    tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    model = PolicyModel(
        hf_config(shape), ModelConfig(dtype="bfloat16", device=device), settings.parallel, settings
    )
    trainer = Trainer.from_settings(model, Grpo(), settings, 1.0)
    norms: list[float] = []

    def step() -> None:
        trainer.accumulate(batches, last=True)
        norms.append(trainer.step(1e-6)["grad_norm"])

    seconds = [timed(step, device) for _ in range(_FIRST + steps)]
    return middle(seconds[_FIRST:]), norms[-1]


if __name__ == "__main__":
    answer(measure)
