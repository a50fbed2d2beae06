"""Files of a run's prompts, named in its configuration or written by its task."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from relax_hpc.base.error_origin import describe_with_location
from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.data.examples import rules_of
from relax_hpc.data.prompt_file import PromptFile, PromptSets, check_same, open_prompts
from relax_hpc.data.prompts import PromptRules
from relax_hpc.data.row_files import RowFiles
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.tasks import Task, get_task, tool_signatures

PAUSES_S = (1.0, 5.0, 20.0)
"""Seconds before each retry, if the network or filesystem of rows did not answer."""
_PERMANENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors of files that a retry does not cure."""


class _Unavailable(Exception):
    """The network or filesystem of rows did not answer."""


def train_files(run: RunDir, config: Config) -> dict[str, Path]:
    """File or folder of each training set, see `RowFiles`. A single set is called `train`."""
    if config.data.train_sets:
        return {name: Path(path) for name, path in config.data.train_sets.items()}
    return {"train": Path(config.data.train) if config.data.train else run.data / "train.jsonl"}


def eval_files(run: RunDir, config: Config) -> dict[str, Path]:
    """File or folder of each evaluation set."""
    if config.data.eval:
        return {name: Path(path) for name, path in config.data.eval.items()}
    return {name: run.data / f"{name}.jsonl" for name in get_task(config.data.task).evaluations}


def open_train(run: RunDir, config: Config, tokenizer: Tokenizer) -> PromptFile | PromptSets:
    """Prompts for training. ConfigError: see `open_prompts`."""
    sets = {
        name: _open_set(config, tokenizer, path, _train_index(run, name), name, split="train")
        for name, path in train_files(run, config).items()
    }
    return PromptSets(sets) if config.data.train_sets else sets["train"]


def open_evals(run: RunDir, config: Config, tokenizer: Tokenizer) -> dict[str, PromptFile]:
    """The prompts of each evaluation set. ConfigError: see `open_prompts`."""
    return {
        name: _open_set(config, tokenizer, path, _eval_index(run, name), name)
        for name, path in eval_files(run, config).items()
    }


def check_unchanged(run: RunDir, config: Config) -> None:
    """Check that prompts are the same as at the start of the run.

    ConfigError: a file, or a setting that determines prompts, has changed. Roles check this too,
    but only after they have got GPUs.
    """
    sets = [
        (path, _eval_index(run, name), name, "") for name, path in eval_files(run, config).items()
    ]
    sets += [
        (path, _train_index(run, name), name, "train")
        for name, path in train_files(run, config).items()
    ]
    indexed = [entry for entry in sets if entry[1].is_file()]
    if not indexed:
        return
    tokenizer = load_tokenizer(run.model)
    for path, index, name, split in indexed:
        files = RowFiles.from_path(path, split)
        check_same(files, index, tokenizer, _rules(config, tokenizer, files, name))


def _open_set(
    config: Config, tokenizer: Tokenizer, path: Path, index: Path, set_name: str, split: str = ""
) -> PromptFile:
    files = RowFiles.from_path(path, split)
    rules = _rules(config, tokenizer, files, set_name)
    return open_prompts(files, index, tokenizer, rules, config.data.max_bad_share)


def _rules(config: Config, tokenizer: Tokenizer, files: RowFiles, set_name: str) -> PromptRules:
    return rules_of(config, tokenizer, files.folder, tool_signatures(config), set_name)


def _train_index(run: RunDir, name: str) -> Path:
    return run.data / "prompts" / ("train.index" if name == "train" else f"train-{name}.index")


def _eval_index(run: RunDir, name: str) -> Path:
    return run.data / "prompts" / f"eval-{name}.index"


def make_files(run: RunDir, config: Config, tokenizer: Tokenizer) -> None:
    """Write the rows and demonstrations of the task.

    Rows are written for sets without a file in the configuration, demonstrations for a warm start.
    Each file appears complete or not at all. ConfigError: a row is invalid, or the task raises.
    """
    task, data, warm = get_task(config.data.task), config.data, config.warm_start
    splits = list[str]()
    if not data.train and not data.train_sets:
        splits.append("train")
    if not data.eval:
        splits += task.evaluations
    if task.makes("rows"):
        for split in splits:
            _write(run.data / f"{split}.jsonl", task, partial(task.rows, split, data))
    if warm.steps:
        demonstrations = partial(task.demonstrations, data, tokenizer, warm.noise, config.seed)
        count = warm.steps * warm.batch_size
        _write(run.data / "warm_start.jsonl", task, demonstrations, count)


def _write(
    path: Path,
    task: Task,
    make_rows: Callable[[], Iterable[Mapping[str, Any]]],
    limit: int | None = None,
) -> None:
    """Write up to ``limit`` rows of ``make_rows`` to ``path``.

    ConfigError: an error that a retry does not cure. RelaxError: network or filesystem still do
    not answer after several retries.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".partial")
    label = f"{type(task).__name__}: row"
    for pause_s in (*PAUSES_S, None):
        try:
            with unfinished.open("w") as file:
                file.writelines(islice(_lines(make_rows, label, path.stem), limit))
        except _Unavailable as failure:
            if pause_s is None:
                raise RelaxError(f"{failure}; start the run again to try it again") from failure
            print(f"{failure}; next attempt in {pause_s:.0f} s", flush=True)
            time.sleep(pause_s)
        else:
            break
    unfinished.replace(path)


def _lines(
    make_rows: Callable[[], Iterable[Mapping[str, Any]]], label: str, split: str
) -> Iterator[str]:
    """Lines of a jsonl file; errors name the row."""
    number = 1
    try:
        for row in make_rows():
            yield json.dumps(row) + "\n"
            number += 1
    except _PERMANENT as error:
        raise ConfigError(
            f"data.task: {label} {number} of {split}: {type(error).__name__}: {error}"
        ) from error
    except (OSError, EOFError) as error:
        raise _Unavailable(
            f"data.task: {label} {number} of {split}: {type(error).__name__}: {error}"
        ) from error
    except Exception as error:  # a user's method may raise anything
        raise ConfigError(
            f"data.task: {label} {number} of {split}: {describe_with_location(error)}; "
            "rows are mappings of texts, numbers and lists"
        ) from error
