"""Batch scripts for sbatch. The templates are in `slurm/`.

All values are quoted: in #SBATCH lines for the parser of sbatch, in shell lines by `shlex`.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError, Mistakes
from relax_hpc.base.local_dir import CACHES
from relax_hpc.cluster.slurm.container import check_container
from relax_hpc.cluster.slurm.expedited_requeue import EXPEDITE
from relax_hpc.cluster.slurm.het_options import neutral_options
from relax_hpc.cluster.slurm.layout import Component, components, group_component, job_name
from relax_hpc.cluster.slurm.own_options import SBATCH, changes_by_setting, check_changes
from relax_hpc.cluster.slurm.srun import check_srun_options
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.process import END_SIGNAL

_PLAIN = re.compile(r"[A-Za-z0-9@%+=:,./_\[\]-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
"""Options that request memory. sbatch accepts only one of them."""
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)


def render(config: Config) -> dict[str, str]:
    """Batch scripts by file name: `run.sbatch`, or in layout `jobs` `<group>.sbatch` for each
    group.

    ``config`` must be resolved, so that its run directory is absolute. ConfigError with all
    mistakes if the layout is not possible, or if a value cannot be written in a script.
    """
    _refuse_mistakes(config)
    if config.layout == "jobs":
        return {f"{job.name}.sbatch": render_group(config, job.name) for job in components(config)}
    title = (
        f"Run {_one_line(config.name)}, layout {config.layout}. The same text starts its "
        "successors."
    )
    het = config.layout == "het"
    variables = _run_variables(config)
    return {"run.sbatch": _render(config, components(config), title=title, het=het, **variables)}


def render_group(config: Config, group: str) -> str:
    """Batch script of the separate job of one group: in layout `jobs`, or in layout `het` a
    replacement, a spare job or a further member."""
    title = f"Group {group} of run {_one_line(config.name)}, layout {config.layout}."
    variables = _run_variables(config, f" --group {shlex.quote(group)}")
    component = group_component(config, group)
    return _render(config, [component], title=title, het=False, **variables)


def render_size(config: Config, size: str, site: Path | None = None) -> str:
    """A batch script that a user submits by hand. ``size`` is the cluster file of ``config``,
    relative to the repository. ``site`` is the site file, if the script is made for one site.

    An environment variable names the run file, and another one the site file if the site needs no
    #SBATCH lines. The batch script creates the run directory.
    """
    suffix = f" on {site.stem}" if site else ""
    command = (
        "RELAX_CONFIG=run.yaml sbatch THIS"
        if site
        else "RELAX_CONFIG=run.yaml RELAX_SITE=site.yaml sbatch THIS"
    )
    title = _one_line(f"{size}{suffix}, layout {config.layout}; in the repository: {command}")
    variables = {
        "by_hand": size,
        "site": shlex.quote(str(site)) if site else "",
        "output": "relax-%j.log",
    }
    return _render(config, components(config), title=title, het=config.layout == "het", **variables)


def templates() -> Path:
    """The folder of the templates, in the installed package or in the repository."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "templates"
    return installed if installed.is_dir() else package.parent / "slurm"


def directive(name: str, value: str) -> str:
    """`--name=value` for an #SBATCH line, quoted for sbatch. ConfigError if the line cannot contain
    the value.

    >>> directive("comment", 'a "b" #c')
    '--comment="a \\\\"b\\\\" #c"'
    """
    return f"--{name}={_quote(value, name)}" if value else f"--{name}"


def render_environment(config: Config) -> str:
    """The lines of every batch script before its program: the site's setup, modules, caches and
    variables."""
    return _template("environment.sh.j2").render(**_environment(config))


def check_sbatch_options(config: Config) -> None:
    """ConfigError for changes of sbatch options that are not allowed, with all mistakes."""
    mistakes = Mistakes()
    for key, changes in changes_by_setting(SBATCH, config).items():
        check_changes(SBATCH, key, changes, mistakes)
        if config.layout == "het" and changes.get("requeue") is not None:
            mistakes.add(
                f"{key}.requeue: found in layout het, where a requeue by Slurm would end the run; "
                "take layout: jobs"
            )
    mistakes.raise_if_any()


