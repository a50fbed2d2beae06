"""Needs of the environment of this process, once it is installed, compared with this machine."""

import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .facts import read_facts
from .gpu_vendors import VENDORS, compat_variables, find_compat_driver
from .requirements import GPU, Problem, find_problems, load_needs, uses_compat_driver


def own_problems(uses: "Sequence[str]" = ()) -> "list[Problem]":
    """Requirements of this environment for ``uses`` that this machine does not meet."""
    return find_problems(read_facts(with_driver=GPU in uses), own_needs(), uses)


def restart_with_compat_driver(module: str, arguments: "Sequence[str]") -> None:
    """Replace this process by ``module`` with the libraries of package cuda-compat, if the driver
    of this machine is too old for CUDA and the package makes up for that.

    The process keeps its pid and everything that it has inherited. Otherwise the function returns.
    """
    if not compat_variables(find_compat_driver()):
        return
    facts, needs = read_facts(), own_needs()
    if uses_compat_driver(facts, needs):
        # ld.so reads LD_LIBRARY_PATH when a process starts, so a change needs a new one.
        os.environ.update(compat_variables(facts.compat_driver))
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def own_needs() -> "dict[str, Any]":
    """Needs of the lock of this environment, and the releases that the installed torch is built
    for, one of each vendor."""
    # Users may install a torch for another release than that of the lock.
    return {**load_needs(), **torch_releases()}


def torch_releases() -> "dict[str, str]":
    """Release of each vendor that the installed torch is built for, such as `{"cuda": "13.0"}`;
    empty texts without one, or without torch.

    It is read from torch's source, because an import takes seconds.
    """
    spec = find_spec("torch")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    text = ""
    for folder in folders:
        file = Path(folder) / "version.py"
        text += file.read_text() if file.exists() else ""
    releases = {}
    for vendor in VENDORS.values():
        match = re.search(vendor.release_pattern, text, re.MULTILINE)
        releases[vendor.release_key] = match[1] if match else ""
    return releases
