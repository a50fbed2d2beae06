"""Checks of the files that a run reads: models, split by their parallel layouts, and data sets."""

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
from relax_hpc.config.groups import group_with_role, trainer_sections
from relax_hpc.config.roles import RANKED
from relax_hpc.config.schema import Config, DataConfig, ModelConfig, ParallelConfig
from relax_hpc.data.examples import rules_of
from relax_hpc.data.prompts import Prompt, PromptRules, RowCounts, parse_rows
from relax_hpc.data.row_files import DataSet, RowFiles, data_sets, rows_exist
from relax_hpc.data.template_files import find_templates
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.ops.checks.model_files import ModelFiles, file_stamp, find_model, missing_packages
from relax_hpc.tasks import tool_signatures
from relax_hpc.training.models.expert_grouping import grouping_errors
from relax_hpc.training.models.hf_mapping import published_forms, stored_forms

READ_S = 5.0
"""Seconds to read a data set. The check skips the remaining rows; the run reads all of them."""
BLOCK, BLOCK_WITH_MEDIA = 1000, 20
"""Rows that are read before the time is checked: sets of text, and sets that may have media."""


def check_files(config: Config) -> Iterator[str]:
    """Check the models, the parallel layouts that split them, and the data sets."""
    model, policy = config.model, ModelFiles()
    if not model.path and not config.data.task:
        yield (
            "model.path: found nothing, and no data.task; name a Hugging Face directory (only "
            "tasks get a tiny model)"
        )
    else:
        policy = find_model(model)
        yield from policy.problems
        if not policy.problems:
            yield from _policy(config, policy)
    yield from _scoring_models(config, policy)
    yield from _teacher(config, policy)
    yield from _critic(config)
    yield from _reward_model(config)
    for rows in data_sets(config.data):
        if not rows_exist(rows.path):
            yield (
                f"{rows.setting}: found {rows.path!r}, which is not a file; name a jsonl or "
                "parquet file, or a folder of them"
            )
        else:
            yield from _prompts(rows, policy.tokenizer, config)


def _policy(config: Config, policy: ModelFiles) -> Iterator[str]:
    """Check settings against the model of the policy, whose files have no mistakes."""
    checks = (
        _sequence_lengths,
        _routing_replay,
        _frozen_towers,
        _stop_texts,
        _tied,
        _transposed_experts,
        _grouped_experts,
    )
    for check in checks:
        yield from check(config, policy)
    for role, parallel in _parallel_layouts(config):
        own_path = f"{role}_path"
        model = policy
        if getattr(config.model, own_path, ""):
            model = find_model(config.model, own_path)
        yield from _parallel_layout(role, parallel, model)


def _teacher(config: Config, policy: ModelFiles) -> Iterator[str]:
    """Check that a run has a teacher if its algorithm needs one, and teacher_top_k."""
    path = config.model.teacher_path
    has_role = any("teacher" in group.roles for group in config.groups.values())
    if has_role and not path:
        yield "model.teacher_path: found nothing with role teacher; name the teacher's directory"
    if path and not has_role:
        yield f"model.teacher_path: found {path!r}, and no algorithm that needs it; remove it"
    top_k = config.algorithm.teacher_top_k
    if policy.spec and top_k > policy.spec.vocab:
        yield (
            f"algorithm.teacher_top_k: found {top_k}, allowed: at most {policy.spec.vocab}, the "
            "policy's vocabulary"
        )


def _critic(config: Config) -> Iterator[str]:
    """Check that a model for a critic is used."""
    path = config.model.critic_path
    if path and not group_with_role(config, "critic"):
        yield (
            f"model.critic_path: found {path!r}, and no algorithm that has a critic; name ppo, "
            "or remove it"
        )


def _scoring_models(config: Config, policy: ModelFiles) -> Iterator[str]:
    """Check each model that scores the policy's tokens: reference, teacher, critic."""
    for field in dataclasses.fields(ModelConfig):
        path = getattr(config.model, field.name)
        if not field.name.endswith("_path") or not path:
            continue
        model = find_model(config.model, field.name)
        yield from model.problems
        if not model.tokenizer or not policy.tokenizer:
            continue
        if not model.tokenizer.has_ids_of(policy.tokenizer):
            yield (
                f"model.{field.name}: found {path!r}, whose tokenizer has other ids than the "
                "policy's; allowed: a model with the policy's tokenizer, because it scores the "
                "policy's tokens"
            )


def _reward_model(config: Config) -> Iterator[str]:
    """Check the generative reward model of role genrm; SGLang checks more when it loads it."""
    path, group = config.genrm.path, group_with_role(config, "genrm")
    if path and not group:
        yield (
            f"genrm.path: found {path!r}, and no group with role genrm; add groups: {{genrm: "
            f"{{}}}}, or remove it"
        )
    elif group and not path:
        yield (
            f"genrm.path: found nothing with role genrm in group {group}; name the directory of "
            "its model"
        )
    elif path:
        missing = [name for name in _SERVED_FILES if not any(Path(path).glob(name))]
        if missing:
            yield (
                f"genrm.path: found no {' and no '.join(missing)} in {path}; name a Hugging Face "
                "directory"
            )
        elif "chat_template" not in config.genrm.flags and not _has_template(path):
            yield (
                f"genrm.path: found no chat template in {path}; name a model for chats, or set "
                "genrm.flags.chat_template"
            )