def _refuse_mistakes(config: Config) -> None:
    """ConfigError with all reasons why no script of the run can be written."""
    mistakes, allocations = Mistakes(), list[Component]()
    checks: tuple[Callable[[Config], object], ...] = (
        _run_variables,
        check_sbatch_options,
        check_srun_options,
        _environment,
    )
    for check in checks:
        with mistakes:
            check(config)
    with mistakes:
        check_container(config, Path(config.run_dir))
    with mistakes:
        allocations = components(config)
    jobs = [[job] for job in allocations] if config.layout == "jobs" else [allocations]
    for job_components in jobs:
        with mistakes:
            _directives(config, job_components, config.layout == "het")
    mistakes.raise_if_any()


def _render(config: Config, job_components: list[Component], **variables: Any) -> str:
    # These errors must appear now, not after the job has waited for its nodes.
    check_sbatch_options(config)
    check_srun_options(config)
    check_container(config, Path(config.run_dir))
    directives = {
        "parts": _directives(
            config, job_components, bool(variables["het"]), str(variables["output"])
        )
    }
    return _template("job.sbatch.j2").render(**directives, **_environment(config), **variables)


def _template(name: str) -> Any:
    # Only submission needs jinja2. Other functions of this module must work without it.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(templates()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template(name)


def _environment(config: Config) -> dict[str, Any]:
    site, env, mistakes = config.site, [], Mistakes()
    for name, value in site.env.items():
        with mistakes:
            env.append((_variable(name), shlex.quote(value)))
    mistakes.raise_if_any()
    return {
        "setup": site.setup,
        "modules": " ".join(shlex.quote(name) for name in site.modules),
        "module_function": site.modules or any("module" in line for line in site.setup),
        "local_dir": shlex.quote(site.local_dir) if site.local_dir else "",
        "caches": list(CACHES.items()),
        "env": env,
    }


def _run_variables(config: Config, group: str = "") -> dict[str, str]:
    """Template variables of a run whose directory is known."""
    run_dir = Path(config.run_dir)
    if not config.run_dir or not run_dir.is_absolute():
        raise ConfigError(
            f"run_dir: found {config.run_dir!r}, allowed in a batch script: an absolute path"
        )
    if "%" in config.run_dir or "\\" in config.run_dir:
        raise ConfigError(
            f"run_dir: found {config.run_dir!r}, allowed: no % and no \\, which sbatch would "
            "replace"
        )
    _quote(config.run_dir, "run_dir")
    return {
        "by_hand": "",
        "site": "",
        "output": str(run_dir / "logs" / "slurm-%j.log"),
        "run_dir": shlex.quote(config.run_dir),
        "code": shlex.quote(str(run_dir / "code")),
        "python": shlex.quote(config.site.python or sys.executable),
        "group": group,
    }


def _directives(
    config: Config,
    job_components: list[Component],
    het: bool,
    output: str = "slurm-%j.log",
) -> list[dict[str, Any]]:
    """The components of one job for the template: names, and #SBATCH options as text."""
    mistakes = Mistakes()
    own = [_own_options(config, component, het, output, mistakes) for component in job_components]
    options = [_options(config, component, mistakes) for component in job_components]
    # The first component sends the signal and writes the output of the whole job.
    for later in own[1:]:
        for name in _OF_FIRST_COMPONENT:
            later.pop(name, None)
    additions: list[dict[str, str]] = [{} for _ in job_components]
    names = [component.name for component in job_components]
    with mistakes:
        additions = neutral_options(list(zip(names, options, strict=True)))
    directives = []
    for component, derived, stated, added in zip(
        job_components, own, options, additions, strict=True
    ):
        with mistakes:
            directives.append(_lines(component, derived, stated, added))
    mistakes.raise_if_any()
    return directives


_SIZE = ("job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time")
_AFTER_LOSS = ("no-kill", "requeue", "no-requeue")
_OF_FIRST_COMPONENT = ("signal", "output", "open-mode", "export")


