"""Minimum requirements that a run has of the machine that checks it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from relax_hpc.base.machine.facts import read_facts
from relax_hpc.base.machine.own_environment import own_problems
from relax_hpc.base.machine.requirements import GPU, Problem, find_problems, load_needs
from relax_hpc.config.schema import Config


def check_machine(config: Config) -> Iterator[str]:
    """A line for each requirement that this machine does not meet, if it runs all roles.

    Nodes of a cluster may differ from the machine that submits: `doctor --deep` and the check of
    nodes before each group compare those.
    """
    if runs_here(config):
        yield from (str(problem) for problem in machine_problems(config) if problem.is_fatal)


def runs_here(config: Config) -> bool:
    """Whether all roles run on this machine. A site has nodes for the layout `local` too."""
    return config.layout == "local" and not config.site.name


def machine_problems(config: Config) -> list[Problem]:
    """Requirements of the interpreter of the roles that this machine does not meet.

    An image has its own C library, and the needs of its environment are not known here.
    """
    if config.site.container.runtime != "none":
        return []
    uses = (GPU,) if config.model.device == "cuda" else ()
    if not config.site.python:
        return own_problems(uses)
    # A link is not resolved: the interpreter of an environment is one, to that of the system.
    program = Path(shutil.which(config.site.python) or config.site.python).absolute()
    needs = load_needs(str(program.parent.parent))
    # The version is that of this interpreter, which is another one.
    facts = read_facts(with_driver=GPU in uses)._replace(python="")
    return find_problems(facts, needs, uses)