_SERVED_FILES = ("config.json", "tokenizer*", "*.safetensors")
"""Files that SGLang needs of a model."""


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
    """Notes on settings that are allowed but may be unintended, and on skipped checks."""
    missing = missing_packages()
    if missing:
        yield f"model.path: the tokenizer was not read; install {', '.join(missing)} to check it"
    yield from _stale_denominator(config)
    if config.model.device == "cuda" and config.layout != "local" and not config.site.kernel_cache:
        yield (
            "site.kernel_cache: found '', so each job compiles its kernels again, which takes "
            "minutes; name a folder on the shared filesystem that only you can write"
        )
    tokenizer = None
    with suppress(OSError):
        tokenizer = find_model(config.model).tokenizer if config.model.path else None
    for rows in data_sets(config.data):
        # `check_files` reports a set that cannot be read.
        with suppress(ConfigError, OSError):
            if rows_exist(rows.path):
                reading = read_prompts(rows, tokenizer, config)
                yield from _prompt_notes(rows.setting, reading, config.data)


def _stale_denominator(config: Config) -> Iterator[str]:
    """Note on a group actor_fwd at a staleness above 0: its scores lag behind the policy."""
    group = group_with_role(config, "actor_fwd")
    if not config.max_staleness or not group:
        return
    alternative = "groups: {actor_fwd: null} and actor: {forward: [actor_fwd]}"
    if config.algorithm.updates <= 1:
        alternative = (
            "groups: {actor_fwd: null}, because with one update per step the policy itself is "
            "the newest"
        )
    yield (
        f"groups.{group}.roles: found actor_fwd with max_staleness {config.max_staleness}; its "
        "log-probabilities are older than the policy before the step, and clipping around them "
        f"costs reward; better: {alternative}"
    )


def _prompt_notes(key: str, reading: PromptReading, data: DataConfig) -> Iterator[str]:
    tally = reading.tally
    if not reading.is_whole:
        yield (
            f"{key}: read {tally.rows} of {reading.total} rows in {READ_S:g} s, {tally.bad} of "
            "them bad; the run reads all of them when it starts"
        )
    elif tally.bad and not reading.problem(data):
        yield f"{key}: {tally.bad} of {reading.total} rows are skipped: {tally.reasons}"
    if reading.named and "prompt" not in data.special_tokens and not data.chat_template:
        yield (
            f"{key}: {reading.named} of {tally.rows} prompts contain names of special tokens, "
            f"such as {reading.example}, which are tokenized as text; if a chat template wrote "
            "them, set data.special_tokens: [prompt]"
        )


@dataclass(kw_only=True, slots=True)
class PromptReading:
    """Counts of the rows of a data set."""

    tally: RowCounts
    total: int = 0
    """Rows of the set, including rows that were not read."""
    named: int = 0
    """Prompts that contain names of special tokens as text."""
    example: str = ""

    @property
    def is_whole(self) -> bool:
        return self.tally.rows == self.total

    def problem(self, data: DataConfig) -> str:
        """Reason why a run would reject the set, whatever the unread rows are; or an empty text."""
        if not self.is_whole and self.tally.bad <= data.max_bad_share * self.total:
            return ""
        return self.tally.problem(data.max_bad_share, self.total)


def read_prompts(rows: DataSet, tokenizer: Tokenizer | None, config: Config) -> PromptReading:
    """Read a set for up to READ_S seconds; cached until its files change.

    ConfigError: a file cannot be read.
    """
    files = rows.files()
    rules = rules_of(config, tokenizer, files.folder, tool_signatures(config), rows.name)
    return _read(files, tuple(map(file_stamp, files.paths)), tokenizer, rules, READ_S)


@functools.lru_cache(maxsize=16)
def _read(
    files: RowFiles,
    _: tuple[tuple[int, ...], ...],
    tokenizer: Tokenizer | None,
    rules: PromptRules,
    read_s: float,
) -> PromptReading:
    special_names = None
    if tokenizer:
        special_names = re.compile("|".join(map(re.escape, tokenizer.special_names)) or "(?!)")
    reading, deadline = PromptReading(tally=RowCounts()), time.monotonic() + read_s
    has_media = rules.media is not None
    block_rows = BLOCK_WITH_MEDIA if has_media else BLOCK
    rows = files.rows(reading.tally.locations, has_media)
    prompts = parse_rows(rows, tokenizer, rules, tokens=False)
    with rules.rendering():
        while block := list(islice(prompts, block_rows)):
            for prompt in block:
                reading.tally.add(prompt)
                if special_names and isinstance(prompt, Prompt):
                    match = special_names.search(prompt.text)
                    if match:
                        reading.named += 1
                        reading.example = reading.example or match[0]
            if time.monotonic() >= deadline:
                reading.total = files.count()
                return reading
    reading.total = reading.tally.rows
    return reading