def _lines(
    component: Component,
    derived: Mapping[str, str],
    stated: Mapping[str, str],
    added: Mapping[str, str],
) -> dict[str, Any]:
    """Texts of #SBATCH lines of a component. ``derived``: options of relax_hpc; ``stated``: further
    ones of the user, of which some replace a derived one; ``added``: options that neutralise those
    of an earlier component."""
    options = {name: stated.get(name, value) for name, value in derived.items()}
    options = {name: value for name, value in options.items() if name not in component.removed}
    mistakes, lines = Mistakes(), dict[str, list[str]]()
    for key, names in (("size", _SIZE), ("after_loss", _AFTER_LOSS), ("job", _OF_FIRST_COMPONENT)):
        with mistakes:
            lines[key] = [directive(name, options[name]) for name in names if name in options]
    further = {name: value for name, value in stated.items() if name not in options}
    lines["options"] = []
    for name, value in further.items():
        with mistakes:
            lines["options"].append(directive(name, value))
    # The equals sign stays if the value is empty, because a flag would have another meaning.
    lines["options"] += [f"--{option}={value}" for option, value in added.items()]
    mistakes.raise_if_any()
    return {
        "groups": component.groups,
        "standby": _has_standby(component),
        "expedited": options.get("requeue") == EXPEDITE,
        **lines,
    }


def _own_options(
    config: Config, component: Component, het: bool, output: str, mistakes: Mistakes
) -> dict[str, str]:
    """Options that relax_hpc derives from other settings, except memory and GPUs."""
    name = component.name
    with mistakes:
        # If the name of the run is wrong, this reports it once, not for each component.
        _quote(config.name, "name")
        name = job_name(config, component)
    options = {
        "job-name": name,
        "nodes": str(component.nodes),
        "ntasks-per-node": str(component.tasks_per_node),
        "cpus-per-task": str(component.cpus_per_task),
        "time": component.time,
    }
    if het or _has_standby(component):
        options["no-kill"] = ""
    # In Slurm 22.05 a component of a heterogeneous job cannot be requeued alone, and if Slurm
    # requeues it after a node failure, the job never starts again. So such a job has --no-requeue,
    # and with --no-kill a component survives a lost node.
    options["no-requeue" if het else "requeue"] = ""
    signal = f"B:{END_SIGNAL.name.removeprefix('SIG')}@{config.slurm.signal_s}"
    return options | {
        "signal": signal,
        "output": output,
        "open-mode": "append",
        "export": "ALL",
    }


def _options(config: Config, component: Component, mistakes: Mistakes) -> dict[str, str]:
    """Options that the user states, and those for memory and GPUs. The memory of a group replaces a
    memory option of the site."""
    memory = "" if "mem" in component.removed else component.memory
    if memory and not _MEMORY.fullmatch(memory):
        mistakes.add(
            f"groups.{component.name}.resources.memory: found {memory!r}, allowed: 64G, 500M, 0 "
            "(all)"
        )
    options = {
        name: value for name, value in component.options.items() if name not in MEMORY or not memory
    }
    gpus = gpu_options(config, component.gpus_per_node, options.pop("gres", ""))
    gpus = {name: value for name, value in gpus.items() if name not in component.removed}
    return gpus | options | ({"mem": memory} if memory else {})


def _has_standby(component: Component) -> bool:
    """Whether this is a hub of two nodes, which has a standby on the second."""
    return component.name == "hub" and component.nodes > 1


def gpu_options(config: Config, count: int, gres: str) -> dict[str, str]:
    """Options that request ``count`` GPUs on each node and the other generic resources ``gres``."""
    style, gpu_type = config.site.gpu_request, config.site.gpu_type
    gpus = f"{gpu_type}:{count}" if gpu_type else str(count)
    if count and style == "gpus_per_node":
        return {"gpus-per-node": gpus} | ({"gres": gres} if gres else {})
    resources = [f"gpu:{gpus}"] if count and style == "gres" else []
    if gres:
        resources.append(gres)
    return {"gres": ",".join(resources)} if resources else {}


def _quote(value: str, key: str) -> str:
    # sbatch 22.05 reads an #SBATCH line with its own parser: double quotes group words, and a
    # backslash escapes the next character. It removes a comment that begins with #.
    if not value.isprintable():
        raise ConfigError(
            f"{key}: found {value!r}, allowed in a batch script: no line breaks or control "
            "characters"
        )
    if value and _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _one_line(text: str) -> str:
    """Text for a comment, without line breaks, which would end it."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise ConfigError(f"site.env: found {name!r}, allowed: names of letters, digits and _")
    return name
