"""One rank of a model whose experts are dealt out: one step, with micro-batches that are as uneven
as can be.

`python -m tests.training.expert_rank FILE WORLD RANK [LAYOUT MODEL OUT LOST]...`, see `training_rank`. If
LOST is not empty, the last rank kills itself at the experts of its second layer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from relax_hpc.algorithms import Grpo
from relax_hpc.training import parallel
from relax_hpc.training.models.batches import Batch, idle_batch
from relax_hpc.training.trainer import Trainer
from tests.helpers import training_helpers as helpers

UNEVEN = ((0, 1), (2, 5), (5, 8))
"""Rows of micro-batches; of two data ranks one idles once, of four one altogether."""


def main() -> None:
    file, world, rank, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    meeting = dist.FileStore(file, int(world))
    for number in range(0, len(cases), 4):
        layout, model, out, lost = cases[number : number + 4]
        print(f"layout {layout}", flush=True)
        settings = json.loads(layout)
        split = helpers.actor_settings(**settings).parallel
        store = dist.PrefixStore(f"{number}", meeting)
        parallel.initialize(split, int(rank), int(world), int(rank), store, "cpu", 0, 60.0)
        ours = trainer(Path(model), settings)
        if lost and int(rank) == int(world) - 1:
            experts = ours.model.module.decoder.layers[1].mlp.experts
            experts.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        metrics, weights = step(ours)
        if weights is not None:
            save_file(weights, Path(out) / "weights.safetensors")
            (Path(out) / "metrics.json").write_text(json.dumps(metrics))
        parallel.destroy()


def trainer(model: Path, settings: dict, coefficient: float = 0.1) -> Trainer:
    """With a balance loss."""
    actor = helpers.actor_settings(**settings)
    algorithm = Grpo(kl=helpers.ALGORITHM.kl, balance_coefficient=coefficient)
    return Trainer.from_settings(
        helpers.policy(model, actor.parallel, actor=actor), algorithm, actor, temperature=0.9
    )


def step(ours: Trainer) -> tuple[dict[str, float], dict[str, torch.Tensor] | None]:
    """What a step says, and the weights after it in rank 0."""
    ours.accumulate(micro_batches(ours))
    metrics = ours.step(helpers.LR)
    return metrics, ours.model.export_hf()


def micro_batches(ours: Trainer) -> list[Batch]:
    """Of this data rank, as many as of the others."""
    layout, split, samples = ours.model.layout, ours.model.pack_split, helpers.rows(8)
    count = -(-len(UNEVEN) // layout.data_size)
    mine = [
        helpers.batch(samples[start:stop], split)
        for start, stop in UNEVEN[layout.data_rank :: layout.data_size]
    ]
    return mine + [idle_batch(samples[0], "cpu", split) for _ in range(count - len(mine))]


if __name__ == "__main__":
    main()
