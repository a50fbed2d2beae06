"""Supervised steps before RL: trains <run>/model from <run>/model-init and
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
    """Train and write the model. Returns the exit code. An existing model is kept."""
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
    """Train the model of `source` by `config.warm_start`, and write it to the new directory
    `target`.

    Returns the last batch's mean cross entropy in nats. The run's seed determines the order of
    demonstrations.
    """
    with fast_imports():
        import torch

        from relax_hpc.training import parallel

    settings = config.warm_start
    tokenizer = load_tokenizer(source)
    rules = PromptRules.from_config(config.data, tokenizer, demonstrations.parent)
    with rules.rendering():
        rows, media = read_demonstrations(demonstrations, rules, tokenizer)
    torch.set_num_threads(config.threads)
    parallel.initialize_alone(config.model.device, config.seed, START_TIMEOUT_S)
    try:
        stored = _StoredMedia(rules.media, media)
        return _train(config, settings.steps, rows, stored, source, target)
    finally:
        parallel.destroy()


class _StoredMedia:
    """Media of all demonstrations."""

    def __init__(self, rules: MediaRules | None, media: Mapping[str, Medium]) -> None:
        self._rules, self._media = rules, media

    def select(self, rows: Sequence[Row]) -> RowMedia | None:
        """Media that ``rows`` name, in the form that towers take. None: they name none."""
        from relax_hpc.training.models.towers.media import RowMedia

        names = media_ids(rows)
        if not names:
            return None
        # Rows can name media only if the data has rules for them.
        assert self._rules is not None
        media = {name: self._media[name] for name in names}
        return RowMedia.from_media(media, self._rules.rules)


def _train(
    config: Config, steps: int, rows: list[Row], media: _StoredMedia, source: Path, target: Path
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
        micro_batches = [
            collate(part, pad, model.device, media=media.select(part))
            for part in split_rows(batch, config.actor.max_tokens_per_micro_batch)
        ]
        trainer.accumulate(micro_batches)
        loss = trainer.step(settings.lr)["loss/policy"]
    model.save_hf(target, source)
    return loss


def _draw(rows: list[Row], size: int, steps: int, seed: int) -> list[list[Row]]:
    """`steps` random batches. Every row is drawn once before a row is drawn again."""
    rng = random.Random(seed)
    order: list[Row] = []
    # Whole permutations, so that every demonstration is used equally often.
    while len(order) < size * steps:
        order += rng.sample(rows, len(rows))
    return [order[start : start + size] for start in range(0, size * steps, size)]


if __name__ == "__main__":
    sys.exit(main())
