"""Mistakes in what a run reads: its model, cut as the parallel layouts say, and its prompts."""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.groups import group_with
from relax_hpc.config.roles import RANKED
from relax_hpc.config.schema import Config, DataConfig, ModelConfig, ParallelConfig
from relax_hpc.data.examples import rules_of
from relax_hpc.data.prompts import Prompt, PromptRules, Tally, prompts_of
from relax_hpc.data.row_files import DataSet, RowFiles, data_sets, is_there
from relax_hpc.data.template_files import find_templates
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.ops.checks.model_files import Model, find_model, stamp, unread
from relax_hpc.tasks import tools_of
from relax_hpc.training.models.hf_mapping import published_forms, stored_forms

READ_S = 5.0
"""Seconds of reading a prompt file, after which the rest is left to the start of the run."""
BLOCK, BLOCK_WITH_MEDIA = 1000, 20
"""Rows that are read in any case, and rows between two looks at the clock, of text and of what may
have media."""


def check_files(config: Config) -> Iterator[str]:
    """Mistakes in the model, the layouts it is cut into, and the prompts."""
    model, policy = config.model, Model()
    if not model.path and not config.data.task:
        yield (
            "model.path: found nothing, and no data.task; name a Hugging Face directory (only "
            "tasks get a tiny model)"
        )
    else:
        policy = find_model(model)
        yield from policy.problems
        if not policy.problems:
            yield from _lengths(config, policy)
            yield from _replay(config, policy)
            yield from _frozen(config, policy)
            yield from _stops(config, policy)
            yield from _tied(config, policy)
            yield from _turned(config, policy)
            for group, parallel in _parallels(config):
                own = f"{group}_path"
                yield from _split(
                    group, parallel, find_model(model, own) if getattr(model, own, "") else policy
                )
    yield from _other_models(config, policy)
    yield from _teacher(config, policy)
    yield from _critic(config, policy)
    yield from _judge(config)
    for rows in data_sets(config.data):
        if not is_there(rows.path):
            yield (
                f"{rows.setting}: found {rows.path!r}, which is not a file; name a jsonl or "
                "parquet file, or a folder of them"
            )
        else:
            yield from _prompts(rows, policy.tokenizer, config)


def _teacher(config: Config, policy: Model) -> Iterator[str]:
    """Whether there is a teacher who reads what the policy writes."""
    path, role = (
        config.model.teacher_path,
        any("teacher" in group.roles for group in config.groups.values()),
    )
    if role != bool(path):
        found = (
            "a role teacher and no directory; name one"
            if role
            else f"{path!r}, and no algorithm that needs it"
        )
        yield f"model.teacher_path: found {found}"
    if policy.spec and (found := config.algorithm.teacher_top_k) > policy.spec.vocab:
        yield (
            f"algorithm.teacher_top_k: found {found}, allowed: at most {policy.spec.vocab}, the "
            "policy's vocabulary"
        )


def _critic(config: Config, policy: Model) -> Iterator[str]:
    """Whether a critic of its own is wanted, and reads what the policy writes."""
    if (path := config.model.critic_path) and not group_with(config, "critic"):
        yield (
            f"model.critic_path: found {path!r}, and no algorithm that has a critic; name ppo, "
            "or leave it out"
        )


def _other_models(config: Config, policy: Model) -> Iterator[str]:
    """Mistakes in every model that scores the policy's tokens: reference, teacher, critic."""
    for field in dataclasses.fields(ModelConfig):
        path = getattr(config.model, field.name)
        if not field.name.endswith("_path") or not path:
            continue
        model = find_model(config.model, field.name)
        yield from model.problems
        if (
            model.tokenizer
            and policy.tokenizer
            and not model.tokenizer.has_ids_of(policy.tokenizer)
        ):
            yield (
                f"model.{field.name}: found {path!r}, whose tokenizer gives other ids than the "
                "policy's; allowed: a "
                "model with the policy's tokenizer, as it is asked of the policy's tokens"
            )


def _judge(config: Config) -> Iterator[str]:
    """Whether a generative reward model is where a role genrm looks for it: SGLang says more when
    it reads it."""
    path, group = config.genrm.path, group_with(config, "genrm")
    if path and not group:
        yield (
            f"genrm.path: found {path!r}, and no group with role genrm; add groups: {{genrm: "
            f"{{}}}}, or leave it out"
        )
    elif group and not path:
        yield (
            f"genrm.path: found nothing with role genrm in group {group}; name the directory of "
            "its model"
        )
    elif path and (lacking := [name for name in _JUDGES if not any(Path(path).glob(name))]):
        yield (
            f"genrm.path: found no {' and no '.join(lacking)} in {path}; name a Hugging Face "
            "directory"
        )
    elif path and "chat_template" not in config.genrm.flags and not _has_template(path):
        yield (
            f"genrm.path: found no chat template in {path}; name a model for chats, or set "
            "genrm.flags.chat_template"
        )


