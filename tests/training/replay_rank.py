"""One rank of a test of routing replay: `python -m tests.training.replay_rank FILE WORLD RANK [LAYOUT MODEL
OUT]...`.

The ranks meet in FILE; LAYOUT is the `actor` section of a file as JSON. The leader writes what it
finds to OUT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relax_hpc.base.routes import NAME
from relax_hpc.config.schema import ActorConfig
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.queue.row_schema import Row
from relax_hpc.training import parallel
from relax_hpc.training.route_agreement import RouteAgreement
from tests.helpers.routes_helpers import declared, routed_batch, routed_rows, routed_trainer
from tests.helpers.training_helpers import LR, actor_settings


def main() -> None:
    file, world, rank, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    meeting = dist.FileStore(file, int(world))
    for number in range(0, len(cases), 3):
        layout, model, out = cases[number : number + 3]
        print(f"layout {layout}", flush=True)
        actor = actor_settings(**json.loads(layout))
        store = dist.PrefixStore(f"{number}", meeting)
        parallel.initialize(actor.parallel, int(rank), int(world), int(rank), store, "cpu", 0, 60.0)
        with declared():
            found = check(Path(model), actor)
        if int(rank) == 0:
            Path(out).write_text(json.dumps(found))
        parallel.destroy()


def samples_of(directory: Path) -> list[Row]:
    """Eight rows of which the first two have their own routes, one of them a token too late."""
    own = json.loads((directory / "own_routes.json").read_text())
    found = routed_rows(8)
    for row, routes in zip(found, own, strict=False):
        row[NAME] = np.array(routes, np.uint8)
    return found


def check(directory: Path, actor: ActorConfig) -> dict[str, Any]:
    """Log-probabilities of rows, a step of several micro-batches, and which rows have other routes;
    complete in the leader."""
    samples, trainer, line = (
        samples_of(directory),
        routed_trainer(directory, actor),
        RankChannel(60.0),
    )
    layout, model = trainer.model.layout, trainer.model
    mine = range(layout.data_rank, len(samples), layout.data_size)
    parts = [list(mine)[start : start + 2] for start in range(0, len(mine), 2)]
    batches = [routed_batch([samples[n] for n in part], model) for part in parts]
    lengths = [len(row["token_ids"]) for row in samples]
    scores = torch.zeros(sum(lengths))
    starts = np.cumsum([0, *lengths])
    for number, values in zip(mine, model.forward_logprobs(batches, 0.9) or (), strict=False):
        scores[starts[number] : starts[number + 1]] = torch.from_numpy(values)
    line.reduce_sum(scores)
    agreement = RouteAgreement(lengths)
    for batch, part in zip(batches, parts, strict=True):
        agreement.add(batch, part, model.pack_split, model.router_tokens(batch))
    line.reduce_sum(agreement.table)
    trainer.accumulate(batches)
    step = trainer.step(LR)
    trainer.accumulate(batches)
    return {
        "logprobs": scores.tolist(),
        "shares": agreement.shares().tolist(),
        "steps": [step, trainer.step(LR)],
    }


if __name__ == "__main__":
    main()
