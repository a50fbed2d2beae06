"""One rank of a model with towers: log-probabilities of rows with and without media, two steps, a
checkpoint between.

`python -m tests.training.tower_rank FILE WORLD RANK [LAYOUT MODEL OUT -]...`, see `training_rank`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from relax_hpc.queue.row_schema import Row
from relax_hpc.training import parallel
from relax_hpc.training.models.batches import Batch, collate, idle_batch
from relax_hpc.training.trainer import Trainer
from tests.helpers import training_helpers as helpers
from tests.helpers.media_helpers import OMNI_MEDIA, OMNI_ROWS, ROW_MEDIA, ROWS

ORDERS = (0, 1, 2), (1, 0, 2)
"""Packs in the order of each step; there are media in the first and the last, so that of two data
ranks one has none of its own in the first step."""


def main() -> None:
    file, world, rank, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    meeting = dist.FileStore(file, int(world))
    for number in range(0, len(cases), 4):
        layout, model, out, _ = cases[number : number + 4]
        print(f"layout {layout}", flush=True)
        settings = json.loads(layout)
        split = helpers.actor_settings(**settings).parallel
        store = dist.PrefixStore(f"{number}", meeting)
        parallel.initialize(split, int(rank), int(world), int(rank), store, "cpu", 0, 60.0)
        check(helpers.trainer(Path(model), **settings), Path(out))
        parallel.destroy()


def check(ours: Trainer, out: Path) -> None:
    """Write what was found to ``out``."""
    scored = scores(ours)
    if scored is not None:
        save_file(
            {"logprobs": torch.cat(scored)},
            out / f"logprobs-{ours.model.layout.data_rank}.safetensors",
        )
    metrics = [step(ours, 0)]
    helpers.save(out / "i000001-step-000001", ours, {"step": 1})
    metrics.append(step(ours, 1))
    same_on_tensor_ranks(ours)
    weights = ours.model.export_hf()
    if weights is not None:
        save_file(weights, out / "weights.safetensors")
        (out / "metrics.json").write_text(json.dumps(metrics))


def scores(ours: Trainer) -> list[torch.Tensor] | None:
    """Log-probabilities of all tokens of this data rank's rows, on the replica's leader."""
    whole = [
        [{key: row[key] for key in ("token_ids", "spans")} for row in rows]
        for rows in packs_of(ours)
    ]
    found = ours.model.forward_logprobs(micro_batches(ours, whole), 1.0)
    return None if found is None else [torch.from_numpy(line.copy()) for line in found]


def hears(ours: Trainer) -> bool:
    """Whether the model takes sounds."""
    return len(ours.model.spec.towers) > 1


def packs_of(ours: Trainer) -> list[list[Row]]:
    """Rows of three packs, the second of text alone."""
    rows = OMNI_ROWS if hears(ours) else ROWS
    return [rows[:2], rows[2:3], rows[3:]]


def step(ours: Trainer, number: int) -> dict[str, float]:
    """What a step says."""
    packs = packs_of(ours)
    ours.accumulate(micro_batches(ours, [packs[pack] for pack in ORDERS[number]]), last=True)
    return ours.step(helpers.LR)


def micro_batches(ours: Trainer, packs: list[list[Row]]) -> list[Batch]:
    """Of this data rank, as many as of the others."""
    layout, split = ours.model.layout, ours.model.pack_split
    media = OMNI_MEDIA if hears(ours) else ROW_MEDIA
    mine = [
        collate(rows, 0, "cpu", split, media=media)
        for rows in packs[layout.data_rank :: layout.data_size]
    ]
    count = -(-len(packs) // layout.data_size)
    return mine + [idle_batch(ROWS[0], "cpu", split) for _ in range(count - len(mine))]


def same_on_tensor_ranks(ours: Trainer) -> None:
    """Towers are the same to the bit in ranks that each have all of them."""
    group = ours.model._tensor_group
    if ours.model.layout.first_stage and group.size() > 1:
        mine = torch.cat(
            [value.detach().flatten() for value in ours.model.module.towers.parameters()]
        )
        everybody = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everybody, mine, group=group)
        assert all(torch.equal(one, mine) for one in everybody)


if __name__ == "__main__":
    main()