_JUDGES = ("config.json", "tokenizer*", "*.safetensors")
"""Files of a model that SGLang serves."""


def _has_template(path: str) -> bool:
    with suppress(ConfigError):
        return bool(find_templates("model", Path(path)))
    return False


def _prompts(rows: DataSet, tokenizer: Tokenizer | None, config: Config) -> Iterator[str]:
    try:
        problem = read_prompts(rows, tokenizer, config).problem(config.data)
    except ConfigError as error:
        yield f"{rows.setting}: {error}"
        return
    if problem:
        yield f"{rows.setting}: {rows.path}: {problem}"


def notes(config: Config) -> Iterator[str]:
    """Notes on what is no mistake, but may not be meant, or was not looked at."""
    if missing := unread():
        yield f"model.path: the tokenizer was not read, for want of {', '.join(missing)} here"
    yield from _stale_denominator(config)
    tokenizer = None
    with suppress(OSError):
        tokenizer = find_model(config.model).tokenizer if config.model.path else None
    for rows in data_sets(config.data):
        # A set that cannot be read is a mistake, which `check_files` reports.
        with suppress(ConfigError, OSError):
            if is_there(rows.path):
                yield from _prompt_notes(
                    rows.setting, read_prompts(rows, tokenizer, config), config.data
                )


def _stale_denominator(config: Config) -> Iterator[str]:
    """Note on a group actor_fwd at a staleness above 0, whose scores are older than the policy
    before the step."""
    group = group_with(config, "actor_fwd")
    if not config.max_staleness or not group:
        return
    if config.algorithm.updates > 1:
        instead = "groups: {actor_fwd: null} and actor: {forward: [actor_fwd]}"
    else:
        instead = (
            "groups: {actor_fwd: null}, as with one update in a step the policy itself is "
            "the newest"
        )
    yield (
        f"groups.{group}.roles: found actor_fwd with max_staleness {config.max_staleness}; its "
        "log-probabilities "
        "are older than the policy before the step, and the clip around them costs reward; "
        f"better: {instead}"
    )


def _prompt_notes(key: str, found: Reading, data: DataConfig) -> Iterator[str]:
    if not found.is_whole:
        yield (
            f"{key}: read {found.tally.rows} of {found.total} rows in {READ_S:g} s, "
            f"{found.tally.bad} of them bad; all of them are read when the run begins"
        )
    elif found.tally.bad and not found.problem(data):
        yield f"{key}: {found.tally.bad} of {found.total} rows are left out: {found.tally.reasons}"
    if found.named and "prompt" not in data.special_tokens and not data.chat_template:
        yield (
            f"{key}: {found.named} of {found.tally.rows} prompts have names of special tokens, "
            f"such as {found.example}, which are text here; if a chat template made them, set "
            "data.special_tokens: [prompt]"
        )


@dataclass(kw_only=True, slots=True)
class Reading:
    """Findings on a prompt file."""

    tally: Tally
    total: int = 0
    """Rows of the file, also those that were not read."""
    named: int = 0
    """Prompts with names of special tokens in their text."""
    example: str = ""

    @property
    def is_whole(self) -> bool:
        return self.tally.rows == self.total

    def problem(self, data: DataConfig) -> str:
        """Reason why a run could not take it, whatever is in the rows that were not read; empty if
        it may."""
        if not self.is_whole and self.tally.bad <= data.max_bad_share * self.total:
            return ""
        return self.tally.problem(data.max_bad_share, self.total)


def read_prompts(rows: DataSet, tokenizer: Tokenizer | None, config: Config) -> Reading:
    """All rows of a set, or those of the first READ_S seconds; once, as long as its files do not
    change. ConfigError: one cannot be read."""
    files = rows.files()
    how = rules_of(config, tokenizer, files.folder, tools_of(config), rows.name)
    return _read(files, tuple(map(stamp, files.paths)), tokenizer, how, READ_S)


