"""Where the prompts of a run lie: in files that its configuration names, or in those that its task has made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from relax_hpc.config.schema import Config
from relax_hpc.data.prompt_file import PromptFile, open_prompts
from relax_hpc.data.prompts import PromptRules, Tokenizer
from relax_hpc.errors import ConfigError
from relax_hpc.rundir import RunDir
from relax_hpc.tasks import Task, get_task


def train_file(run: RunDir, config: Config) -> Path:
    """Of the training prompts."""
    return Path(config.data.train) if config.data.train else run.data / "train.jsonl"


def eval_files(run: RunDir, config: Config) -> dict[str, Path]:
    """Of each evaluation set."""
    if config.data.eval:
        return {name: Path(path) for name, path in config.data.eval.items()}
    return {name: run.data / f"{name}.jsonl" for name in get_task(config.data.task).evaluations}


def open_train(run: RunDir, config: Config, tokenizer: Tokenizer) -> PromptFile:
    """The training prompts. ConfigError: see `open_prompts`."""
    return _opened(run, config, tokenizer, "train", train_file(run, config))


def open_evals(run: RunDir, config: Config, tokenizer: Tokenizer) -> dict[str, PromptFile]:
    """The prompts of each evaluation set. ConfigError: see `open_prompts`."""
    files = eval_files(run, config)
    return {name: _opened(run, config, tokenizer, f"eval-{name}", path) for name, path in files.items()}


def _opened(run: RunDir, config: Config, tokenizer: Tokenizer, name: str, path: Path) -> PromptFile:
    how = PromptRules.of(config.data, tokenizer)
    return open_prompts(path, run.data / "prompts" / f"{name}.index", tokenizer, how, config.data.max_bad_share)


def make_files(run: RunDir, config: Config, tokenizer: Tokenizer) -> None:
    """Write what the task makes: rows of the sets that no file is named for, and demonstrations for a warm start.

    Each file appears whole or not at all. ConfigError: a row is none.
    """
    task, data, warm = get_task(config.data.task), config.data, config.warm_start
    splits = [*([] if data.train else ["train"]), *([] if data.eval else task.evaluations)]
    for split in splits if task.makes("rows") else ():
        _write(run.data / f"{split}.jsonl", task.rows(split, data), task)
    if warm.steps:
        rows = islice(task.demonstrations(data, tokenizer, warm.noise, config.seed), warm.steps * warm.batch_size)
        _write(run.data / "warm_start.jsonl", rows, task)


def _write(path: Path, rows: Iterable[Mapping[str, Any]], task: Task) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, made = path.with_suffix(".partial"), 0
    with partial.open("w") as file:
        try:
            for row in rows:
                file.write(json.dumps(row) + "\n")
                made += 1
        except Exception as error:  # a user's method may raise anything
            if isinstance(error, OSError):
                raise
            raise ConfigError(
                f"data.task: {type(task).__name__}: row {made + 1} of {path.stem}: {type(error).__name__}: {error}; "
                "rows are mappings of texts, numbers and lists"
            ) from error
    partial.replace(path)
