"""Files of a run's prompts: those that its configuration names, or those that its task has made."""

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
from relax_hpc.tasks import Task, get_task, tools_of

PAUSES_S = (1.0, 5.0, 20.0)
"""Seconds before rows are asked for again, whose network or filesystem did not answer."""
_WRONG = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors of files and networks that are there the next time too."""


class _Away(Exception):
    """Failure of the network or filesystem of rows to answer."""


def train_files(run: RunDir, config: Config) -> dict[str, Path]:
    """File of each training set, or folder, see `RowFiles`. A run with one set calls it `train`."""
    if config.data.train_sets:
        return {name: Path(path) for name, path in config.data.train_sets.items()}
    return {"train": Path(config.data.train) if config.data.train else run.data / "train.jsonl"}


def eval_files(run: RunDir, config: Config) -> dict[str, Path]:
    """File, or folder, of each evaluation set."""
    if config.data.eval:
        return {name: Path(path) for name, path in config.data.eval.items()}
    return {name: run.data / f"{name}.jsonl" for name in get_task(config.data.task).evaluations}


def open_train(run: RunDir, config: Config, tokenizer: Tokenizer) -> PromptFile | PromptSets:
    """Prompts to train on. ConfigError: see `open_prompts`."""
    files = train_files(run, config)
    sets = {
        name: _opened(config, tokenizer, path, _train_index(run, name), name, split="train")
        for name, path in files.items()
    }
    return PromptSets(sets) if config.data.train_sets else sets["train"]


def open_evals(run: RunDir, config: Config, tokenizer: Tokenizer) -> dict[str, PromptFile]:
    """The prompts of each evaluation set. ConfigError: see `open_prompts`."""
    files = eval_files(run, config)
    return {
        name: _opened(config, tokenizer, path, _eval_index(run, name), name)
        for name, path in files.items()
    }


def check_unchanged(run: RunDir, config: Config) -> None:
    """ConfigError: a file of prompts, or a rule that makes prompts of its rows, has changed since
    the run began. Roles check this too, once they have GPUs."""
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


def _opened(
    config: Config, tokenizer: Tokenizer, named: Path, index: Path, set_name: str, split: str = ""
) -> PromptFile:
    files = RowFiles.from_path(named, split)
    rules = _rules(config, tokenizer, files, set_name)
    return open_prompts(files, index, tokenizer, rules, config.data.max_bad_share)


def _rules(config: Config, tokenizer: Tokenizer, files: RowFiles, set_name: str) -> PromptRules:
    return rules_of(config, tokenizer, files.folder, tools_of(config), set_name)


def _train_index(run: RunDir, name: str) -> Path:
    return run.data / "prompts" / ("train.index" if name == "train" else f"train-{name}.index")


def _eval_index(run: RunDir, name: str) -> Path:
    return run.data / "prompts" / f"eval-{name}.index"


def make_files(run: RunDir, config: Config, tokenizer: Tokenizer) -> None:
    """Write what the task makes: rows of the sets that no file is named for, and demonstrations for
    a warm start.

    Each file appears whole or not at all. ConfigError: a row is none, or the task raises.
    """
    task, data, warm = get_task(config.data.task), config.data, config.warm_start
    splits = [
        *([] if data.train or data.train_sets else ["train"]),
        *([] if data.eval else task.evaluations),
    ]
    for split in splits if task.makes("rows") else ():
        _write(run.data / f"{split}.jsonl", task, partial(task.rows, split, data))
    if warm.steps:
        made = partial(task.demonstrations, data, tokenizer, warm.noise, config.seed)
        _write(run.data / "warm_start.jsonl", task, made, warm.steps * warm.batch_size)


def _write(
    path: Path, task: Task, made: Callable[[], Iterable[Mapping[str, Any]]], most: int | None = None
) -> None:
    """The rows that ``made`` gives, not more than ``most``. ConfigError: it does not, and never
    will. RelaxError: what it reads from is not there now, asked a few times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".partial")
    for pause in (*PAUSES_S, None):
        try:
            with unfinished.open("w") as file:
                file.writelines(
                    islice(_lines(made, f"{type(task).__name__}: row", path.stem), most)
                )
        except _Away as away:
            if pause is None:
                raise RelaxError(f"{away}; a run that is started again asks for it again") from away
            print(f"{away}; again in {pause:.0f} s", flush=True)
            time.sleep(pause)
        else:
            break
    unfinished.replace(path)


def _lines(made: Callable[[], Iterable[Mapping[str, Any]]], who: str, split: str) -> Iterator[str]:
    number = 1
    try:
        for row in made():
            yield json.dumps(row) + "\n"
            number += 1
    except _WRONG as error:
        raise ConfigError(
            f"data.task: {who} {number} of {split}: {type(error).__name__}: {error}"
        ) from error
    except (OSError, EOFError) as error:
        raise _Away(
            f"data.task: {who} {number} of {split}: {type(error).__name__}: {error}"
        ) from error
    except Exception as error:  # a user's method may raise anything
        raise ConfigError(
            f"data.task: {who} {number} of {split}: {describe_with_location(error)}; "
            "rows are mappings of texts, numbers and lists"
        ) from error
