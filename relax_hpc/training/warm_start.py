"""Supervised steps before RL: makes <run>/model out of <run>/model-init and
<run>/data/warm_start.jsonl.

Run as ``python -m relax_hpc.training.warm_start --run_dir RUN``, in one process.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.algorithms import Sft
from relax_hpc.base.errors import RelaxError
from relax_hpc.base.imports import fast_imports
from relax_hpc.base.rundir import RunDir
from relax_hpc.config import load_resolved
from relax_hpc.config.schema import Config, OptimizerConfig, ParallelConfig
from relax_hpc.data.media import MediaRules
from relax_hpc.data.multimodal.medium import Medium
from relax_hpc.data.prompts import PromptRules
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.media import media_ids
from relax_hpc.training.demonstrations import read_demonstrations

if TYPE_CHECKING:
    from relax_hpc.training.models.towers.media import RowMedia

START_TIMEOUT_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Train and write the model; the exit code. A model that is there already is kept."""
    parser = argparse.ArgumentParser(prog="relax_hpc.training.warm_start")
    parser.add_argument("--run_dir", type=Path, required=True)
    run_dir = parser.parse_args(argv).run_dir
    try:
        config = load_resolved(run_dir)
        run = RunDir(run_dir)
        if not run.model.exists():
            warm_start(config, run.root / "model-init", run.data / "warm_start.jsonl", run.model)
    except RelaxError as error:
        print(f"warm start: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def warm_start(config: Config, source: Path, demonstrations: Path, target: Path) -> float:
    """Train the model of `source` as `config.warm_start` says and write it to the new directory
    `target`.

    The result is the last batch's mean cross entropy in nats. The run's seed decides the order of
    demonstrations.
    """
    with fast_imports():
        import torch

        from relax_hpc.training import parallel

    settings = config.warm_start
    tokenizer = load_tokenizer(source)
    how = PromptRules.from_config(config.data, tokenizer, demonstrations.parent)
    with how.rendering():
        rows, media = read_demonstrations(demonstrations, how, tokenizer)
    torch.set_num_threads(config.threads)
    parallel.initialize_alone(config.model.device, config.seed, START_TIMEOUT_S)
    try:
        return _train(config, settings.steps, rows, _Shown(how.media, media), source, target)
    finally:
        parallel.destroy()


class _Shown:
    """Media of demonstrations, given out for a few of them at a time."""

    def __init__(self, rules: MediaRules | None, media: Mapping[str, Medium]) -> None:
        self._rules, self._media = rules, media

    def select(self, rows: Sequence[Row]) -> RowMedia | None:
        """Media that ``rows`` name, as towers take them; None: they name none."""
        from relax_hpc.training.models.towers.media import RowMedia

        names = media_ids(rows)
        return (
            RowMedia.from_media({name: self._media[name] for name in names}, self._rules.rules)
            if names
            else None
        )


def _train(
    config: Config, steps: int, rows: list[Row], shown: _Shown, source: Path, target: Path
) -> float:
    from relax_hpc.training.model import PolicyModel
    from relax_hpc.training.models.batches import collate, split_rows
    from relax_hpc.training.models.hf_files import read_config
    from relax_hpc.training.trainer import Trainer

    settings = config.warm_start
    model = PolicyModel(read_config(source), config.model, ParallelConfig())
    model.load_hf(source)
    optimizer = OptimizerConfig(lr=settings.lr)
    trainer = Trainer(
        model,
        Sft(balance_coefficient=config.algorithm.balance_coefficient),
        optimizer,
        temperature=1.0,
    )
    pad = model.hf_config.get("pad_token_id") or 0
    loss = float("nan")
    for batch in _draw(rows, settings.batch_size, steps, config.seed):
        parts = split_rows(batch, config.actor.max_tokens_per_micro_batch)
        trainer.accumulate(
            [collate(part, pad, model.device, media=shown.select(part)) for part in parts]
        )
        loss = trainer.step(settings.lr)["loss/policy"]
    model.save_hf(target, source)
    return loss


def _draw(rows: list[Row], size: int, steps: int, seed: int) -> list[list[Row]]:
    """`steps` batches; no row comes again before all have come."""
    rng = random.Random(seed)
    order: list[Row] = []
    while len(order) < size * steps:
        order += rng.sample(rows, len(rows))
    return [order[start : start + size] for start in range(0, size * steps, size)]


if __name__ == "__main__":
    sys.exit(main())
