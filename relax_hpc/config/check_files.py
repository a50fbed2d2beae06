"""Mistakes in what a run reads: its model, cut as the parallel layouts say, and its prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from relax_hpc.config.model_files import Model, find_model, unread
from relax_hpc.config.roles import RANKED
from relax_hpc.config.schema import Config, DataConfig, ParallelConfig
from relax_hpc.data.prompts import Prompt, Tokenizer, prompts_of, share_problem
from relax_hpc.data.rows import read_rows
from relax_hpc.errors import ConfigError

SAMPLE = 1000
"""Rows of a prompt file that are looked at; all of them are once a run prepares."""


def check_files(config: Config) -> Iterator[str]:
    """What is wrong with the model, the layouts it is cut into, and the prompts."""
    model, policy = config.model, Model()
    if not model.path and not config.data.task:
        yield "model.path: found nothing, and no data.task; name a Hugging Face directory (only tasks get a tiny model)"
    else:
        policy = find_model(model)
        yield from policy.problems
        if not policy.problems:
            yield from _lengths(config, policy)
            for group, parallel in _parallels(config):
                yield from _split(group, parallel, policy)
    if model.reference_path:
        yield from find_model(model, "reference_path").problems
    for key, path in _prompt_files(config).items():
        if not Path(path).is_file():
            yield f"{key}: found {path!r}, which is not a file; name a jsonl file"
        elif problem := prompts_problem(path, policy.tokenizer, config.data):
            yield f"{key}: {problem}"


def _prompt_files(config: Config) -> dict[str, str]:
    train = {"data.train": config.data.train} if config.data.train else {}
    return train | {f"data.eval.{name}": path for name, path in config.data.eval.items()}


def notes(config: Config) -> Iterator[str]:
    """What is no mistake, but may not be meant."""
    if missing := unread():
        yield f"model.path: tokenizer and weights were not looked at, for want of {', '.join(missing)} here"
    yield from special_tokens_note(config)


def special_tokens_note(config: Config) -> Iterator[str]:
    """Files whose prompts have names of special tokens in their text, where these are text like any other."""
    tokenizer = find_model(config.model).tokenizer if config.model.path else None
    if tokenizer is None or not tokenizer.special_names or "prompt" in config.data.special_tokens:
        return
    names = re.compile("|".join(map(re.escape, tokenizer.special_names)))
    for key, path in _prompt_files(config).items():
        with suppress(ConfigError):
            rows = list(islice(prompts_of(read_rows(path), None, config.data.max_prompt_tokens), SAMPLE))
            found = [match[0] for row in rows if isinstance(row, Prompt) and (match := names.search(row.text))]
            if found:
                yield (
                    f"{key}: {len(found)} of {len(rows)} prompts have names of special tokens, such as {found[0]}, "
                    "which are text here; if a chat template made them, set data.special_tokens: [prompt]"
                )


def prompts_problem(path: str, tokenizer: Tokenizer | None, data: DataConfig, sample: int = SAMPLE) -> str:
    """Why a run could not take the prompts of a file, by its first rows; by all of it if too many of these are bad."""
    try:
        rows = prompts_of(read_rows(path), tokenizer, data.max_prompt_tokens, data.special_tokens)
        found = list(islice(rows, sample))
        if share_problem(found, data.max_bad_share):
            found += rows
    except ConfigError as error:
        return str(error)
    problem = share_problem(found, data.max_bad_share)
    return f"{path}: {problem}" if problem else ""


def _lengths(config: Config, model: Model) -> Iterator[str]:
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    if model.positions and prompt + response > model.positions:
        yield (
            f"rollout.max_new_tokens: found {response}, with data.max_prompt_tokens {prompt} together "
            f"{prompt + response}; allowed: max_position_embeddings of the model, {model.positions}; lower one of them"
        )


def _parallels(config: Config) -> Iterator[tuple[str, ParallelConfig]]:
    roles = {role for group in config.groups.values() for role in group.roles}
    for name in RANKED:
        if name in roles:
            yield name, getattr(config, name).parallel


def _split(group: str, parallel: ParallelConfig, model: Model) -> Iterator[str]:
    key, tensor = f"{group}.parallel", parallel.tensor
    for name, size in model.tensor_sizes().items():
        if size % tensor:
            yield f"{key}.tensor: found {tensor}, allowed: a divisor of the model's {name}, {size}"
    if model.layers % parallel.pipeline:
        yield (
            f"{key}.pipeline: found {parallel.pipeline}, allowed: a divisor of the model's num_hidden_layers, "
            f"{model.layers}"
        )
    if parallel.sequence_parallel and tensor == 1:
        yield f"{key}.sequence_parallel: found true with {key}.tensor 1, allowed: false, or a larger tensor"
