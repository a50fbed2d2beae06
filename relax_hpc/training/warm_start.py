"""Supervised steps before RL: makes <run>/model out of <run>/model-init and <run>/data/warm_start.jsonl.

Run as ``python -m relax_hpc.training.warm_start --run_dir RUN``, in one process.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.algorithms import Sft
from relax_hpc.config import load_resolved
from relax_hpc.config.schema import Config, OptimizerConfig, ParallelConfig
from relax_hpc.data.media import Encode, MediaRules, spans_of
from relax_hpc.data.prompts import load_tokenizer
from relax_hpc.errors import ConfigError, RelaxError
from relax_hpc.imports import many_imports
from relax_hpc.multimodal.bad import BadMedium
from relax_hpc.multimodal.medium import Medium
from relax_hpc.rundir import RunDir
from relax_hpc.transfer_queue.row_schema import Row
from relax_hpc.transfer_queue.storage.media import media_ids

if TYPE_CHECKING:
    from relax_hpc.models.towers.media import RowMedia

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
    """Train the model of `source` as `config.warm_start` says and write it to the new directory `target`.

    The result is the last batch's mean cross entropy in nats. The run's seed decides the order of demonstrations.
    """
    with many_imports():
        import torch

        from relax_hpc.training import parallel

    settings = config.warm_start
    rules = MediaRules.of(config.data, source, demonstrations.parent)
    encode = functools.partial(load_tokenizer(source).encode, special=False)
    rows, media = read_demonstrations(demonstrations, rules, encode)
    torch.set_num_threads(config.threads)
    parallel.initialize_alone(config.model.device, config.seed, START_TIMEOUT_S)
    try:
        return _train(config, settings.steps, rows, _Shown(rules, media), source, target)
    finally:
        parallel.destroy()


class _Shown:
    """Media of demonstrations, given out for a few of them at a time."""

    def __init__(self, rules: MediaRules | None, media: Mapping[str, Medium]) -> None:
        self._rules, self._media = rules, media

    def of(self, rows: Sequence[Row]) -> RowMedia | None:
        """Media that ``rows`` name, as towers take them; None: they name none."""
        from relax_hpc.models.towers.media import RowMedia

        names = media_ids(rows)
        return RowMedia.of({name: self._media[name] for name in names}, self._rules.rules) if names else None


def _train(config: Config, steps: int, rows: list[Row], shown: _Shown, source: Path, target: Path) -> float:
    from relax_hpc.models.hf_files import read_config
    from relax_hpc.training.batches import collate, split_rows
    from relax_hpc.training.model import PolicyModel
    from relax_hpc.training.trainer import Trainer

    settings = config.warm_start
    model = PolicyModel(read_config(source), config.model, ParallelConfig())
    model.load_hf(source)
    optimizer = OptimizerConfig(lr=settings.lr)
    trainer = Trainer(model, Sft(balance_coefficient=config.algorithm.balance_coefficient), optimizer, temperature=1.0)
    pad = model.hf_config.get("pad_token_id") or 0
    loss = float("nan")
    for batch in _draw(rows, settings.batch_size, steps, config.seed):
        parts = split_rows(batch, config.actor.max_tokens_per_micro_batch)
        trainer.accumulate([collate(part, pad, model.device, media=shown.of(part)) for part in parts])
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


def read_demonstrations(
    path: Path, rules: MediaRules | None = None, encode: Encode = list
) -> tuple[list[Row], dict[str, Medium]]:
    """Rows of a jsonl file of {"token_ids", "prompt_len"}, trained on everything after the prompt, and their media by
    id, which rows have as those of `data.prompts` do.

    ConfigError names the line that is not one. ``rules``, ``encode``: see `MediaRules.placed`; None: there are no
    media.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; the warm start needs demonstrations") from error
    rows, media = list[Row](), dict[str, Medium]()
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            given, prompt = value["token_ids"], int(value["prompt_len"])
            tokens, spans = _shown_in(given, value, rules, encode, media) if rules else (given, [])
        except (ValueError, KeyError, TypeError, BadMedium) as error:
            raise ConfigError(f"{path}:{number}: {error!r}; expected {{token_ids, prompt_len}}") from error
        prompt += len(tokens) - len(given)
        mask = [0] * prompt + [1] * (len(tokens) - prompt)
        rows.append({"token_ids": tokens, "loss_mask": mask, "spans": spans})
    if not rows:
        raise ConfigError(f"{path}: empty; expected a demonstration {{token_ids, prompt_len}} a line")
    return rows, media


def _shown_in(
    tokens: list[int], value: dict[str, Any], rules: MediaRules, encode: Encode, media: dict[str, Medium]
) -> tuple[list[int], list[dict[str, Any]]]:
    """Tokens and spans of a demonstration, whose media join the ``media`` of others."""
    tokens, placed = rules.placed(tokens, rules.taken(value), encode)
    named = []
    for one in placed:
        loaded = rules.pool.load(one.kind, one.source)
        # A copy: a process may have so many maps of memory, and no more.
        media[loaded.media_id] = Medium.from_bytes(bytes(loaded.blob))
        named.append(replace(one, blob=Path(loaded.media_id)))
    return tokens, spans_of(named)


if __name__ == "__main__":
    sys.exit(main())
