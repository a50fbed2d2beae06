"""One rank of overlap.py."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch.distributed as dist
from child import answer, middle, timed
from policies import PATIENCE_S, settings_of
from shapes import hf_config, rows

from relax_hpc.algorithms import Grpo
from relax_hpc.config.schema import ActorConfig, ModelConfig, ParallelConfig
from relax_hpc.models.families import spec_of
from relax_hpc.training import parallel

_FIRST = 2
"""Steps that bring kernels, and tell how often each parameter has a gradient."""


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
    """Median seconds of a step of ``count`` rows of ``length`` tokens a rank, in micro-batches of ``micro``, with and
    without overlap."""
    split = ParallelConfig(data=ranks)
    parallel.initialize(split, rank, ranks, rank, dist.FileStore(meeting, ranks), device, 0, PATIENCE_S)
    from relax_hpc.training.batches import collate

    samples, each = rows(count, length, spec_of(hf_config(shape)).vocab), max(1, micro // length)
    parts = [samples[at : at + each] for at in range(0, count, each)]
    settings = settings_of(actor, device)
    settings.parallel = split
    found = {}
    for name, overlapped in (("after_s", False), ("beside_s", True)):
        settings = copy.deepcopy(settings)
        settings.optimizer.overlap_gradients = overlapped
        batches = [collate(part, 0, device) for part in parts]
        found[name] = _step_s(shape, settings, batches, device, steps)
        gc.collect()
    return found | {"beside_of_after": found["beside_s"] / found["after_s"]}


def _step_s(shape: str, settings: ActorConfig, batches: list[Any], device: str, steps: int) -> float:
    from relax_hpc.training.model import PolicyModel
    from relax_hpc.training.trainer import Trainer

    model = PolicyModel(hf_config(shape), ModelConfig(dtype="bfloat16", device=device), settings.parallel, settings)
    trainer = Trainer.of(model, Grpo(), settings, 1.0)

    def step() -> None:
        trainer.accumulate(batches, last=True)
        trainer.step(1e-6)

    return middle([timed(step, device) for _ in range(_FIRST + steps)][_FIRST:])


if __name__ == "__main__":
    answer(measure)
