"""The text that is handed to sbatch. Templates lie in `slurm/` and only call Python.

Whatever a value holds, it stays a value: #SBATCH lines are quoted as sbatch reads them, shell words
by `shlex`.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError, Mistakes
from relax_hpc.base.local_dir import CACHES
from relax_hpc.cluster.slurm.container import check_container
from relax_hpc.cluster.slurm.het_options import undone
from relax_hpc.cluster.slurm.layout import Component, component, components, job_name
from relax_hpc.cluster.slurm.srun import srun_options
from relax_hpc.config.schema import Config

OWN_OPTIONS = {
    "job-name": "name",
    "nodes": "groups.<group>.resources.nodes",
    "ntasks": "the sizes of the group's roles",
    "ntasks-per-node": "the sizes of the group's roles",
    "cpus-per-task": "groups.<group>.resources.cpus_per_task",
    "time": "slurm.time",
    "gpus": "groups.<group>.resources.gpus_per_node",
    "gpus-per-node": "groups.<group>.resources.gpus_per_node",
    "signal": "slurm.signal_s",
    "output": "",
    "error": "",
    "open-mode": "",
    "export": "site.env",
    "requeue": "layout",
    "no-requeue": "layout",
    "no-kill": "layout",
    "array": "",
    "dependency": "",
    "chdir": "",
    "wrap": "",
}
"""sbatch options that are made from other settings -> what to set instead, empty if there is
nothing."""
FLAGS = frozenset(
    (
        "contiguous",
        "exclusive",
        "get-user-env",
        "hold",
        "ignore-pbs",
        "nice",
        "overcommit",
        "oversubscribe",
        "propagate",
        "reboot",
        "spread-job",
        "stepmgr",
        "use-min-nodes",
        "verbose",
        "x11",
    )
)
"""sbatch options that may stand without a value, in Slurm 22.05 to 25.05."""
_PLAIN = re.compile(r"[A-Za-z0-9@%+=:,./_\[\]-]*")
_LONG_NAME = re.compile(r"[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
"""Ways to ask for memory, of which sbatch takes one."""
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)


def render(config: Config) -> dict[str, str]:
    """sbatch text by file name: `run.sbatch`, or in the `jobs` layout `<group>.sbatch` for each
    group.

    ``config`` is a resolved one: its run directory is absolute. ConfigError, with every mistake,
    for a layout that cannot be had and for values that cannot be written.
    """
    _refuse_mistakes(config)
    if config.layout == "jobs":
        return {
            f"{part.name}.sbatch": render_group(config, part.name) for part in components(config)
        }
    title = (
        f"Run {_one_line(config.name)}, layout {config.layout}. The same text starts its "
        "successors."
    )
    het = config.layout == "het"
    return {
        "run.sbatch": _render(config, components(config), title=title, het=het, **_of_run(config))
    }


def render_group(config: Config, group: str) -> str:
    """The ordinary job of one group: its own in the `jobs` layout; a replacement, spare or further
    member in `het`."""
    title = f"Group {group} of run {_one_line(config.name)}, layout {config.layout}."
    part = component(config, group)
    return _render(
        config, [part], title=title, het=False, **_of_run(config, f" --group {shlex.quote(group)}")
    )


def render_size(config: Config, size: str, site: Path | None = None) -> str:
    """A file to submit by hand: ``size``, relative to the repository, is the cluster file that
    ``config`` is made of, and ``site`` the site file, if it is made for one.

    The run is named by an environment variable, and so is a site that needs nothing in #SBATCH
    lines. The batch script makes the run directory.
    """
    on = f" on {site.stem}" if site else ""
    words = (
        "RELAX_CONFIG=run.yaml sbatch THIS"
        if site
        else "RELAX_CONFIG=run.yaml RELAX_SITE=site.yaml sbatch THIS"
    )
    title = _one_line(f"{size}{on}, layout {config.layout}; in the repository: {words}")
    named = {
        "by_hand": size,
        "site": shlex.quote(str(site)) if site else "",
        "output": "relax-%j.log",
    }
    return _render(config, components(config), title=title, het=config.layout == "het", **named)


def templates() -> Path:
    """The folder of the templates: in the installed package, or in the repository."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "templates"
    return installed if installed.is_dir() else package.parent / "slurm"


def directive(name: str, value: str) -> str:
    """`--name=value` for an #SBATCH line, quoted as sbatch reads it; ConfigError for what such a
    line cannot hold.

    >>> directive("comment", 'a "b" #c')
    '--comment="a \\\\"b\\\\" #c"'
    """
    if not _LONG_NAME.fullmatch(name):
        raise ConfigError(
            f"options: found {name!r}, allowed: the long name of an sbatch option, without dashes "
            "before"
        )
    if not value and name not in FLAGS:
        raise ConfigError(
            f"options.{name}: found nothing, allowed: a value; null in a group's options takes "
            "off what the site's options set"
        )
    return f"--{name}={_quote(value, name)}" if value else f"--{name}"