def _sequence_lengths(config: Config, model: ModelFiles) -> Iterator[str]:
    """Check that rows fit into the positions of the model."""
    prompt = config.data.max_prompt_tokens
    positions = model.spec.positions if model.spec else 0
    if not positions:
        return
    allowed = f"allowed: max_position_embeddings of the model, {positions}"
    if config.algorithm.from_file:
        row_tokens = config.data.max_row_tokens
        if row_tokens > positions:
            yield f"data.max_row_tokens: found {row_tokens}, {allowed}; lower it"
        return
    responses = {"rollout": config.rollout.max_new_tokens, "eval": config.eval.max_new_tokens}
    for section, response in responses.items():
        if response and prompt + response > positions:
            yield (
                f"{section}.max_new_tokens: found {response}, which is {prompt + response} with "
                f"data.max_prompt_tokens {prompt}; {allowed}; lower one of them"
            )


def _routing_replay(config: Config, model: ModelFiles) -> Iterator[str]:
    replay = config.model.routing_replay
    if replay == "off":
        return
    if model.spec and not model.spec.route_shape:
        yield (
            f"model.routing_replay: found {replay} with a {model.spec.model_type} model, allowed: "
            "off; a model without experts has no routes"
        )
    if config.actor.megatron.get("moe_router_fusion"):
        yield (
            f"actor.megatron.moe_router_fusion: found true with model.routing_replay {replay}, "
            "allowed: false; Transformer Engine's fused router accepts no recorded routes"
        )


def _frozen_towers(config: Config, model: ModelFiles) -> Iterator[str]:
    if model.spec:
        for misfit in model.spec.frozen_tower_errors(config.model.frozen_towers):
            yield f"model.{misfit}"


def _stop_texts(config: Config, model: ModelFiles) -> Iterator[str]:
    """Check stop texts: responses are decoded without special tokens, so these never match."""
    special_names = model.tokenizer.special_names if model.tokenizer else ()
    for text in config.rollout.stop:
        contained = [name for name in special_names if name in text and name != text]
        if contained:
            yield (
                f"rollout.stop: found {text!r}, allowed: texts without special tokens, or one "
                f"special token alone, such as {contained[0]!r}"
            )


def _tied(config: Config, model: ModelFiles) -> Iterator[str]:
    """Check that SGLang ties the output layer if the model does."""
    spec = model.spec
    if spec and spec.tied and not spec.ties_in_sglang and config.rollout.engine.kind == "sglang":
        key = "model.path" if config.model.path else "model.tiny"
        yield (
            f"{key}: found tie_word_embeddings true in a {spec.model_type}, with engine sglang "
            "allowed: false, because SGLang does not tie them in this model; store a copy as "
            "lm_head.weight, and set it to false"
        )


def _transposed_experts(config: Config, model: ModelFiles) -> Iterator[str]:
    """Check the layout of packed experts: transformers 5 saves them transposed."""
    spec = model.spec
    if not spec or config.rollout.engine.kind != "sglang":
        return
    saved_forms = stored_forms(spec)
    for name, form in published_forms(spec).items():
        if form.transposed and model.shapes.get(name) == saved_forms[name][-1].shape:
            yield (
                f"model.path: found {name} as transformers 5 saves it, with engine sglang allowed: "
                "each expert transposed, as published; `relax-hpc convert` makes a megatron-core "
                "checkpoint of it, and with --shard-size 5GB a directory as published from that"
            )
            return


def _grouped_experts(config: Config, model: ModelFiles) -> Iterator[str]:
    """Check that `experts: grouped` of a trainer of the policy's model can run."""
    for section, settings in trainer_sections(config):
        # The critic's model may be another one; it is checked when it starts.
        is_policy = section == "actor" or not config.model.critic_path
        if model.spec and is_policy and settings.experts == "grouped":
            for error in grouping_errors(model.spec, config.model, settings.parallel):
                yield f"{section}.{error}"


def _parallel_layouts(config: Config) -> Iterator[tuple[str, ParallelConfig]]:
    """Roles of the run that split the model, and their parallel layouts."""
    roles = set[str]().union(*(group.roles for group in config.groups.values()))
    for role in RANKED:
        if role in roles:
            yield role, getattr(config, role).parallel


def _parallel_layout(role: str, parallel: ParallelConfig, model: ModelFiles) -> Iterator[str]:
    key = f"{role}.parallel"
    for misfit in model.spec.split_errors(parallel) if model.spec else ():
        yield f"{key}.{misfit}"
    if parallel.sequence_parallel and parallel.tensor == 1:
        yield (
            f"{key}.sequence_parallel: found true with {key}.tensor 1, allowed: false, or a "
            "larger tensor"
        )
