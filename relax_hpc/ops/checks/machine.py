"""Minimum requirements that a run has of the machine that checks it, and of its nodes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.machine.facts import Facts, facts_from_json, read_facts
from relax_hpc.base.machine.gpu_vendors import MissingTool, NoGpuAnswer
from relax_hpc.base.machine.own_environment import own_needs, own_problems
from relax_hpc.base.machine.requirements import GPU, Problem, find_problems, load_needs
from relax_hpc.config.gpus import gpu_vendor
from relax_hpc.config.schema import Config

FACTS_FILE = "machine_facts.json"
"""File in the root of an environment: facts of the machines that use it, from `env/setup.sh` with
RELAX_FACTS."""


def check_machine(config: Config, starts_here: bool = False) -> Iterator[str]:
    """A line for each requirement that this machine does not meet, if it runs all roles.
    ``starts_here``: see `runs_here`.

    Nodes of a cluster may differ from the machine that submits: `doctor --deep` and the check of
    nodes before each group compare those.
    """
    if runs_here(config, starts_here):
        yield from (str(problem) for problem in machine_problems(config) if problem.is_fatal)


def runs_here(config: Config, starts_here: bool = False) -> bool:
    """Whether all roles run on this machine. In layout `local` with a site they run in a job: here,
    if the command ``starts_here`` the roles, or if this process runs in a job on its node."""
    is_node = bool(os.environ.get("SLURMD_NODENAME"))
    return config.layout == "local" and (starts_here or is_node or not config.site.name)


def machine_problems(config: Config) -> list[Problem]:
    """Requirements of the interpreter of the roles that this machine does not meet.

    An image has its own C library, and the needs of its environment are not known here.
    """
    if config.site.container.runtime != "none":
        return []
    uses = _uses(config)
    if not config.site.python:
        problems = own_problems(uses)
    else:
        # The version is that of this interpreter, which is another one.
        facts = read_facts(with_driver=GPU in uses)._replace(python="")
        problems = find_problems(facts, environment_needs(config), uses)
    # The tool of a driver that does not answer would hang too.
    if GPU in uses and not any(problem.is_node_fault for problem in problems):
        problems += _tool_problems(config)
    return problems


def node_problems(config: Config) -> list[Problem] | None:
    """Requirements that the nodes do not meet, by the facts that the environment has of them. None:
    it has none. ConfigError: the file of the facts is damaged."""
    file = _environment_folder(config) / FACTS_FILE
    if config.site.container.runtime != "none" or not file.exists():
        return None
    try:
        facts = facts_from_json(file.read_text(encoding="utf-8"), Facts())
    except ValueError as problem:
        raise ConfigError(f"{file}: {problem}; call env/setup.sh with RELAX_FACTS again") from None
    return find_problems(facts, environment_needs(config), _uses(config))


def environment_needs(config: Config) -> dict[str, Any]:
    """Needs of the environment of the roles. They are empty if `env/setup.sh` did not make it."""
    if not config.site.python:
        return own_needs()
    return load_needs(str(_environment_folder(config)))


def _environment_folder(config: Config) -> Path:
    """Root of the environment of the roles."""
    if not config.site.python:
        return Path(sys.prefix)
    # A link is not resolved: the interpreter of an environment is one, to that of the system.
    program = Path(shutil.which(config.site.python) or config.site.python).absolute()
    return program.parent.parent


def _uses(config: Config) -> tuple[str, ...]:
    return (GPU,) if config.model.device == "cuda" else ()


def _tool_problems(config: Config) -> Iterator[Problem]:
    """GPUs of this machine that do not answer the tool of their vendor."""
    vendor = gpu_vendor(config)
    if not vendor.has_driver(Path("/")):
        return
    try:
        vendor.read_memory()
    except MissingTool:
        # Containers often lack the tool, which roles do not need.
        return
    except NoGpuAnswer as error:
        advice = f"this machine needs a repair (dmesg, {vendor.smi[0]})"
        found = f"{vendor.driver_title}: {error}"
        yield Problem(found, "an answer", "by all GPUs", advice, is_node_fault=True)