@functools.lru_cache(maxsize=16)
def _read(
    files: RowFiles,
    _: tuple[tuple[int, ...], ...],
    tokenizer: Tokenizer | None,
    how: PromptRules,
    read_s: float,
) -> Reading:
    names = (
        re.compile("|".join(map(re.escape, tokenizer.special_names)) or "(?!)")
        if tokenizer
        else None
    )
    found, until = Reading(tally=Tally()), time.monotonic() + read_s
    rows = prompts_of(
        files.rows(found.tally.places, how.media is not None), tokenizer, how, tokens=False
    )
    with how.rendering():
        while block := list(islice(rows, BLOCK_WITH_MEDIA if how.media else BLOCK)):
            for one in block:
                found.tally.add(one)
                if names and isinstance(one, Prompt) and (match := names.search(one.text)):
                    found.named, found.example = found.named + 1, found.example or match[0]
            if time.monotonic() >= until:
                found.total = files.count()
                return found
    found.total = found.tally.rows
    return found


def _lengths(config: Config, model: Model) -> Iterator[str]:
    prompt, positions = config.data.max_prompt_tokens, model.spec.positions if model.spec else 0
    if config.algorithm.from_file:
        if positions and (found := config.data.max_row_tokens) > positions:
            yield (
                f"data.max_row_tokens: found {found}, allowed: max_position_embeddings of the "
                f"model, {positions}; lower it"
            )
        return
    for key, response in (
        ("rollout", config.rollout.max_new_tokens),
        ("eval", config.eval.max_new_tokens),
    ):
        if positions and response and prompt + response > positions:
            yield (
                f"{key}.max_new_tokens: found {response}, with data.max_prompt_tokens {prompt} "
                "together "
                f"{prompt + response}; allowed: max_position_embeddings of the model, {positions}; "
                "lower one of them"
            )


def _replay(config: Config, model: Model) -> Iterator[str]:
    found = config.model.routing_replay
    if found != "off" and model.spec and not model.spec.route_shape:
        yield (
            f"model.routing_replay: found {found} with a {model.spec.model_type} model, allowed: "
            "off; a model without experts has no routes"
        )
    if found != "off" and config.actor.megatron.get("moe_router_fusion"):
        yield (
            f"actor.megatron.moe_router_fusion: found true with model.routing_replay {found}, "
            "allowed: false; Transformer Engine's fused router takes no routes"
        )


def _frozen(config: Config, model: Model) -> Iterator[str]:
    found = model.spec.frozen_tower_errors(config.model.frozen_towers) if model.spec else ()
    yield from (f"model.{misfit}" for misfit in found)


def _stops(config: Config, model: Model) -> Iterator[str]:
    """Stop texts that can never be found, as responses are decoded without special tokens."""
    names = model.tokenizer.special_names if model.tokenizer else ()
    for text in config.rollout.stop:
        name = next((name for name in names if name in text and name != text), "")
        if name:
            yield (
                f"rollout.stop: found {text!r}, allowed: texts without special tokens, or one "
                f"special token alone, such as {name!r}"
            )


def _tied(config: Config, model: Model) -> Iterator[str]:
    spec = model.spec
    if spec and spec.tied and not spec.sglang_ties and config.rollout.engine.kind == "sglang":
        key = "model.path" if config.model.path else "model.tiny"
        yield (
            f"{key}: found tie_word_embeddings true in a {spec.model_type}, with engine sglang "
            "allowed: false, as its "
            "output layer would not be the embedding; store lm_head.weight, a copy, and set it "
            "false"
        )


def _turned(config: Config, model: Model) -> Iterator[str]:
    spec = model.spec
    if not spec or config.rollout.engine.kind != "sglang":
        return
    packed = (name for name, form in published_forms(spec).items() if form.turned)
    if name := next(
        (name for name in packed if model.shapes.get(name) == stored_forms(spec)[name][-1].shape),
        "",
    ):
        yield (
            f"model.path: found {name} as transformers 5 saves it, with engine sglang allowed: "
            "each expert turned around, as published; relax-hpc convert makes a megatron-core "
            "checkpoint of it, and with --shard-size 5GB of that a directory as published"
        )


def _parallels(config: Config) -> Iterator[tuple[str, ParallelConfig]]:
    roles = {role for group in config.groups.values() for role in group.roles}
    for name in RANKED:
        if name in roles:
            yield name, getattr(config, name).parallel


def _split(group: str, parallel: ParallelConfig, model: Model) -> Iterator[str]:
    key, tensor = f"{group}.parallel", parallel.tensor
    yield from (
        f"{key}.{misfit}" for misfit in (model.spec.split_errors(parallel) if model.spec else ())
    )
    if parallel.sequence_parallel and tensor == 1:
        yield (
            f"{key}.sequence_parallel: found true with {key}.tensor 1, allowed: false, or a "
            "larger tensor"
        )