def render_environment(config: Config) -> str:
    """The lines of every batch script before its program: the site's own, modules, caches,
    variables."""
    return _template("environment.sh.j2").render(**_environment(config))


def _refuse_mistakes(config: Config) -> None:
    """ConfigError with everything for which no script of the run could be written."""
    mistakes, parts = Mistakes(), []
    for look in (_of_run, srun_options, _environment):
        with mistakes:
            look(config)
    with mistakes:
        check_container(config, Path(config.run_dir))
    with mistakes:
        parts = components(config)
    for together in [[part] for part in parts] if config.layout == "jobs" else [parts]:
        with mistakes:
            _directives(config, together)
    mistakes.raise_if_any()


def _render(config: Config, parts: list[Component], **variables: Any) -> str:
    # What no role could be started with is an error now, not when the job has waited for its nodes.
    srun_options(config)
    check_container(config, Path(config.run_dir))
    parted = {"parts": _directives(config, parts), "signal_s": config.slurm.signal_s}
    return _template("job.sbatch.j2").render(**parted, **_environment(config), **variables)


def _template(name: str) -> Any:
    # Only submission needs jinja2; reading this package's other functions must not.
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


def _of_run(config: Config, group: str = "") -> dict[str, str]:
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
    return {
        "by_hand": "",
        "site": "",
        "output": _quote(str(run_dir / "logs" / "slurm-%j.log"), "run_dir"),
        "run_dir": shlex.quote(config.run_dir),
        "code": shlex.quote(str(run_dir / "code")),
        "python": shlex.quote(config.site.python or sys.executable),
        "group": group,
    }


def _directives(config: Config, parts: list[Component]) -> list[dict[str, Any]]:
    """The components as the template wants them: every value checked, the further options as whole
    words."""
    mistakes = Mistakes()
    options = [_options(config, part, mistakes) for part in parts]
    besides: list[dict[str, str]] = [{} for _ in parts]
    with mistakes:
        besides = undone([(part.name, own) for part, own in zip(parts, options, strict=True)])
    found = []
    for part, own, more in zip(parts, options, besides, strict=True):
        words = []
        for option, value in own.items():
            with mistakes:
                words.append(directive(option, value))
        # An empty value is a word of its own here: a flag would mean something else.
        words += [f"--{option}={value}" for option, value in more.items()]
        with mistakes:
            texts = {
                "job_name": _job_name(config, part),
                "options": words,
                "standby": _has_standby(part),
            }
            found.append(asdict(part) | texts)
    mistakes.raise_if_any()
    return found


def _job_name(config: Config, part: Component) -> str:
    # The run's own is judged, so that what is wrong with it is one mistake.
    _quote(config.name, "name")
    return _quote(job_name(config, part), "name")


def _options(config: Config, part: Component, mistakes: Mistakes) -> dict[str, str]:
    """Options of a component beside its size; a group's own memory replaces what the site's options
    ask for."""
    stated = {
        name: value for name, value in part.options.items() if name not in MEMORY or not part.memory
    }
    for name in filter(OWN_OPTIONS.__contains__, stated):
        instead = (
            f"set {OWN_OPTIONS[name]} instead" if OWN_OPTIONS[name] else "it cannot be changed"
        )
        mistakes.add(
            f"options.{name}: found {stated[name]!r}, but it is set by relax_hpc; {instead}"
        )
    if part.memory and not _MEMORY.fullmatch(part.memory):
        mistakes.add(
            f"groups.{part.name}.resources.memory: found {part.memory!r}, allowed: 64G, 500M, 0 "
            "(all)"
        )
    options = {name: value for name, value in stated.items() if name not in OWN_OPTIONS}
    gpus = gpu_options(config, part.gpus_per_node, options.pop("gres", ""))
    return gpus | options | ({"mem": part.memory} if part.memory else {})


def _has_standby(part: Component) -> bool:
    """Whether the hub has a standby: one of two nodes has it on the second."""
    return part.name == "hub" and part.nodes > 1


def gpu_options(config: Config, count: int, gres: str) -> dict[str, str]:
    """Options by which the site is asked for ``count`` GPUs a node, beside other generic resources,
    ``gres``."""
    style, kind = config.site.gpu_request, config.site.gpu_type
    kind = f"{kind}:" if kind else ""
    if count and style == "gpus_per_node":
        return {"gpus-per-node": f"{kind}{count}"} | ({"gres": gres} if gres else {})
    wanted = [f"gpu:{kind}{count}"] if count and style == "gres" else []
    found = ",".join([*wanted, *([gres] if gres else [])])
    return {"gres": found} if found else {}


def _quote(value: str, key: str) -> str:
    if not value.isprintable():
        raise ConfigError(
            f"{key}: found {value!r}, allowed in a batch script: no line breaks or control "
            "characters"
        )
    if value and _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _one_line(text: str) -> str:
    """Text for a comment: a line break would end it."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise ConfigError(f"site.env: found {name!r}, allowed: names of letters, digits and _")
    return name
