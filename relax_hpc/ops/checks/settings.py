"""Checks of settings against each other and against this machine.

A finding is one line: the setting, the value found, the values allowed, the fix. No check changes
or starts anything.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.metrics.trackers import CALLED_WITH, KEY, tracker_class
from relax_hpc.base.path_errors import explain_path_error
from relax_hpc.base.protocol import describe_protocol_mismatch
from relax_hpc.base.signatures import describe_mismatch
from relax_hpc.config.differences import leaves
from relax_hpc.config.groups import trainer_sections
from relax_hpc.config.profiling import ENGINES, PROFILED_ROLES, parse_steps
from relax_hpc.config.schema import Config, SimulatedConfig
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.ops.checks.data import check_data
from relax_hpc.ops.checks.environment import check_environment
from relax_hpc.ops.checks.from_file import check_from_file
from relax_hpc.ops.checks.groups import (
    check_colocation,
    check_devices,
    check_fields,
    check_groups,
    check_parts,
    check_removed_engines,
)
from relax_hpc.ops.checks.machine import check_machine
from relax_hpc.ops.checks.sampling import check_sampling
from relax_hpc.rollout.engines.kinds import findings_of
from relax_hpc.tasks import environment_name, get_task, misfits
from relax_hpc.training.models import megatron_settings

Findings = Iterator[str]
_WITHOUT_PROFILER = ("simulated", "transformers")
"""Kinds of engines that cannot record a trace."""
_MIN_COLLECTIVE_S = 10.0
"""Seconds by which a rank may be late for a collective without any fault, for example if its node
pages, at least."""


def check(config: Config, starts_here: bool = False) -> list[str]:
    """Mistakes in `config`, one line each; empty without mistakes. ``starts_here``: whether the
    roles start on this machine next, whatever `site` says."""
    checks: tuple[Callable[[Config], Findings], ...] = (
        _run,
        _data,
        check_environment,
        _files,
        check_groups,
        check_parts,
        _code,
        check_colocation,
        _algorithm,
        check_from_file,
        _megatron,
        _kernels,
        _rollout,
        check_removed_engines,
        check_sampling,
        partial(check_devices, starts_here=starts_here),
        _queue,
        _engine,
        _rewards,
        _trackers,
        _profile,
        _programs,
        partial(check_machine, starts_here=starts_here),
        _planes,
        _weights,
        _service,
        _memory,
    )
    findings = list[str]()
    for function in checks:
        try:
            findings += function(config)
        except OSError as error:
            # This function skips its remaining checks until the path is corrected.
            findings.append(_unreadable(config, error))
    return list(dict.fromkeys(findings))


def _unreadable(config: Config, error: OSError) -> str:
    """Finding about a path that cannot be read, with the setting that names it."""
    sentence = explain_path_error(error)
    if not sentence:
        raise error
    path = Path(os.fsdecode(error.filename or "")).absolute()
    settings = [
        (key, value)
        for key, value in leaves(dataclasses.asdict(config))
        if isinstance(value, str) and value and path.is_relative_to(Path(value).absolute())
    ]
    if not settings:
        return sentence
    key, value = max(settings, key=lambda setting: len(setting[1]))
    return f"{key}: found {value!r}, but {sentence}"


def check_request(config: Config) -> list[str]:
    """Mistakes of `check`, and requests that Slurm cannot meet.

    For a run that has no job yet: a script by hand may request something else than the
    configuration. Layout `local` may run without Slurm.
    """
    findings = check(config)
    known_keys = {_key(finding) for finding in findings}
    return findings + [finding for finding in _request(config) if _key(finding) not in known_keys]


def _key(finding: str) -> str:
    return finding.partition(":")[0]


def _profile(config: Config) -> Findings:
    profile = config.profile
    try:
        steps = parse_steps(profile.steps)
    except ConfigError as error:
        yield str(error)
        return
    for role in profile.roles:
        if role not in PROFILED_ROLES:
            yield f"profile.roles: found {role!r}, allowed: {', '.join(PROFILED_ROLES)}"
    if any(rank < 0 for rank in profile.ranks):
        yield f"profile.ranks: found {min(profile.ranks)}, allowed: numbers from 0 on"
    kind = config.rollout.engine.kind
    if steps and ENGINES in profile.roles and kind in _WITHOUT_PROFILER:
        yield (
            f"profile.roles: found {ENGINES} with engine kind {kind}, which has no profiler; "
            "allowed: an engine of kind sglang, or other roles"
        )


def _run(config: Config) -> Findings:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.name):
        yield (
            f"name: found {config.name!r}, allowed: letters, digits, ., _ and - (it may name a "
            "directory)"
        )
    path = Path(config.run_dir or f"runs/{config.name}").absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        yield f"run_dir: found {path}, but {existing} is a file; name a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"run_dir: found {path}, but you cannot write in {existing}; name another directory"
    liveness = config.liveness
    if liveness.lease_s <= 2 * liveness.beat_s:
        yield (
            f"liveness.lease_s: found {liveness.lease_s}, allowed: more than two beats "
            f"(liveness.beat_s is {liveness.beat_s}), else every group is taken for dead"
        )
    limit_s = liveness.collective_timeout_s
    if limit_s and not _MIN_COLLECTIVE_S <= limit_s < liveness.hang_s:
        yield (
            f"liveness.collective_timeout_s: found {limit_s:g}, allowed: 0, or at least "
            f"{_MIN_COLLECTIVE_S:g} and less than liveness.hang_s ({liveness.hang_s:g}), after "
            "which the group is taken for dead without naming the lost rank"
        )


def _code(config: Config) -> Findings:
    for name, group in config.groups.items():
        problem = describe_protocol_mismatch(Path(group.code)) if group.code else ""
        if problem:
            yield f"groups.{name}.code: {problem}"


def _weights(config: Config) -> Findings:
    weights, every = config.weights, config.weights.publish_every
    if every > config.max_staleness + 1:
        yield (
            f"weights.publish_every: found {every}, allowed: at most max_staleness + 1, "
            f"{config.max_staleness + 1}; samples of the previous version would be too stale"
        )
    if weights.publish_lag < every - 1:
        yield (
            f"weights.publish_lag: found {weights.publish_lag}, allowed: at least "
            f"weights.publish_every - 1, {every - 1}; an engine can have no newer version"
        )
    if weights.slabs == 1:
        yield (
            "weights.slabs: found 1, allowed: 0, or at least 2; one is written while another is "
            "read"
        )
    multiples = f"allowed: 0, or multiples of weights.publish_every, {every}"
    for name in ("file_every", "keep_every"):
        interval = getattr(weights, name)
        if interval and interval % every and every % interval:
            yield f"weights.{name}: found {interval}, {multiples}"
    refresh_every = config.algorithm.kl.refresh_every
    if refresh_every % every:
        yield (
            f"algorithm.kl.refresh_every: found {refresh_every}, {multiples}; other versions are "
            "not published"
        )


def _service(config: Config) -> Findings:
    service = config.service
    if service.max_engines and service.max_engines < service.min_engines:
        yield (
            f"service.max_engines: found {service.max_engines}, allowed: at least "
            f"service.min_engines, {service.min_engines}, or 0 for no limit"
        )
    if not (service.autoscaler.enabled or service.autoscaler.dry_run):
        return
    if not service.max_engines:
        yield (
            "service.max_engines: found 0, allowed with service.autoscaler: at least 1; set the "
            "largest number of engines that the autoscaler may request"
        )
    if not service.enabled:
        yield (
            "service.autoscaler.enabled: found true, allowed with service.enabled=false: false; "
            "the autoscaler runs in the service"
        )
    if config.colocate:
        yield (
            "service.autoscaler.enabled: found true, allowed with colocate: false; actor and "
            "engines share devices, so that the number of engines cannot change"
        )


def _data(config: Config) -> Findings:
    data = config.data
    try:
        task = get_task(data.task)
    except ConfigError as error:
        yield f"data.task: {str(error).partition(': ')[2]}"
        return
    for problem in misfits(task):
        yield f"data.task: {data.task}.{problem}"
    has_files = bool(data.train or data.train_sets)
    if task.makes("rows") and has_files:
        key = "data.train" if data.train else "data.train_sets"
        yield (
            f"{key}: found {data.train or data.train_sets!r} with data.task {data.task!r}, which "
            "makes its own rows; remove one of them"
        )
    if not task.makes("rows") and not has_files:
        source = f"data.task {data.task!r} without `rows`" if data.task else "no data.task"
        yield f"data.train: found nothing, and {source}; name a jsonl file, or a task in data.task"
    yield from check_data(data)
    if data.system and not data.chat_template:
        yield (
            f"data.system: found {data.system[:40]!r} without data.chat_template, which would "
            "insert it; set data.chat_template: model"
        )
    for kind in data.multimodal_keys.keys() - set(Kind):
        yield f"data.multimodal_keys: found a column for {kind!r}, allowed: {', '.join(Kind)}"
    for name in ("image_{}_token_num", "video_{}_token_num", "fps_{}_frames"):
        min_name, max_name = name.format("min"), name.format("max")
        low, high = getattr(data.multimodal, min_name), getattr(data.multimodal, max_name)
        if 0 < high < low:
            yield (
                f"data.multimodal.{max_name}: found {high}, allowed: at least {min_name}={low}, "
                "or 0"
            )
    if config.warm_start.steps and not task.makes("demonstrations"):
        yield (
            f"warm_start.steps: found {config.warm_start.steps} without a task that has "
            "demonstrations, allowed: 0; add them to the task, as "
            "relax_hpc.examples.tasks.sort_digits:SortDigits does"
        )


def _files(config: Config) -> Findings:
    # Imported late, because the readers of files are slow to import and not all commands check.
    from relax_hpc.ops.checks.files import check_files

    return check_files(config)


def _memory(config: Config) -> Findings:
    from relax_hpc.ops.checks.memory import check_memory

    return check_memory(config)


def _request(config: Config) -> Findings:
    if config.layout == "local":
        return
    from relax_hpc.cluster.slurm.render import render
    from relax_hpc.config.load import resolve

    try:
        render(resolve(config))
    except ConfigError as problem:
        yield from problem.mistakes


def _algorithm(config: Config) -> Findings:
    algorithm = config.algorithm
    yield from (f"algorithm.{finding}" for finding in algorithm.findings())
    yield from check_fields(config)
    yield from _overlong(config)
    warmup = getattr(algorithm, "critic_warmup_steps", 0)
    if warmup >= config.steps:
        yield (
            f"algorithm.critic_warmup_steps: found {warmup}, allowed: less than steps, "
            f"{config.steps}; the policy would never be trained"
        )
    prompts, mini_batches = config.prompts_per_step, algorithm.mini_batches
    if prompts % mini_batches:
        yield (
            f"algorithm.mini_batches: found {mini_batches}, allowed: a divisor of "
            f"prompts_per_step, {prompts}"
        )
        return
    # Episodes whose losses are compared have to be on the same rank.
    episodes = 1 if algorithm.sequences > 1 else config.samples_per_prompt
    samples = prompts // mini_batches * episodes
    for section, settings in trainer_sections(config):
        ranks = settings.parallel.data
        if samples < ranks:
            yield (
                f"{section}.parallel.data: found {ranks}, allowed: at most {samples} "
                f"(prompts_per_step {prompts} / algorithm.mini_batches {mini_batches} * "
                "samples_per_prompt), else a rank gets no sample"
            )


def _overlong(config: Config) -> Findings:
    """Check that an episode can be as long as the maximum overlong penalty needs."""
    try:
        has_many_rows = bool(environment_name(config))
        if not has_many_rows:
            has_many_rows = get_task(config.data.task).makes("episode")
    except ConfigError:
        return  # `_data` names the mistake in the task.
    limits = {"rollout.max_new_tokens": config.rollout.max_new_tokens}
    if has_many_rows:
        # Each row has max_new_tokens, and an episode may have any number of rows.
        names = ("sampled_tokens", "episode_tokens")
        limits = {f"environment.{name}": getattr(config.environment, name) for name in names}
    key, limit = min(limits.items(), key=lambda item: item[1] or math.inf)
    max_tokens = config.algorithm.overlong.max_tokens
    if limit and max_tokens > limit:
        yield (
            f"algorithm.overlong.max_tokens: found {max_tokens}, allowed: at most {key}, "
            f"{limit}; no episode is longer"
        )


def _megatron(config: Config) -> Findings:
    # Nodes may use another environment than this process, with another megatron-core.
    is_here = not config.site.python and config.site.container.runtime == "none"
    for section, settings in trainer_sections(config):
        yield from megatron_settings.setting_errors(settings, is_here, section)


def _kernels(config: Config) -> Findings:
    for section, settings in trainer_sections(config):
        if settings.kernels != "plain" and config.model.device == "cpu":
            yield (
                f"{section}.kernels: found {settings.kernels} with model.device cpu, allowed: "
                "plain; the other kernels need a GPU"
            )


def _rollout(config: Config) -> Findings:
    processes, replicas = config.rollout.processes, config.rollout.replicas
    if replicas % processes:
        yield (
            f"rollout.processes: found {processes}, allowed: a divisor of rollout.replicas, "
            f"{replicas}; each process has the same number of replicas"
        )


def _queue(config: Config) -> Findings:
    max_rows = config.queue.max_rows
    step_rows = config.prompts_per_step * config.samples_per_prompt
    rows_ahead = step_rows * (config.max_staleness + 1)
    if max_rows < rows_ahead:
        yield (
            f"queue.max_rows: found {max_rows}, but max_staleness {config.max_staleness} lets "
            f"rollout be {rows_ahead} rows ahead (prompts_per_step * samples_per_prompt * "
            "(max_staleness + 1)); allowed: at least that, or a max_staleness of at most "
            f"{max(0, max_rows // step_rows - 1)}"
        )


def _engine(config: Config) -> Findings:
    engine = config.rollout.engine
    if engine.simulated != SimulatedConfig() and engine.kind != "simulated":
        yield (
            f"rollout.engine.simulated: found settings, but kind is {engine.kind}; remove them, "
            "or set the kind"
        )
    try:
        yield from findings_of(engine.kind, config)
    except ConfigError as error:
        yield str(error)


def _rewards(config: Config) -> Findings:
    from relax_hpc.ops.checks.rewards import check_rewards

    return check_rewards(config)


def _trackers(config: Config) -> Findings:
    names = config.metrics.trackers
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{KEY}: found {name!r} twice, allowed: once"
    for name in names:
        try:
            tracker = tracker_class(name)
        except ConfigError as error:
            yield str(error)
            continue
        mismatch = describe_mismatch(tracker, "run_dir", "settings")
        if mismatch:
            yield f"{KEY}: {name!r} {mismatch}"
        for method, parameters in CALLED_WITH.items():
            # The first parameter is the object.
            mismatch = describe_mismatch(getattr(tracker, method), "self", *parameters)
            if mismatch:
                yield f"{KEY}: {name!r}: method {method} {mismatch}"


def _programs(config: Config) -> Findings:
    from relax_hpc.ops.checks.programs import check_programs

    return check_programs(config)


def _planes(config: Config) -> Findings:
    # The nodes of a cluster may use another environment; `doctor --deep` and each process of the
    # run check that one.
    if config.layout != "local" or config.queue.planes.rdma != "required":
        return
    from relax_hpc.net.transport.choice import missing_plane
    from relax_hpc.net.transport.rdma_agent import why_not_installed

    reason = why_not_installed()
    if reason:
        yield missing_plane("rdma", reason)
