"""Mistakes that show only when several fields, or the machine, are looked at together.

Every finding is one line: key, what was found, what is allowed or how to mend it. Nothing is
changed or started.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.fields import FIELDS, fields_by
from relax_hpc.base.metrics.trackers import CALLED_WITH, KEY, tracker_class
from relax_hpc.base.path_errors import explain_path_error
from relax_hpc.base.protocol import describe_protocol_mismatch
from relax_hpc.base.signatures import describe_mismatch as misfit_of_call
from relax_hpc.config.differences import leaves
from relax_hpc.config.groups import base_name, ranks_of, trainers_of
from relax_hpc.config.roles import ROLES
from relax_hpc.config.schema import Config, SimulatedConfig, TrainerConfig
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.ops.checks.data import check_data
from relax_hpc.ops.checks.environment import check_environment
from relax_hpc.rollout.engines.kinds import findings_of
from relax_hpc.tasks import environment_of, get_task, misfits
from relax_hpc.training.models import megatron_settings

Findings = Iterator[str]


def always_needed(config: Config) -> tuple[str, ...]:
    """Roles that such a run always has; `reference` is needed when the loss looks at it,
    `actor_fwd` when a step has more than one update."""
    return ("data", "actor") if config.algorithm.from_file else ("rollout", "actor", "advantages")


def check(config: Config) -> list[str]:
    """Mistakes in `config`, one line each; empty: none were found."""
    checks = (
        _run,
        _data,
        check_environment,
        _files,
        _groups,
        _code,
        _colocate,
        _algorithm,
        _from_file,
        _megatron,
        _kernels,
        _rollout,
        _without,
        _sampling,
        _devices,
        _queue,
        _engine,
        _rewards,
        _trackers,
        _programs,
        _planes,
        _weights,
        _memory,
    )
    findings = list[str]()
    for function in checks:
        try:
            findings += function(config)
        except OSError as error:
            # What follows in this function is not checked before the path is corrected.
            findings.append(_unreadable(config, error))
    return list(dict.fromkeys(findings))


def _unreadable(config: Config, error: OSError) -> str:
    """Finding about a path that cannot be looked at, with the setting that names it."""
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
    """Mistakes as of `check`, and requests that Slurm cannot meet: of a run that is not in its job
    yet. A script by hand may have asked otherwise. Layout `local` may run without Slurm."""
    found = check(config)
    said = {finding.partition(":")[0] for finding in found}
    return found + [
        finding for finding in _request(config) if finding.partition(":")[0] not in said
    ]


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
        yield (
            f"run_dir: found {path}, but {existing} is not writable for you; name another directory"
        )
    if config.liveness.lease_s <= 2 * config.liveness.beat_s:
        yield (
            f"liveness.lease_s: found {config.liveness.lease_s}, allowed: more than two beats "
            f"(liveness.beat_s is {config.liveness.beat_s}), else every group is taken for dead"
        )


def _code(config: Config) -> Findings:
    for name, group in config.groups.items():
        if group.code and (why := describe_protocol_mismatch(Path(group.code))):
            yield f"groups.{name}.code: {why}"


def _weights(config: Config) -> Findings:
    weights, every = config.weights, config.weights.publish_every
    if every > config.max_staleness + 1:
        yield (
            f"weights.publish_every: found {every}, allowed: at most max_staleness + 1, "
            f"{config.max_staleness + 1}; samples by the version before would be too old"
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
    for name in ("file_every", "keep_every"):
        found = getattr(weights, name)
        if found and found % every and every % found:
            yield (
                f"weights.{name}: found {found}, allowed: 0, or multiples of "
                f"weights.publish_every, {every}"
            )
    if (found := config.algorithm.kl.refresh_every) % every:
        yield (
            f"algorithm.kl.refresh_every: found {found}, allowed: 0, or multiples of "
            f"weights.publish_every, {every}; other versions are not published"
        )


def _data(config: Config) -> Findings:
    data = config.data
    try:
        task = get_task(data.task)
    except ConfigError as error:
        yield f"data.task: {str(error).partition(': ')[2]}"
        return
    yield from (f"data.task: {data.task}.{finding}" for finding in misfits(task))
    has_files = bool(data.train or data.train_sets)
    if task.makes("rows") and has_files:
        key, named = (
            ("data.train", data.train) if data.train else ("data.train_sets", data.train_sets)
        )
        yield (
            f"{key}: found {named!r} with data.task {data.task!r}, which makes its own; remove one"
        )
    if not task.makes("rows") and not has_files:
        found = f"data.task {data.task!r} without `rows`" if data.task else "no data.task"
        yield f"data.train: found nothing, and {found}; name a jsonl file, or a task in data.task"
    yield from check_data(data)
    if data.system and not data.chat_template:
        yield (
            f"data.system: found {data.system[:40]!r} without data.chat_template, which would "
            "place it; set data.chat_template: model"
        )
    for kind in data.multimodal_keys.keys() - set(Kind):
        yield f"data.multimodal_keys: found a column for {kind!r}, allowed: {', '.join(Kind)}"
    for what in ("image_{}_token_num", "video_{}_token_num", "fps_{}_frames"):
        (least, low), (most, high) = (
            (name, getattr(data.multimodal, name)) for name in map(what.format, ("min", "max"))
        )
        if 0 < high < low:
            yield f"data.multimodal.{most}: found {high}, allowed: at least {least}={low}, or 0"
    if config.warm_start.steps and not task.makes("demonstrations"):
        yield (
            f"warm_start.steps: found {config.warm_start.steps} without a task that has "
            "demonstrations, allowed: 0; "
            "give the task some, as relax_hpc.examples.tasks.sort_digits:SortDigits does"
        )


def _files(config: Config) -> Findings:
    # It imports what reads them, which other commands need not wait for.
    from relax_hpc.ops.checks.files import check_files

    return check_files(config)


def _memory(config: Config) -> Findings:
    from relax_hpc.ops.checks.memory import check_memory

    return check_memory(config)


def _groups(config: Config) -> Findings:
    if "hub" not in config.groups:
        yield (
            f"groups: found {', '.join(config.groups) or 'none'}, but no hub; add hub: {{roles: "
            f"[advantages]}}"
        )
    places: Counter[str] = Counter(role for group in config.groups.values() for role in group.roles)
    for role, count in places.items():
        if count > 1:
            groups = [name for name, group in config.groups.items() if role in group.roles]
            yield (
                f"groups: found role {role} {count} times (in {', '.join(groups)}), allowed: "
                "once; remove the others"
            )
    for needed in always_needed(config):
        if needed not in places:
            yield (
                f"groups: found role {needed} in no group; every run needs it, add it to the "
                "roles of one"
            )
    if (found := config.algorithm.kl.coefficient) and "reference" not in {
        *places,
        *config.actor.forward,
    }:
        yield (
            f"algorithm.kl.coefficient: found {found}, but role reference is in no group; "
            "set it to 0, or add reference to the roles of a group, or to actor.forward"
        )
    yield from _forward(config, places)
    for name, group in config.groups.items():
        if not group.roles and name != "hub":
            yield (
                f"groups.{name}.roles: found none; give it a role, or remove the group (groups: "
                f"{{{name}: null}})"
            )


def _request(config: Config) -> Findings:
    if config.layout == "local":
        return
    from relax_hpc.cluster.slurm.render import render
    from relax_hpc.config.load import resolve

    try:
        render(resolve(config))
    except ConfigError as problem:
        yield from problem.mistakes


def _colocate(config: Config) -> Findings:
    if not config.colocate:
        return
    if config.max_staleness:
        yield (
            f"colocate: found true with max_staleness {config.max_staleness}, allowed: 0; engines "
            "generate what is "
            "stale while the actor trains, for which they need devices of their own"
        )
    roles = next((group.roles for group in config.groups.values() if "actor" in group.roles), [])
    if "rollout" not in roles:
        yield (
            "colocate: found true with rollout and actor in different groups, which have devices "
            "of their own; put "
            "both into one (groups: {rollout: null, actor: {roles: [rollout, actor]}})"
        )


def _forward(config: Config, places: Collection[str]) -> Findings:
    """Mistakes in who scores: roles in groups, ``places``, in the actor, or, for want of an
    actor_fwd, nobody."""
    for role in sorted({*places}.intersection(config.actor.forward)):
        yield (
            f"actor.forward: found {role}, which is in a group too, allowed: one of them; remove "
            "it here or there"
        )
    if config.algorithm.uses_old and "actor_fwd" not in {*places, *config.actor.forward}:
        for name in ("passes", "mini_batches"):
            if (found := getattr(config.algorithm, name)) > 1:
                yield (
                    f"algorithm.{name}: found {found} without role actor_fwd, allowed: 1; the "
                    "ratio to the policy before the step would be taken for 1, so that nothing is "
                    "clipped; add actor_fwd to the roles of a group, or to actor.forward"
                )
    if "reference" in config.actor.forward and (every := config.algorithm.kl.refresh_every):
        yield (
            f"algorithm.kl.refresh_every: found {every} with reference in actor.forward, "
            "allowed: 0; "
            "checkpoints do not hold the weights it would have after a restart; give it a group"
        )


def _algorithm(config: Config) -> Findings:
    yield from (f"algorithm.{finding}" for finding in config.algorithm.findings())
    yield from _fields(config)
    yield from _overlong(config)
    warmup = getattr(config.algorithm, "critic_warmup_steps", 0)
    if warmup >= config.steps:
        yield (
            f"algorithm.critic_warmup_steps: found {warmup}, allowed: less than steps, "
            f"{config.steps}; the policy would never be trained"
        )
    groups, parts = config.prompts_per_step, config.algorithm.mini_batches
    # Episodes that are compared are on one rank.
    rows = groups // parts * (1 if config.algorithm.sequences > 1 else config.samples_per_prompt)
    if groups % parts:
        yield (
            f"algorithm.mini_batches: found {parts}, allowed: a divisor of prompts_per_step, "
            f"{groups}"
        )
        return
    for section, data in ((name, settings.parallel.data) for name, settings in _trainers(config)):
        if rows >= data:
            continue
        yield (
            f"{section}.parallel.data: found {data}, allowed: at most {rows} (prompts_per_step "
            f"{groups} / "
            f"algorithm.mini_batches {parts} * samples_per_prompt), else a rank gets no sample"
        )


def _overlong(config: Config) -> Findings:
    """Whether an episode can draw as many tokens as the whole overlong penalty is of."""
    try:
        has_many_rows = bool(environment_of(config)) or get_task(config.data.task).makes("episode")
    except ConfigError:
        return  # `_data` names the mistake in the task.
    limits = {"rollout.max_new_tokens": config.rollout.max_new_tokens}
    if has_many_rows:
        # Each row has max_new_tokens, and an episode may have any number of rows.
        names = ("sampled_tokens", "episode_tokens")
        limits = {f"environment.{name}": getattr(config.environment, name) for name in names}
    key, limit = min(limits.items(), key=lambda item: item[1] or math.inf)
    most_punished = config.algorithm.overlong.max_tokens
    if limit and most_punished > limit:
        yield (
            f"algorithm.overlong.max_tokens: found {most_punished}, allowed: at most {key}, "
            f"{limit}; no episode draws more"
        )


def _from_file(config: Config) -> Findings:
    from relax_hpc.ops.checks.from_file import check_from_file

    return check_from_file(config)


def _megatron(config: Config) -> Findings:
    # What nodes run may be another environment's.
    is_here = not config.site.python and config.site.container.runtime == "none"
    for section, settings in _trainers(config):
        yield from megatron_settings.setting_errors(settings, is_here, section)


def _kernels(config: Config) -> Findings:
    for section, settings in _trainers(config):
        if (found := settings.kernels) != "plain" and config.model.device == "cpu":
            yield (
                f"{section}.kernels: found {found} with model.device cpu, allowed: plain; it is "
                "compiled for GPUs"
            )


def _trainers(config: Config) -> Iterator[tuple[str, TrainerConfig]]:
    """Sections of the configuration that say how a model is trained, of the roles that are
    placed."""
    placed = {"actor"}.union(trainers_of(config.groups))
    yield from ((name, getattr(config, name)) for name in ("actor", "critic") if name in placed)


def _fields(config: Config) -> Findings:
    """Whether somebody gives what the algorithm needs; `_groups` and `_forward` say more of what
    losses mostly need."""
    for name in trainers_of(config.groups):
        if (gives := fields_by(name)) and not ROLES[name].scores:
            yield (
                f"groups: found role {name}, which trains and gives {', '.join(gives)}, allowed: "
                "one of both, as what "
                "it claims is settled when the step is trained; have a role that does not train "
                "give them"
            )
    algorithm, usual = config.algorithm, {"old_logprobs", "ref_logprobs"}
    if "critic" in trainers_of(config.groups) and "returns" not in algorithm.gives:
        yield (
            f"groups: found role critic with algorithm {algorithm.name}, which has none; remove "
            "it, or name ppo"
        )
    groups = {role for group in config.groups.values() for role in group.roles}.union(
        always_needed(config)
    )
    late = [
        (name, groups.union(config.actor.forward), "") for name in {*algorithm.loss_needs()} - usual
    ]
    early = [
        (name, groups, "; inside of the actor it would come too late") for name in algorithm.needs
    ]
    for name, places, why in (*early, *late):
        if (giver := FIELDS[name].by if name in FIELDS else "") not in places:
            who = (
                f"role {giver}, which is in no group{why}"
                if giver
                else "nobody, see relax_hpc.base.fields"
            )
            yield f"algorithm.name: found {algorithm.name}, which needs field {name} of {who}"


def _rollout(config: Config) -> Findings:
    if config.rollout.replicas % config.rollout.processes:
        yield (
            f"rollout.processes: found {config.rollout.processes}, with {config.rollout.replicas} "
            "replicas, allowed: what divides them; each process has as many"
        )


def _without(config: Config) -> Findings:
    shape, aside = config.rollout, defaultdict(set)
    bases = [name for name, group in config.groups.items() if "rollout" in group.roles]
    if config.colocate and shape.without:
        yield (
            f"rollout.without: found {', '.join(shape.without)} with colocate, allowed: none; the "
            "actor takes turns with all of rollout.replicas engines"
        )
    for name in shape.without:
        group, _, number = name.rpartition("/")
        if not base_name(group, bases) or not number.isdecimal() or int(number) >= shape.replicas:
            allowed = (
                f"{bases[0] if bases else 'rollout'}/0 to {shape.replicas - 1} (rollout.replicas)"
            )
            yield (
                f"rollout.without: found {name!r}, allowed: {allowed}, or of its members such as "
                "rollout-2"
            )
            continue
        each = max(1, shape.replicas // ranks_of(config, group, "rollout"))
        aside[group, int(number) // each].add(number)
        if len(aside[group, int(number) // each]) == each:
            yield (
                f"rollout.without: found {', '.join(shape.without)}, which leaves process "
                f"{int(number) // each} of "
                f"{group} none of its engines, allowed: at least one; relax-hpc scale --replicas "
                "ends whole jobs"
            )


def _sampling(config: Config) -> Findings:
    from relax_hpc.ops.checks.sampling import check_sampling

    return check_sampling(config)


def _devices(config: Config) -> Findings:
    if config.model.device != "cuda":
        yield from _unused_gpus(config)
        return
    if config.layout == "local":
        # With a site, `local` is the layout of one job: what counts is its node, and not the one
        # that submits.
        if (
            not config.site.name
            and not any(Path("/dev").glob("nvidia[0-9]*"))
            and not Path("/dev/dxg").exists()
        ):
            yield (
                "model.device: found cuda, but this machine has no NVIDIA device (/dev/nvidia0); "
                "set cpu"
            )
        return
    for name, group in config.groups.items():
        if (
            not all(ROLES[role].on_cpus for role in group.roles)
            and not group.resources.gpus_per_node
        ):
            yield (
                f"groups.{name}.resources.gpus_per_node: found 0 with model.device cuda; ask for "
                "GPUs, or add its roles to a group that has some"
            )


def _unused_gpus(config: Config) -> Findings:
    """GPUs that are asked for in a run on CPUs, the default, which would leave them idle."""
    requests: dict[str, object] = {"site.options.gres": _gpus_of(config.site.options)}
    for name, group in config.groups.items():
        requests[f"groups.{name}.resources.gpus_per_node"] = group.resources.gpus_per_node
        requests[f"groups.{name}.resources.options.gres"] = _gpus_of(group.resources.options)
        requests[f"groups.{name}.env.CUDA_VISIBLE_DEVICES"] = group.env.get(
            "CUDA_VISIBLE_DEVICES", ""
        )
    for key, value in requests.items():
        # CUDA_VISIBLE_DEVICES=-1 hides all GPUs.
        if value and value != "-1":
            yield (
                f"{key}: found {value!r} with model.device cpu, which uses no GPU; set "
                "model.device: cuda, or leave it out"
            )


def _gpus_of(options: Mapping[str, str]) -> str:
    """Option gres among sbatch ``options``, if it asks for GPUs."""
    gres = options.get("gres", "")
    return gres if "gpu" in gres else ""


def _queue(config: Config) -> Findings:
    most, step = config.queue.max_rows, config.prompts_per_step * config.samples_per_prompt
    if most < step * (config.max_staleness + 1):
        yield (
            f"queue.max_rows: found {most}, but max_staleness {config.max_staleness} lets rollout "
            f"be {step * (config.max_staleness + 1)} rows ahead (prompts_per_step * "
            "samples_per_prompt * (max_staleness + 1)); allowed: at least that, or a "
            f"max_staleness of at most {max(0, most // step - 1)}"
        )


def _engine(config: Config) -> Findings:
    engine = config.rollout.engine
    if engine.simulated != SimulatedConfig() and engine.kind != "simulated":
        yield (
            f"rollout.engine.simulated: found settings, but kind is {engine.kind}; leave them "
            "out, or set the kind"
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
    yield from (
        f"{KEY}: found {name!r} twice, allowed: once"
        for name, count in Counter(names).items()
        if count > 1
    )
    for name in names:
        try:
            tracker = tracker_class(name)
        except ConfigError as error:
            yield str(error)
            continue
        if text := misfit_of_call(tracker, "run_dir", "settings"):
            yield f"{KEY}: {name!r} {text}"
        for method, parameters in CALLED_WITH.items():
            # The first parameter is the object.
            if text := misfit_of_call(getattr(tracker, method), "self", *parameters):
                yield f"{KEY}: {name!r}: method {method} {text}"


def _programs(config: Config) -> Findings:
    from relax_hpc.ops.checks.programs import check_programs

    return check_programs(config)


def _planes(config: Config) -> Findings:
    # The nodes of a cluster may have another environment: there each process looks for itself, and
    # `doctor --deep`.
    if config.layout != "local" or config.queue.planes.rdma != "required":
        return
    from relax_hpc.net.transport.choice import missing_plane
    from relax_hpc.net.transport.rdma_agent import why_not_installed

    if why := why_not_installed():
        yield missing_plane("rdma", why)
